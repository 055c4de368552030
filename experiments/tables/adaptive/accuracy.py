r"""Accuracy and shift consistency of trained runs beside shift-equivariant ViTs: Tables 1, 2, 5, 6 and A9 to A12.

    python -m equivit.train --config=configs/adaptive_cifar.py:10,swin_t --workdir=runs/adaptive/swin_t \
        --seeds=0,1,2,3,4
    python -m experiments tables.adaptive.accuracy runs/adaptive  # some seconds
    python -m experiments tables.adaptive.accuracy runs/adaptive --evaluate --tables=A11  # runs their models

Takes the runs of configs/adaptive_cifar.py, adaptive_imagenet.py and adaptive_ade20k.py in the directory, at any depth;
means and standard deviations are over seeds.  Rows without a run stay empty; --missing prints the commands that train
them.  Tables A9 to A12 also evaluate models in other conditions (`further_evaluations.py`): --evaluate does so where it
has not been done.

Table 5 has mean IoU and mASCC.  Table 6 leaves one part out of a model; the paper's "progressively evaluated" could
also mean one after the other.  A-CvT-13 of Table A12 is trained for 90 epochs by its text, for 100 by Appendix A3; here
it is Table 1's.

Claims: the predictions of adaptive models do not change under circular shifts, with any seed.  Every other model is at
least as accurate and as consistent as the default one of its table, or not further behind than in the paper; judged
where both follow their recipes.
"""

import pathlib
import statistics
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from configs import recipes
from experiments import findings
from experiments.findings import Claim
from experiments.tables import finished_runs
from experiments.tables.adaptive import further_evaluations, paper_numbers
from experiments.tables.adaptive.paper_numbers import Cell, Entry
from experiments.tables.finished_runs import Run

CLASSES = {10: "cifar10", 100: "cifar100", 1000: "imagenet", 150: "ade20k"}
PARTS = {"no token": "window,merge,position", "no window": "token,merge,position", "no merge": "token,window,position"}
TABLES = {
    "1": "CIFAR",
    "2": "ImageNet",
    "5": "ADE20K: mean IoU and mASCC",
    "6": "without one of the parts, CIFAR-10",
    "A9": "with a square erased, CIFAR-10",
    "A10": "upside down, CIFAR-10",
    "A11": "by the range of circular shifts, CIFAR-10",
    "A12": "default models made adaptive, CIFAR-10",
}
FIGURES = ("top1", "consistency")
COLUMNS = dict(label="", seeds="seeds")
for name in FIGURES:
    COLUMNS |= {name: name, f"{name}_spread": "+-", f"{name}_paper": "paper", f"{name}_paper_spread": "+-"}


def main(arguments=None) -> int:
    options = _options(arguments)
    entries = [entry for entry in paper_numbers.entries() if entry.table in options.tables]
    cells = list(dict.fromkeys(entry.cell for entry in entries))
    runs = finished_runs.read(options.runs, may_be_empty=options.missing)
    found = finished_runs.present(runs, cell_of, cells, free=("init",))
    if options.evaluate:
        evaluate(entries, found)
    others = {cell: departures(cell, runs) for cell, runs in found.items() if runs}
    rows = [row(entry, found[entry.cell], others.get(entry.cell, [])) for entry in entries]
    _print(rows, others)
    if options.missing:
        print(*(command(cell, options) for cell in cells if not found[cell]), sep="\n")
    return findings.finish(options, dict(rows=rows), claims_of(rows))


def _options(arguments):
    parser = finished_runs.parser(__doc__, __file__, tables=TABLES)
    parser.add_argument("--evaluate", action="store_true", help="the conditions of Tables A9 to A12, where not done")
    return parser.parse_args(arguments)


def cell_of(run: Run) -> Cell | None:
    """The cell of a run; None for other models."""
    config, name = run.config, run.config.model.name
    if name not in recipes.HIERARCHICAL or run.model.num_classes not in CLASSES:
        return None
    shifts = "circular" if "circular" in config.evaluation.shift.kinds else "standard"
    variant = _variant(config, run.model)
    return None if variant is None else Cell(CLASSES[run.model.num_classes], shifts, name, variant)


def _variant(config, model) -> str | None:
    parts = getattr(model, "parts", ())
    if not parts:
        return "da" if config.data.augment.circular_shift else "default"
    if parts == replace(model, adaptive=True).parts:
        begun = config.init is not None and config.objective.name != "segmentation"
        return f"adapted={config.epochs:g}" if begun else "adaptive"
    return {words: name for name, words in PARTS.items()}.get(",".join(parts))


def recipe(cell: Cell) -> str:
    file = cell.data if cell.data in ("imagenet", "ade20k") else "cifar"
    words = [cell.data.removeprefix("cifar")] if file == "cifar" else []
    words += [cell.model, *(["standard"] if cell.shifts == "standard" else [])]
    words += ["adaptive"] if cell.variant in PARTS else [] if cell.variant == "default" else [cell.variant]
    return f"configs/adaptive_{file}.py:{','.join(words)}"


