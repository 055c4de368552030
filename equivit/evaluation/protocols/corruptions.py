"""Accuracy on ImageNet-C's 15 corruptions, at --config.evaluation.severities."""

from equivit.evaluation import corrupted
from equivit.evaluation.protocol import Protocol
from equivit.evaluation.protocols import accuracy

PROTOCOL = Protocol(
    needs=accuracy.PROTOCOL.needs,
    run=lambda run: corrupted.each(run, accuracy.run),
    lines=corrupted.lines,
    data=corrupted.first,
    curve="mean_top1",
)
