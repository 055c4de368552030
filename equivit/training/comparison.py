"""Compare runs: final figures with their spread over seeds, the keys in which the recipes differ, and curves."""

import csv
import dataclasses
import io
import pathlib
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from equivit import errors, files, metrics_files
from equivit.evaluation import runner
from equivit.training import config as configs
from equivit.training.run import resuming

FILES = ("comparison.png", "comparison.md", "comparison.csv")
# Keys that change no figure of a run.
HARMLESS = ("seed", *resuming.SILENT)
SHOWN = ("loss", "accuracy")  # metrics of training among the curves


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Runs that differ in their seeds alone."""

    name: str  # the values of the differing keys, or the name or the path of the directory; no two are the same
    keys: dict[str, Any]  # the keys in which recipes differ, and their values here
    runs: tuple[pathlib.Path, ...]
    steps: tuple[int, ...]  # the last step of each run
    finished: bool  # whether all runs are
    figures: dict[str, tuple[float, ...]]  # the final figures by name, one for each run that has it


def runs_in(places: Iterable[pathlib.Path]) -> list[pathlib.Path]:
    """The run directories among places and directly in them, such as the runs of a sweep or of several seeds.

    Raises FileNotFoundError for a place without any run.
    """
    found = []
    for place in places:
        inside = (
            [place]
            if _is_run(place)
            else sorted(filter(_is_run, place.glob("*"))) + sorted(filter(_is_run, place.glob("*/seed_*")))
        )
        if not inside:
            raise FileNotFoundError(
                f"{place}: there is no run in it; a run directory has config.json and metrics.jsonl."
            )
        found += inside
    return list(dict.fromkeys(found))


def recipes(runs: Sequence[pathlib.Path]) -> list[Recipe]:
    """Group runs by their configurations without the seed, in the order of the runs.

    Raises ValueError if a file of a run is damaged.
    """
    every = {run: _comparable(configs.from_json(run / "config.json")) for run in runs}
    groups: list[list[pathlib.Path]] = []
    for run in runs:
        same = next((group for group in groups if every[group[0]] == every[run]), None)
        groups.append([run]) if same is None else same.append(run)
    firsts = [every[group[0]] for group in groups]
    names = sorted({key for values in firsts for key in values})
    differing = [key for key in names if any(values.get(key) != firsts[0].get(key) for values in firsts)]
    found = [_recipe(group, {key: every[group[0]].get(key) for key in differing}) for group in groups]
    short = [recipe.name for recipe in found]
    return [
        recipe if short.count(recipe.name) == 1 else dataclasses.replace(recipe, name=str(recipe.runs[0]))
        for recipe in found
    ]


def _is_run(place: pathlib.Path) -> bool:
    return (place / "config.json").is_file() and (place / "metrics.jsonl").is_file()


def _comparable(config: ConfigDict) -> dict[str, Any]:
    values = configs.flat(configs.plain(config))
    return {key: value for key, value in values.items() if not key.startswith(HARMLESS)}


def _recipe(group: list[pathlib.Path], keys: dict[str, Any]) -> Recipe:
    figures: dict[str, list[float]] = {}
    steps, finished = [], True
    for run in group:
        rows = metrics_files.rows(run / "metrics.jsonl")
        last = {name: value for row in rows for name, value in row.items()}
        steps.append(int(last.get("step", 0)))
        if (run / "report.json").is_file():
            last = files.read_json(run / "report.json", "step")
        else:
            finished = False
        for name, value in last.items():
            if name.startswith("eval/"):
                figures.setdefault(name.removeprefix("eval/"), []).append(float(value))
    name = ", ".join(f"{key.rpartition('.')[2]}={errors.word(str(value))}" for key, value in keys.items())
    name = _directory(group[0]) if not name or len(keys) > 3 else name
    values = {name: tuple(found) for name, found in figures.items()}
    return Recipe(name, keys, tuple(group), tuple(steps), finished, values)


def _directory(run: pathlib.Path) -> str:
    """The name of a run's directory; of one of several seeds, of the directory around it."""
    run = run.absolute()
    return run.parent.name if re.fullmatch(r"seed_\d+", run.name) else run.name


def write(found: Sequence[Recipe], folder: pathlib.Path) -> str:
    """Write `FILES` into a folder; return the Markdown page."""
    from equivit.evaluation import figures  # slow: matplotlib

    page = markdown(found)
    files.write_text(folder / FILES[1], page)
    files.write_text(folder / FILES[2], table(found))
    rows = {recipe.name: [metrics_files.rows(run / "metrics.jsonl") for run in recipe.runs] for recipe in found}
    figures.compared(rows, [*SHOWN, *runner.curves()], folder / FILES[0])
    return page


def table(found: Sequence[Recipe]) -> str:
    """A CSV table: a row for each recipe, with mean, spread and number of runs of each figure."""
    names = _figure_names(found)
    columns = [column for name in names for column in (name, f"{name} spread", f"{name} runs")]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["recipe", *_differing(found), "runs", "step", "finished", *columns])
    for recipe in found:
        cells = [cell for name in names for cell in _summary(recipe.figures.get(name, ()))]
        rows.writerow(
            [recipe.name, *recipe.keys.values(), len(recipe.runs), min(recipe.steps), recipe.finished, *cells]
        )
    return text.getvalue()


def markdown(found: Sequence[Recipe]) -> str:
    """A page: a table with a column for each recipe, first its differing keys, then its figures."""
    lines = [["", *(recipe.name for recipe in found)]]
    lines += [[f"`{key}`", *(errors.shown(recipe.keys[key]) for recipe in found)] for key in _differing(found)]
    lines.append(["runs", *(str(len(recipe.runs)) for recipe in found)])
    lines.append(["step", *(f"{min(r.steps)}{'' if r.finished else ' (unfinished)'}" for r in found)])
    lines += [[name, *(_shown(recipe.figures.get(name, ())) for recipe in found)] for name in _figure_names(found)]
    lines.insert(1, ["---"] * len(lines[0]))
    rows = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"# Comparison of {sum(len(recipe.runs) for recipe in found)} runs\n\n{rows}\n\n![Curves]({FILES[0]})\n"


def _differing(found: Sequence[Recipe]) -> list[str]:
    return list(found[0].keys)


def _figure_names(found: Sequence[Recipe]) -> list[str]:
    return list(dict.fromkeys(name for recipe in found for name in recipe.figures))


def _summary(values: Sequence[float]) -> tuple[float | str, float | str, int]:
    """Mean, standard deviation (n - 1) and number of values."""
    if not values:
        return "", "", 0
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else "", len(values)


def _shown(values: Sequence[float]) -> str:
    mean, spread, _ = _summary(values)
    return "" if mean == "" else f"{mean:.4g}" + (f" ± {spread:.2g}" if spread != "" else "")
