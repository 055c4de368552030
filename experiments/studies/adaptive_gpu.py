"""Swin-T and adaptive Swin-T on CIFAR-10 at 224 px, on a GPU and for equal times (`together.py`).

    python -m experiments studies.adaptive_gpu --source=npz:/data/cifar10.npz  # at most 12 minutes (--minutes)
    python -m experiments studies.adaptive_gpu --source=npz:/data/cifar10.npz --quick --output=/tmp/gpu.json

The published model on images enlarged from 32 px (arXiv 2305.16316, Table 1, has 100 epochs).  "shifted" is the
accuracy after a random circular shift of each test image, which the ordinary model is not trained on; "constant" the
share of images whose class it leaves.
"""

import functools
from collections.abc import Sequence

import numpy as np

from equivit.training import config as configs
from experiments.studies import held_out, several_seeds, together

# Words of the config's mode, and keys.
ARMS = {"ordinary": ("swin_t", []), "adaptive": ("swin_t,adaptive", [])}
ARMS |= {"by input": ("swin_t,adaptive", ["model.select=input"])}
RATES = (5e-4, 1.5e-3)
SHARED = ["precision=mixed", "data.image_size=(32,32)", *several_seeds.SMALL, "batch_size=64", "model.num_classes=10"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = together.parser(__doc__, __file__, seconds=180, rates=RATES)
    parser.add_argument("--source", required=True, help="CIFAR-10, such as npz:<file> with splits train and test")
    parser.set_defaults(seeds=[0])
    options = parser.parse_args(arguments)
    return together.study(options, {"swin_t": functools.partial(arms, options)}, shifts)


def arms(options) -> list[together.Arm]:
    """The arms of the table."""
    path = held_out.prepared(config_of(options, "ordinary").data, options.workdir / "images.npz")
    return [together.Arm(arm, config_of(options, arm), path) for arm in ARMS]


def config_of(options, arm: str):
    """The config of an arm: images are 32 px in memory, and 224 px for the model."""
    words, keys = ARMS[arm]
    texts = [*SHARED, *held_out.WHOLE, *several_seeds.QUIET, *several_seeds.source(options), *keys, *options.override]
    return configs.load(f"configs/adaptive_cifar.py:10,{words}", texts)


def shifts(predict, images: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """The accuracy after a random circular shift of each image, and the share of images whose class stays.

    Shifts are of whole pixels before the enlargement, so of multiples of 7 pixels after it.
    """
    amounts = np.random.default_rng(0).integers(1, images.shape[1], (len(images), 2))
    moved = np.stack([np.roll(image, tuple(by), (0, 1)) for image, by in zip(images, amounts, strict=True)])
    before, after = predict(images), predict(moved)
    return dict(shifted=(after == labels).mean(1), constant=(after == before).mean(1))
