"""Accuracy of octic ViTs on images that turn by any angle, between the orientations of their symmetry.

    python -m experiments studies.octic_angles --data=blood_cells --source=npz:/data/pbc_wbc96.npz

A plain ViT, and H8, I8 and D8 of as many multiply-adds, by the recipe, the widths and the learning rates of
`octic_equal_compute.py`.  "plain, turned" has seen training images in all eight orientations.  Training and test images
show their inscribed disc alone, inside which test images turn, antialiased, from 0 to 345 degrees in steps of 15.

"worst" and "best" are accuracies of single angles, "between" is the mean of the angles that are no quarter turns, and
"same" the share of images whose class no angle changes.
Claims: accuracies of I8 and D8 repeat every 90 degrees; between them, I8 keeps its lead over plain.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from equivit.data.pixels import normalize
from equivit.guarantees.measured import STEP, turned
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import findings, flags
from experiments.findings import Claim
from experiments.studies import differences, held_out, octic_equal_compute, several_seeds
from experiments.studies.octic_equal_compute import FAMILIES, Model

ARMS = {"plain": ("plain", []), "plain, turned": ("plain", ["data.augment.octic=True"])}
ARMS |= {family: (family, []) for family in FAMILIES}
SYMMETRIC = ("I8", "D8")
# Entries of the JSON of `octic_equal_compute`.
ENTRIES = {"blood_cells": "xavier", "cifar10": "cifar10_xavier", "patterns": "patterns"}
ANGLES = tuple(range(0, 360, STEP))
QUARTER = 90
BATCH = 200
COLUMNS = dict(upright="0 degrees, %", between="between, %", worst="worst, %", best="best, %", same="same, %")
REPEATED = 1e-3  # an image whose best two logits differ by rounding may change its class


def main(arguments: Sequence[str] | None = None) -> int:
    parser = several_seeds.parser(__doc__, __file__, epochs=False)
    parser.add_argument("--arms", default=list(ARMS), type=flags.one_of(ARMS), help="(all)")
    parser.add_argument("--steps", type=flags.at_least(1), help="training steps (as in octic_equal_compute)")
    options = several_seeds.parse(parser, arguments, ENTRIES)
    if options.source is None:
        parser.error("--source is missing; give the data, such as --source=npz:<file> with splits train and test")
    file = findings.read_json(pathlib.Path(octic_equal_compute.__file__).with_suffix(".json"))
    chosen = file[ENTRIES[options.data]]
    found = {arm: [figures(options, arm, chosen, seed) for seed in options.seeds] for arm in options.arms}
    rows = {arm: summary(of_seeds) for arm, of_seeds in found.items()}
    gains = differences.gains(rows, [(arm, "plain") for arm in rows if arm != "plain"], list(COLUMNS))
    several_seeds.show(rows, COLUMNS, gains)
    accuracy = {arm: [one["accuracy"] for one in of_seeds] for arm, of_seeds in found.items()}
    draw(accuracy, findings.picture(options), options.data.replace("_", " "))
    settings = dict(data=options.data, seeds=options.seeds, overrides=options.override, angles=ANGLES)
    return findings.finish(options, dict(**settings, rows=rows, gains=gains, accuracy=accuracy), claims(rows, accuracy))


def figures(options: argparse.Namespace, arm: str, chosen: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The accuracy of a trained model at each of ANGLES, and the share of images with one class at all of them."""
    family, texts = ARMS[arm]
    row = next(row for row in chosen["rows"] if row["family"] == family and row["rule"] in (None, "multiply-adds"))
    overrides = [*chosen["overrides"], *options.override]
    equal = argparse.Namespace(steps=options.steps or chosen["steps"], override=overrides)
    setattr(equal, options.data, options.source)
    model = Model(family, row["width"], row["rule"])
    data = octic_equal_compute.config_of(options.data, model, equal).data
    redraw = functools.partial(turned, angle=0, fill=mean_colour(data))
    images = held_out.prepared(data, options.workdir / "images.npz", redraw=redraw)
    texts = [f"data.source=npz:{images}", *held_out.WHOLE, "data.split=train", f"schedule.lr={row['rate']}", *texts]
    texts += ["evaluation.suite=('accuracy',)", f"seed={seed}"]
    config = octic_equal_compute.config_of(options.data, model, equal, *texts)
    workdir = options.workdir / arm.replace(", ", "_") / f"seed_{seed}"
    several_seeds.trained(config, workdir)
    kept = workdir.with_name(f"{workdir.name}_angles.json")
    return findings.cached(kept, lambda: at_angles(config, workdir), configs.flat(configs.plain(config.data)))


