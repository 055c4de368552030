"""Accuracy of fine-tuned ViTs with attention replaced beside depthwise attention: Tables 2, 3, 4, 5, A.1 and A.2.

    python -m experiments tables.depthwise.accuracy runs/depthwise --missing --tables=2
    python -m experiments tables.depthwise.selection runs/depthwise/stage1 --output=runs/depthwise/selection.json
    python -m experiments tables.depthwise.accuracy runs/depthwise --selection=runs/depthwise/selection.json

Takes the runs of configs/depthwise.py in the directory, at any depth; means and standard deviations are over seeds.
Rows without a run stay empty; --missing prints the commands that train them.  Milliseconds are those of speed.py, one
CPU thread; the paper's are of an Orin Nano.  Trained parameters (Table A.1) are counted without a run.

A config does not record how blocks were chosen.  Those of ViT-L/14 on COCO are compared with the JSON of selection.py,
with the gates' choices if it got `--dsp`; without --selection, and on other backbones and data, they count as those of
lowest Sigma.  In Table 2 Ens+DW in 10 blocks has 64.81 mean IoU, used here, and loses 1.61, which would be 64.42.

Claims, for runs of the recipe: no model is further behind the one with attention than in the paper, by more than 0.3
points.  DW is above SPViT-style and Ens+DW that save as much time; blocks of lowest Sigma are above those of highest
Sigma and those that gates choose.  Trained parameters are the paper's within 1 %.
"""

import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from equivit import logical, pretrained
from equivit.configs import depthwise
from equivit.depthwise import selection
from equivit.training import build, freezing
from equivit.training import config as configs
from experiments import machine
from experiments.findings import Claim
from experiments.tables import finished_runs, papers
from experiments.tables.depthwise import calls
from experiments.tables.finished_runs import Run

CLASSES = {81: "coco", 150: "ade20k", 1000: "in1k"}
FIGURES = {"coco": "eval/segmentation/miou", "ade20k": "eval/segmentation/miou", "in1k": "eval/accuracy/top1"}
TABLES = {
    "2": "replacements of attention",
    "3": "DW on other data",
    "4": "DW in other backbones",
    "5": "ways to choose blocks and heads",
    "A.1": "frozen except for the replacements",
    "A.2": "with the class token",
}
# Stage of configs/depthwise.py, and in words; "heads": of single heads in place of whole blocks.
WAYS = {
    "attention": ("stage1", ""),
    "class_token": ("stage1", ", class token"),
    "lowest": ("stage2", ""),
    "highest": ("stage2", ", highest Sigma"),
    "dsp_2s": ("stage2", ", DSP-2S"),
    "dsp": ("gated", ", DSP-e2e"),
    "lowest_heads": ("stage2", " heads"),
    "dsp_2s_heads": ("stage2", " heads, DSP-2S"),
    "dsp_heads": ("gated", " heads, DSP-e2e"),
    "frozen": ("frozen", ", frozen"),
    "one_stage": ("one_stage", ", one stage"),
}
FREE = ("init", "model.replaced")
TRAINED = {"lowest": 284.4, "frozen": 25.3}  # M parameters, Table A.1
# Of the same data and backbone the first is above the second: (kind, how many, way).
ABOVE = (
    (("dw", 12, "lowest"), ("spvit", 10, "lowest")),
    (("dw", 12, "lowest"), ("ens_dw", 10, "lowest")),
    (("dw", 16, "lowest"), ("ens_dw", 12, "lowest")),
    (("dw", 12, "lowest"), ("dw", 12, "dsp")),
    (("dw", 12, "lowest"), ("dw", 12, "highest")),
    (("dw", 12, "lowest"), ("dw", 7, "highest")),
    (("dw", 17, "lowest"), ("dw", 17, "dsp")),
    (("dw", 192, "lowest_heads"), ("dw", 192, "dsp_heads")),
)
WITHIN = 0.3  # points
COLUMNS = dict(label="", seeds="seeds", figure="%", spread="+-", paper="paper", gap="to attention", gap_paper="paper")
SPEED = dict(ms="ms", saved="saved %", ms_paper="paper ms", saved_paper="saved %")
MORE = {"2": SPEED, "4": SPEED, "A.1": dict(trained="M trained", trained_paper="paper")}  # columns


class Cell(NamedTuple):
    """One training: words of configs/depthwise.py, the kind and way of replacement, the number of blocks or heads."""

    task: str
    backbone: str
    kind: str
    number: int
    way: str


class Entry(NamedTuple):
    """A row of a table: percent and milliseconds, None where the table has none."""

    table: str
    cell: Cell
    figure: float
    ms: float | None


PAPER = papers.rows(__file__, "paper.csv", words=("table", "task", "backbone", "kind", "way"))
ENTRIES = [Entry(row["table"], Cell(*(row[key] for key in Cell._fields)), row["figure"], row["ms"]) for row in PAPER]


