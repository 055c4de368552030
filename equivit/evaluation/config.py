"""The `evaluation` section of a configuration: its keys, their defaults and their checks."""

import dataclasses
from typing import Annotated, Any

from ml_collections import ConfigDict

from equivit import constraints
from equivit.constraints import Above0, OneOf, PositiveFloat, PositiveInt
from equivit.data.corruptions import SEVERITIES
from equivit.evaluation.adaptation import REFERENCE_BATCH, Sar
from equivit.evaluation.consistency import Shifts
from equivit.evaluation.label_maps import Views
from equivit.evaluation.linear_probe import BASE_RATES

DEFAULTS = dict(
    every_epochs=None,  # this or every_steps; both None: once, at the end
    every_steps=None,
    suite=None,  # protocols (evaluation/runner.py)
    severities=(5,),  # of the corruptions
    corruption_crop_ratio=0.875,  # data.crop_ratio for images that are corrupted here: ImageNet-C's, 224 of 256 pixels
    sar=dict(batch_size=REFERENCE_BATCH, **dataclasses.asdict(Sar())),  # test-time adaptation
    shift=dataclasses.asdict(Shifts()),  # consistency (evaluation/consistency.py)
    segmentation=dataclasses.asdict(Views()),  # how label maps are predicted (evaluation/label_maps.py)
    knn=dict(ks=(20, 10, 100, 200)),  # numbers of neighbours, the headline first
    linear_probe=dict(  # on frozen features (evaluation/linear_probe.py)
        steps=12_500,
        batch_size=1024,
        base_rates=BASE_RATES,  # at a batch of 256
        blocks=(1, 4),  # of which the class tokens are read
        averages=(False, True),  # whether the mean patch token is read
        augment=True,  # random crops and mirror images of data.split; False: the images as they are tested, read once
        held_out=10_000,  # images of data.split to choose the head by, at most a tenth of it
    ),
)
TYPES: dict[str, Any] = dict(
    every_epochs=PositiveFloat | None,
    every_steps=PositiveInt | None,
    suite=str | tuple[str, ...] | None,
    severities=tuple[Annotated[int, OneOf(SEVERITIES)], ...],
    corruption_crop_ratio=Above0,
    sar=dict(batch_size=PositiveInt, **constraints.types_of(Sar)),
    shift=constraints.types_of(Shifts),
    segmentation=constraints.types_of(Views),
    knn=dict(ks=tuple[PositiveInt, ...]),
    linear_probe=dict(
        steps=PositiveInt,
        batch_size=PositiveInt,
        base_rates=tuple[PositiveFloat, ...],
        blocks=tuple[PositiveInt, ...],
        averages=tuple[bool, ...],
        augment=bool,
        held_out=PositiveInt,
    ),
)


def check(section: ConfigDict) -> None:
    """ValueError for an invalid value; evaluation/runner.py checks that the protocols fit the model."""
    constraints.check_section("config.evaluation", section, TYPES)
    if section.every_epochs is not None and section.every_steps is not None:
        raise ValueError("config.evaluation: every_epochs and every_steps are both set; set one to None.")
    settings = section.sar.to_dict()
    settings.pop("batch_size")
    Sar(**settings)
    Views(**section.segmentation.to_dict())
