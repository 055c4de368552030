"""Running a notebook from top to bottom, as a user does."""

import os
import pathlib

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "colabs"
HANGS = 3600  # seconds after which a notebook hangs, on any machine
# The kernel's messaging libraries open sockets that they leave to the garbage collector.
LEAVES_SOCKETS = pytest.mark.filterwarnings(
    "ignore::ResourceWarning:zmq", "ignore::pytest.PytestUnraisableExceptionWarning"
)


def run(name: str, *, short: bool = False) -> str:
    """Everything that a notebook prints.

    Args:
      short: it trains so little that compiling takes longest: programs are compiled as those of other tests are.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    # Its own time-outs are short: a kernel has a minute to start, and after 4 seconds without output the rest is lost.
    patience = dict(timeout=HANGS, startup_timeout=HANGS, iopub_timeout=HANGS)
    client = nbclient.NotebookClient(notebook, **patience, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=os.environ | {"JAX_PLATFORMS": "cpu"} | ({} if short else _optimised()))
    return "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))


def _optimised():
    """XLA's first level of optimisation, where tests/conftest.py has none to compile fast.

    A notebook trains, and would take twice as long to run, transposed convolutions four times.  The programs that draw
    parameters compile in a quarter of the last level's time.
    """
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "fusion_emitters" not in flag]
    flags.append("--xla_backend_optimization_level=1")
    return {"XLA_FLAGS": " ".join(flags), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
