"""The same corruptions with and without SAR, restarted for each: Table 2 of Jumbo."""

import dataclasses

from ml_collections import ConfigDict

from equivit.evaluation.protocols import corruptions, sar


def check(config: ConfigDict) -> None:
    """As `corruptions.check` and `sar.check`."""
    corruptions.check(config)
    sar.check(config)


PROTOCOL = dataclasses.replace(
    corruptions.PROTOCOL, run=lambda run: corruptions.each(run, sar.run), check=check, opens=sar.opens
)
