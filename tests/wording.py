"""Phrases that the project does not use; `make lint` runs this file: python -m tests.wording."""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("equivit", "kernels", "configs", "experiments", "tests", "colabs", "docs")
PHRASES = re.compile(r"\b(anew|mended|(is|are|be|was) told|so many)\b", re.IGNORECASE)
# A docstring begins with a verb or a noun.
BEGINNINGS = re.compile(r"(That of|Those of|Of|What|Whatever)\b")


def found() -> Iterator[str]:
    """A line for each banned phrase: file, line number, words."""
    paths = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]
    for path in sorted(path for path in paths if path.suffix in (".py", ".md", ".ipynb")):
        if path == pathlib.Path(__file__):
            continue
        text = path.read_text()
        for number, line in enumerate(text.splitlines(), 1):
            yield from (f"{path.relative_to(ROOT)}:{number}: {phrase[0]}" for phrase in PHRASES.finditer(line))
        if path.suffix == ".py":
            for number, docstring in docstrings(text):
                if begins := BEGINNINGS.match(docstring):
                    yield f"{path.relative_to(ROOT)}:{number}: a docstring begins with {begins[0]!r}"


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The docstrings of a file, with the numbers of their lines."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring


if __name__ == "__main__":
    lines = list(found())
    print(*lines, sep="\n", end="\n" if lines else "")
    sys.exit(bool(lines))
