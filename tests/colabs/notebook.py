"""Running a notebook from top to bottom, as a user does."""

import os
import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "colabs"
# The kernel's messaging libraries open sockets that they leave to the garbage collector.
LEAVES_SOCKETS = pytest.mark.filterwarnings(
    "ignore::ResourceWarning:zmq", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def run(name: str, *, short: bool = False) -> str:
    """Everything that a notebook prints.

    Args:
      short: it trains so little that compiling takes longest: XLA optimises less, to the first of its levels.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=_environment(short))
    return "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))


def _environment(short):
    """Without what tests/conftest.py sets to compile fast: a notebook trains, and would take twice as long to run.

    A short one keeps the flags, with XLA's first level: at none, transposed convolutions take four times as long.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if short:
        flags.append("--xla_backend_optimization_level=1")
    else:
        flags = [flag for flag in flags if "fusion_emitters" not in flag]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    return environment
