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
    sar=dict(batch_size=REFERENCE_BATCH, **dataclasses.asdict(Sar())),  # test-time adaptation
)


def check(section: ConfigDict) -> None:
    """ValueError for an invalid value; evaluation/suite.py checks that the protocols fit the model."""
    errors.number("config.evaluation.every_epochs", section.every_epochs, "positive", optional=True)
    for severity in section.severities or (None,):
        errors.one_of("config.evaluation.severities", severity, SEVERITIES)
    settings = section.sar.to_dict()
    errors.whole("config.evaluation.sar.batch_size", settings.pop("batch_size"))
    Sar(**settings)
