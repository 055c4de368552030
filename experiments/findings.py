"""Results of a script: claims, entries of its JSON file, tables."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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


class Entry:
    """An entry of the JSON file that is written after each measurement, so that an interrupted run keeps its rows.

    Rows of earlier runs stay, each with its commit.  All are of one machine, its versions, and one choice of settings:
    other settings need another entry, and so does another machine, unless its run measures every row of the entry.

    Args:
      options: what `flags.parser` parsed; ValueError if its entry has other settings.
      settings: what all rows share; stored beside them.
      budget: of `measured`; its omissions and failures are stored.
    """

    def __init__(self, options, settings: Mapping[str, Any], budget: Budget | None = None):
        self._options, self.budget, self._facts = options, budget or Budget(math.inf), facts()
        self._settings = json.loads(json.dumps(settings))
        self._before = read(options).get(options.entry, {})
        self._tables: dict[str, _Table] = {}
        self._begun = False  # to write
        for name, value in self._settings.items():
            if (other := self._before.get(name, value)) != value:
                self._refuse(f"was measured with {name}={other}, and this run has {value}")

    def keep(self, by: Sequence[str], keys: Iterable[tuple], name: str = "rows") -> None:
        """Begin a table with the rows of earlier runs.

        Args:
          by: the fields that tell measurements apart; a measurement may have several rows.
          keys: their values in the measurements of this run.

        Raises:
          ValueError: the entry has rows of another machine or other versions that this run does not measure.
        """
        kept = self._tables[name] = _Table(by, list(keys))
        before = self._before.get(name, [])
        kept.add({**row, "commit": row.get("commit", self._before["commit"])} for row in before)
        if elsewhere := self._elsewhere():
            if lost := [key for key in kept.rows if key not in kept.keys]:
                self._refuse(f"has rows of {elsewhere} that this run does not measure, such as {kept.label(lost[0])}")
            kept.rows.clear()

    def add(self, rows: Iterable[Mapping[str, Any]], name: str = "rows", **others: Any) -> None:
        """Write the rows of a measurement, in place of its earlier ones, and other results."""
        self._begun = True
        self._tables[name].add({**row, "commit": self._facts["commit"]} for row in rows)
        _put(self._options, {**self._facts, **self._results(), **others})

    def rows(self, name: str = "rows") -> list[dict[str, Any]]:
        """All rows of a table."""
        return [row for rows in self._tables[name].rows.values() for row in rows]

    def measured(self, measure: Callable[..., dict], columns: Mapping[str, str], name: str = "rows") -> list[dict]:
        """All rows after `measure(*key)` of each key, unless it does not fit into the budget or fails; prints each."""
        for key in self._tables[name].keys:
            label = self._tables[name].label(key)
            if self.budget.allows(label):
                with self.budget.trying(label):
                    row = measure(*key)
                    self.add([row], name)
                    print(table([row], columns), flush=True)
        return self.rows(name)

    def finish(self, claims: Sequence[Claim], **others: Any) -> int:
        """`findings.finish` with settings, rows and other results; where nothing was measured, the file stays."""
        if self._begun or not self._tables:
            return finish(self._options, {**self._results(), **others}, claims, self.budget)
        print(f"nothing was measured: {self._options.output}")
        return _judged(claims, self.budget)[1]

    def _results(self) -> dict[str, Any]:
        return self._settings | {name: self.rows(name) for name in self._tables}

    def _elsewhere(self) -> str:
        """The machine or the versions of earlier rows where they differ from this run's; else ""."""
        before = self._before or self._facts
        if before["device"]["name"] != self._facts["device"]["name"]:
            return before["device"]["name"]
        return ", ".join(f"{n} {v}" for n, v in before["versions"].items() if self._facts["versions"].get(n) != v)

    def _refuse(self, why: str) -> None:
        raise ValueError(f"{self._options.output}: entry {self._options.entry} {why}; name another one with --entry.")


class _Table:
    """Rows by the fields that tell their measurements apart, and the keys of the measurements of this run."""

    def __init__(self, by: Sequence[str], keys: list[tuple]):
        self.by, self.keys = by, keys
        self.rows: dict[tuple, list[dict[str, Any]]] = {}

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Rows of one measurement replace its earlier ones, at their place."""
        new: dict[tuple, list[dict[str, Any]]] = {}
        for row in rows:
            new.setdefault(tuple(row[field] for field in self.by), []).append(row)
        self.rows |= new

    def label(self, key: tuple) -> str:
        """A key in words."""
        return ", ".join(f"{field} {value}" for field, value in zip(self.by, key, strict=True))


def finish(options, results: Mapping[str, Any], claims: Sequence[Claim], budget: Budget | None = None) -> int:
    """Write the results, print every claim, and return the exit status: 1 if a claim or a variant fails.

    `options` is what `flags.parser` parsed.
    """
    judged, status = _judged(claims, budget or Budget(0))
    write(options, {**results, **judged})
    return status


def _judged(claims: Sequence[Claim], budget: Budget) -> tuple[dict[str, Any], int]:
    """Claims and budget as `finish` writes them, and the exit status; prints them."""
    for name in budget.left_out:
        print(f"left out: {name}")
    for name, error in budget.failed.items():
        print(f"failed: {name}: {error.splitlines()[0]}")
    for claim in claims:
        print(claim)
    judged = [{**dataclasses.asdict(claim), "holds": claim.holds} for claim in claims]
    found = dict(claims=judged, left_out=budget.left_out, failed=budget.failed)
    return found, int(bool(budget.failed) or any(claim.holds is False for claim in claims))


def write(options, results: Mapping[str, Any]) -> None:
    """Write the results with machine, versions and commit into one entry of the JSON file; other entries stay.

    So does an entry with the same results: it names the machine and the commit that trained the runs of a study, which
    may be reported again elsewhere.
    """
    about = facts()
    known = {key: value for key, value in read(options).get(options.entry, {}).items() if key not in about}
    if known == json.loads(json.dumps(results)):
        print(f"as before: {options.output}")
        return
    _put(options, {**about, **results})
    print(f"written: {options.output}")


def _put(options, entry: Mapping[str, Any]) -> None:
    """Write one entry of the JSON file."""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    files.write_text(options.output, json.dumps(read(options) | {options.entry: entry}, indent=1) + "\n")


def facts() -> dict[str, Any]:
    """Machine, versions and commit of a result."""
    return dict(device=machine.device(), versions=machine.versions(), commit=machine.commit())


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


def cached(path: pathlib.Path, compute: Callable[[], Any], settings: Mapping[str, Any] | None = None) -> Any:
    """The result in a JSON file; computed and written if there is no file, or one of other settings or another form."""
    settings, known = json.loads(json.dumps(settings or {})), read_json(path)
    if not isinstance(known, dict) or known.keys() != {"settings", "result"} or known["settings"] != settings:
        files.write_text(path, json.dumps(dict(settings=settings, result=compute()), indent=1) + "\n")
        known = read_json(path)
    return known["result"]


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
