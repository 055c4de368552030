"""Results of finished runs, for tables and figures made from several of them.

A run is a directory that `equivit.train` wrote: config.json, and at its end report.json.  Runs are known by their
configs, not by the names of their directories.  Runs that differ in their seeds alone are one cell of a table.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from ml_collections import ConfigDict

from equivit.evaluation import runner
from equivit.training import build, checkpoints, sharding
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

    mean: float | None
    spread: float | None
    values: list[float]


def parser(description: str, script: str, *, tables: Iterable[str] | None = None) -> argparse.ArgumentParser:
    """The flags of a script that reads the runs of a directory, and prints one or several tables."""
    options = flags.parser(description, script)
    options.add_argument("runs", type=pathlib.Path, help="directory of the runs")
    if tables is not None:
        options.add_argument("--tables", type=flags.one_of(list(tables)), default=list(tables), help="(all)")
        options.add_argument("--missing", action="store_true", help="print the commands that train missing runs")
    return options


def entry(options, rows: Sequence[dict]) -> findings.Entry:
    """The entry with rows of the chosen tables; rows of other tables stay."""
    found = findings.Entry(options, {})
    found.keep(("table",), [(name,) for name in options.tables])
    found.add(rows)
    return found


def read(directory: pathlib.Path, *, may_be_empty: bool = False) -> list[Run]:
    """All runs in a directory, at any depth.

    Raises ValueError where a config or a report cannot be read, or there is no run, unless that may be.
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


def present(
    runs: Iterable[Run], cell: Callable[[Run], Hashable], wanted: Sequence[Hashable], *, free: Sequence[str] = ()
) -> dict[Any, list[Run]]:
    """The finished runs of each wanted cell of a table, of some perhaps none; cells may be of several recipes.

    `cell` says which one a run belongs to.  Raises ValueError if two runs of a cell have one seed, or differ in keys
    that are not in `free`, where a key that ends in a dot is a section.
    """
    found: dict[Any, list[Run]] = {name: [] for name in wanted}
    for run in runs:
        if run.report is not None and (name := cell(run)) in found:
            found[name].append(run)
    for name, group in found.items():
        _check_recipe(group, free)
        places: dict[int, pathlib.Path] = {}
        for run in group:
            if (other := places.setdefault(run.config.seed, run.place)) != run.place:
                both = f"{other} and {run.place} are both runs of {_text(name)} with seed {run.config.seed}"
                raise ValueError(f"{both}; leave one out.")
    return found


def of_one_recipe(
    directory: pathlib.Path,
    cell: Callable[[Run], Hashable],
    wanted: Sequence[Hashable],
    *,
    free: Sequence[str],
    recipe: Callable[[Any], str],
) -> tuple[dict[Any, list[Run]], list[str]]:
    """`present`, and the keys in which the runs depart from their recipe, the config of a cell; prints them.

    Raises ValueError as `read` and `present`, and if a cell has no finished run, or cells differ in keys beside `free`.
    """
    runs = read(directory)
    found = present(runs, cell, wanted, free=free)
    if missing := [name for name in wanted if not found[name]]:
        begun = [str(run.place) for name in missing for run in runs if cell(run) == name]
        note = f" Not finished: {', '.join(begun)}; its own command resumes it." if begun else ""
        train = command(recipe(missing[0]), directory / _text(missing[0]).replace(" ", "_"))
        names = "; ".join(map(_text, missing))
        raise ValueError(f"there is no finished run of {names}. It is trained by: {train}.{note}")
    _check_recipe([run for group in found.values() for run in group], free)
    if others := departures(found[wanted[0]][0], recipe(wanted[0]), free=free):
        file = recipe(wanted[0]).partition(":")[0]
        print(f"Not the recipe of the paper's numbers: {file} has other values of {', '.join(others)}.")
    return found, others


def _text(name) -> str:
    return " ".join(map(str, name)) if isinstance(name, tuple) else str(name)


