"""The arms of `jumbo_rates.py` on a GPU, all learning rates and seeds of an arm together (`together.py`).

    python -m experiments studies.jumbo_rates_gpu --source=npz:/data/cifar10.npz  # at most 12 minutes (--minutes)
    python -m experiments studies.jumbo_rates_gpu --source=npz:/data/cifar10.npz --quick --output=/tmp/gpu.json

CIFAR-10 in patches of 4 pixels, six blocks, Xavier's initial weights, layer scales that start at 1.  A table has a
width and a number of classes, ten, or 512 clusters (`jumbo_rates.clustered`).
"""

import functools
from collections.abc import Sequence

from equivit.training import config as configs
from experiments.studies import held_out, jumbo_rates, several_seeds, together
from experiments.studies.jumbo_rates import ARMS, HEADS

TEN = 10
# Widths and numbers of classes, most decisive first.
TABLES = ((96, TEN), (96, 512), (48, TEN), (192, TEN), (48, 512), (192, 512))
RATES = (5e-4, 1.5e-3, 4.5e-3, 1.35e-2)
MODEL = ["model.depth=6", "model.init=xavier_uniform", "precision=mixed", "batch_size=128"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = together.parser(__doc__, __file__, seconds=25, rates=RATES)
    parser.add_argument("--source", required=True, help="CIFAR-10, such as npz:<file> with splits train and test")
    options = parser.parse_args(arguments)
    tables = {f"width {width}, {n} classes": functools.partial(arms, options, width, n) for width, n in TABLES}
    return together.study(options, tables)


def arms(options, width: int, classes: int) -> list[together.Arm]:
    """The arms of a table; the images are prepared once for each number of classes."""
    path, data = options.workdir / f"images_{classes}.npz", config_of(options, width, classes, "Jumbo").data
    relabel = None if classes == TEN else functools.partial(jumbo_rates.clustered, number=classes)
    held_out.prepared(data, path, relabel, labels=classes)
    return [together.Arm(arm, config_of(options, width, classes, arm), path) for arm in ARMS]


def config_of(options, width: int, classes: int, arm: str):
    """The config of an arm; its rate, seed and length are arguments of the program."""
    size = [f"model.width={width}", f"model.num_heads={HEADS[width]}", f"model.num_classes={classes}"]
    texts = [*jumbo_rates.SHARED, *held_out.WHOLE, *MODEL, *size, *several_seeds.source(options), *ARMS[arm]]
    return configs.load("configs/cifar.py:10,plain", [*texts, *options.override])