def mean_colour(data: ConfigDict) -> tuple[int, ...]:
    return tuple(round(255 * value) for value in data.mean)


def at_angles(config, workdir: pathlib.Path) -> dict[str, Any]:
    """Evaluate the model of a run on the turned test images."""
    model = checkpoints.load_run(workdir).model
    images, labels = several_seeds.decoded(config.data, config.data.eval_split).values()
    mean, std = tuple(config.data.mean), tuple(config.data.std)

    @jax.jit
    def predict(images):
        return model(normalize(images, mean, std)).argmax(-1)

    classes = []
    for angle in ANGLES:
        moved = turned(images, angle, mean_colour(config.data))
        parts = [predict(moved[start : start + BATCH]) for start in range(0, len(moved), BATCH)]
        classes.append(np.concatenate(parts))
    jax.clear_caches()
    right = [float(np.mean(found == labels)) for found in classes]
    return dict(accuracy=right, same=float(np.mean(np.all(np.stack(classes) == classes[0], 0))))


def summary(of_seeds: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The figures of COLUMNS, a value for each seed."""
    each = [one["accuracy"] for one in of_seeds]
    between = [[a for angle, a in zip(ANGLES, one, strict=True) if angle % QUARTER] for one in each]
    found = dict(upright=[one[0] for one in each], between=list(map(statistics.fmean, between)))
    return found | dict(worst=list(map(min, each)), best=list(map(max, each)), same=[one["same"] for one in of_seeds])


def claims(rows: Mapping[str, Mapping], accuracy: Mapping[str, Sequence[Sequence[float]]]) -> list[Claim]:
    found, period = [], QUARTER // STEP
    for family in SYMMETRIC:
        if family in accuracy:
            each = np.array(accuracy[family])
            apart = float(np.abs(each - np.roll(each, period, axis=1)).max())
            found.append(Claim(f"{family}: change of the accuracy after 90 degrees", apart, at_most=REPEATED))
    if {"plain", "I8"} <= set(rows):
        lead = {key: statistics.fmean(rows["I8"][key]) - statistics.fmean(rows["plain"][key]) for key in COLUMNS}
        found.append(Claim("I8 over plain, between quarter turns", lead["between"], at_least=0))
    return found


def draw(accuracy: Mapping[str, Sequence[Sequence[float]]], path: pathlib.Path, title: str) -> None:
    """Mean accuracy over angles of each arm, with the spread over seeds as a band."""
    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    colors = dict(zip(ARMS, ("black", "tab:gray", "tab:blue", "tab:orange", "tab:green"), strict=True))
    for arm, of_seeds in accuracy.items():
        each = 100 * np.array(of_seeds)
        mean, spread = each.mean(0), each.std(0, ddof=1) if len(each) > 1 else np.zeros(len(ANGLES))
        axes.plot(ANGLES, mean, color=colors[arm], label=arm)
        axes.fill_between(ANGLES, mean - spread, mean + spread, color=colors[arm], alpha=0.15, linewidth=0)
    axes.set(title=title, xlabel="angle, degrees", ylabel="test accuracy, %", xticks=range(0, 361, QUARTER // 2))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=len(accuracy), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
