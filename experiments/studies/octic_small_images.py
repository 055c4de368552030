"""Plain against H8, I8 and D8 on small images at equal epochs: accuracy upright and over the eight orientations.

    python -m experiments studies.octic_small_images --data=digits
    python -m experiments studies.octic_small_images --data=cifar10 --source=npz:/data/cifar10.npz
    python -m experiments studies.octic_small_images --data=blood_cells --source=npz:/data/pbc_wbc96.npz --epochs=50

Claim: the predictions of invariant models (I8, D8) are identical in all eight orientations.
"""

from experiments import findings, flags
from experiments.studies import differences, several_seeds

FAMILIES = ("plain", "H8", "I8", "D8")
FIGURES = {"upright": "eval/accuracy/top1", "eight orientations": "eval/orientation/accuracy_mean"}
FIGURES |= {"never changes": "eval/orientation/consistency"}
# Remat is faster for octic blocks on a CPU, which waits for memory.
SMALL = ["model.width=64", "model.depth=4", "model.num_heads=2", *several_seeds.SMALL, "model.remat=full"]
# No canonical orientation: every model is trained with mirrored images only, as on CIFAR.
CELLS = ["data.image_size=(48,48)", "model.image_size=(48,48)", "model.patch_size=8", "model.num_classes=8"]
DATA = {
    "digits": ["configs/quickstart.py:{family}"],
    "cifar10": ["configs/cifar.py:10,{family}", *SMALL, *several_seeds.CIFAR10],
    "blood_cells": ["configs/cifar.py:10,{family}", *SMALL, *CELLS],
}


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--families", default=FAMILIES, type=flags.one_of(FAMILIES))
    options = several_seeds.parse(parser, arguments, DATA)
    file, *overrides = DATA[options.data]
    rows = {}
    for family in options.families:
        rows[family] = several_seeds.aggregate(options, file.format(family=family), overrides, family)
    figures = {family: {key: row[FIGURES[key]]["values"] for key in FIGURES} for family, row in rows.items()}
    pairs = ((family, "plain") for family in rows if family != "plain")
    gains = differences.gains(figures, pairs, list(FIGURES)[:2])
    several_seeds.show(figures, {key: f"{key}, %" for key in FIGURES}, gains)
    findings.write(options, dict(data=options.data, **several_seeds.settings(options), rows=rows))
    keys = ("eval/orientation/identical", "eval/orientation/decided")  # numbers of images without a tie
    counts = [[rows[family][key]["values"] for key in keys] for family in ("I8", "D8") if family in rows]
    return int(any(identical != decided for identical, decided in counts))
