"""Shared by the trainings on small images: several seeds of each variant, and whether a difference is resolved.

No gain is claimed unless it exceeds the spread over seeds: a difference is called resolved when it is larger than twice
the combined standard error of the two means.
"""

import argparse
import json
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence

import jax
from ml_collections import ConfigDict

from equivit import train
from equivit.training import config as configs
from experiments import benchmark

# A few epochs of a small model: nothing to regularise.
SMALL = ["batch_size=64", "model.drop_path=0.0", "data.augment.rand_augment=None", "objective.mixup=0.0"]
SMALL += ["objective.cutmix=0.0", "data.workers=0"]
QUIET = ["log.tensorboard=False", "evaluation.every_epochs=None"]
CIFAR10 = ["data.train_examples=10000", "data.eval_examples=2000"]


def parser(description: str, name: str) -> argparse.ArgumentParser:
    """Options of such a training; `name` is that of its directory and of its JSON in runs/."""
    options = argparse.ArgumentParser(description=description.split("\n")[0])
    options.add_argument("--source", help="in place of the config's, such as npz:<file>")
    options.add_argument("--epochs", type=int, help="in place of the config's")
    options.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    options.add_argument("--seeds", default=[0, 1, 2], type=_seeds, help="whole numbers with commas between (0,1,2)")
    options.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs") / name)
    options.add_argument("--out", type=pathlib.Path, default=pathlib.Path(f"runs/{name}.json"))
    return options


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers with commas between, such as 0,1,2") from None


def run(options: argparse.Namespace, file: str, overrides: Sequence[str], name: str) -> dict:
    """Train one variant with every seed, or go on where it stopped; mean, spread and values of each figure."""
    overrides = [*overrides, *QUIET, *([f"data.source={options.source}"] if options.source else [])]
    overrides += [f"epochs={options.epochs}", "schedule.warmup_epochs=1"] if options.epochs else []
    reports = {}
    for seed in options.seeds:
        config = configs.load(file, [*overrides, *options.override, f"seed={seed}"])
        reports[seed] = trained(config, options.workdir / name / f"seed_{seed}")
    return train.aggregate(reports) | {"epochs": config.epochs}


def trained(config: ConfigDict, workdir: pathlib.Path) -> dict[str, float]:
    """The final figures of a run, which goes on where it stopped; of a finished one they are read."""
    report = workdir / "report.json"
    if report.is_file():
        before = configs.flat(configs.plain(configs.from_json(workdir / "config.json")))
        if all(before.get(key) == value for key, value in configs.flat(configs.plain(config)).items()):
            return json.loads(report.read_text())
    try:
        return train.train(config, workdir)
    finally:
        jax.clear_caches()  # a run compiles programs of its own


def write(path: pathlib.Path, results: Mapping) -> None:
    """Write the results as JSON, with machine, versions and commit."""
    facts = dict(device=benchmark.device(), versions=benchmark.versions(), commit=benchmark.commit())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **results}, indent=1) + "\n")
    print(f"written: {path}")


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float | None]:
    """mean(a) - mean(b) and its standard error; None where one has a single value."""
    gap = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < 2:
        return gap, None
    return gap, math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation (n - 1) in percent."""
    if len(values) < 2:
        return f"{100 * values[0]:.1f}" if values else "-"
    return f"{100 * statistics.fmean(values):.1f} ± {100 * statistics.stdev(values):.1f}"


def verdict(gap: float, error: float | None) -> str:
    """A difference in points, and whether the seeds resolve it."""
    if error is None:
        return f"{100 * gap:+.2f} points; one seed resolves nothing"
    resolved = "" if abs(gap) > 2 * error else "not "
    return f"{100 * gap:+.2f} points, standard error {100 * error:.2f}: {resolved}resolved"
