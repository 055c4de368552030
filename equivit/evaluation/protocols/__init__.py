"""Evaluation protocols, one per file.  The file's name is the protocol's name; `--help` shows its first line.

A file defines one `PROTOCOL` (`evaluation/protocol.py`); adding a protocol changes nothing else.  Protocols are found
by listing this folder, without a decorator or a registry: names and first lines are known without importing JAX, and a
failed import names its file.
"""

import ast
import importlib
import pathlib
from typing import Any

_FILES = sorted(path for path in pathlib.Path(__file__).parent.glob("*.py") if path.stem != "__init__")


def about() -> dict[str, str]:
    """The first line of each protocol's docstring, by the protocol's name, without importing any."""
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] for path in _FILES}


def load() -> dict[str, Any]:
    """Every protocol by its name."""
    return {path.stem: importlib.import_module(f"{__name__}.{path.stem}").PROTOCOL for path in _FILES}
