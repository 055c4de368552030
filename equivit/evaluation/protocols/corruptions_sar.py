"""The same corruptions with and without SAR, restarted for each: Table 2 of Jumbo."""

import dataclasses

from equivit.evaluation.protocols import corruptions, sar

PROTOCOL = dataclasses.replace(
    corruptions.PROTOCOL, run=lambda run: corruptions.each(run, sar.run), opens=sar.PROTOCOL.opens
)
