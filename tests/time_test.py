"""No test depends on how fast the machine is, or on what else it does."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
HANGS = 1800  # seconds: the shortest time-out, for what would otherwise wait for ever


def time_outs(path):
    """The time-outs that a file gives as numbers: line and value."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and "timeout" in (node.arg or "") and isinstance(node.value, ast.Constant):
            yield node.value.lineno, node.value.value


def test_time_outs_are_for_what_hangs():
    found = {path.relative_to(ROOT): list(time_outs(path)) for path in (ROOT / "tests").rglob("*.py")}
    assert sum(map(len, found.values())) >= 3
    short = [f"{path}:{line}: {value}" for path in found for line, value in found[path] if value and value < HANGS]
    assert not short, f"a loaded machine may take longer: {short}"
