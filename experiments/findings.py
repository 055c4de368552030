"""Results of a script: claims, the JSON file, tables."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from equivit import files
from experiments import machine
from experiments.timing import Budget


@dataclasses.dataclass(frozen=True)
class Claim:
    """A figure of ours and the bound it is held to.  `ours` is None where it was not measured.

    A claim about a kind of machine is not judged on another: `judged` is False there.
    """

    text: str
    ours: float | None
    at_least: float | None = None
    at_most: float | None = None
    judged: bool = True

    @property
    def holds(self) -> bool | None:
        """None where it is not judged."""
        if self.ours is None or not self.judged:
            return None
        above = self.at_least is None or self.ours >= self.at_least
        return above and (self.at_most is None or self.ours <= self.at_most)

    def __str__(self):
        both = (("at least", self.at_least), ("at most", self.at_most))
        bounds = [f"{word} {bound:g}" for word, bound in both if bound is not None]
        ours = "not measured" if self.ours is None else f"{self.ours:.4g}"
        verdict = {None: "not judged", True: "holds", False: "FAILS"}[self.holds]
        return f"{verdict:10} {self.text}: {ours}, claimed {' and '.join(bounds)}"


def measured(
    measure: Callable[..., dict], variants: Mapping[str, tuple], columns: Mapping[str, str], budget: Budget
) -> list[dict]:
    """`measure` of the arguments of each variant, unless it does not fit into the budget or fails; prints each row."""
    rows = []
    for name, arguments in variants.items():
        if budget.allows(name):
            with budget.trying(name):
                rows.append(measure(*arguments))
                print(table(rows[-1:], columns), flush=True)
    return rows


def finish(options, results: Mapping[str, Any], claims: Sequence[Claim], budget: Budget | None = None) -> int:
    """Write the results, print every claim, and return the exit status: 1 if a claim or a variant fails.

    `options` is what `flags.parser` parsed.
    """
    budget = budget or Budget(0)
    for name in budget.left_out:
        print(f"left out: {name}")
    for name, error in budget.failed.items():
        print(f"failed: {name}: {error.splitlines()[0]}")
    for claim in claims:
        print(claim)
    judged = [{**dataclasses.asdict(claim), "holds": claim.holds} for claim in claims]
    write(options, {**results, "claims": judged, "left_out": budget.left_out, "failed": budget.failed})
    return int(bool(budget.failed) or any(claim.holds is False for claim in claims))


def write(options, results: Mapping[str, Any]) -> None:
    """Write the results with machine, versions and commit into one entry of the JSON file; other entries stay.

    So does an entry with the same results: it names the machine and the commit that trained the runs of a study, which
    may be reported again elsewhere.
    """
    facts = dict(device=machine.device(), versions=machine.versions(), commit=machine.commit())
    entries = read(options)
    known = {key: value for key, value in entries.get(options.entry, {}).items() if key not in facts}
    if known == json.loads(json.dumps(results)):
        print(f"as before: {options.output}")
        return
    entries |= {options.entry: {**facts, **results}}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(options.output, json.dumps(entries, indent=1) + "\n")
    print(f"written: {options.output}")


def picture(options) -> pathlib.Path:
    """Path of the picture that belongs to the entry."""
    stem = options.output.stem if options.entry == "main" else f"{options.output.stem}_{options.entry}"
    return options.output.with_name(f"{stem}.png")


def read(options) -> dict[str, dict[str, Any]]:
    """All entries of the JSON file; none where there is no file."""
    return read_json(options.output)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    return json.loads(path.read_text()) if path.is_file() else {}


def cached(path: pathlib.Path, compute: Callable[[], Any]) -> Any:
    """The object in a JSON file, computed and written where there is no file."""
    if not path.is_file():
        files.write_text(path, json.dumps(compute(), indent=1) + "\n")
    return json.loads(path.read_text())


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as aligned text; `columns` maps keys to headings.  Missing cells are "-"."""
    body = [[_cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns.values(), *body, strict=True)]
    lines = [list(columns.values()), *body]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)
