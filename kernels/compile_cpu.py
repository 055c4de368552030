"""Compile the kernels for this CPU; programs find them from then on.

    python -m kernels.compile_cpu

The library, of 0.6 MB, is put into ~/.cache/equivit, or $XDG_CACHE_HOME/equivit.
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import jax

from kernels.cpu import FLAGS, HERE, SOURCES, library


def compiled(compiler: str | None = None) -> pathlib.Path:
    """The library, compiled now unless it is there.

    Args:
      compiler: a C++ compiler; None for $CXX, or the first of c++, g++ and clang++ that is installed.

    Raises:
      FileNotFoundError: there is no compiler, or no home directory.
      RuntimeError: it fails; the message has its errors.
    """
    path = library()
    if path.exists():
        return path
    if not path.is_absolute():
        raise FileNotFoundError(f"kernels.compile_cpu: {path.parent} is no absolute path: set XDG_CACHE_HOME to one.")
    compiler = compiler or os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None or shutil.which(compiler) is None:
        raise FileNotFoundError(
            f"kernels.compile_cpu: there is no C++ compiler{f' {compiler}' if compiler else ''}; install g++ or "
            "clang++, or name another one with CXX=...  Without these kernels programs use XLA."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # another process may be compiling, too
        made = pathlib.Path(folder) / path.name
        sources = [str(HERE / name) for name in SOURCES]
        command = [compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), *sources, "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            lines = run.stderr.splitlines()
            errors = "\n".join([line for line in lines if "error" in line][:5] or lines[-5:])
            raise RuntimeError(f"kernels.compile_cpu: {compiler} cannot compile the kernels; it needs C++20.\n{errors}")
        made.replace(path)
    return path


def main() -> int:
    """Compile; returns the exit status."""
    try:
        print(f"kernels for this CPU: {compiled()}")
    except (OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
