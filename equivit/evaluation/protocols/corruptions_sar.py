"""The same corruptions with and without SAR, restarted for each: Table 2 of Jumbo."""

from equivit.evaluation import corrupted
from equivit.evaluation.protocol import Protocol
from equivit.evaluation.protocols import sar

PROTOCOL = Protocol(
    needs=sar.PROTOCOL.needs,
    run=lambda run: corrupted.each(run, sar.run),
    lines=corrupted.lines,
    data=corrupted.first,
    opens=sar.PROTOCOL.opens,
    curve="mean_top1",
)
