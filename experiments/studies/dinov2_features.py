"""Patch features of a frozen model as colours: images upright and turned, in one basis.

    python -m experiments studies.dinov2_features runs/dinov2/I8 --output=features_I8.png
    python -m experiments studies.dinov2_features models/dinov2_vit_s14 --config=configs/dinov2.py:L,plain

Red, green and blue are the first three principal components of the patch tokens of all images, upright above and turned
by 90 degrees below; the colours of an invariant model turn with the image.  Prints the share of the variance in the
three components, and the deviation of turned features, relative to their largest entry.
"""

import argparse
import pathlib

import numpy as np
from matplotlib.figure import Figure

from equivit.data import loader
from equivit.evaluation import predictions
from equivit.models import saved
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import flags


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path, help="directory of a run, or of a saved model with --config")
    parser.add_argument("--config", help="whose data section is read, for a saved model")
    note = "of the evaluation split, drawn at random (%(default)s)"
    parser.add_argument("--images", type=flags.at_least(1), default=8, help=note)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("runs/features.png"))
    options = parser.parse_args(arguments)
    if options.config:
        config, model = configs.load(options.config), saved.load(options.model)
    else:
        config, model, _ = checkpoints.load_run(options.model)
    extract = predictions.extractor(model, config.data.mean, config.data.std, config.precision)
    pipeline = loader.evaluate(config.data, batch_size=options.images, seed=config.seed, shuffle=True)
    images = next(iter(pipeline.batches()))["image"]
    upright = np.asarray(extract(images).patches.values)
    turned = np.asarray(extract(np.rot90(images, 1, (1, 2)).copy()).patches.values)
    colours, share = principal_colours(np.stack([upright, turned]))
    gap = np.abs(turned - np.rot90(upright, 1, (1, 2))).max() / np.abs(upright).max()
    print(f"three components hold {share:.0%} of the variance; turned features differ by {gap:.1e}")
    draw(images, colours, options.output)
    print(f"picture: {options.output}")
    return 0


def principal_colours(tokens: np.ndarray) -> tuple[np.ndarray, float]:
    """The first three principal components of tokens [*B, D] as colours in 0..1, [*B, 3], and their share of variance.

    Each goes from its second to its 98th percentile; its sign is that of its largest weight.
    """
    rows = tokens.reshape(-1, tokens.shape[-1]).astype(np.float64)
    centred = rows - rows.mean(0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    largest = np.abs(directions).argmax(1, keepdims=True)
    directions = directions * np.sign(np.take_along_axis(directions, largest, 1))
    found = centred @ directions[:3].T
    low, high = np.percentile(found, [2, 98], axis=0)
    share = (sizes[:3] ** 2).sum() / (sizes**2).sum()
    return np.clip((found - low) / (high - low), 0, 1).reshape(*tokens.shape[:-1], 3), float(share)


def draw(images: np.ndarray, colours: np.ndarray, output: pathlib.Path) -> None:
    """Columns of images [B, H, W, C] over their colours [2, B, h, w, 3], upright and turned."""
    rows = [images, colours[0], np.rot90(images, 1, (1, 2)), colours[1]]
    figure = Figure(figsize=(len(images) * 1.2, len(rows) * 1.25), layout="constrained")
    axes = figure.subplots(len(rows), len(images), squeeze=False)
    for row, pictures in enumerate(rows):
        for axis, picture in zip(axes[row], pictures, strict=True):
            axis.imshow(picture.squeeze(), cmap="gray", interpolation="nearest")
            axis.set(xticks=[], yticks=[])
    for row, name in enumerate(("image", "features", "turned by 90°", "features")):
        axes[row, 0].set_ylabel(name, fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
