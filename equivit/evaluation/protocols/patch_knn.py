"""Mean IoU of label maps from the nearest patches by frozen features, as in CAPI."""

import functools
from typing import Any

import numpy as np

from equivit.data import sources
from equivit.data.crops import VOID
from equivit.evaluation import frozen, scores
from equivit.evaluation import patch_segmentation as patches
from equivit.evaluation.patch_segmentation import Part
from equivit.evaluation.protocol import Line, Run, percent
from equivit.evaluation.protocols import segmentation
from equivit.symmetry.groups import OCTIC

# The `data` section with images (bicubic) and maps (nearest) squashed to `data.image_size`.
data = functools.partial(frozen.squashed, interpolation="bicubic")


def opens(run: Run) -> None:
    """As `frozen.opens`; also ValueError for features on a grid that does not divide the maps."""
    _, features, maps = frozen.opens(run, "map", least=2)  # one to train on, one to choose the setting
    patches.patch_size(features, maps)


def measure(run: Run, method: str = "knn") -> dict[str, Any]:
    """Score label maps of the test images by a classifier of patches, chosen on a tenth of the training images.

    Returns "miou", "miou_official" (the paper's) and "accuracy" of the upright images, "iou" by class name;
    "selected", the setting, and "validation", the official mIoU of each setting on the tenth; "miou_by_orientation",
    with maps turned back, "miou_mean" over the eight and "delta" against upright; "same", the fraction of pixels with
    the same class in all orientations; "examples".
    """
    run = run.on(data(run.config), "squashed")
    pipeline = run.open()
    void = _void(pipeline.source, pipeline.num_classes)
    train, test = frozen.patches(run, run.data.split)["e"], frozen.patches(run, run.data.eval_split, OCTIC.elements)
    counted: dict[str, Any] = dict(num_classes=pipeline.num_classes, ignore=(void,))
    maps, features = train.grid.to_grid(np.where(train.maps == VOID, void, train.maps)), train.grid.values
    rows, tenth = np.random.RandomState(0).permutation(len(maps)), max(1, len(maps) // 10)  # as in CAPI
    parts = (Part(features[some], maps[some]) for some in (np.sort(rows[tenth:]), np.sort(rows[:tenth])))
    classifier = patches.choose(*parts, method=method, **counted)
    true = np.where(test["e"].maps == VOID, void, test["e"].maps)
    predicted = {g: found.grid.to_image(classifier.predict(found.grid.values)) for g, found in test.items()}
    upright = scores.segmentation(true, predicted["e"], **counted)
    each = {g: scores.segmentation(true, labels, **counted)["miou"] for g, labels in predicted.items()}
    mean = float(np.mean(list(each.values())))
    return segmentation.by_name(upright, pipeline.classes) | {
        "selected": _name(classifier.selected),
        "validation": {_name(setting): miou for setting, miou in classifier.validation.items()},
        "miou_by_orientation": each,
        "miou_mean": mean,
        "delta": mean - each["e"],
        "same": float(np.all([labels == predicted["e"] for labels in predicted.values()], axis=0).mean()),
        "examples": len(true),
    }


def _void(source: sources.Source, classes: int) -> int:
    """The label of pixels without a class: below the classes if 0 means void in the source (ADE20K), else above.

    Its order decides ties with a class.
    """
    legend = sources.legend(source)
    return VOID if legend is not None and 0 in legend.void else classes


def _name(setting: Any) -> str:
    return f"C={setting:.3g}" if isinstance(setting, float) else "{}, k={}".format(*setting)


def lines(result: dict[str, Any], by: str = "nearest patches") -> list[Line]:
    """Both means, and the orientations."""
    official = f"official {percent(result['miou_official'])}"
    right = f"{percent(result['accuracy'])} of the pixels ({result['examples']} images)"
    against = f"{100 * result['delta']:+.1f} points against upright"
    same = f"the same class in all for {percent(result['same'])} of the pixels"
    return [
        (f"mean IoU by {by}", f"{percent(result['miou'])}, {official} ({result['selected']})"),
        ("... right class", right),
        ("... in eight orientations", f"{percent(result['miou_mean'])} in the mean ({against}), {same}"),
    ]


PROTOCOL = frozen.squashing(run=measure, lines=lines, data=data, opens=opens, curve="miou")
