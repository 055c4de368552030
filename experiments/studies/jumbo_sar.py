"""Test-time adaptation of a tiny registers and a tiny Jumbo ViT on CIFAR-10, in the form of Jumbo's Table 2.

    pip install .[corruptions]
    python -m experiments studies.jumbo_sar --source=npz:/data/cifar10.npz

Both models (width 96, depth 4, patch 4) are trained on clean images, then meet each corruption of the test images, at
severity 5, as a shuffled stream, with and without SAR.  Jumbo's MLP learns at a J-th of the rate (`jumbo_rates.py`).
The paper's rows are ViT-S on ImageNet-C.  Claim: SAR costs no model accuracy in the mean.
"""

import argparse
import pathlib
import statistics

from equivit.data import corruptions, loader
from equivit.evaluation import adaptation
from equivit.evaluation.protocols.corruptions import HEADINGS
from equivit.training import checkpoints
from experiments import findings
from experiments.studies import differences, several_seeds

MODELS = {
    "Registers": ["model.name=register_vit_pico16"],
    "Jumbo": ["model.name=jumbo_vit_pico16", "optimizer.rates=('jumbo_mlp.*=1/6',)"],
}
SHARED = ["model.depth=4", "model.patch_size=4", "schedule.lr=2e-3", "schedule.warmup_epochs=1"]
# With label smoothing no prediction of so small a model is confident, and SAR does nothing.
SHARED += ["objective.label_smoothing=0.0"]
# Layer scale begins with blocks that do next to nothing, which takes longer to leave than these runs last.
SHARED += ["model.layer_scale=None", "model.init=xavier_uniform", "evaluation.suite=('accuracy',)"]
SHARED += [*several_seeds.SMALL, *several_seeds.CIFAR10]
# Accuracy in percent, in the order of `corruptions.NAMES` (Table 2).
PAPER = {
    "Registers": (13.6, 14.2, 13.0, 29.3, 20.3, 34.9, 28.7, 49.0, 50.4, 56.6, 73.5, 47.8, 29.0, 45.6, 56.1),
    "Jumbo": (25.9, 26.6, 25.8, 31.2, 21.4, 33.3, 30.6, 53.1, 51.9, 57.3, 75.2, 49.4, 30.5, 47.5, 57.1),
    "Registers+SAR": (38.9, 39.2, 41.5, 48.2, 48.7, 56.5, 32.1, 62.0, 59.4, 68.9, 76.1, 61.5, 59.1, 65.5, 66.1),
    "Jumbo+SAR": (45.2, 49.6, 51.2, 53.3, 53.2, 61.1, 44.5, 66.2, 58.5, 71.7, 77.5, 67.1, 65.2, 69.0, 69.0),
}
PAIRS = [("Jumbo", "Registers"), ("Jumbo+SAR", "Registers+SAR"), ("Registers+SAR", "Registers"), ("Jumbo+SAR", "Jumbo")]


def main(arguments: list[str] | None = None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--lr", type=float, default=adaptation.Sar.lr, help="of SAR, for batches of 64")
    parser.set_defaults(epochs=20)
    options = several_seeds.parse(parser, arguments)
    settings, runs = adaptation.Sar(lr=options.lr), {}
    for kind, own in MODELS.items():
        overrides = [*SHARED, *own, *several_seeds.length_in_epochs(options.epochs)]
        seeds = several_seeds.reports(options, "configs/cifar.py:10,plain", overrides, kind)
        places = [options.workdir / kind / f"seed_{seed}" for seed in seeds]
        runs[kind] = {
            name: [evaluate(place, name, settings) for place in places] for name in ("clean", *corruptions.NAMES)
        }
    return show(runs, corruptions.NAMES, options)


def evaluate(workdir: pathlib.Path, name: str, settings: adaptation.Sar) -> dict:
    """The run's model on the shuffled test images under one corruption."""
    config, model, _ = checkpoints.load_run(workdir)
    size = dict(batch_size=config.evaluation.sar.batch_size, seed=config.seed, shuffle=True)
    if name != "clean":
        with config.unlocked():
            config.data.update(corruption=name, severity=5)
    stream = loader.evaluate(config.data, **size).batches()
    pixels = dict(mean=tuple(config.data.mean), std=tuple(config.data.std))
    return adaptation.adaptation(model, stream, **pixels, settings=settings)


def show(runs: dict, names: tuple[str, ...], options: argparse.Namespace) -> int:
    """Print and write the table; returns the exit status."""
    ours = {}
    for suffix, figure in (("", "unadapted_top1"), ("+SAR", "top1")):
        for kind, results in runs.items():
            ours[kind + suffix] = {name: [r[figure] for r in results[name]] for name in ("clean", *names)}
    columns = [HEADINGS[corruptions.NAMES.index(name)] for name in names]
    print(f"{'':22}{'clean':>8}" + "".join(f"{column:>9}" for column in (*columns, "Avg.")))
    for row, figures in ours.items():
        means = [100 * statistics.fmean(figures[name]) for name in ("clean", *names)]
        print(f"{'ours ' + row:22}{means[0]:8.1f}" + _cells(means[1:]))
    for row, figures in PAPER.items():
        print(f"{'paper ' + row:22}{'':8}" + _cells([figures[corruptions.NAMES.index(name)] for name in names]))
    for kind, results in runs.items():
        kept = statistics.fmean(r["kept"] for name in names for r in results[name])
        print(f"{kind}: SAR adapted to {100 * kept:.0f} % of the images, those whose prediction is confident")
    averages = {row: [statistics.fmean(v) for v in zip(*map(f.get, names), strict=True)] for row, f in ours.items()}
    gains = {f"{a} - {b}": differences.paired_difference(averages[a], averages[b]) for a, b in PAIRS}
    for pair, gain in gains.items():
        print(f"{pair}, mean over the corruptions: {differences.verdict(gain)}")
    about = dict(lr=options.lr, epochs=options.epochs, seeds=options.seeds, overrides=[*SHARED, *options.override])
    findings.write(options, {**about, "paper": PAPER, "runs": runs, "gains": gains})
    means = {row: statistics.fmean(values) for row, values in averages.items()}
    return int(any(means[f"{kind}+SAR"] < means[kind] for kind in runs))


def _cells(values) -> str:
    return "".join(f"{value:9.1f}" for value in (*values, statistics.fmean(values)))