def main(arguments=None) -> int:
    parser = finished_runs.parser(__doc__, __file__, tables=TABLES)
    several = dict(type=pathlib.Path, action="append", default=[])
    parser.add_argument("--selection", **several, help="JSON of selection.py; may be given several times")
    parser.add_argument("--speed", **several, help="JSON of speed.py; may be given several times")
    options = parser.parse_args(arguments)
    default = pathlib.Path(__file__).with_name("speed.json")
    times = speeds(options.speed or ([default] if default.is_file() else []))
    wanted = [entry for entry in ENTRIES if entry.table in options.tables]
    cells = list(dict.fromkeys(entry.cell for entry in wanted))
    choices = [found for path in options.selection for found in _read("--selection", path, "selection.py")]
    runs = finished_runs.read(options.runs, may_be_empty=True)
    found = finished_runs.present(runs, lambda run: cell_of(run, choices), cells, free=FREE)
    others = {cell: departures(cell, group[0]) for cell, group in found.items() if group}
    rows = table(wanted, found, others, times)
    print("Mean IoU (COCO, ADE20K) and top-1 accuracy (ImageNet-1k), %; beside ours the paper's.")
    departed = {label(cell): keys for cell, keys in others.items()}
    finished_runs.show(rows, TABLES, COLUMNS, departed, more=MORE)
    if options.missing:
        print(*(command(cell, options.runs) for cell in cells if not found[cell]), sep="\n")
    entry = finished_runs.entry(options, rows)
    return entry.finish(claims_of(entry.rows()))


def _read(flag: str, path: pathlib.Path, script: str) -> list[dict[str, Any]]:
    """The entries of the JSON file of another script; ValueError, which names the flag, where there is none."""
    try:
        return [dict(entry) for entry in json.loads(path.read_text()).values()]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{flag}={path}: this is no JSON of {script} ({error}); run that first.") from error


# ---- Which run is what


def cell_of(run: Run, choices: Sequence[dict]) -> Cell | None:
    """The cell of a run; None for other models, and for blocks chosen in other ways."""
    config, model = run.config, run.model
    task, backbone = CLASSES.get(model.num_classes), _backbone(config)
    if task is None or backbone is None:
        return None
    if config.objective.name.startswith("gated_"):
        options = config.objective
        return Cell(task, backbone, options.kind, options.gates, "dsp_heads" if options.by_head else "dsp")
    if not model.replaced:
        return Cell(task, backbone, "-", 0, "class_token" if model.class_token else "attention")
    kinds = {one.kind for one in model.replaced}
    by_head = any(one.heads for one in model.replaced)
    places = [(one.block, head) for one in model.replaced for head in one.heads or range(model.num_heads)]
    chosen = places if by_head else [one.block for one in model.replaced]
    compared = choices if (task, backbone) == ("coco", "dinov2_l14") else ()
    way = chosen_by(chosen, compared)
    if len(kinds) > 1 or way is None:
        return None
    source, colon, _ = (config.init or "").partition(":")
    if set(depthwise.ONLY_REPLACED) <= set(config.optimizer.freeze):
        way = "frozen"
    elif colon and source in pretrained.FORMATS:
        way = "one_stage"
    return Cell(task, backbone, kinds.pop(), len(chosen), f"{way}_heads" if by_head else way)


def _backbone(config) -> str | None:
    """The word of configs/depthwise.py for a model; tokens beside the patches do not count."""
    for word, fields in depthwise.BACKBONES.items():
        kept = {key: value for key, value in fields.items() if key not in depthwise.PATCHES_ONLY}
        if all(config.model.get(key) == value for key, value in kept.items()):
            return word
    return None


def chosen_by(chosen: list, choices: Sequence[dict]) -> str | None:
    """How these blocks or (block, head) pairs were chosen, by the JSON of selection.py."""
    if not choices:
        return "lowest"
    by_head = isinstance(chosen[0], tuple)
    for found in choices:
        scores = np.array(found["sigma"]["after"]["heads" if by_head else "blocks"])
        for order in ("lowest", "highest"):
            if len(chosen) <= scores.size and list(selection.select(scores, len(chosen), order)) == chosen:
                return order
        listed = [list(place) for place in chosen] if by_head else chosen
        if any(places == listed for name, places in found["chosen"].items() if name.startswith("DSP")):
            return "dsp_2s"
    return None


def recipe(cell: Cell) -> str:
    return f"configs/depthwise.py:{cell.task},{cell.backbone},{WAYS[cell.way][0]}"


def changes(cell: Cell) -> list[str]:
    """The changes of the recipe, except for `init`."""
    stage = WAYS[cell.way][0]
    if stage == "gated":
        heads = ["objective.by_head=True"] if cell.way == "dsp_heads" else []
        return [f"objective.gates={cell.number}", f"objective.kind={cell.kind}", *heads]
    if stage != "stage1":
        return ["model.replaced=BLOCKS"]
    if cell.way == "class_token":
        token = ["model.class_token=True", "model.class_position=True"]
        return [*token, "model.pool=class"] if cell.task == "in1k" else token
    return []


