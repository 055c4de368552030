"""The `evaluation` section of a configuration."""

import dataclasses
from typing import Annotated

from ml_collections import ConfigDict

from equivit.constraints import Above0, OneOf, PositiveFloat, PositiveInt
from equivit.data.corruptions import SEVERITIES
from equivit.evaluation.adaptation import REFERENCE_BATCH, Sar
from equivit.evaluation.consistency import Shifts
from equivit.evaluation.label_maps import Views
from equivit.evaluation.linear_probe import BASE_RATES


@dataclasses.dataclass(frozen=True)
class SarConfig(Sar):
    """`evaluation.sar`: test-time adaptation."""

    batch_size: PositiveInt = REFERENCE_BATCH


@dataclasses.dataclass(frozen=True)
class NeighboursConfig:
    """`evaluation.knn`."""

    ks: tuple[PositiveInt, ...] = (20, 10, 100, 200)  # numbers of neighbours, the headline first


@dataclasses.dataclass(frozen=True)
class ProbeConfig:
    """`evaluation.linear_probe`, on frozen features (evaluation/linear_probe.py)."""

    steps: PositiveInt = 12_500
    batch_size: PositiveInt = 1024
    base_rates: tuple[PositiveFloat, ...] = BASE_RATES  # at a batch of 256
    blocks: tuple[PositiveInt, ...] = (1, 4)  # use the class tokens of this many last blocks
    averages: tuple[bool, ...] = (False, True)  # whether to use the mean patch token
    augment: bool = True  # random crops and flips of data.split; False: test-time preprocessing, read once
    held_out: PositiveInt = 10_000  # images of data.split for choosing the head, at most a tenth of it


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """`evaluation`: times and protocols (evaluation/runner.py)."""

    every_epochs: PositiveFloat | None = None  # this or every_steps; both None: once, at the end
    every_steps: PositiveInt | None = None
    suite: str | tuple[str, ...] | None = None
    severities: tuple[Annotated[int, OneOf(SEVERITIES)], ...] = (5,)  # of the corruptions
    corruption_crop_ratio: Above0 = 0.875  # data.crop_ratio for corrupted images: ImageNet-C's, 224 of 256 pixels
    sar: SarConfig = SarConfig()
    shift: Shifts = Shifts()
    segmentation: Views = Views()
    knn: NeighboursConfig = NeighboursConfig()
    linear_probe: ProbeConfig = ProbeConfig()


def check(section: ConfigDict) -> None:
    """Raise ValueError for values that do not fit together; evaluation/runner.py checks the protocols."""
    if section.every_epochs is not None and section.every_steps is not None:
        raise ValueError("config.evaluation: every_epochs and every_steps are both set; set one to None.")
    SarConfig(**section.sar.to_dict())
    Views(**section.segmentation.to_dict())
