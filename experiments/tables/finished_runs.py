"""Results of finished runs, for tables and figures made from several of them.

A run is a directory that `equivit.train` wrote: config.json, and at its end report.json.  Runs are known by their
configs, not by the names of their directories.  Runs that differ in their seeds alone are one cell of a table.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from equivit.training import build
from equivit.training import config as configs
from experiments import findings, flags, machine

# Keys that may differ between runs that are compared, beside what the table is about: they change no result.
FREE = ("seed", "data.workers", "model.remat", "optimizer.accumulation", "checkpoint.", "evaluation.", "log.", "mesh.")


class Run(NamedTuple):
    """A run directory, its config, the configuration of its model, and its final figures; None: it has not ended."""

    place: pathlib.Path
    config: ConfigDict
    model: Any
    report: dict[str, float] | None


class Figure(NamedTuple):
    """A figure over the seeds, in percent; the spread is the standard deviation (n - 1), None of a single value."""

    mean: float
    spread: float | None
    values: list[float]


def parser(description: str, script: str, *, tables: Iterable[str]) -> argparse.ArgumentParser:
    """The flags of a script that prints tables from the runs of a directory."""
    options = flags.parser(description, script)
    options.add_argument("runs", type=pathlib.Path, help="directory of the runs")
    options.add_argument("--tables", type=flags.one_of(list(tables)), default=list(tables), help="(all)")
    options.add_argument("--missing", action="store_true", help="print the commands that train missing runs")
    return options


def read(directory: pathlib.Path, *, may_be_empty: bool = False) -> list[Run]:
    """All runs in a directory, at any depth.

    Args:
      may_be_empty: whether a directory without runs is as good, for tables whose cells may all be empty.

    Raises:
      ValueError: there is none, or a config or a report cannot be read.
    """
    if may_be_empty and not directory.is_dir():
        raise ValueError(f"{directory}: there is no such directory; create it, or give the directory of the runs.")
    runs = [_read(path.parent) for path in sorted(directory.rglob("config.json"))]
    if not runs and not may_be_empty:
        raise ValueError(f"{directory}: there is no run of equivit.train in it (no config.json).")
    return runs


def _read(place: pathlib.Path) -> Run:
    report = place / "report.json"
    try:
        config = configs.from_json(place / "config.json")
        figures = json.loads(report.read_text()) if report.is_file() else None
        return Run(place, config, build.model_configuration(config), figures)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{place}: not a run of this version of equivit: {error}") from error


def cells(
    runs: Iterable[Run],
    cell: Callable[[Run], Hashable],
    wanted: Sequence[Hashable],
    *,
    free: Sequence[str],
    command: Callable[[Any], str],
) -> dict[Any, list[Run]]:
    """The finished runs of each wanted cell of a table.

    Args:
      runs: what `read` returned.
      cell: which cell a run belongs to; runs of others are left out.
      wanted: the cells.
      free: keys in which cells differ; ending in a dot: a section.
      command: what trains the run of a cell.

    Raises:
      ValueError: a cell has no finished run, or two with one seed, or runs differ in other keys.
    """
    found = _of_cells(runs, cell, wanted)
    missing = [name for name in wanted if not _finished(found[name])]
    if missing:
        begun = [str(run.place) for name in missing for run in found[name]]
        note = f" Not finished: {', '.join(begun)}; its own command resumes it." if begun else ""
        names = "; ".join(map(_text, missing))
        raise ValueError(f"there is no finished run of {names}. It is trained by: {command(missing[0])}.{note}")
    finished = {name: _finished(group) for name, group in found.items()}
    _check_recipe([run for group in finished.values() for run in group], free)
    _check_seeds(finished)
    return finished


def present(
    runs: Iterable[Run], cell: Callable[[Run], Hashable], wanted: Sequence[Hashable], *, free: Sequence[str] = ()
) -> dict[Any, list[Run]]:
    """The finished runs of each wanted cell, of some perhaps none; cells may be of several recipes.

    Args:
      free: keys in which runs of a cell differ.

    Raises:
      ValueError: two runs of a cell have one seed, or differ in other keys.
    """
    finished = {name: _finished(group) for name, group in _of_cells(runs, cell, wanted).items()}
    for group in finished.values():
        _check_recipe(group, free)
    _check_seeds(finished)
    return finished


def _of_cells(runs, cell, wanted) -> dict[Any, list[Run]]:
    found: dict[Any, list[Run]] = {name: [] for name in wanted}
    for run in runs:
        if (name := cell(run)) in found:
            found[name].append(run)
    return found


def _finished(runs: Iterable[Run]) -> list[Run]:
    return [run for run in runs if run.report is not None]


def _check_seeds(found: dict[Any, list[Run]]) -> None:
    for name, group in found.items():
        places: dict[int, pathlib.Path] = {}
        for run in group:
            if (other := places.setdefault(run.config.seed, run.place)) != run.place:
                both = f"{other} and {run.place} are both runs of {_text(name)} with seed {run.config.seed}"
                raise ValueError(f"{both}; leave one out.")


def _text(name) -> str:
    return " ".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _check_recipe(runs: Sequence[Run], free: Sequence[str]) -> None:
    for run in runs[1:]:
        if keys := _others(configs.differences(runs[0].config, run.config), free):
            raise ValueError(
                f"{runs[0].place} and {run.place} are not of one recipe: they differ in {', '.join(keys)}; give a "
                "directory with runs of one."
            )


def departures(run: Run, recipe: str, *, free: Sequence[str], changes: Sequence[str] = ()) -> list[str]:
    """The keys in which a run differs from a config, such as "configs/deit3.py:L,H8", beside `free`.

    Where the config does not say how many classes there are, they are the 1000 of ImageNet.

    Args:
      changes: of the config, such as "model.k=6".
    """
    config = configs.load(str(machine.ROOT / recipe), changes)
    with config.unlocked():  # which a run notes when it has seen the data
        config.model = {"num_classes": 1000, "in_channels": 3, **config.model}
    return _others(configs.differences(run.config, config), [*free, "data.source"])


def _others(keys: Iterable[str], free: Sequence[str]) -> list[str]:
    known = (*FREE, *free)
    return [key for key in keys if not any(key == k or (k.endswith(".") and key.startswith(k)) for k in known)]


def figure(runs: Sequence[Run], name: str) -> Figure:
    """A figure of report.json, such as "eval/accuracy/top1", over the runs of a cell.

    Raises:
      ValueError: a run has no such figure.
    """
    for run in runs:
        if name not in (run.report or {}):
            raise ValueError(f"{run.place}/report.json has no {name}; was its protocol in the run's evaluation.suite?")
    values = [100 * run.report[name] for run in runs if run.report is not None]
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, values)


def show(
    rows: Sequence[Mapping[str, Any]],
    titles: Mapping[str, str],
    columns: Callable[[Sequence[Mapping[str, Any]]], Mapping[str, str]],
    others: Mapping[str, Sequence[str]],
) -> None:
    """Print rows by their "table", and how many have runs ("seeds").

    Args:
      titles: of the tables.
      columns: of the rows of a table, as in `findings.table`.
      others: by the label of a cell, the keys in which its runs depart from their recipe.
    """
    for name, title in titles.items():
        if lines := [row for row in rows if row["table"] == name]:
            print(f"\nTable {name}: {title}\n{findings.table(lines, columns(lines))}")
    print(f"\n{sum(row['seeds'] > 0 for row in rows)} of {len(rows)} rows have runs.")
    for label, keys in others.items():
        if keys:
            print(f"{label}: not the recipe, which has other values of {', '.join(keys)}")


def evaluations(path: pathlib.Path, key: str) -> dict[str, dict[str, Any]]:
    """The results of further evaluations in a run directory, by name; empty if there is no file.

    Raises:
      ValueError: the file is damaged.
    """
    try:
        return json.loads(path.read_text())[key] if path.is_file() else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and evaluate again.") from error


def write_evaluations(path: pathlib.Path, key: str, step: int, results: Mapping[str, Mapping[str, Any]]) -> None:
    """Write further evaluations with the step of the weights."""
    path.write_text(json.dumps({"step": step, key: results}, indent=1) + "\n")
