"""Each notebook has a test module of its own, so that processes can share them."""

import pathlib

from tests.colabs import notebook


def test_every_notebook_is_tested():
    tested = {path.stem.removesuffix("_test") for path in pathlib.Path(__file__).parent.glob("*_test.py")}
    assert {path.stem for path in notebook.FOLDER.glob("*.ipynb")} == tested - {"every_notebook"}
