"""Figures of a run: its learning curves, learned patch filters and predicted label maps."""

import collections
import itertools
import pathlib
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from PIL import Image

from equivit import files, metrics_files
from equivit.evaluation import colours

COMPONENTS = 16  # at most, as in Figure 6
VISIBLE = 1e-4  # share of the variance; components below it are rounding errors
OPAQUE = 0.65  # opacity of a label map over its image
TILE, LEGEND_COLUMNS = 3.2, 6  # width of an image in inches
PANELS = 6  # most metrics in a comparison
NAMED, NUMBERED = 60, 30  # most classes of a confusion matrix with names, and with numbers
LONGEST_NAME = 24  # letters
POINTS = dict(xycoords="data", textcoords="offset points")  # a text at a distance from a place in the data
TEST_STYLES = (("tab:orange", "o"), ("tab:red", "s"), ("tab:green", "^"), ("tab:purple", "D"), ("tab:brown", "v"))


def learning_curves(metrics: pathlib.Path, output: pathlib.Path, curves: Iterable[str] = ()) -> None:
    """Plot loss and accuracy over the steps of a run, in training and from protocols.

    Args:
      metrics: metrics.jsonl, with some of "loss", "accuracy" and `curves`; unreadable lines are left out.
      output: the PNG to write.
      curves: names such as "eval/accuracy/top1"; names with the ending "/loss" share the plot of the training loss,
        others the plot of the accuracy.
    """
    rows = metrics_files.rows(metrics)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    _curve(left, rows, "loss", label="training", color="tab:blue")
    _curve(right, rows, "accuracy", label="training", color="tab:blue")
    measured = [key for key in curves if any(key in row for row in rows)]
    for (color, marker), key in zip(itertools.cycle(TEST_STYLES), measured, strict=False):
        axes = left if key.endswith("/loss") else right
        _curve(axes, rows, key, label="test: " + key.removeprefix("eval/"), color=color, marker=marker)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(loc="best", frameon=False)
    _write(figure, output)


def compared(recipes: dict[str, list[list[dict]]], metrics: Iterable[str], output: pathlib.Path) -> None:
    """Plot the metrics of several recipes over the steps, a panel for each metric and a colour for each recipe.

    Args:
      recipes: by name, the rows of metrics.jsonl of each run, as `metrics_files.rows` gives them.
      metrics: names to plot where a row has them; the first six.
      output: the PNG to write.
    """
    rows = [row for runs in recipes.values() for run in runs for row in run]
    known = [name for name in dict.fromkeys(metrics) if any(name in row for row in rows)][:PANELS]
    columns = min(len(known), 2) or 1
    lines = -(-len(known) // columns) or 1
    figure = Figure(figsize=(4.6 * columns, 3.2 * lines + 0.25 * len(recipes)), layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True)
    colors = [f"C{k}" for k in range(10)]
    for axes, metric in itertools.zip_longest(grid.flat, known):
        if metric is None:
            axes.set_axis_off()
            continue
        axes.set(xlabel="step", title=metric.removeprefix("eval/") if "/" in metric else f"{metric}, training")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(alpha=0.3)
        for color, runs in zip(itertools.cycle(colors), recipes.values(), strict=False):
            for run in runs:
                _curve(axes, run, metric, color=color, alpha=0.9 if len(runs) == 1 else 0.6)
    handles = [
        Line2D([], [], color=color, label=name) for color, name in zip(itertools.cycle(colors), recipes, strict=False)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=1 if max(map(len, recipes)) > 40 else 2)
    _write(figure, output)


def label_maps(
    examples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], classes: Sequence[str], output: pathlib.Path
) -> None:
    """Draw images with their true and predicted label maps, and a legend of the classes.

    An example is an image, uint8 [H, W, C], with a true and a predicted map, int [h, w], of any size.  A class has the
    same colour in every picture; pixels with a label outside 0..len(classes) - 1 are grey.  `output` is the PNG.
    """
    palette = np.array([*colours.of_classes(len(classes)), colours.VOID])  # the last one is also the colour of -1
    height, width = np.max([true.shape for _, true, _ in examples], axis=0)
    names = _legend([labels for _, *maps in examples for labels in maps], classes, palette)
    legend = -(-len(names) // LEGEND_COLUMNS)
    size = 3 * TILE, len(examples) * TILE * height / width + 0.22 * legend + 0.4
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(examples), 3, squeeze=False)
    for row, (image, true, predicted) in zip(grid, examples, strict=True):
        image = _resized(image, true.shape)
        grey = 0.25 + 0.5 * image.mean(-1, keepdims=True)  # keeps colours close to the legend's
        for axes, picture in zip(row, (image, *(_over(grey, m, palette) for m in (true, predicted))), strict=True):
            axes.imshow(picture, vmin=0, vmax=1, interpolation="nearest")
            axes.set_axis_off()
    for axes, title in zip(grid[0], ("image", "label", "prediction"), strict=True):
        axes.set_title(title, fontsize=10)
    figure.legend(handles=names, loc="outside lower center", ncols=LEGEND_COLUMNS, frameon=False, fontsize=9)
    _write(figure, output)


