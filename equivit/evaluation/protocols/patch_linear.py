"""Mean IoU of label maps from a linear classifier of frozen patch features, as in CAPI."""

import dataclasses
import functools

from equivit.evaluation.protocols.patch_knn import PROTOCOL as NEIGHBOURS
from equivit.evaluation.protocols.patch_knn import lines, measure

PROTOCOL = dataclasses.replace(
    NEIGHBOURS,
    run=functools.partial(measure, method="linear"),
    lines=functools.partial(lines, by="linear classes"),
)
