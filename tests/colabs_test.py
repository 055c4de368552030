"""Every notebook runs from top to bottom."""

import os
import pathlib
import re

import nbclient
import nbformat
import pytest

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "colabs").glob("*.ipynb"))


# The kernel's messaging libraries open sockets that they leave to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning:zmq", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    os.environ["JAX_PLATFORMS"] = "cpu"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    text = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    CHECKS[path.stem](text)


def check_octic_quickstart(text):
    assert "plain ViT: octic element 'r'" in text
    accuracies = [line.split()[-1] for line in text.splitlines() if "test accuracy" in line]
    assert len(accuracies) == 8 and len(set(accuracies)) == 1  # invariant
    assert float(accuracies[0]) > 0.3  # it learns: chance is 0.1


def check_jumbo_mae(text):
    first, last = map(float, re.search(r"loss ([\d.]+) at the first step, ([\d.]+) at the end", text).groups())
    assert last < 0.52 < first  # the mean image alone gives 0.52


CHECKS = {"octic_quickstart": check_octic_quickstart, "jumbo_mae": check_jumbo_mae}