def confusion(matrix: np.ndarray, classes: Sequence[str], output: pathlib.Path) -> None:
    """Draw a confusion matrix, int [true, predicted]: colours are shares of the true class, numbers are examples.

    Many classes get no names and no numbers.  `output` is the PNG to write.
    """
    number = len(classes)
    side = min(max(4.5, 0.42 * number + 2), 12)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="predicted class", ylabel="true class")
    if number <= NAMED:
        names = list(map(_shortened, classes))
        axes.set_xticks(range(number), names, rotation=90, fontsize=8)
        axes.set_yticks(range(number), names, fontsize=8)
    for row, column in np.argwhere(matrix) if number <= NUMBERED else ():
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, str(matrix[row, column]), ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(picture, ax=axes, label="share of the true class", shrink=0.7)
    _write(figure, output)


def contact_sheet(
    images: Sequence[np.ndarray], titles: Sequence[str], heading: str, output: pathlib.Path, columns: int = 5
) -> None:
    """Draw images, uint8 [H, W, C] of any size, in rows, each below its title; `output` is the PNG to write."""
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.9 * columns, 2.4 * rows + 0.4), layout="constrained")
    figure.suptitle(heading, fontsize=11)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, image, title in zip(grid.flat, images, titles, strict=False):
        axes.imshow(image)
        axes.set_title("\n".join(_shortened(line) for line in title.split("\n")), fontsize=8)
    _write(figure, output)


