"""ONNX files: written from JAX functions by jax2onnx, and run by ONNX Runtime.  Both are optional."""

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
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
OLDEST = 13  # opset: in those before, axes of Squeeze and others are no inputs, as jax2onnx writes them
LARGEST = 2**31 - 1  # bytes of a file: those of a protocol buffer


class Refused(ValueError):
    """ONNX Runtime does not take a file."""


def library(name: str) -> Any:
    """The optional package of that name; ValueError with the command that installs it."""
    try:
        with _quiet():
            return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed ({error}); {INSTALL} installs what exported files need.") from error


def check_opset(thing: str, opset: int) -> None:
    """ValueError for a version of the standard's operations that jax2onnx does not write, or that is not out yet."""
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
    """Write a function of one array, with all constants that it uses.

    The operations are those of the standard: MatMul, Softmax, LayerNormalization, Conv, ...

    Args:
      function: traced here; its results are arrays named by `outputs`.
      image: shape and dtype of the input, `jax.ShapeDtypeStruct`; in the file it is called "image".
      opset: version of the standard's operations.
      metadata: texts by name, kept in the file.

    Raises:
      ValueError: jax2onnx is not installed, has no such version or operation, or the file would be too large.
    """
    import jax

    to_onnx = library("jax2onnx").to_onnx
    check_opset("--opset", opset)
    names: dict[str, Any] = dict(input_names=["image"], output_names=list(outputs))
    try:
        with _quiet():
            proto = to_onnx(function, [image], opset=opset, normalization_mode="prefer_native", **names)
    except Exception as error:  # NotImplementedError, TypeError and others, by the operation
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"jax2onnx cannot write this function at opset {opset}: {reason}; a .stablehlo file has no such limits."
        ) from error
    finally:
        jax.clear_caches()  # functions traced meanwhile hold operations of jax2onnx, which JAX cannot compile
    for name, text in metadata.items():
        proto.metadata_props.add(key=name, value=text)
    if (size := proto.ByteSize()) > LARGEST:
        raise ValueError(f"an ONNX file of {size / 2**30:.1f} GiB cannot be: 2 GiB is the most; try half precision.")
    files.write_bytes(path, proto.SerializeToString())


def session(path: str | os.PathLike, *, provider: str = "cpu", threads: int = 1) -> Any:
    """The file, ready to run.

    Args:
      provider: a key of PROVIDERS.
      threads: those that ONNX Runtime works with.

    Raises:
      ValueError: ONNX Runtime is not installed, has no such provider here, or (`Refused`) does not take the file.
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
    options.log_severity_level = 3  # warnings tell of constants that were not needed
    try:
        found = onnxruntime.InferenceSession(str(path), options, providers=[name])
    except Exception as error:  # its exceptions have no common class
        raise Refused(f"{path}: ONNX Runtime refuses it: {' '.join(str(error).split())[:300]}") from error
    if name not in found.get_providers():
        raise ValueError(f"--provider={provider}: ONNX Runtime has it, but finds no device that it can use.")
    return found


def operations(path: str | os.PathLike) -> list[str]:
    """The operations of the file, by their names, one for each node."""
    return [node.op_type for node in library("onnx").load(str(path), load_external_data=False).graph.node]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what jax2onnx says of libraries that are not there, and of names that Flax renames."""
    logger = logging.getLogger("jax2onnx")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
