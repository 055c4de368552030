"""Registers and Jumbo on CIFAR-10, each with its own best learning rate and for the same time.

    python -m experiments studies.jumbo_rates --source=npz:/data/cifar10.npz
    python -m experiments studies.jumbo_rates --source=npz:/data/cifar10.npz --labels=512 --entry=clusters

Jumbo's MLP is J times wider than a register's and sums its gradients over all blocks, so that one rate for all of a
model need not suit it.  ARMS has 5 registers and a class token, a Jumbo token of J = 6 without an MLP of its own, with
it, and with it at a J-th of the learning rate.  64 patches, three blocks, layer scales that start at 1.

Each arm gets the rate with the best accuracy on a held-out fifth of the training images, for one seed; it is then
trained on all training images with every seed.  All arms take as long as Jumbo's --steps: step times are measured in
turn in one process, once.  With --labels=N the classes are N clusters of the images (k-means of 64 principal components
at 16 by 16 pixels, of the training images): the paper expects a larger gain with more outputs.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from sklearn import cluster, decomposition

from equivit.training import config as configs
from experiments import findings, flags
from experiments.studies import differences, held_out, several_seeds

HEADS = {48: 2, 96: 3, 192: 6}  # by width
J = 6
JUMBO = ["model.name=jumbo_vit_ti16", f"model.jumbo={J}"]
ARMS = {
    "registers": ["model.name=register_vit_ti16", f"model.registers={J - 1}"],
    "no MLP": [*JUMBO, "model.jumbo_mlp=none"],
    "Jumbo": JUMBO,
    "Jumbo, rate / J": [*JUMBO, f"optimizer.rates=('jumbo_mlp.*=1/{J}',)"],
}
LONGEST = "Jumbo"  # whose steps set the time
SHARED = ["model.depth=3", "model.patch_size=4", "model.layer_scale=1.0", "schedule.min_lr=0.0"]
SHARED += ["evaluation.suite=('accuracy',)", *several_seeds.SMALL, *several_seeds.CIFAR10, *several_seeds.QUIET]
COMPONENTS, SIDE = 64, 16  # principal components, and pixels, of the clusters
ACCURACY = "eval/accuracy/top1"
COLUMNS = dict(width="width", arm="arm", steps="steps", rate="rate", top1="test, %", loss="training loss", note="")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    relabel = (lambda splits: clustered(splits, options.labels)) if options.labels else None
    data = _config(options, options.widths[0], LONGEST, options.steps).data
    images = held_out.prepared(data, options.workdir / "images.npz", relabel, labels=options.labels)
    rows = []
    for width in options.widths:
        made = {arm: _config(options, width, arm, options.steps) for arm in ARMS}
        settings = dict(steps=options.steps, labels=options.labels, override=options.override)
        path = options.workdir / f"steps_{width}.json"
        seconds = several_seeds.planned(path, settings, lambda made=made: several_seeds.step_seconds(made))
        for arm in options.arm:
            rows.append(row(options, images, width, arm, seconds))
            print(findings.table([cells(rows[-1], options.rates)], COLUMNS), flush=True)
    gains = gains_of(rows)
    print(findings.table([cells(row, options.rates) for row in rows], COLUMNS))
    for name, gain in gains.items():
        print(f"{name}: {differences.verdict(gain)}")
    about = dict(steps=options.steps, labels=options.labels, rates=options.rates, seeds=options.seeds)
    findings.write(options, about | dict(overrides=[*SHARED, *options.override], rows=rows, gains=gains))
    return 0


def clustered(splits: dict[str, dict[str, np.ndarray]], number: int) -> None:
    """Replace the labels by clusters of the images, fitted on the training images."""
    kind = {}
    for split, arrays in splits.items():
        size = (len(arrays["image"]), SIDE, SIDE, arrays["image"].shape[-1])
        small = jax.image.resize(arrays["image"].astype(np.float32), size, "linear")
        kind[split] = np.asarray(small).reshape(len(small), -1)
    components = decomposition.PCA(COMPONENTS, random_state=0).fit(kind["train"])
    kind = {split: components.transform(values) for split, values in kind.items()}
    clusters = cluster.KMeans(number, n_init=1, random_state=0).fit(kind["train"])
    for split, arrays in splits.items():
        arrays["label"] = clusters.predict(kind[split]).astype(np.int64)


def row(options: argparse.Namespace, images: pathlib.Path, width: int, arm: str, seconds: Mapping[str, float]) -> dict:
    """The figures of an arm: its rate chosen, then a run for each seed, all as long as LONGEST's."""
    steps = round(options.steps * seconds[LONGEST] / seconds[arm])
    directory = options.workdir / f"{arm}_{width}".replace(" / ", "_over_")
    make = functools.partial(_config, options, width, arm, steps)
    found = held_out.row(make, images, directory, options, {"top1": ACCURACY}, chosen=ACCURACY)
    return dict(width=width, arm=arm, steps=steps, step_seconds=seconds[arm]) | found


def cells(row: Mapping, rates: Sequence[float]) -> dict:
    """A row as text."""
    notes = [f"{row['diverged']} diverged"] if row["diverged"] else []
    if row["rate"] in (min(rates), max(rates)):
        notes.append("rate at the edge")
    loss = f"{statistics.fmean(row['loss']):.3f}" if row["loss"] else "-"
    shown = dict(rate=f"{row['rate']:g}", top1=several_seeds.spread(row["top1"]), loss=loss, note="; ".join(notes))
    return {**row, **shown}


def gains_of(rows: Sequence[Mapping]) -> dict[str, dict]:
    """The difference of each arm to registers of its width, and what the rate over J adds."""
    values = {(row["arm"], row["width"]): row["top1"] for row in rows}
    pairs = [(arm, "registers") for arm in ARMS if arm != "registers"] + [("Jumbo, rate / J", "Jumbo")]
    return {
        f"{one} - {other}, {width}": differences.difference(values[one, width], values[other, width])
        for width in dict.fromkeys(row["width"] for row in rows)
        for one, other in pairs
        if (one, width) in values and (other, width) in values
    }


def _config(options: argparse.Namespace, width: int, arm: str, steps: int, *overrides: str):
    size = [f"model.width={width}", f"model.num_heads={HEADS[width]}", f"model.num_classes={options.labels or 10}"]
    texts = [*SHARED, *size, *several_seeds.length_in_steps(steps, warmup=20), *several_seeds.source(options)]
    texts += [*ARMS[arm], *options.override, *overrides]
    return configs.load("configs/cifar.py:10,plain", texts)


def _options(arguments):
    parser = several_seeds.parser(__doc__, __file__, epochs=False)
    parser.add_argument("--arm", action="append", choices=ARMS, help="may be repeated (all)")
    parser.add_argument("--labels", type=flags.at_least(1), help="clusters in place of the ten classes")
    parser.add_argument("--widths", default=[48, 96], type=flags.each_at_least(1))
    parser.add_argument("--steps", type=flags.at_least(1), default=1000, help="of Jumbo (%(default)s)")
    parser.add_argument("--rates", default=[5e-4, 1.5e-3, 5e-3, 1.5e-2], type=flags.each_at_least(0, float))
    parser.set_defaults(seeds=[0, 1, 2, 3])
    options = several_seeds.parse(parser, arguments)
    options.arm = options.arm or list(ARMS)
    if unknown := [width for width in options.widths if width not in HEADS]:
        parser.error(f"--widths={unknown[0]} must be one of {', '.join(map(str, HEADS))}")
    return options
