"""Plain, H8, I8 and D8 on small images at equal compute.

    python -m experiments studies.octic_equal_compute --blood_cells=npz:pbc_wbc96.npz --cifar10=npz:cifar10.npz
    python -m experiments studies.octic_equal_compute --patterns=npz:patterns.npz  # of studies.patterns

At equal width an octic model does less arithmetic (`octic_small_images.py`).  Here a plain ViT sets two budgets: the
multiply-adds of a forward pass, and the time of a training step on this machine, measured in turn in one process.

Each octic model gets the legal width that is nearest to a budget, a multiple of 8 with heads of 16 to 64 channels.
Each model gets the learning rate, of three, with the best accuracy on a held-out fifth of the training images, for one
seed; it is then trained on all training images with three seeds.  All runs are equally long.  "Late fall" is the share
of the fall of the training loss in the last tenth of the steps.  --plan measures and prints the plan alone.
"""

import argparse
import functools
import math
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from equivit import summarize
from equivit.training import config as configs
from experiments import compiled_models, findings, flags, timing
from experiments.studies import differences, held_out, several_seeds

# 17 tokens, and so few images that two hours on two cores are a dozen epochs of each run.  Mirrored and shifted images
# for every model: as on CIFAR, nothing is turned in training.
CELLS = ["data.image_size=(48,48)", "model.image_size=(48,48)", "model.patch_size=12", "model.num_classes=8"]
DATA = {"blood_cells": CELLS, "cifar10": ["model.patch_size=8", "data.eval_examples=2000"], "patterns": CELLS}
SHARED = ["data.train_examples=5000", "model.depth=4", "model.layer_scale=0.1", "schedule.min_lr=0.0"]
SHARED += ["checkpoint.every_seconds=60", *several_seeds.SMALL, *several_seeds.QUIET]
FAMILIES = ("H8", "I8", "D8")
RULES = ("multiply-adds", "step time")  # the two budgets
LEGAL = range(8, 1025, 8)  # 8 is the order of the group
HEAD = 32  # channels of a head, within a factor of two
FLAT = 0.02  # of the fall of the training loss, at most, in the last tenth of the steps
ROUNDS = dict(warmup=3, runs=25)
FIGURES = dict(upright="eval/orientation/upright", eight="eval/orientation/accuracy_mean")
FIGURES |= dict(constant="eval/orientation/consistency")
PLAN = dict(model="model", width="width", heads="heads", macs="M multiply-adds", macs_ratio="of plain's")
PLAN |= dict(milliseconds="ms a step", time_ratio="of plain's")
COLUMNS = dict(data="data", model="model", width="width", macs="multiply-adds", time="step time", rate="rate")
COLUMNS |= dict(upright="upright, %", eight="eight orientations, %", constant="never changes, %", flat="late fall, %")
COLUMNS |= dict(notes="")


class Model(NamedTuple):
    """A family at a width, and the rule that chose the width; the plain ViT has none."""

    family: str
    width: int
    rule: str | None = None

    def __str__(self):
        return self.family if self.rule is None else f"{self.family}, equal {self.rule}"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    names = [name for name in DATA if getattr(options, name)]
    # First, so that a missing file is found before minutes of measurements.
    images = {} if options.plan else {name: _images(name, options) for name in names}
    plans = {name: planned(name, options) for name in names}
    if options.plan:
        return 0
    rows = []
    for name, plan in plans.items():
        rows += [_row(name, Model(*entry["model"]), entry, images[name], options) for entry in plan]
        show(rows, options)
    return 0


def _images(name: str, options: argparse.Namespace) -> pathlib.Path:
    """The file of the data set with held-out images, written where there is none."""
    data = config_of(name, Model("plain", options.width), options).data
    return held_out.prepared(data, options.workdir / name / "images.npz")


# ---- Widths


def heads_of(width: int) -> int | None:
    """The number of heads with channels nearest to HEAD; None if none is within a factor of two."""
    units = width // LEGAL.step
    known = [heads for heads in range(1, units + 1) if units % heads == 0 and HEAD / 2 <= width / heads <= 2 * HEAD]
    return min(known, key=lambda heads: abs(math.log(width / heads / HEAD)), default=None)


def legal(smallest: float, largest: float) -> list[int]:
    """The widths between the two that have a number of heads."""
    return [width for width in LEGAL if smallest <= width <= largest and heads_of(width)]


def nearest(widths: Sequence[int], cost: Callable[[int], float]) -> int:
    """The width whose cost, a multiple of the plain model's, is nearest to 1; the cost grows with the width."""
    low, high, cost = 0, len(widths) - 1, functools.cache(cost)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if cost(widths[middle]) < 1 else (low, middle)
    return min(widths[max(low - 1, 0) : low + 1], key=lambda width: abs(math.log(cost(width))))


