"""Kernels for CPUs: C++ that `compile_cpu.py` compiles once, for the processor that it is to run on.

Without the library programs use XLA.  Its name is a digest of the sources, the processor and the version of jaxlib:
what was compiled for other ones is not found.

XLA calls a kernel by its name, with arrays in row-major order, and lends it threads.  Float32.
Source of the interface: JAX's "foreign function interface".
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import warnings

import jax
import jax.numpy as jnp
import jaxlib.version

HERE = pathlib.Path(__file__).parent
SOURCES = ("attention_cpu.cc", "d8_gelu_cpu.cc", "linear_cpu.cc", "norm_cpu.cc")
HEADERS = ("cpu_gelu.h", "cpu_products.h", "cpu_threads.h", "cpu_vectors.h")
KERNELS = (
    *(f"equivit_{op}{end}" for op in ("attention", "d8_gelu", "norm") for end in ("", "_backward")),
    *(f"equivit_linear{end}" for end in ("", "_backward_x", "_backward_weight")),
)
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
    for name in KERNELS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(loaded, name)), platform="cpu")
    return True


def supported(*arrays: jax.Array) -> bool:
    """Whether they are available, for arrays of these dtypes and shapes (not for symbolic ones, nor empty)."""
    known = all(isinstance(n, int) and n > 0 for a in arrays for n in a.shape)
    return known and all(a.dtype == jnp.float32 for a in arrays) and available()


def call(name: str, arguments: tuple[jax.Array, ...], shapes: list[tuple[int, ...]], **attributes) -> tuple:
    """The kernel's results, float32 of these shapes; under `jax.vmap` one call for each.

    Raises:
      RuntimeError: it has not been compiled.
    """
    if not available():
        raise RuntimeError(f"{name} has not been compiled: python -m kernels.compile_cpu")
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return tuple(jax.ffi.ffi_call(name, results, vmap_method="sequential")(*arguments, **attributes))


@functools.cache
def _processor() -> str:
    """Its name and its instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU"))}))
