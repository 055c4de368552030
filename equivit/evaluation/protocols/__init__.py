"""Evaluation protocols, one per file.  The file's name is the protocol's name, its first line is shown by `--help`.

A file defines one `PROTOCOL` (`evaluation/protocol.py`); a new protocol changes nothing else.  They are found by
listing this folder, not by a decorator or a registry: names and first lines are known without importing JAX, and a
failed import names its file.
"""

import ast
import importlib
import pathlib
from typing import Any

_FILES = sorted(path for path in pathlib.Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def about() -> dict[str, str]:
    """The first line of each protocol's docstring, by the protocol's name; imports none of them."""
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] for path in _FILES}


def load() -> dict[str, Any]:
    """Every protocol by its name."""
    return {path.stem: importlib.import_module(f"{__name__}.{path.stem}").PROTOCOL for path in _FILES}