def chosen(name: str, options: argparse.Namespace) -> list[Model]:
    """The plain model, and the models of each family as wide as its multiply-adds, or its step time, allow."""
    plain = Model("plain", options.width)
    budget = _counts(name, plain, options)["macs"]
    models = [plain]
    call = compiled_models.training_step(config_of(name, plain, options)).start()
    for family in options.families:

        def macs_ratio(width, family=family):
            return _counts(name, Model(family, width), options)["macs"] / budget

        def time_ratio(width, family=family):
            return step_ratio(name, Model(family, width), call, options)

        width = nearest(legal(options.width / 2, 3 * options.width), macs_ratio)
        if RULES[0] in options.rules:
            models.append(Model(family, width, RULES[0]))
        if RULES[1] in options.rules:
            models.append(Model(family, nearest(legal(options.width / 2, 1.25 * width), time_ratio), RULES[1]))
    return models


def step_ratio(name: str, model: Model, plain: Callable, options: argparse.Namespace) -> float:
    """The step time of a model over the plain one's, measured in turn."""
    call = compiled_models.training_step(config_of(name, model, options)).start()
    medians = timing.medians(timing.interleaved({"plain": plain, "model": call}, **ROUNDS))
    return medians["model"] / medians["plain"]


# ---- The plan


def planned(name: str, options: argparse.Namespace) -> list[dict]:
    """The runs on a data set: each model with its costs.  Cached, because step times are measured once."""
    settings = {key: getattr(options, key) for key in ("width", "families", "rules", "steps", "rates", "override")}
    settings |= dict(source=getattr(options, name), chosen_by_seed=options.seeds[0], shared=SHARED, data=DATA[name])
    path, compute = options.workdir / name / "plan.json", lambda: measured(name, chosen(name, options), options)
    entries = several_seeds.planned(path, settings, compute, keep=not options.plan)
    rows = []
    for entry in entries:
        model = Model(*entry["model"])
        own = dict(model=str(model), width=model.width, macs=entry["macs"] / 1e6)
        rows.append(entry | own | dict(milliseconds=1e3 * entry["step_seconds"]))
    print(f"{name}: {options.steps} steps a run; learning rates {options.rates}, then seeds {options.seeds}")
    print(findings.table(rows, PLAN))
    fixed, one = (estimate(entries, options, steps) for steps in (0, 1))
    hour = max(0, int((3600 - fixed) / (one - fixed)))
    print(f"{name}: about {estimate(entries, options, options.steps) / 60:.0f} minutes", end="; ")
    print(f"an hour is enough for --steps={hour}", flush=True)
    return entries


def measured(name: str, models: Sequence[Model], options: argparse.Namespace) -> list[dict]:
    """The costs of each model; all step times are of the same rounds."""
    calls, entries = {}, []
    for model in models:
        begin = time.perf_counter()
        calls[str(model)] = compiled_models.training_step(config_of(name, model, options)).start()
        compile_seconds, counted = time.perf_counter() - begin, _counts(name, model, options)
        entry = {key: counted[key] for key in ("parameters", "macs", "fvcore")} | dict(compile_seconds=compile_seconds)
        entries.append(dict(model=list(model), heads=heads_of(model.width), **entry))
    seconds = timing.medians(timing.interleaved(calls, **ROUNDS))
    plain, plain_seconds = entries[0], seconds[str(models[0])]
    for entry, step in zip(entries, seconds.values(), strict=True):
        entry |= dict(step_seconds=step, time_ratio=step / plain_seconds, macs_ratio=entry["macs"] / plain["macs"])
    return entries


def estimate(entries: Iterable[Mapping], options: argparse.Namespace, steps: int) -> float:
    """Seconds of all runs: their steps, and for each run twice the time to compile a step."""
    runs = {tuple(entry["model"][:2]): entry for entry in entries}  # models of the same width are trained once
    each = [2 * entry["compile_seconds"] + steps * entry["step_seconds"] for entry in runs.values()]
    return sum(each) * (len(options.seeds) + (len(options.rates) if len(options.rates) > 1 else 0))


# ---- Runs


def _row(name: str, model: Model, entry: dict, data: pathlib.Path, options: argparse.Namespace) -> dict:
    """The figures of a model: its rate chosen, then a run for each seed."""
    make = functools.partial(config_of, name, model, options)
    directory = data.parent / f"{model.family}_{model.width}"
    final = (*held_out.FINAL, "evaluation.suite=('orientation',)")
    found = held_out.row(make, data, directory, options, FIGURES, chosen="eval/accuracy/top1", final=final)
    return dict(data=name) | entry | model._asdict() | dict(model=str(model)) | found


def config_of(name: str, model: Model, options: argparse.Namespace, *overrides: str):
    size = [f"model.width={model.width}", f"model.num_heads={heads_of(model.width)}"]
    length = several_seeds.length_in_steps(options.steps, warmup=20)
    source = [f"data.source={getattr(options, name)}"]
    texts = [*SHARED, *DATA[name], *size, *length, *source, *options.override, *overrides]
    return configs.load(f"configs/cifar.py:10,{model.family}", texts)


def _counts(name, model, options):
    return summarize.counts(config_of(name, model, options))


