"""Tokens of an image and of its shifted copy, by an ordinary and an adaptive model: Figure 4 of shift-equivariant ViTs.

    python -m experiments tables.adaptive.tokens  # CvT-13, about a minute on a CPU
    python -m experiments tables.adaptive.tokens --model=swin_t --entry=swin_t
    python -m experiments tables.adaptive.tokens --quick --output=/tmp/quick.json  # a tiny model; tries the script

A photograph of scikit-learn is shifted by one row and one column, around the torus.  After each stage the tokens of the
copy are subtracted from those at the same place of the image, as nearly as the grid allows.  The picture shows the
patches of both copies, and the difference in the channel of the highest energy.  Every parameter is random, where the
paper's models are trained; both models have the same ones.  Without the anchor (`anchor=False`) the layers of an
adaptive model follow the shift by themselves, up to rounding.

Claims: in each stage the ordinary model's tokens differ by more than a hundredth of the largest token, the adaptive
one's not at all; without the anchor by less than 1e-4, unless rounding decides a choice.
"""

import dataclasses
import pathlib

import jax
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from equivit.configs import recipes
from equivit.data import config as data_config
from equivit.data.pixels import normalize
from equivit.models import zoo
from equivit.models.features import Grid
from experiments import compiled_models, findings, flags
from experiments.findings import Claim

SHIFT = (1, 1)  # (down, right), as in the paper
VARIANTS = {"ordinary": {}, "adaptive": dict(adaptive=True), "adaptive, no anchor": dict(adaptive=True, anchor=False)}
BOUNDS = {"ordinary": dict(at_least=1e-2), "adaptive": dict(at_most=0.0), "adaptive, no anchor": dict(at_most=1e-4)}
DRAWN = ("ordinary", "adaptive")
DETAIL = 20  # pixels of the image in which patches are drawn
COLUMNS = dict(variant="model", stage="stage", tokens="tokens", begins="begin at", moved="shifted")
COLUMNS |= dict(difference="largest difference", changed="tokens changed, %")