def patch_filters(kernels: dict[str, np.ndarray], output: pathlib.Path) -> None:
    """Plot the principal components of a patch embedding's kernels, one row per feature type.

    Up to 16 components each, sorted by variance and labelled with its share.  On small patches the symmetry leaves
    fewer.  The kernels are from `patch_kernels`; `output` is the PNG to write.

    Source: octic ViTs, Figure 6 and Appendix B.2.
    """
    components = {name: principal_components(kernel) for name, kernel in kernels.items()}
    columns = max(len(tiles) for tiles, _ in components.values())
    figure = Figure(figsize=(1.6 + 0.8 * max(columns, 4), 0.8 + 0.9 * len(components)), layout="constrained")
    figure.suptitle("Patch filters: principal components\nand their shares of the variance", fontsize=11)
    rows = figure.subplots(len(components), squeeze=False)[:, 0]  # an axes for each tile would take seconds
    for axes, (name, (tiles, shares)) in zip(rows, components.items(), strict=True):
        height, width = tiles.shape[1:3]
        step = width + max(width // 8, 1)
        picture = np.ones((height, step * columns, 3))
        for left, tile, share in zip(range(0, step * columns, step), tiles, shares, strict=False):
            picture[:, left : left + width] = _colours(tile)
            axes.annotate(f"{share:.0%}", (left + (width - 1) / 2, -0.5), (0, 2), ha="center", fontsize=7, **POINTS)
        axes.imshow(picture, interpolation="nearest")
        axes.annotate(name, (-0.5, (height - 1) / 2), (-12, 0), ha="right", va="center", fontsize=11, **POINTS)
        axes.set_axis_off()
    _write(figure, output)


def patch_kernels(model: nnx.Module) -> dict[str, np.ndarray]:
    """Kernels [ph, pw, in, channels] of a model's patch embedding, by feature type.

    They come from `patch_embed.filters()` of the model, or of a masked autoencoder's encoder; {} without such a method.
    All processes of a run must call this.
    """
    embed = next((m for path, m in nnx.iter_modules(model) if path and path[-1] == "patch_embed"), None)
    if not hasattr(embed, "filters"):
        return {}
    in_order = jax.jit(lambda embed: collections.OrderedDict(embed.filters()))  # jit would sort a dict
    return dict(multihost_utils.process_allgather(in_order(embed), tiled=True))


def principal_components(kernels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Kernels [ph, pw, in, channels] to components [n, ph, pw, in] of norm 1 and their shares of the variance [n].

    The entry of largest magnitude is positive in each component.
    """
    rows = kernels.reshape(-1, kernels.shape[-1]).T.astype(np.float64)
    _, sizes, components = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    shares = sizes**2 / max(np.sum(sizes**2), np.finfo(float).tiny)
    count = max(1, min(COMPONENTS, int(np.sum(shares > VISIBLE))))
    components, shares = components[:count], shares[:count]
    largest = np.take_along_axis(components, np.abs(components).argmax(1)[:, None], axis=1)
    return (components * np.where(largest < 0, -1, 1)).reshape(count, *kernels.shape[:-1]), shares


def _resized(image, size):
    """RGB in 0..1, of the size of its label."""
    pixels = Image.fromarray(image if image.shape[-1] == 3 else image.repeat(3, -1))
    return np.asarray(pixels.resize(size[::-1], Image.Resampling.BILINEAR)) / 255


def _over(grey, labels, palette):
    """The colours of the classes over a grey image, [h, w, 3]."""
    known = (labels >= 0) & (labels < len(palette) - 1)
    return OPAQUE * palette[np.where(known, labels, -1)] + (1 - OPAQUE) * grey


def _legend(maps, classes, palette):
    """The legend of the classes in some maps, in class order, with colours over a medium grey."""
    seen = np.unique(np.concatenate([labels.ravel() for labels in maps]))
    known = [k for k in range(len(classes)) if k in seen]
    names = {k: classes[k] for k in known} | ({} if len(known) == len(seen) else {-1: "no class"})
    return [Patch(facecolor=OPAQUE * palette[k] + (1 - OPAQUE) / 2, label=name) for k, name in names.items()]


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST_NAME else f"{text[: LONGEST_NAME - 1]}…"


def _write(figure: Figure, output: pathlib.Path) -> None:
    with files.replacing(output) as unfinished:
        figure.savefig(unfinished, dpi=150)


def _curve(axes: Axes, rows, name, **style):
    points = [(row["step"], row[name]) for row in rows if name in row]
    if points:
        style = {"marker": "o", **style} if len(points) == 1 else style  # a line of one point is invisible
        axes.plot(*zip(*points, strict=True), **style)


def _colours(tile: np.ndarray) -> np.ndarray:
    """RGB in 0..1: three channels as they are, any other number by its mean; zero is grey (white for a mean)."""
    values = tile if tile.shape[-1] == 3 else tile.mean(-1)
    values = 0.5 + 0.5 * values / (np.abs(values).max() or 1.0)
    return values if tile.shape[-1] == 3 else colormaps["RdBu_r"](values)[..., :3]
