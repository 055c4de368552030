"""ONNX files: write JAX functions with jax2onnx, and run them with ONNX Runtime.  Both are optional."""

import contextlib
import importlib
import logging
import os
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from equivit import files

INSTALL = "make install-export"
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider", "tensorrt": "TensorrtExecutionProvider"}
TF32 = "NVIDIA_TF32_OVERRIDE"  # an environment variable; of TensorRT there is no other switch
OLDEST = 13  # opset; before 13, axes of Squeeze and others are not inputs, but jax2onnx writes them as inputs
LARGEST = 2**31 - 1  # bytes of a protocol buffer


class Refused(ValueError):
    """ONNX Runtime rejects a file."""


def library(name: str) -> Any:
    """Import an optional package; ValueError with the install command if it is missing."""
    try:
        with _quiet():
            return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{name} is not installed ({error}); {INSTALL} installs it, or the pip commands of docs/export.md."
        ) from error


def check_opset(thing: str, opset: int) -> None:
    """ValueError for an opset version that jax2onnx does not support, or that does not exist yet."""
    newest = library("onnx").defs.onnx_opset_version()
    if not OLDEST <= opset <= newest:
        near = OLDEST if opset < OLDEST else newest
        raise ValueError(f"{thing}={opset} must lie between {OLDEST} and {newest}; the nearest is {near}.")


def write(
    path: str | os.PathLike,
    function: Callable,
    image: Any,
    outputs: tuple[str, ...],
    *,
    opset: int,
    metadata: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Write a function of one array, including its constants.

    Only standard operations are used: MatMul, Softmax, LayerNormalization, Conv, ...

    Args:
      function: traced here; its results are arrays named by `outputs`.
      image: shape and dtype of the input, a `jax.ShapeDtypeStruct`; its name in the file is "image".  Its batch may be
        symbolic (`jax.export.symbolic_shape`).
      opset: the opset version.
      metadata: texts by name, stored in the file.

    Raises ValueError if jax2onnx is not installed, lacks the version or an operation, or the file would be too large.
    """
    import jax

    to_onnx = library("jax2onnx").to_onnx
    check_opset("--opset", opset)
    names: dict[str, Any] = dict(input_names=["image"], output_names=list(outputs))
    try:
        with _quiet():
            proto = to_onnx(function, [image], opset=opset, normalization_mode="prefer_native", **names)
    except Exception as error:  # NotImplementedError, TypeError and others
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"jax2onnx cannot write this function at opset {opset}: {reason}; a .stablehlo file has no such limits."
        ) from error
    finally:
        jax.clear_caches()  # functions traced meanwhile contain operations of jax2onnx, which JAX cannot compile
    for name, text in metadata.items():
        proto.metadata_props.add(key=name, value=text)
    if (size := proto.ByteSize()) > LARGEST:
        raise ValueError(f"the ONNX file would have {size / 2**30:.1f} GiB; the limit is 2 GiB; try half precision.")
    files.write_bytes(path, proto.SerializeToString())


def session(path: str | os.PathLike, *, provider: str = "cpu", threads: int = 1, tf32: bool = False) -> Any:
    """Open a file to run it with a provider of PROVIDERS and a number of threads.

    Args:
      tf32: let a GPU round the factors of float32 products to TF32, 10 bits.  For TensorRT this is a setting of the
        whole process, which holds from its first session on.

    Raises ValueError if ONNX Runtime is not installed, lacks the provider here, or rejects the file (`Refused`).
    """
    onnxruntime = library("onnxruntime")
    name = PROVIDERS[provider]
    if name not in (available := onnxruntime.get_available_providers()):
        raise ValueError(
            f"--provider={provider}: this ONNX Runtime has {', '.join(available)}; on a machine with such a device, "
            "pip install onnxruntime-gpu in place of onnxruntime."
        )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    options.log_severity_level = 3  # hides warnings about unused constants
    try:
        found = onnxruntime.InferenceSession(str(path), options, providers=_providers(provider, tf32))
    except Exception as error:  # its exceptions have no common class
        raise Refused(f"{path}: ONNX Runtime rejects the file: {' '.join(str(error).split())[:300]}") from error
    if name not in found.get_providers():
        raise ValueError(f"--provider={provider}: ONNX Runtime has it, but finds no usable device or library of it.")
    return found


def _providers(provider: str, tf32: bool) -> list[Any]:
    """The providers of a session with their options; CUDA runs what TensorRT does not support."""
    if provider == "cpu":
        return [PROVIDERS["cpu"]]
    if provider == "tensorrt":
        os.environ.pop(TF32, None)
        os.environ |= {} if tf32 else {TF32: "0"}
    cuda = (PROVIDERS["cuda"], dict(use_tf32=str(int(tf32))))
    return [PROVIDERS["tensorrt"], cuda] if provider == "tensorrt" else [cuda]


def operations(path: str | os.PathLike) -> list[str]:
    """The names of the file's operations, one per node."""
    return [node.op_type for node in library("onnx").load(str(path), load_external_data=False).graph.node]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of jax2onnx about missing libraries, names that Flax renamed, and types of symbolic shapes."""
    loggers = [logging.getLogger(name) for name in ("jax2onnx", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
