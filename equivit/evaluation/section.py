"""The `evaluation` section of a configuration: its keys, their defaults and their checks."""

import dataclasses

from ml_collections import ConfigDict

from equivit import errors
from equivit.data.corruptions import SEVERITIES
from equivit.evaluation.adaptation import REFERENCE_BATCH, Sar

DEFAULTS = dict(
    every_epochs=None,  # None: once, at the end
    suite=None,  # protocols (evaluation/suite.py)
    severities=(5,),  # of the corruptions
    corruption_crop_ratio=0.875,  # data.crop_ratio for images that are corrupted here: ImageNet-C's, 224 of 256 pixels
    sar=dict(batch_size=REFERENCE_BATCH, **dataclasses.asdict(Sar())),  # test-time adaptation
)


def check(section: ConfigDict) -> None:
    """ValueError for an impossible value; which protocols suit the model is checked in evaluation/suite.py."""
    errors.number("config.evaluation.every_epochs", section.every_epochs, "positive", optional=True)
    for severity in section.severities or (None,):
        errors.one_of("config.evaluation.severities", severity, SEVERITIES)
    errors.number("config.evaluation.corruption_crop_ratio", section.corruption_crop_ratio, "in (0, 1]")
    settings = section.sar.to_dict()
    errors.whole("config.evaluation.sar.batch_size", settings.pop("batch_size"))
    Sar(**settings)