def command(cell: Cell, options) -> str:
    place = options.runs / "_".join(cell).replace(" ", "_").replace("=", "_")
    words = [f"python -m equivit.train --config={recipe(cell)} --workdir={place}"]
    words += ["--seeds=0,1,2,3,4"] if cell.data.startswith("cifar") and cell.variant != "da" else []
    words += ["--config.init=IMAGENET_RUN"] if cell.data == "ade20k" else []
    words += [f"--config.model.adaptive={PARTS[cell.variant]}"] if cell.variant in PARTS else []
    words += ["--config.init=DEFAULT_RUN"] if cell.variant.startswith("adapted") else []
    return " ".join(words)


def departures(cell: Cell, runs: list[Run]) -> list[str]:
    """The keys in which the runs of a cell differ from its recipe."""
    begun = cell.variant in PARTS or cell.variant.startswith("adapted") or cell.data == "ade20k"
    free = ("init", "model.adaptive") if begun else ()
    changes = [f"init={runs[0].config.init}"] if cell.variant.startswith("adapted") else []
    return finished_runs.departures(runs[0], recipe(cell), free=free, changes=changes)


def evaluate(entries: Iterable[Entry], found: dict[Cell, list[Run]]) -> None:
    """Evaluate all runs in the conditions of the tables."""
    wanted: dict[pathlib.Path, list[str]] = {}
    for entry in entries:
        for run in found[entry.cell] if entry.condition else ():
            wanted.setdefault(run.place, []).append(entry.condition)
    for place, conditions in wanted.items():
        further_evaluations.evaluate(place, list(dict.fromkeys(conditions)))


def row(entry: Entry, runs: list[Run], other_values: list[str]) -> dict[str, Any]:
    """A row of a table in percent, ours beside the paper's; None for missing values."""
    found = dict(table=entry.table, **entry.cell._asdict(), condition=entry.condition, range=entry.range)
    values = {name: [] for name in FIGURES}
    for run in runs:
        if (figures := figures_of(entry, run)) is not None:
            for name, value in zip(FIGURES, figures, strict=True):
                values[name].append(value)
    for name in FIGURES:
        paper, ours = getattr(entry, name), values[name] if getattr(entry, name) else []
        found |= {name: statistics.fmean(ours) if ours else None, f"{name}_values": ours}
        found[f"{name}_spread"] = statistics.stdev(ours) if len(ours) > 1 else None
        found |= {f"{name}_paper": paper and paper.mean, f"{name}_paper_spread": paper and paper.spread}
    return found | dict(seeds=len(values["consistency"]), other_values=other_values)


def figures_of(entry: Entry, run: Run) -> tuple[float, float] | None:
    """Accuracy and consistency of a run, in percent; None where its condition has not been evaluated."""
    if entry.condition:
        result = further_evaluations.read(run.place).get(entry.condition)
        return None if result is None else (100 * result["top1"], 100 * result[f"circular_{entry.range}"])
    names = ("eval/accuracy/top1", f"eval/shift/{_shifts(entry.cell, run)}")
    if entry.cell.data == "ade20k":
        names = ("eval/segmentation/miou", f"eval/segmentation_shift/{_shifts(entry.cell, run)}")
    top1, consistency = (finished_runs.figure([run], name).mean for name in names)
    return top1, consistency


def _shifts(cell: Cell, run: Run) -> str:
    """The name of a setting in the figures of the shift protocol."""
    if cell.shifts == "circular":
        return "circular_full"
    if cell.data == "ade20k":
        return "zeros_64"
    return "crop_full" if cell.data == "imagenet" else f"zeros_{6 * run.config.data.image_size[0] // 32}"


def claims_of(rows: list[dict]) -> list[Claim]:
    claims, defaults = [], {_group(r): r for r in rows if r["variant"] == "default" and r["condition"] != "adapted"}
    for r in (r for r in rows if r["seeds"]):
        adaptive = r["variant"] == "adaptive" or r["variant"].startswith("adapted") or r["condition"] == "adapted"
        name = f"Table {r['table']}, {label(r)}"
        if adaptive and r["shifts"] == "circular":
            claims.append(Claim(f"{name}: least consistency of a seed, %", min(r["consistency_values"]), at_least=100))
        default = defaults[_group(r)]
        if r is default or not default["seeds"]:
            continue
        judged = not r["other_values"] and not default["other_values"]
        for figure in (figure for figure in FIGURES if r[figure] is not None):
            bound = min(0.0, round(r[f"{figure}_paper"] - default[f"{figure}_paper"], 2))
            text = f"{name}: {figure}, points above the default model"
            claims.append(Claim(text, r[figure] - default[figure], at_least=bound, judged=judged))
    return claims


def _group(r: dict) -> tuple:
    """The key that a row shares with the default model that it is compared with."""
    condition = "" if r["condition"] == "adapted" else r["condition"]
    return r["table"], r["data"], r["shifts"], r["model"], condition, r["range"]


def label(r: dict) -> str:
    range_ = f" {r['range'].replace('_', ' ')}" if r["condition"] == "ranges" else ""
    condition = {"": "", "ranges": "", "adapted": ", adapted at once"}.get(r["condition"], f", {r['condition']}")
    return f"{r['data']}, {r['shifts']}{range_}, {r['model']}, {r['variant']}{condition}"


def _print(rows: list[dict], others: dict[Cell, list[str]]) -> None:
    print("Top-1 accuracy and shift consistency, %; beside ours the paper's.")
    lines = [{**r, "label": label(r)} for r in rows]
    finished_runs.show(lines, TABLES, lambda _: COLUMNS, {" ".join(cell): keys for cell, keys in others.items()})
