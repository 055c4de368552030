"""Plain against H8, I8 and D8 on small images at equal epochs: accuracy upright and over the eight orientations.

Not in the paper, whose results need ImageNet.  No gain is claimed unless it exceeds the spread over seeds: a difference
is called resolved when it is larger than twice the combined standard error of the two means.

    python experiments/octic_small_images.py --data=digits
    python experiments/octic_small_images.py --data=cifar10 --source=npz:/data/cifar10.npz
    python experiments/octic_small_images.py --data=blood_cells --source=npz:/data/pbc_wbc96.npz --epochs=50

Prints a table, writes JSON with every run's figures, versions and machine; exits 1 when an invariant model (I8, D8) is
not identical in all eight orientations.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments import benchmark, small_images

FAMILIES = ("plain", "H8", "I8", "D8")
# Remat is faster for octic blocks on a CPU, which waits for memory.
SMALL = ["model.width=64", "model.depth=4", "model.num_heads=2", *small_images.SMALL, "model.remat=full"]
DATA = {
    "digits": ["configs/quickstart.py:{family}"],
    "cifar10": ["configs/cifar.py:10,{family}", *SMALL, *small_images.CIFAR10],
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


def main(arguments=None) -> int:
    parser = small_images.parser(__doc__, "octic_small_images")
    parser.add_argument("--data", choices=DATA, required=True)
    parser.add_argument("--families", default=FAMILIES, type=benchmark.one_of(FAMILIES))
    options = parser.parse_args(arguments)
    rows = {}
    file, *overrides = DATA[options.data]
    for family in options.families:
        rows[family] = small_images.run(options, file.format(family=family), overrides, f"{options.data}/{family}")
    _print(rows)
    small_images.write(options.out, dict(data=options.data, rows=rows))
    return int(not all(_identical(rows[family]) for family in ("I8", "D8") if family in rows))


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
    for family in [name for name in rows if name != "plain"] if "plain" in rows else ():
        for name, key in list(columns.items())[:2]:
            gap = small_images.difference(rows[family][key]["values"], rows["plain"][key]["values"])
            print(f"{family} - plain, {name}: {small_images.verdict(*gap)}")


def _identical(row) -> bool:
    """Whether every image without a tie is predicted the same in all eight orientations."""
    return row["eval/orientation/identical"]["values"] == row["eval/orientation/decided"]["values"]


if __name__ == "__main__":
    sys.exit(main())
