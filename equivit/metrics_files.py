"""Read metrics.jsonl, the metrics of a run: one JSON object per line, with "step" and numbers by name."""

import json
import os
import pathlib
from typing import NamedTuple

from equivit import errors


class Line(NamedTuple):
    """A line of the file and its row, None if the line cannot be read."""

    content: bytes
    row: dict[str, float] | None


def lines(path: str | os.PathLike) -> list[Line]:
    """The lines of a file, [] if it is missing; a truncated last line is left out."""
    path = pathlib.Path(path)
    *whole, last = path.read_bytes().split(b"\n") if path.exists() else [b""]
    found = [Line(line, _row(line)) for line in (*whole, last)]
    return found if found[-1].row is not None else found[:-1]


def rows(path: str | os.PathLike) -> list[dict[str, float]]:
    """The rows of all lines that can be read."""
    return [line.row for line in lines(path) if line.row is not None]


def _row(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line.decode())  # json.loads(bytes) accepts surrogates, which cannot be encoded again
        numbers = {name: float(value) for name, value in row.items() if errors.is_number(value)}
    except (ValueError, AttributeError, OverflowError, RecursionError):
        return None
    return row if len(numbers) == len(row) and isinstance(row.get("step"), int) else None
