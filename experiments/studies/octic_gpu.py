"""Plain, H8, I8 and D8 on a GPU for equal times, all learning rates and seeds together (`together.py`).

    python -m experiments studies.octic_gpu --blood_cells=npz:pbc_wbc96.npz --cifar10=npz:cifar10.npz  # 12 minutes
    python -m experiments studies.octic_gpu --blood_cells=npz:pbc_wbc96.npz --quick --output=/tmp/gpu.json

Images without an orientation, at 96 px in patches of 12, and CIFAR-10 in patches of 4; six blocks.  At equal width an
octic model has fewer parameters and cheaper steps: D8 and I8 are also tried wider.  "eight" is the mean accuracy over
the eight orientations of the test images.
"""

import functools
from collections.abc import Sequence

import numpy as np

from equivit.training import config as configs
from experiments.studies import held_out, several_seeds, together

CELLS = ["data.image_size=(96,96)", "model.image_size=(96,96)", "model.patch_size=12", "model.num_classes=8"]
DATA = {"blood_cells": CELLS, "cifar10": []}
ARMS = {"plain": ("plain", 192), "H8": ("H8", 192), "I8": ("I8", 192), "D8": ("D8", 192)}
ARMS |= {"I8, wider": ("I8", 256), "D8, wider": ("D8", 256)}
HEADS = {192: 6, 256: 8}  # by width
RATES = (5e-4, 1.5e-3, 4.5e-3)
MODEL = ["model.depth=6", "model.layer_scale=0.1", "model.init=xavier_uniform", "precision=mixed"]
MODEL += [*several_seeds.SMALL, "batch_size=128"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = together.parser(__doc__, __file__, seconds=35, rates=RATES)
    for name in DATA:
        parser.add_argument(f"--{name}", help="the data, such as npz:<file> with splits train and test")
    options = parser.parse_args(arguments)
    names = [name for name in DATA if getattr(options, name)]
    if not names:
        parser.error(f"give the data: {', '.join(f'--{name}' for name in DATA)}")
    return together.study(options, {name: functools.partial(arms, options, name) for name in names}, orientations)


def arms(options, name: str) -> list[together.Arm]:
    """The arms of a data set."""
    path = held_out.prepared(config_of(options, name, "plain", 192).data, options.workdir / f"{name}.npz")
    return [together.Arm(arm, config_of(options, name, *model), path) for arm, model in ARMS.items()]


def config_of(options, name: str, family: str, width: int):
    """The config of a family at a width."""
    size = [f"model.width={width}", f"model.num_heads={HEADS[width]}", f"data.source={getattr(options, name)}"]
    texts = [*MODEL, *held_out.WHOLE, *several_seeds.QUIET, *DATA[name], *size, *options.override]
    return configs.load(f"configs/cifar.py:10,{family}", texts)


def orientations(predict, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The mean accuracy over the eight orientations, and the share of images whose class is the same in all."""
    turned = [np.rot90(view, k, (1, 2)) for view in (images, images[:, :, ::-1]) for k in range(4)]
    classes = np.stack([predict(np.ascontiguousarray(view)) for view in turned])
    return dict(eight=(classes == labels).mean((0, 2)), constant=(classes == classes[0]).all(0).mean(1))
