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

DEFAULTS = dict(
    every_epochs=None,  # this or every_steps; both None: once, at the end
    every_steps=None,
    suite=None,  # protocols (evaluation/suite.py)
    severities=(5,),  # of the corruptions
    corruption_crop_ratio=0.875,  # data.crop_ratio for images that are corrupted here: ImageNet-C's, 224 of 256 pixels
    sar=dict(batch_size=REFERENCE_BATCH, **dataclasses.asdict(Sar())),  # test-time adaptation
    shift=dataclasses.asdict(Shifts()),  # consistency (evaluation/consistency.py)
    segmentation=dataclasses.asdict(Views()),  # how label maps are predicted (evaluation/label_maps.py)
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
)


def check(section: ConfigDict) -> None:
    """ValueError for an invalid value; evaluation/suite.py checks that the protocols fit the model."""
    constraints.check_section("config.evaluation", section, TYPES)
    if section.every_epochs is not None and section.every_steps is not None:
        raise ValueError("config.evaluation: every_epochs and every_steps are both set; set one to None.")
    settings = section.sar.to_dict()
    settings.pop("batch_size")
    Sar(**settings)
    Views(**section.segmentation.to_dict())