# ---- What came of it


def show(rows: Sequence[dict], options: argparse.Namespace) -> None:
    """Print, write and draw the rows so far."""
    print(findings.table([cells(row, options.rates) for row in rows], COLUMNS))
    gains = gains_of(rows)
    for name, gain in gains.items():
        print(f"{name}: {differences.verdict(gain)}")
    about = dict(steps=options.steps, rates=options.rates, seeds=options.seeds, held_out=held_out.HELD_OUT)
    about |= dict(overrides=[*SHARED, *options.override], data=DATA)
    draw(rows, findings.picture(options))
    findings.write(options, {**about, "rows": rows, "gains": gains})


def cells(row: Mapping, rates: Sequence[float]) -> dict:
    """A row as text."""
    notes = [f"{row['diverged']} diverged"] if row["diverged"] else []
    if len(rates) > 1 and row["rate"] in (min(rates), max(rates)):
        notes.append("rate at the edge")
    falls = [fall for fall in row["late_fall"] if fall is not None]
    if not falls or max(falls) > FLAT:
        notes.append("loss not flat")
    spreads = {key: several_seeds.spread(row[key]) for key in ("upright", "eight", "constant")}
    return dict(data=row["data"], model=row["model"], width=row["width"], rate=f"{row['rate']:g}", **spreads) | dict(
        macs=f"{row['macs'] / 1e6:.2f} M ({100 * row['macs_ratio'] - 100:+.1f} %)",
        time=f"{1e3 * row['step_seconds']:.1f} ms ({100 * row['time_ratio'] - 100:+.1f} %)",
        flat=f"{100 * max(falls):.1f}" if falls else "-",
        notes="; ".join(notes),
    )


def gains_of(rows: Sequence[Mapping]) -> dict[str, dict]:
    """The difference of each model to the plain one of the same data, and its standard error."""
    gains = {}
    plain = {row["data"]: row for row in rows if row["rule"] is None}
    for row in rows:
        reference = plain[row["data"]]
        if row is reference or row["diverged"] or reference["diverged"]:
            continue
        for key, words in (("upright", "upright"), ("eight", "eight orientations")):
            name = f"{row['data']}, {words}: {row['model']}, minus plain"
            gains[name] = differences.difference(row[key], reference[key])
    return gains


def draw(rows: Sequence[Mapping], path: pathlib.Path) -> None:
    """Accuracy over multiply-adds, upright and over the eight orientations, a row of panels for each set of data."""
    names = list(dict.fromkeys(row["data"] for row in rows))
    figure = Figure(figsize=(9.5, 0.6 + 3.2 * len(names)), layout="constrained")
    panels = figure.subplots(len(names), 2, squeeze=False, sharey="row")
    colors = dict(zip(("plain", *FAMILIES), ("black", "tab:blue", "tab:orange", "tab:green"), strict=True))
    markers = {None: "s", RULES[0]: "o", RULES[1]: "^"}
    for name, line in zip(names, panels, strict=True):
        for axes, (key, title) in zip(line, dict(upright="upright", eight="eight orientations").items(), strict=True):
            for row in (row for row in rows if row["data"] == name and row[key]):
                style = dict(color=colors[row["family"]], marker=markers[row["rule"]], markersize=6, label=row["model"])
                several_seeds.errorbar(axes, row["macs"] / 1e6, row[key], **style)
            axes.set(title=f"{name.replace('_', ' ')}, {title}", xlabel="million multiply-adds of an image")
            axes.set_xlim(left=0)
            axes.grid(alpha=0.3)
        line[0].set_ylabel("test accuracy, %")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _options(arguments):
    parser = several_seeds.parser(__doc__, __file__, epochs=False, source=False)
    parser.add_argument("--blood_cells", help="their source, such as npz:<file> with splits train and test")
    parser.add_argument("--cifar10", help="its source")
    parser.add_argument("--patterns", help="their source, drawn by studies.patterns")
    parser.add_argument("--width", type=int, default=64, help="of the plain model (%(default)s)")
    parser.add_argument("--families", default=list(FAMILIES), type=flags.one_of(FAMILIES))
    parser.add_argument("--rules", default=list(RULES), type=flags.one_of(RULES), help="budgets (both)")
    parser.add_argument("--steps", type=flags.at_least(1), default=1000, help="of every run (%(default)s)")
    parser.add_argument("--rates", default=[1e-3, 3e-3, 9e-3], type=flags.each_at_least(0, float))
    parser.add_argument("--plan", action="store_true", help="measure, print what would be run, and end")
    options = several_seeds.parse(parser, arguments)
    if not any(getattr(options, name) for name in DATA):
        parser.error("nothing to train on; give " + " or ".join(f"--{name}=npz:<file>" for name in DATA))
    if heads_of(options.width) is None or options.width not in LEGAL:
        near = min(legal(0, 1024), key=lambda width: abs(width - options.width))
        parser.error(f"--width={options.width} is no multiple of 8 with heads of 16 to 64 channels; nearest: {near}")
    return options
