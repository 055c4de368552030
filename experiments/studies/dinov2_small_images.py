"""Self-supervised training of small plain, H8 and I8 ViTs by DINOv2: frozen features before and after.

    python -m experiments studies.dinov2_small_images --data=blood_cells --source=npz:/data/pbc_wbc96.npz
    python -m experiments studies.dinov2_small_images --data=cifar10 --source=npz:/data/cifar10.npz
    python -m experiments studies.dinov2_small_images --data=blood_cells --source=npz:/data/pbc_wbc96.npz \
        --override=model.init=xavier_uniform --entry=blood_cells_xavier

The recipe is configs/dinov2.py:small; CIFAR-10 is trained at 32 px in patches of 4, with mirrored views only.  Accuracy
is of 20 nearest neighbours and of a linear probe on the teacher's frozen features, upright and in the eight
orientations, after training and at the start; and of 20 neighbours by pixels.  The targets' entropies show collapse.

Claims, for blood cells: the probe gains at least 5 points over the start, and k-NN gains, both by more than the spread;
no target is uniform.
"""

import json
import statistics
from collections.abc import Mapping

import numpy as np

from equivit.evaluation.protocols.knn import Neighbours
from equivit.objectives import dinov2
from equivit.training import config as configs
from experiments import findings, flags
from experiments.findings import Claim
from experiments.studies import differences, several_seeds

FAMILIES = ("plain", "H8", "I8")
CIFAR10 = ["data.image_size=(32,32)", "model.image_size=(32,32)", "model.patch_size=4"]
CIFAR10 += ["data.views.local_size=(16,16)", "data.augment.octic=False", *several_seeds.CIFAR10]
SETS = {"blood_cells": ["data.train_examples=None"], "cifar10": CIFAR10}
ENTROPIES = ("classes/rows", "classes/mean", "patches/rows", "patches/mean")
LEAST = {"linear_probe/top1": 0.05, "knn/top1": 0.0}  # what training is claimed to add
FIGURES = ("knn/top1", "linear_probe/top1", "knn/accuracy_mean", "linear_probe/accuracy_mean", "knn/consistency")


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--rows", default=list(FAMILIES), type=flags.one_of(FAMILIES), help="(all)")
    options = several_seeds.parse(parser, arguments, SETS)
    rows = {row: runs(row, options) for row in options.rows}
    pixels = by_pixels(config_of(options.rows[0], options))
    gains = gains_of(rows)
    print(f"\n{options.data}: accuracy in percent; by pixels {100 * pixels:.1f}")
    several_seeds.show(rows, COLUMNS, gains)
    settings = dict(seeds=options.seeds, overrides=options.override)
    return findings.finish(options, dict(rows=rows, gains=gains, pixels=pixels, **settings), claims(options.data, rows))


def config_of(family, options, seed=0):
    texts = [*SETS[options.data], "log.to=()", f"seed={seed}", *options.override]
    texts += several_seeds.source(options)
    texts += [f"epochs={options.epochs}"] if options.epochs else []
    return configs.load(f"configs/dinov2.py:small,{family}", texts)


def runs(family, options) -> dict[str, list]:
    """The figures of a model, one for each seed: at the start, at the end, and the last entropies of its targets."""
    found = []
    for seed in options.seeds:
        place = options.workdir / family / f"seed_{seed}"
        config = config_of(family, options, seed)
        before = several_seeds.at_start(config, place)
        after = several_seeds.trained(config, place)
        lines = (place / "metrics.jsonl").read_text().splitlines()
        last = [json.loads(line) for line in lines if "classes/rows" in line][-1]
        row = {f"start {figure}": before[figure] for figure in FIGURES}
        row |= {figure: after[f"eval/{figure}"] for figure in FIGURES}
        found.append(row | {key: last[key] for key in ENTROPIES})
    return {key: [row[key] for row in found] for key in found[0]}


def by_pixels(config) -> float:
    """Accuracy of 20 nearest neighbours by the pixels of the images, centred, by cosine."""
    known, asked = (several_seeds.decoded(config.data, split) for split in (config.data.split, config.data.eval_split))
    keys, queries = (part["image"].reshape(len(part["image"]), -1).astype(np.float32) for part in (known, asked))
    number, mean = 1 + int(known["label"].max()), keys.mean(0)
    best = Neighbours(keys - mean, known["label"], num_classes=number, ks=(20,)).best(queries - mean)
    return float((best[0, :, 0] == asked["label"]).mean())


def gains_of(rows: Mapping[str, Mapping[str, list]]) -> dict[str, dict]:
    """Differences from plain, at the start, at the end and in what training adds; and of each model from its start."""
    octic = [family for family in rows if family != "plain" and "plain" in rows]
    compared = [f"{when}{figure}" for figure in LEAST for when in ("start ", "")]
    gains = differences.gains(rows, ((family, "plain") for family in octic), compared)
    for figure in LEAST:
        added = {family: np.subtract(row[figure], row[f"start {figure}"]) for family, row in rows.items()}
        for family, row in rows.items():
            gain = differences.paired_difference(row[figure], row[f"start {figure}"])
            gains[f"{family} - its start, {figure}"] = gain
        for family in octic:
            gain = differences.difference(added[family].tolist(), added["plain"].tolist())
            gains[f"{family} - plain, added to {figure}"] = gain
    return gains


def claims(name: str, rows: Mapping[str, Mapping[str, list]]) -> list[Claim]:
    """The claims about a set."""
    found = []
    for family, row in rows.items():
        for figure, least in LEAST.items():
            before, after = row[f"start {figure}"], row[figure]
            spread = max(statistics.stdev(one) if len(one) > 1 else 0.0 for one in (before, after))
            text = f"{name}, {family}: gain of {figure} over the start"
            judged, gain = name == "blood_cells" and len(after) > 1, statistics.fmean(after) - statistics.fmean(before)
            found.append(Claim(text, gain, at_least=max(least, spread), judged=judged))
        fullest = max(*row["classes/rows"], *row["patches/rows"])
        found.append(Claim(f"{name}, {family}: entropy of targets over log K", fullest, at_most=dinov2.UNIFORM))
    return found


COLUMNS = {"start linear_probe/top1": "probe at start", "linear_probe/top1": "probe", "start knn/top1": "k-NN at start"}
COLUMNS |= {"knn/top1": "k-NN", "knn/accuracy_mean": "k-NN, eight", "knn/consistency": "same in eight"}
COLUMNS |= {"classes/rows": "entropy, rows", "classes/mean": "entropy, mean"}
