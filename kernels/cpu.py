"""Kernels for CPUs: C++ that `compile_cpu.py` compiles once, for the processor that it is to run on.

Without the library programs use XLA.  Its name is a digest of the sources, the processor and the version of jaxlib:
what was compiled for other ones is not found.

XLA calls a kernel by its name, with arrays in row-major order, and lends it threads.  All are for float32, and some for
bfloat16, too, on a processor that multiplies tiles of it (AMX).
Source of the interface: JAX's "foreign function interface".
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import warnings
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import jaxlib.version

HERE = pathlib.Path(__file__).parent
SOURCES = (
    "attention_cpu.cc",
    "attention_bfloat16_cpu.cc",
    "bfloat16_cpu.cc",
    "d8_gelu_cpu.cc",
    "linear_cpu.cc",
    "linear_bfloat16_cpu.cc",
    "norm_cpu.cc",
)
HEADERS = (
    "cpu_gelu.h",
    "cpu_heads.h",
    "cpu_linear.h",
    "cpu_matrix.h",
    "cpu_products.h",
    "cpu_softmax.h",
    "cpu_threads.h",
    "cpu_tiles.h",
    "cpu_vectors.h",
)
ENDS = {
    "attention": ("", "_backward"),
    "d8_gelu": ("", "_backward"),
    "linear": ("", "_backward_x", "_backward_weight"),
    "norm": ("", "_backward"),
}
IN_BFLOAT16 = ("attention", "d8_gelu", "linear")
# Of C++ itself.  On ARM the compilers of before 2023 know only -mcpu.
TARGET = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
FLAGS = (TARGET, "-std=c++20", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")


def library() -> pathlib.Path:
    """Where the library of these sources for this machine is, if it has been compiled."""
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # of nobody it stays "~"
    digest = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        digest.update((HERE / name).read_bytes())
    digest.update(repr((FLAGS, jaxlib.version.__version__, _processor())).encode())
    return cache / "equivit" / f"cpu-{digest.hexdigest()[:16]}.so"


@functools.cache
def available() -> bool:
    """Whether programs that are lowered for this CPU can call the kernels: from the first time on, the same answer."""
    path = library()
    if not path.exists():
        return False
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        warnings.warn(
            f"The kernels for this CPU cannot be loaded, and programs use XLA.  Remove {path} and compile them again "
            f"with python -m kernels.compile_cpu: {error}",
            stacklevel=2,
        )
        return False
    names = [f"equivit_{op}{end}" for op, ends in ENDS.items() for end in ends]
    if _has_bfloat16():
        names += [f"equivit_{op}{end}_bfloat16" for op in IN_BFLOAT16 for end in ENDS[op]]
    for name in names:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    return True


def supported(*arrays: jax.Array, in_bfloat16: bool = False) -> bool:
    """Whether they are available, for arrays of these dtypes and shapes (not for symbolic ones, nor empty).

    Args:
      arrays: what a kernel is to take.
      in_bfloat16: it is one of those that are also for bfloat16.
    """
    known = all(isinstance(n, int) and n > 0 for a in arrays for n in a.shape)
    if not known or not available():
        return False
    in_float32, all_bfloat16 = (all(a.dtype == t for a in arrays) for t in (jnp.float32, jnp.bfloat16))
    return in_float32 or in_bfloat16 and all_bfloat16 and _has_bfloat16()


def call(name: str, arguments: tuple[jax.Array, ...], results: list[jax.ShapeDtypeStruct], **attributes) -> tuple:
    """The results of the kernel for the dtype of the first argument; under `jax.vmap` one call for each.

    Raises:
      RuntimeError: it has not been compiled.
    """
    if not available():
        raise RuntimeError(f"{name} has not been compiled: python -m kernels.compile_cpu")
    name = f"{name}_bfloat16" if arguments[0].dtype == jnp.bfloat16 else name
    return tuple(jax.ffi.ffi_call(name, results, vmap_method="sequential")(*arguments, **attributes))


def like(arrays: Iterable[jax.Array]) -> list[jax.ShapeDtypeStruct]:
    """Descriptions of results that have the shapes and dtypes of these arrays."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]


@functools.cache
def _has_bfloat16() -> bool:
    """Whether the library, which is there, has kernels for bfloat16."""
    asked = ctypes.CDLL(str(library())).equivit_has_bfloat16
    asked.restype = ctypes.c_bool
    return asked()


@functools.cache
def _processor() -> str:
    """Its name and its instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))}))
