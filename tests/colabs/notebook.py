"""Running a notebook from top to bottom, as a user does; as a command, also storing its outputs (`make notebooks`).

    python -m tests.colabs.notebook
    python -m tests.colabs.notebook segmentation

The first runs all, the second some.
"""

import copy
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Mapping
from types import MappingProxyType

import nbclient
import nbformat
import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "colabs"
HANGS = 3600  # seconds after which a notebook hangs, on any machine
# The kernel's messaging libraries open sockets that they leave to the garbage collector.
LEAVES_SOCKETS = pytest.mark.filterwarnings(
    "ignore::ResourceWarning:zmq", "ignore::pytest.PytestUnraisableExceptionWarning"
)
# Lines that another run or machine would print differently: paths and times.
VARYING = re.compile(rf"{re.escape(tempfile.gettempdir())}|{re.escape(str(FOLDER.parent))}|images/s|microseconds")


def run(name: str, *, optimised: bool = False, shorter: Mapping[str, str] = MappingProxyType({})) -> str:
    """Everything that a notebook prints.

    Args:
      optimised: compile its programs at XLA's first level, not as in other tests.
      shorter: replacements of texts that its code has once, for trainings of fewer steps.
    """
    notebook = read(name)
    for text, other in shorter.items():
        (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
        assert cell.source.count(text) == 1, text
        cell.source = cell.source.replace(text, other)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=1"
    _execute(notebook, {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": flags} if optimised else {})
    return "".join(output.get("text", "") for output in outputs(notebook))


def _execute(notebook, variables=MappingProxyType({})):
    # Its own time-outs are short: a kernel has a minute to start, and after 4 seconds without output the rest is lost.
    patience = dict(timeout=HANGS, startup_timeout=HANGS, iopub_timeout=HANGS)
    resources = {"metadata": {"path": str(FOLDER)}}
    client = nbclient.NotebookClient(
        notebook, **patience, record_timing=False, coalesce_streams=True, resources=resources
    )
    client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu", **variables})


def read(name: str) -> nbformat.NotebookNode:
    """The notebook of a name."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    """All outputs of its cells."""
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def store(name: str) -> None:
    """Run a notebook and store its outputs in its file, without the lines that vary and the standard error."""
    notebook = read(name)
    metadata = copy.deepcopy(notebook.metadata)  # the kernel adds the version of Python
    _execute(notebook)
    notebook.metadata = metadata
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in map(_kept, cell.outputs) if output is not None]
    nbformat.write(notebook, FOLDER / f"{name}.ipynb")


def _kept(output):
    """The output without lines that vary; None if nothing is left, or if it is of the standard error."""
    if output.output_type != "stream":
        return output
    lines = "".join(line for line in output.text.splitlines(keepends=True) if not VARYING.search(line))
    return nbformat.from_dict({**output, "text": lines}) if lines and output.name == "stdout" else None


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        store(name)
        print(f"{name}: outputs stored", flush=True)
