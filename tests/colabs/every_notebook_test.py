"""Each notebook has a test module of its own, so that processes can share them; here is what all have in common."""

import pathlib
import re
import subprocess
import sys

import pytest

from tests.colabs import notebook

NAMES = sorted(path.stem for path in notebook.FOLDER.glob("*.ipynb"))


def setup(name):
    """The first code cell."""
    return next(cell.source for cell in notebook.read(name).cells if cell.cell_type == "code")


def test_every_notebook_is_tested():
    tested = {path.stem.removesuffix("_test") for path in pathlib.Path(__file__).parent.glob("*_test.py")}
    assert set(NAMES) == tested - {"every_notebook"}


def test_outputs_are_stored_without_what_another_machine_would_print():
    for name in NAMES:
        stored = notebook.outputs(notebook.read(name))
        assert any("image/png" in output.get("data", {}) for output in stored), name
        assert all(output.get("name") != "stderr" for output in stored), name
        texts = [output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in stored]
        assert not re.search(r"(?<![\w.])/(tmp|home|root|Users|usr|var|work|content)/", "".join(texts)), name
        assert not notebook.VARYING.search("".join(texts)), name
        assert (notebook.FOLDER / f"{name}.ipynb").stat().st_size < 300_000, name


def test_the_first_cell_finds_the_clone_or_makes_one(tmp_path, monkeypatch):
    (source,) = {setup(name) for name in NAMES}
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.chdir(notebook.FOLDER)
    exec(source, names := {})
    assert sys.path == [str(notebook.FOLDER.parent)] and names["root"] == notebook.FOLDER.parent

    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    (tmp_path / "equivit").mkdir()  # not a clone
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="set URL above"):
        exec(source, {})
    clone = tmp_path / "equivit-jax"
    exec(source.replace('URL = "URL"', 'URL = "https://host/name"'), {})
    assert commands[0][:2] + commands[0][3:] == ["git", "clone", "https://host/name", clone] and sys.path[0] == str(
        clone
    )
    assert commands[1][1:4] == ["-m", "pip", "install"] and commands[1][-1] == clone / "requirements.txt"
    clone.mkdir()
    exec(source, {})  # the clone of a session before: no address needed
    assert len(commands) == 3
