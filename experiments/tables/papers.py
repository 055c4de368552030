"""The papers' numbers: CSV files beside the scripts that use them."""

import csv
import json
import pathlib
from collections.abc import Collection
from typing import Any


def rows(script: str, file: str, words: Collection[str]) -> list[dict[str, Any]]:
    """The rows of a CSV file beside a script, whose `__file__` is given.

    Columns of `words` hold text, all others numbers; None where a cell is empty.
    """

    def value(column: str, text: str) -> Any:
        return text if column in words else json.loads(text) if text else None

    with pathlib.Path(script).with_name(file).open(newline="") as lines:
        return [{column: value(column, text) for column, text in row.items()} for row in csv.DictReader(lines)]