def command(cell: Cell, runs: pathlib.Path) -> str:
    stage = WAYS[cell.way][0]
    source = cell.backbone.partition("_")[0] + ":FILE" if stage in ("stage1", "one_stage") else "STAGE1_RUN"
    keys = [f"--config.{change}" for change in (f"init={source}", *changes(cell))]
    return finished_runs.command(recipe(cell), runs / "_".join(map(str, cell)).replace("_-_0", ""), *keys)


def departures(cell: Cell, run: Run) -> list[str]:
    """The keys in which the runs of a cell differ from its recipe."""
    given = [change.replace("BLOCKS", "((0,),)") for change in changes(cell)]
    return finished_runs.departures(run, recipe(cell), free=FREE, changes=given)


# ---- Figures


def speeds(files: Sequence[pathlib.Path]) -> dict[tuple, tuple[float, float]]:
    """Milliseconds on a CPU and the share saved, in %, by (backbone, kind, blocks), of images of 336 px."""
    kinds, found = {name: kind or "-" for kind, name in calls.NAMES.items()}, {}
    for measured in (entry for path in files for entry in _read("--speed", path, "speed.py")):
        if measured["pixels"] == 336 and "onnxruntime" in measured:
            for row in measured["rows"]:
                if row["part"] in ("table_2", "table_4") and row["ms"] is not None:
                    found[row["subject"], kinds[row["name"]], row["number"]] = row["ms"], row["saved"]
    return found


def trained(cell: Cell) -> float:
    """M parameters that the recipe trains."""
    blocks = "model.replaced=" + repr(tuple((block,) for block in range(cell.number)))
    config = configs.load(str(machine.ROOT / recipe(cell)), [blocks]).unlock()
    config.model.in_channels = 3
    objective = build.make_objective(config)
    make = lambda: objective.module(build.make_model(config, nnx.Rngs(0)), jax.random.key(0))  # noqa: E731
    tables = logical.tensors(jax.eval_shape(make))
    rule = freezing.rule(objective, tables)
    return sum(math.prod(t.shape) for each in tables.values() for t in each.flat if not rule(t).frozen) / 1e6


def table(wanted: Sequence[Entry], found: dict, others: dict, times: dict) -> list[dict[str, Any]]:
    """The rows, ours beside the paper's; None for missing values."""
    means = {cell: finished_runs.figure(runs, FIGURES[cell.task]) for cell, runs in found.items() if runs}
    paper = {entry.cell: entry for entry in ENTRIES[::-1]}  # of Table 2, which has times, rather than of later ones
    rows = []
    for name, cell, theirs, ms in wanted:
        attention = cell._replace(kind="-", number=0, way="attention")
        ours, before, base = means.get(cell), means.get(attention), paper[attention]
        row = dict(table=name, **cell._asdict(), label=label(cell), seeds=len(found[cell]), paper=theirs)
        row |= dict(figure=ours and ours.mean, spread=ours and ours.spread)
        row |= dict(other_values=others.get(cell, []), before=others.get(attention, []))
        if cell != attention:
            row |= dict(gap=ours.mean - before.mean if ours and before else None, gap_paper=theirs - base.figure)
        if ms is not None:
            time, saved = times.get((cell.backbone, cell.kind, cell.number), (None, None))
            saved_paper = 100 * (1 - ms / base.ms)
            if cell == attention:
                saved = saved_paper = None
            row |= dict(ms=time, saved=saved, ms_paper=ms, saved_paper=saved_paper)
        if name == "A.1":
            row |= dict(trained=trained(cell), trained_paper=TRAINED[cell.way])
        rows.append(row)
    return rows


def label(cell: Cell) -> str:
    name = calls.NAMES[None if cell.kind == "-" else cell.kind]
    return f"{cell.task} {cell.backbone} {name}{f' {cell.number}' if cell.number else ''}{WAYS[cell.way][1]}"


def claims_of(rows: Sequence[dict]) -> list[Claim]:
    """Each claim once, also where two tables have the row."""
    claims, found = {}, {(r["task"], r["backbone"], r["kind"], r["number"], r["way"]): r for r in rows}
    for r in rows:
        if r.get("gap") is not None:
            judged = not r["other_values"] and not r["before"]
            least = round(min(0.0, r["gap_paper"]) - WITHIN, 2)
            text = f"{r['label']}: points above attention"
            claims[text] = Claim(text, r["gap"], at_least=least, judged=judged)
        if "trained" in r:
            text, ratio = f"{r['label']}: trained parameters over the paper's", r["trained"] / r["trained_paper"]
            claims[text] = Claim(text, ratio, at_least=0.99, at_most=1.01)
    for data in dict.fromkeys((r["task"], r["backbone"]) for r in rows):
        for pair in ABOVE:
            better, worse = (found.get((*data, *part)) for part in pair)
            if better and worse and better["seeds"] and worse["seeds"]:
                judged = not better["other_values"] and not worse["other_values"]
                text = f"{better['label']}: points above {worse['label']}"
                claims[text] = Claim(text, better["figure"] - worse["figure"], at_least=0, judged=judged)
    return list(claims.values())
