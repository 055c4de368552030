"""Plain against H8, I8 and D8 on small images at equal epochs: accuracy upright and over the eight orientations.

Not in the paper, whose results need ImageNet.  No gain is claimed unless it exceeds the spread over seeds: a difference
is called resolved when it is larger than twice the combined standard error of the two means.

    python experiments/octic_small_images.py --data=digits
    python experiments/octic_small_images.py --data=cifar10 --source=npz:/data/cifar10.npz
    python experiments/octic_small_images.py --data=blood_cells --source=npz:/data/pbc_wbc96.npz --epochs=50

Prints a table, writes JSON with every run's figures, versions and machine; exits 1 when an invariant model (I8, D8) is
not identical in all eight orientations.
"""

import argparse
import json
import math
import pathlib
import platform
import statistics
import sys

import jax

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from equivit import train
from equivit.training import config as configs

FAMILIES = ("plain", "H8", "I8", "D8")
SMALL = ["model.width=64", "model.depth=4", "model.num_heads=2", "batch_size=64"]
# A few epochs of a small model: nothing to regularise.
SMALL += ["model.drop_path=0.0", "data.augment.rand_augment=None", "objective.mixup=0.0", "objective.cutmix=0.0"]
SMALL += ["data.workers=0", "model.remat=full"]  # remat is faster here: the CPU waits for memory
DATA = {
    "digits": ["configs/quickstart.py:{family}"],
    "cifar10": ["configs/cifar.py:10,{family}", *SMALL, "data.train_examples=10000", "data.eval_examples=2000"],
    # No canonical orientation: every model is trained with mirrored images only, as on CIFAR.
    "blood_cells": [
        "configs/cifar.py:10,{family}",
        *SMALL,
        "data.image_size=(48,48)",
        "model.image_size=(48,48)",
        "model.patch_size=8",
        "model.num_classes=8",
    ],
}


def main() -> int:
    options = _parser().parse_args()
    rows = {}
    for family in options.families.split(","):
        file, *overrides = DATA[options.data]
        overrides = [*overrides, "log.tensorboard=False", "evaluation.every_epochs=None"]
        overrides += [f"data.source={options.source}"] if options.source else []
        overrides += [f"epochs={options.epochs}", "schedule.warmup_epochs=1"] if options.epochs else []
        overrides += options.override
        reports = {}
        for seed in map(int, options.seeds.split(",")):
            config = configs.load(file.format(family=family), [*overrides, f"seed={seed}"])
            report = train.train(config, options.workdir / options.data / family / f"seed_{seed}")
            if report is None:  # stopped by SIGTERM
                return 1
            reports[seed] = report
        rows[family] = train.aggregate(reports)
    _print(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = dict(data=options.data, epochs=config.epochs, rows=rows, **_machine())
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written: {options.out}")
    return int(not all(_identical(rows[family]) for family in ("I8", "D8") if family in rows))


def _parser():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", choices=DATA, required=True)
    parser.add_argument("--source", help="in place of the config's, such as npz:<file>")
    parser.add_argument("--epochs", type=int, help="in place of the config's")
    parser.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/octic_small_images"))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/octic_small_images.json"))
    return parser


def _print(rows):
    columns = {
        "upright": "eval/accuracy/top1",
        "eight orientations": "eval/orientation/accuracy_mean",
        "never changes": "eval/orientation/consistency",
    }
    print(f"{'model':8}" + "".join(f"{name:>28}" for name in columns))
    for family, row in rows.items():
        cells = (row[key] for key in columns.values())
        print(f"{family:8}" + "".join(f"{100 * c['mean']:20.2f} +- {100 * (c['spread'] or 0):4.2f}" for c in cells))
    for family in rows.keys() - {"plain"} if "plain" in rows else ():
        for name, key in list(columns.items())[:2]:
            print(f"{family} - plain, {name}: {_verdict(rows[family][key]['values'], rows['plain'][key]['values'])}")


def _identical(row) -> bool:
    """Whether every image without a tie is predicted the same in all eight orientations."""
    return row["eval/orientation/identical"]["values"] == row["eval/orientation/decided"]["values"]


def _identical(row) -> bool:
    """Whether every image without a tie is predicted the same in all eight orientations."""
    return row["eval/orientation/identical"]["values"] == row["eval/orientation/decided"]["values"]


def _verdict(a, b) -> str:
    """The difference of two means, and whether the seeds resolve it."""
    gap = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < 2:
        return f"{100 * gap:+.2f} points; one seed resolves nothing"
    error = math.sqrt(statistics.variance(a) / len(a) + statistics.variance(b) / len(b))
    return (
        f"{100 * gap:+.2f} points, standard error {100 * error:.2f}: {'' if abs(gap) > 2 * error else 'not '}resolved"
    )


def _machine():
    device = jax.devices()[0]
    return dict(jax=jax.__version__, device=device.device_kind, host=platform.processor() or platform.machine())


if __name__ == "__main__":
    sys.exit(main())
