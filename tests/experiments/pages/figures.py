"""How the pages of experiments/ write figures, and the tables of a page with the functions that make their rows."""

import functools
import json
import math
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence

from scipy import special

from experiments.studies import differences, several_seeds

ROOT = pathlib.Path(__file__).parents[3]
COMMANDS = ("table, figure | subject | command",)  # headings of tables that a page may have several times
CONV = ("EfficientViT B0", "EfficientViT B1", "SHViT S1", "SHViT S2", "SHViT S3", "MobileNetV4 conv-small")
CONV += ("MobileNetV4 conv-medium", "MobileNetV4 hybrid-medium", "BiXT-Ti/16")


class Page:
    """A page and its tables: by heading, functions that yield the rows."""

    def __init__(self, name: str):
        self.text = (ROOT / f"experiments/{name}.md").read_text()
        self.tables: dict[str, Callable] = {}

    def table(self, heading: str, *arguments):
        """Register a function that yields the rows of a table."""

        def register(function):
            self.tables[heading] = functools.partial(function, *arguments)
            return function

        return register

    def written(self) -> dict[str, list[list[str]]]:
        """The tables in the text by their headings: rows of cells."""
        found = {}
        for block in re.findall(r"(?:^\|.*\|\n)+", self.text, re.MULTILINE):
            lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
            heading = " | ".join(lines[0])
            assert heading not in found or heading in COMMANDS, heading
            found[heading] = lines[2:]
        return found


def entry(name: str, key: str = "main") -> dict:
    """An entry of the JSON file of a script."""
    return json.loads((ROOT / f"experiments/{name}.json").read_text())[key]


def rows_by(name: str, key: str, *fields: str) -> dict:
    """The rows of an entry by some of their fields."""
    return {tuple(row[field] for field in fields): row for row in entry(name, key)["rows"]}


def gap(name: str, gain: str, key: str = "main") -> str:
    """A difference of a study, without its sign, in points."""
    return f"{100 * abs(entry(f'studies/{name}', key)['gains'][gain]['gap']):.1f}"


def error(name: str, gain: str, key: str = "main") -> str:
    """The standard error of a difference of a study, in points."""
    return f"{100 * entry(f'studies/{name}', key)['gains'][gain]['standard_error']:.1f}"


def verdict(name: str, gain: str, key: str = "main") -> str:
    """Whether a difference of a study is resolved, in words."""
    found = entry(f"studies/{name}", key)["gains"][gain]
    return "resolved" if differences.resolved(found) else "not resolved"


def least_of_six(a: Sequence[float], b: Sequence[float]) -> float:
    """The points that Welch's test of six seeds resolves, by the spread of these."""
    parts = [statistics.variance(values) / 6 for values in (a, b)]
    degrees = sum(parts) ** 2 / sum(part**2 / 5 for part in parts)
    return 100 * math.sqrt(sum(parts)) * special.stdtrit(degrees, 1 - differences.LEVEL / 2)


def short(value: float) -> str:
    """Three digits, and whole numbers above."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def hundreds(value: float) -> str:
    """Rounded to hundreds."""
    return f"{round(value, -2):,.0f}"


def times(value: float) -> str:
    """A ratio."""
    return f"{value:.2f}x"


def percent(value: float) -> str:
    """A share in percent; "100" if all but a few of a hundred thousand."""
    return "100" if value > 0.99999 else f"{100 * value:.1f}"


spread = several_seeds.spread


def constant(values: list[float]) -> str:
    """Shares that are 1 with every seed, up to a few pixels, are "100"."""
    return "100" if min(values) > 0.99999 else spread(values)
