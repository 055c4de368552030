"""Accuracy and shift consistency of trained runs beside shift-equivariant ViTs: Tables 1, 2, 5, 6 and A9 to A12.

    python -m experiments tables.adaptive.accuracy runs/adaptive --missing  # some seconds
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

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from equivit.configs import recipes
from experiments.findings import Claim
from experiments.tables import finished_runs, papers
from experiments.tables.adaptive import further_evaluations
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
FIGURES = ("top1", "consistency")  # accuracy, on ADE20K mean IoU; consistency under the cell's shifts, there mASCC
COLUMNS = dict(label="", seeds="seeds")
for name in FIGURES:
    COLUMNS |= {name: name, f"{name}_spread": "+-", f"{name}_paper": "paper", f"{name}_paper_spread": "+-"}


class Cell(NamedTuple):
    """One training.

    Attributes:
      data: "cifar10", "cifar100", "imagenet" or "ade20k".
      shifts: "circular" or "standard".
      model: a name of the zoo.
      variant: "default", "da" (trained on circular shifts), "adaptive", "no token", "no window" or "no merge" (adaptive
        in all but one part), "adapted=20" (a default model, fine-tuned as an adaptive one for that many epochs).
    """

    data: str
    shifts: str
    model: str
    variant: str


# Rows of the tables: a cell; "condition", "" for runs as they ended, or of `further_evaluations.CONDITIONS`; "range" of
# circular shifts, of `consistency.FRACTIONS`; figures in percent, and their spreads over five seeds if there are any.
ENTRIES = papers.rows(__file__, "paper.csv", words=("table", *Cell._fields, "condition", "range"))
Entry = Mapping[str, Any]


def main(arguments=None) -> int:
    parser = finished_runs.parser(__doc__, __file__, tables=TABLES)
    parser.add_argument("--evaluate", action="store_true", help="the conditions of Tables A9 to A12, where not done")
    options = parser.parse_args(arguments)
    entries = [entry for entry in ENTRIES if entry["table"] in options.tables]
    cells = list(dict.fromkeys(cell_in(entry) for entry in entries))
    runs = finished_runs.read(options.runs, may_be_empty=options.missing)
    found = finished_runs.present(runs, cell_of, cells, free=("init",))
    for entry in (entry for entry in entries if options.evaluate and entry["condition"]):
        for run in found[cell_in(entry)]:
            further_evaluations.evaluate(run.place, [entry["condition"]])
    others = {cell: departures(cell, runs[0]) for cell, runs in found.items() if runs}
    rows = [row(entry, found[cell_in(entry)], others.get(cell_in(entry), [])) for entry in entries]
    print("Top-1 accuracy and shift consistency, %; beside ours the paper's.")
    lines = [{**r, "label": label(r)} for r in rows]
    finished_runs.show(lines, TABLES, COLUMNS, {" ".join(cell): keys for cell, keys in others.items()})
    if options.missing:
        print(*(command(cell, options) for cell in cells if not found[cell]), sep="\n")
    entry = finished_runs.entry(options, rows)
    return entry.finish(claims_of(entry.rows()))


def cell_in(entry: Entry) -> Cell:
    """The cell of a row."""
    return Cell(*(entry[key] for key in Cell._fields))


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
    words = ["--seeds=0,1,2,3,4"] if cell.data.startswith("cifar") and cell.variant != "da" else []
    words += ["--config.init=IMAGENET_RUN"] if cell.data == "ade20k" else []
    words += [f"--config.model.adaptive={PARTS[cell.variant]}"] if cell.variant in PARTS else []
    words += ["--config.init=DEFAULT_RUN"] if cell.variant.startswith("adapted") else []
    return finished_runs.command(recipe(cell), options.runs / re.sub("[ =]", "_", "_".join(cell)), *words)


def departures(cell: Cell, run: Run) -> list[str]:
    """The keys in which the runs of a cell differ from its recipe."""
    adapted = cell.variant.startswith("adapted")
    free = ("init", "model.adaptive") if adapted or cell.variant in PARTS or cell.data == "ade20k" else ()
    changes = [f"init={run.config.init}"] if adapted else []
    return finished_runs.departures(run, recipe(cell), free=free, changes=changes)


def row(entry: Entry, runs: list[Run], other_values: list[str]) -> dict[str, Any]:
    """A row of a table in percent, ours beside the paper's; None for missing values."""
    found = {key: entry[key] for key in ("table", *Cell._fields, "condition", "range")}
    figures = [values for run in runs if (values := figures_of(entry, run)) is not None]
    for place, name in enumerate(FIGURES):
        ours = finished_runs.over_seeds([values[place] for values in figures] if entry[name] is not None else [])
        found |= {name: ours.mean, f"{name}_spread": ours.spread, f"{name}_values": ours.values}
        found |= {f"{name}_paper": entry[name], f"{name}_paper_spread": entry[f"{name}_spread"]}
    return found | dict(seeds=len(figures), other_values=other_values)


def figures_of(entry: Entry, run: Run) -> tuple[float, float] | None:
    """Accuracy and consistency of a run, in percent; None where its condition has not been evaluated."""
    if entry["condition"]:
        result = further_evaluations.read(run.place).get(entry["condition"])
        return None if result is None else (100 * result["top1"], 100 * result[f"circular_{entry['range']}"])
    standard = {"ade20k": "zeros_64", "imagenet": "crop_full"}
    cifar = f"zeros_{6 * run.config.data.image_size[0] // 32}"
    shifts = "circular_full" if entry["shifts"] == "circular" else standard.get(entry["data"], cifar)
    names = ("eval/accuracy/top1", f"eval/shift/{shifts}")
    if entry["data"] == "ade20k":
        names = ("eval/segmentation/miou", f"eval/segmentation_shift/{shifts}")
    top1, consistency = (finished_runs.figure([run], name).mean for name in names)
    return top1, consistency


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