def _check_recipe(runs: Sequence[Run], free: Sequence[str]) -> None:
    for run in runs[1:]:
        if keys := _others(configs.differences(runs[0].config, run.config), free):
            both = f"{runs[0].place} and {run.place} are not of one recipe: they differ in {', '.join(keys)}"
            raise ValueError(f"{both}; give a directory with runs of one.")


def _others(keys: Iterable[str], free: Sequence[str]) -> list[str]:
    known = (*FREE, *free)
    return [key for key in keys if not any(key == k or (k.endswith(".") and key.startswith(k)) for k in known)]


def departures(run: Run, recipe: str, *, free: Sequence[str], changes: Sequence[str] = ()) -> list[str]:
    """The keys in which a run differs from a config with changes, such as "configs/deit3.py:L,H8", beside `free`.

    Where the config does not say how many classes there are, they are the 1000 of ImageNet.
    """
    config = configs.load(str(machine.ROOT / recipe), changes)
    with config.unlocked():  # which a run notes when it has seen the data
        config.model = {"num_classes": 1000, "in_channels": 3, **config.model}
    return _others(configs.differences(run.config, config), [*free, "data.source"])


def command(recipe: str, place: pathlib.Path, *more: str) -> str:
    """The command that trains a recipe in a directory."""
    return " ".join([f"python -m equivit.train --config={recipe} --workdir={place}", *more])


def figure(runs: Sequence[Run], name: str) -> Figure:
    """A figure of report.json, such as "eval/accuracy/top1", over the runs of a cell; ValueError where one has none."""
    for run in runs:
        if name not in (run.report or {}):
            raise ValueError(f"{run.place}/report.json has no {name}; was its protocol in the run's evaluation.suite?")
    return over_seeds([100 * run.report[name] for run in runs if run.report is not None])


def over_seeds(values: list[float]) -> Figure:
    """A figure from the values of seeds, which may be none."""
    mean = statistics.fmean(values) if values else None
    return Figure(mean, statistics.stdev(values) if len(values) > 1 else None, values)


def show(rows: Sequence[dict], titles: dict, columns: dict, others: dict, *, more: dict | None = None) -> None:
    """Print rows by their "table", and how many have runs ("seeds").

    Args:
      columns: of all tables, as in `findings.table`; `more` are of one table.
      others: by the label of a cell, the keys in which its runs depart from their recipe.
    """
    for name, title in titles.items():
        if lines := [row for row in rows if row["table"] == name]:
            print(f"\nTable {name}: {title}\n{findings.table(lines, columns | (more or {}).get(name, {}))}")
    print(f"\n{sum(row['seeds'] > 0 for row in rows)} of {len(rows)} rows have runs.")
    for label, keys in others.items():
        if keys:
            print(f"{label}: not the recipe, which has other values of {', '.join(keys)}")


def protocols(
    config: ConfigDict, model: Any, names: tuple[str, ...], *, directory: pathlib.Path | None = None
) -> dict[str, dict]:
    """The results of protocols on the data of a config; a long one resumes from its directory."""
    runner.check(names, config, model)
    with jax.set_mesh(sharding.create_mesh(config.mesh)):
        return runner.evaluate(model, config, names, directory=directory)


def evaluations(path: pathlib.Path, key: str) -> dict[str, dict[str, Any]]:
    """The results of further evaluations of a run, by name; empty if there is no file, ValueError if it is damaged."""
    try:
        return json.loads(path.read_text())[key] if path.is_file() else {}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); delete it and evaluate again.") from error


def evaluate(path: pathlib.Path, key: str, wanted: Sequence[str], measure: Callable[..., dict | None]) -> None:
    """Add evaluations that are missing in a file of a run's directory; each result is written at once.

    `measure` gives the result by name, config and model, or None.
    """
    known = evaluations(path, key)
    if missing := [name for name in wanted if name not in known]:
        config, model, step = checkpoints.load_run(path.parent)
        for name in missing:
            if (result := measure(name, config, model)) is not None:
                known[name] = result
                path.write_text(json.dumps({"step": step, key: known}, indent=1) + "\n")
