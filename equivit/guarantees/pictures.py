"""Pictures of a report: deviations by block, features of moved images, and changes over angles."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from equivit import files
from equivit.guarantees.measured import Stability
from equivit.guarantees.motions import Motion, Pair, Shift, Turn
from equivit.guarantees.proof import BATCH, Proof, features, stages_of
from equivit.models.features import Grid
from equivit.models.model import ModelModule

ZERO = 1e-18  # where a logarithmic axis shows a deviation of zero
COLORS = {"octic": "tab:blue", "flip": "tab:green", "shift": "tab:orange"}
STYLES = ("-", "--", ":")
SHOWN = 5  # stages in the picture of features


def deviations(path: pathlib.Path, proofs: Sequence[Proof], seen: Proof | None = None) -> None:
    """Plot the largest deviation and the mean correlation of every stage, for each symmetry and precision.

    Args:
      seen: the proof on images, whose correlations are shown too.
    """
    names = [stage.name.removeprefix("the ").removeprefix("block ") for stage in proofs[0].stages]
    figure = Figure(figsize=(max(7, 0.42 * len(names) + 2), 6.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for proof, style in zip(proofs, STYLES, strict=False):
        for symmetry in ("octic", "shift"):
            rows, color = proof.rows(symmetry), COLORS[symmetry]
            worst = np.clip(proof.deviations[rows].max(0), ZERO, 10)
            above.plot(worst, style, marker=".", color=color, label=f"{symmetry}, {proof.precision}")
            if (at := proof.broken(symmetry)) is not None:
                first = [stage.name for stage in proof.stages].index(at.stage)
                above.plot(first, worst[first], "x", color=color, markersize=11, markeredgewidth=2)
        above.axhline(proof.bound, color="grey", linestyle=style, linewidth=0.8)
    compared = [(proofs[0], "random", "-"), *([] if seen is None else [(seen, "images", "--")])]
    for proof, what, style in compared:
        for symmetry in ("octic", "shift"):
            mean = proof.correlations[proof.moving(symmetry)].mean(0)
            below.plot(mean, style, marker=".", color=COLORS[symmetry], label=f"{symmetry}, {what}")
    above.set(yscale="log", ylim=(ZERO / 3, 30), ylabel="largest deviation")
    above.set_title("grey: bounds; cross: the first stage beyond its bound; bottom line: zero", fontsize=9)
    below.set(ylim=(-0.25, 1.05), ylabel="correlation", xlabel="block", xticks=range(len(names)))
    below.set_xticklabels(names, rotation=45 if len(names) > 14 else 0, ha="right" if len(names) > 14 else "center")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        axes.legend(loc="best", frameon=False, fontsize=8)
    _write(figure, path)


def turned_features(path: pathlib.Path, model: ModelModule, image: np.ndarray, *, square: bool, offset: Pair) -> None:
    """Draw features of moved copies of one image, moved back: equal rows where the model is symmetric.

    The colours are the first three principal components of the upright features of a stage.

    Args:
      image: normalised, [H, W, C].
      square: whether the model takes images with swapped sides.
      offset: (down, right) of the shift to show.
    """
    stages = stages_of(model)[:-1]
    shown = np.unique(np.linspace(0, len(stages) - 1, min(SHOWN, len(stages))).round().astype(int))
    elements = ("e", "r", "rr", "rrr", "m") if square else ("e", "rr", "m", "mrr")
    motions: list[Motion] = [*map(Turn, elements), Shift(offset)]
    figure = Figure(figsize=(1.5 * (len(shown) + 1), 1.55 * len(motions)), layout="constrained")
    panels = figure.subplots(len(motions), len(shown) + 1)
    bases, scales = {}, {}  # of each stage, of the upright image
    for row, motion in zip(panels, motions, strict=True):
        moved = motion.of_images(np.repeat(image[None], BATCH, 0))
        _show(row[0], _scaled(moved[0], image), "the image" if motion is motions[0] else "")
        label = "as it is" if motion is motions[0] else motion.name.removeprefix("element ")
        row[0].set_ylabel(label, fontsize=8)
        grids = features(model, moved)
        for axes, k in zip(row[1:], shown, strict=True):
            back = motion.inverse.of_grid(grids[k], stages[k].group)
            if motion is motions[0]:
                bases[k] = _basis(back.values)
                scales[k] = back.values @ bases[k]
            colours = pixels(dataclasses.replace(back, values=back.values @ bases[k]))
            _show(axes, _scaled(colours, scales[k][0]), stages[k].name if motion is motions[0] else "")
    _write(figure, path)


def angles(path: pathlib.Path, stability: Stability) -> None:
    """Plot the share of kept predictions and the cosine over the angle of the image."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    at = list(stability.angles)
    kept = [1 - change.changed for change in stability.angles.values()]
    what = "same class" if stability.by_class else "nearest to itself"
    axes.plot(at, kept, marker="o", markersize=3, color="tab:blue", label=what)
    cosines = [change.cosine for change in stability.angles.values()]
    axes.plot(at, cosines, marker="s", markersize=3, color="tab:orange", label="cosine of the output")
    axes.set(xlabel="angle in degrees", xticks=range(0, 361, 45), ylim=(min(0, *cosines) - 0.02, 1.02))
    axes.set_title(f"{stability.images} images, inside a disc", fontsize=9)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower center", frameon=False)
    _write(figure, path)


def pixels(grid: Grid) -> np.ndarray:
    """The value of each pixel's token, in the frame of the image: one map [1, h, w, D] to [H, W, D]."""
    rows, columns = grid.stride
    values = grid.values[0].repeat(rows, 0).repeat(columns, 1)
    return np.roll(values, tuple(grid.offset[0]), (0, 1))


def smooth(size: tuple[int, int], channels: int) -> np.ndarray:
    """A random image [H, W, C] of few low frequencies, with standard deviation 1."""
    random, (height, width) = np.random.default_rng(0), size
    rows, columns = np.fft.fftfreq(height) * height, np.fft.fftfreq(width) * width
    envelope = np.exp(-np.hypot(rows[:, None], columns) / 2)[..., None]
    noise = np.fft.ifft2(np.fft.fft2(random.standard_normal((*size, channels)), axes=(0, 1)) * envelope, axes=(0, 1))
    image = noise.real - noise.real.mean()
    return image / image.std()


def _basis(values: Any) -> np.ndarray:
    """The first three principal components of [1, h, w, D], [D, 3]; fewer are followed by zeros."""
    rows = values.reshape(-1, values.shape[-1]).astype(np.float64)
    rows -= rows.mean(0)
    components = np.linalg.eigh(rows.T @ rows)[1][:, :-4:-1]
    return np.pad(components, ((0, 0), (0, 3 - components.shape[1])))


def _scaled(values: np.ndarray, like: np.ndarray) -> np.ndarray:
    """Colours in 0..1, scaled as the channels of `like`."""
    low, high = np.percentile(like, (2, 98), (0, 1))
    colours = np.clip((values - low) / np.maximum(high - low, 1e-12), 0, 1)
    return colours if colours.shape[-1] == 3 else colours[..., :1].repeat(3, -1)


def _show(axes: Axes, colours: np.ndarray, title: str) -> None:
    axes.imshow(colours)
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=8)


def _write(figure: Figure, path: pathlib.Path) -> None:
    with files.replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=130)
