"""The objectives, by their names in a config."""

from equivit.objectives.dinov2 import DinoV2
from equivit.objectives.distillation import Distillation
from equivit.objectives.feature_matching import FeatureMatching
from equivit.objectives.gated import GatedSegmentation, GatedSupervised
from equivit.objectives.linear_probe import LinearProbe
from equivit.objectives.mae import Mae
from equivit.objectives.objective import Objective
from equivit.objectives.segmentation import Segmentation
from equivit.objectives.supervised import Supervised

OBJECTIVES: dict[str, type[Objective]] = {
    "mae": Mae,
    "supervised": Supervised,
    "distillation": Distillation,
    "linear_probe": LinearProbe,
    "segmentation": Segmentation,
    "dinov2": DinoV2,
    "feature_matching": FeatureMatching,
    "gated_supervised": GatedSupervised,
    "gated_segmentation": GatedSegmentation,
}
