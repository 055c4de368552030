"""Blocks and heads whose attention is replaced: Figures 3, A.1, A.2, A.3, A.4 of depthwise attention, of your models.

    python -m experiments tables.depthwise.selection runs/stage1 --before=runs/stage1_init --dsp=runs/dsp --number=12

The model is a run, a saved model, or weights such as "dinov2:file.pth"; `--before` is the same before fine-tuning,
`--dsp` runs with gates (`objectives/gated.py`).  Images are training images of `--data`, a run (default: the model),
cropped as for evaluation.  Class and register tokens are left out.

- selection.png: the chosen blocks (Figure 3), Sigma of every head with the chosen ones (A.4), and Sigma of the blocks,
  before fine-tuning too (A.1);
- selection_maps.png: sigma maps of the heads with the lowest, the middle and the highest Sigma, the query in the
  centre, beside a square of 3x3 tokens (A.2); cells are means over all pairs of tokens with that offset;
- selection_positions.png: the cosine between a token's position and all others, after subtracting their mean (A.3).
"""

import pathlib
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from equivit.depthwise import replacement, selection
from equivit.depthwise.training_images import TrainingImages
from equivit.layers.grid import check_grid
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.training import checkpoints
from equivit.training.loading import load_model
from experiments import findings, flags

CHOSEN, NEXT, OTHER = "tab:red", "tab:orange", "lightgrey"
SHOWN = 4  # heads of each kind in the maps
CROP = 7  # tokens to each side in the maps
QUERIES = 3  # along each side


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("model", help="a run, a saved model, or <source>:<file>")
    parser.add_argument("--before", help="the model before it was fine-tuned")
    parser.add_argument("--dsp", action="append", default=[], help="a run with gates; may be given several times")
    parser.add_argument("--data", help="the run whose training images are used; the model, if it is one")
    parser.add_argument("--images", type=int, default=1000, help="how many (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="at a time (%(default)s)")
    parser.add_argument("--number", type=int, help="blocks that are chosen; half of them if not given")
    options = parser.parse_args(arguments)
    model = alone(load_model(options.model))
    place = pathlib.Path(options.data or options.model)
    if not (place / "config.json").is_file():
        given = f"--data={place}" if options.data else options.model
        raise ValueError(f"{given}: this is no run, so that it names no training images; give one with --data.")
    data = checkpoints.load_run(place).config.data
    batches = TrainingImages(data, options.images, batch_size=options.batch)
    moments = selection.moments(model, batches)
    scores = {"after": selection.Sigma.from_moments(moments)}
    if options.before:
        scores["before"] = selection.sigma(alone(load_model(options.before)), batches)
    choices = chosen(scores, options.number or model.config.depth // 2, options.dsp)
    grid = check_grid(tuple(data.image_size), model.config.patch_size, "data.image_size")
    sigma = {name: dict(heads=one.heads.tolist(), blocks=one.blocks.tolist()) for name, one in scores.items()}
    status = findings.finish(options, dict(sigma=sigma, chosen=choices, images=options.images), [])
    picture = findings.picture(options)
    draw_selection(scores, choices, picture)
    draw_maps(moments, scores["after"].heads, grid, picture.with_stem(f"{picture.stem}_maps"))
    if model.position is not None:
        draw_positions(similarities(model.position(grid), grid), picture.with_stem(f"{picture.stem}_positions"))
    return status


def alone(model: Any) -> Any:
    """The ViT in a model, on patch tokens alone; ValueError for other models."""
    return replacement.patches_only(getattr(model, "backbone", model))


def chosen(scores: dict[str, selection.Sigma], number: int, dsp: list[str]) -> dict[str, list]:
    """Blocks and (block, head) pairs by way of choosing, and the choices of runs with gates."""
    heads = scores["after"].heads
    found = {f"Sigma {name}": list(selection.select(one.blocks, number)) for name, one in scores.items()}
    found["Sigma of heads"] = [list(pair) for pair in selection.select(heads, number * heads.shape[1])]
    for place in dsp:
        config = alone(load_model(place)).config
        by_head = any(one.heads for one in config.replaced)
        pairs = [[one.block, h] for one in config.replaced for h in one.heads or range(config.num_heads)]
        found[f"DSP {pathlib.Path(place).name}"] = pairs if by_head else [one.block for one in config.replaced]
    return found


def similarities(positions: Any, grid: tuple[int, int]) -> np.ndarray:
    """The cosine of each token's position with all others, after the mean is subtracted, [h, w, h, w]."""
    dense = fields.to_dense(positions) if isinstance(positions, Isotypic) else positions
    dense = np.asarray(dense, np.float64).reshape(grid[0] * grid[1], -1)
    dense = dense - dense.mean(0)
    dense /= np.maximum(np.linalg.norm(dense, axis=1, keepdims=True), 1e-12)
    return (dense @ dense.T).reshape(*grid, *grid)


def draw_selection(scores: dict[str, selection.Sigma], choices: dict[str, list], output: pathlib.Path) -> None:
    """Chosen blocks, Sigma of the heads, and Sigma of the blocks."""
    figure = Figure(figsize=(9, 3 + 2.2 * len(scores)), layout="constrained")
    rows = figure.subplots(2 + len(scores), 1)
    depth = len(scores["after"].blocks)
    of_blocks = {name: places for name, places in choices.items() if not _of_heads(places)}
    shown = np.array([[i in places for i in range(depth)] for places in of_blocks.values()], float)
    rows[0].imshow(shown, cmap="Reds", vmin=0, vmax=1.4, aspect="auto")
    rows[0].set(yticks=range(len(of_blocks)), yticklabels=of_blocks, xlabel="block", xticks=range(depth))
    _draw_heads(rows[1], scores["after"].heads, choices)
    for axes, (name, one) in zip(rows[2:], scores.items(), strict=True):
        places = choices[f"Sigma {name}"]
        others = np.where(np.isin(range(depth), places), np.nan, one.blocks)
        following = selection.select(others, min(5, depth - len(places)))
        colors = [CHOSEN if i in places else NEXT if i in following else OTHER for i in range(depth)]
        axes.bar(range(depth), np.nan_to_num(one.blocks), color=colors)
        axes.set(xlabel="block", ylabel="Sigma", xticks=range(depth), title=f"{name} fine-tuning")
    figure.savefig(output, dpi=150)


def _of_heads(places: list) -> bool:
    """Whether a choice is of (block, head) pairs."""
    return bool(places) and isinstance(places[0], list)


def _draw_heads(axes, heads: np.ndarray, choices: dict[str, list]) -> None:
    """Every head, the chosen ones in colour, with a diamond around those that gates chose."""
    lowest = {tuple(pair) for pair in choices["Sigma of heads"]}
    for block, head in np.ndindex(heads.shape):
        axes.plot(block, heads[block, head], "o", ms=4, color=NEXT if (block, head) in lowest else OTHER)
    for name, places in choices.items():
        if name.startswith("DSP") and _of_heads(places):
            points = [(block, heads[block, head]) for block, head in places]
            axes.plot(*zip(*points, strict=True), "D", ms=7, mfc="none", color=CHOSEN, label=name)
            axes.legend(frameon=False)
    axes.set(xlabel="block", ylabel="Sigma of a head", xticks=range(len(heads)))


def draw_maps(moments: selection.Moments, heads: np.ndarray, grid: tuple[int, int], output: pathlib.Path) -> None:
    """The middle of the aligned maps, of heads in the order of their Sigma."""
    order = [divmod(int(i), heads.shape[1]) for i in np.argsort(heads, axis=None) if np.isfinite(heads.flat[i])]
    number, middle = min(SHOWN, max(1, len(order) // 3)), len(order) // 2
    rows = {"lowest": order[:number], "middle": order[middle : middle + number], "highest": order[-number:]}
    figure = Figure(figsize=(2 * number, 6.6), layout="constrained")
    r, c = grid[0] - 1, grid[1] - 1
    top, left = max(r - CROP, 0), max(c - CROP, 0)
    for line, (name, places) in zip(figure.subplots(3, number, squeeze=False), rows.items(), strict=True):
        for axes, (block, head) in zip(line, places, strict=False):
            deviation = jax.tree.map(lambda a, b=block: a[b], moments).deviation()[head]
            whole = np.asarray(selection.aligned(deviation, grid))
            axes.imshow(whole[top : r + CROP + 1, left : c + CROP + 1], cmap="viridis")
            axes.add_patch(Rectangle((c - left - 1.5, r - top - 1.5), 3, 3, fill=False, color="red"))
            axes.set_title(f"{name}: block {block}, head {head}\nSigma {heads[block, head]:.1f}", fontsize=7)
        for axes in line:
            axes.set_axis_off()
    figure.savefig(output, dpi=150)


def draw_positions(cosines: np.ndarray, output: pathlib.Path) -> None:
    """The maps of some tokens across the grid."""
    h, w = cosines.shape[:2]
    places = [[round((i + 0.5) * side / QUERIES - 0.5) for i in range(QUERIES)] for side in (h, w)]
    figure = Figure(figsize=(2 * QUERIES, 2 * QUERIES), layout="constrained")
    for line, row in zip(figure.subplots(QUERIES, QUERIES), places[0], strict=True):
        for axes, column in zip(line, places[1], strict=True):
            picture = axes.imshow(cosines[row, column], cmap="RdBu_r", vmin=-1, vmax=1)
            axes.plot(column, row, "k+")
            axes.set_axis_off()
    figure.colorbar(picture, ax=figure.axes, shrink=0.6)
    figure.savefig(output, dpi=150)