def main(arguments=None) -> int:
    known = [name for name in recipes.HIERARCHICAL if "adaptive" in zoo.types_of(name)]
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("--model", choices=known, default="cvt_13", help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    recipe = recipes.HIERARCHICAL[options.model]
    side, small = (32, recipe["small"]) if options.quick else (recipe["side"], {})
    entry = findings.Entry(options, dict(model=options.model, pixels=side, shift=SHIFT, quick=options.quick))
    image = photograph(side)
    pixels = {"upright": image, "moved": np.roll(image, SHIFT, (0, 1))}
    common, maps = dict(image_size=(side, side), **recipe["circular"], **small), {}
    for variant, fields in VARIANTS.items():
        model = compiled_models.random_model(options.model, **common, **fields)
        maps[variant] = {name: jax.device_get(stages(model, image)) for name, image in pixels.items()}
    rows = [row for variant, both in maps.items() for row in compared(variant, both["upright"], both["moved"])]
    print(f"{options.model}, {side} px, shifted by {SHIFT}; differences relative to the largest token")
    print(findings.table([{**row, "changed": 100 * row["changed"]} for row in rows], COLUMNS))
    status = entry.finish(claims_of(rows), rows=rows)
    draw(pixels, maps, findings.picture(options))
    return status


def photograph(side: int) -> np.ndarray:
    """The centre of scikit-learn's picture of a temple, uint8 [side, side, 3]."""
    from sklearn import datasets  # slow to import

    image = Image.fromarray(datasets.load_sample_image("china.jpg"))
    width, height = image.size
    left = (width - height) // 2
    return np.asarray(image.crop((left, 0, left + height, height)).resize((side, side), Image.Resampling.BICUBIC))


@jax.jit
def stages(model, pixels: np.ndarray) -> list[Grid]:
    """The map after each stage."""
    images = normalize(pixels[None], data_config.DataConfig.mean, data_config.DataConfig.std)
    last = tuple(int(block) - 1 for block in np.cumsum(model.config.depths))
    seen = model.features(images, blocks=last, norm=False).blocks
    return [seen[block].patches for block in last]


def compared(variant: str, upright: list[Grid], moved: list[Grid]) -> list[dict]:
    """Differences between the shifted image's tokens and the image's, stage by stage."""
    rows = []
    for stage, (one, other) in enumerate(zip(upright, moved, strict=True), 1):
        difference, follows = subtracted(one, other)
        tokens = "{}x{}".format(*one.values.shape[1:3])
        row = dict(variant=variant, stage=stage, tokens=tokens, begins=tuple(one.offset[0].tolist()))
        row |= dict(moved=tuple(other.offset[0].tolist()), follows=follows)
        row |= dict(difference=float(difference.max() / np.abs(one.values).max()))
        rows.append(row | dict(changed=float((difference > 0).any(-1).mean())))
    return rows


def subtracted(upright: Grid, moved: Grid) -> tuple[np.ndarray, bool]:
    """|difference| [h, w, D] of tokens at the same place of the image, and whether the grid has moved with the image.

    Where it has not, the place is the nearest one that the grid has.
    """
    stride = np.array(upright.stride)
    size = stride * upright.values.shape[1:3]
    beyond = moved.offset[0] - upright.offset[0] - SHIFT
    beyond = (beyond + size // 2) % size - size // 2  # pixels; a torus
    steps = np.rint(beyond / stride).astype(int)
    there = np.roll(moved.values[0], tuple(steps), (0, 1))
    return np.abs(there - upright.values[0]), bool((beyond == steps * stride).all())


def claims_of(rows: list[dict]) -> list[Claim]:
    claims = []
    for row in rows:
        text = f"{row['variant']}, stage {row['stage']}: largest difference of tokens"
        judged = row["follows"] or row["variant"] != "adaptive, no anchor"
        claims.append(Claim(text, row["difference"], **BOUNDS[row["variant"]], judged=judged))
    return claims


def draw(pixels: dict[str, np.ndarray], maps: dict[str, dict[str, list[Grid]]], path: pathlib.Path) -> None:
    """The patches of both copies in the middle of the image, and the difference of tokens after each stage."""
    number = len(maps["ordinary"]["upright"])
    figure = Figure(figsize=(1.7 * (number + 2), 3.8), layout="constrained")
    grid = figure.subplots(len(DRAWN), number + 2)
    shown = {variant: [_channel(*pair) for pair in zip(*maps[variant].values(), strict=True)] for variant in DRAWN}
    for line, variant in zip(grid, DRAWN, strict=True):
        for axes, (name, stages) in zip(line[:2], maps[variant].items(), strict=True):
            _patches(axes, pixels[name], stages[0])
        for stage, (axes, image) in enumerate(zip(line[2:], shown[variant], strict=True)):
            drawn = axes.imshow(image, cmap="magma", vmin=0, vmax=max(shown[v][stage].max() for v in DRAWN))
            h, w = maps[variant]["upright"][stage].values.shape[1:3]
            axes.set_xlabel(f"{h}x{w}, at most {image.max():.2g}", fontsize=7)
            if variant == DRAWN[-1]:
                figure.colorbar(drawn, ax=grid[:, stage + 2], location="bottom", shrink=0.9).ax.tick_params(labelsize=6)
        line[0].set_ylabel(variant)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    titles = ("patches", "one pixel on", *(f"stage {stage + 1}" for stage in range(number)))
    for axes, title in zip(grid[0], titles, strict=True):
        axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=150)


def _channel(upright: Grid, moved: Grid) -> np.ndarray:
    """The difference in the channel of the highest energy, at each pixel of the image, [H, W]."""
    channel = np.square(upright.values[0]).sum((0, 1)).argmax()
    difference = subtracted(upright, moved)[0][None, ..., channel, None]
    return dataclasses.replace(upright, values=difference).pixels()[0, ..., 0]


def _patches(axes, image, grid):
    """The middle of an image with the borders of its patches."""
    first = (len(image) - DETAIL) // 2
    axes.imshow(image[first : first + DETAIL, first : first + DETAIL], extent=(0, DETAIL, DETAIL, 0))
    for line, begin, step in zip((axes.axhline, axes.axvline), grid.offset[0], grid.stride, strict=True):
        for place in range((int(begin) - first) % step, DETAIL + 1, step):
            line(place, color="white", linewidth=1)
