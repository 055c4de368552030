"""The pictures of the README, from three short runs on scikit-learn's digits.

    python -m experiments pictures  # trains what is missing: about ten minutes on two CPU cores
    python -m experiments pictures --workdir=runs/pictures --output=experiments/figures

fields.png, filters.png, orientation.png and reconstructions.png; experiments/README.md describes them.
"""

import argparse
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from equivit import train
from equivit.data import loader
from equivit.data.pixels import normalize
from equivit.evaluation import figures
from equivit.layers.dense import patchify, unpatchify
from equivit.objectives import masking
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import machine

# A masked autoencoder of 32 px in patches of 4, small enough for digits.
DIGITS = ["data.source=digits", "data.channels=1", "data.mean=(0.305,)", "data.std=(0.349,)", "data.workers=0"]
DIGITS += ["data.augment.crop=pad", "data.augment.flip=0.0", "objective.target=pixels", "batch_size=64", "epochs=60"]
DIGITS += ["model.width=96", "model.depth=4", "model.num_heads=3"]
RUNS = {"H8": ("configs/quickstart.py", []), "I8": ("configs/quickstart.py:I8", [])}
RUNS |= {"autoencoder": ("configs/mae.py:cifar,jumbo", DIGITS)}
ORIENTATIONS = ("upright", "90°", "180°", "270°", "mirrored", "90°,\nmirrored", "180°,\nmirrored", "270°,\nmirrored")
LABELS = {"A1": "A1\nno change", "A2": "A2\nmirror: −", "B1": "B1\nquarter turn: −"}
LABELS |= {"B2": "B2\nmirror: −\nquarter turn: −", "E": "E\narrows turn\nand mirror"}
LEGEND = {"H8": "H8: octic, then dense", "I8": "I8: octic, then invariant"}
IMAGES = (28, 0, 1, 3, 6, 7, 9, 21)  # of the test split; the first is the one whose field is drawn


def main(arguments=None) -> int:
    options = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    options.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/pictures"), help="where runs are")
    options.add_argument("--output", type=pathlib.Path, default=machine.ROOT / "experiments/figures")
    options = options.parse_args(arguments)
    if not all(trained(name, options.workdir) for name in RUNS):
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    config, model, _ = checkpoints.load_run(options.workdir / "H8")
    draw_fields(field_panels(model.patch_embed, test_images(config)[:1]), options.output / "fields.png")
    figures.patch_filters(figures.patch_kernels(model), options.output / "filters.png")
    rows = {name: accuracies(options.workdir / name) for name in LEGEND}
    draw_orientation(rows, options.output / "orientation.png")
    config, model, _ = checkpoints.load_run(options.workdir / "autoencoder")
    draw_reconstructions(reconstructions(model, test_images(config)), options.output / "reconstructions.png")
    print(f"pictures: {options.output}")
    return 0


def trained(name: str, workdir: pathlib.Path) -> bool:
    """Train a run unless it is finished; False if SIGTERM ended it."""
    if (workdir / name / "evaluation.json").is_file():
        return True
    file, overrides = RUNS[name]
    return train.train(configs.load(str(machine.ROOT / file), overrides), workdir / name) is not None


def test_images(config) -> jax.Array:
    """Some images of the evaluation split, as the model takes them."""
    pixels = next(iter(loader.evaluate(config.data, batch_size=max(IMAGES) + 1).batches()))["image"]
    return normalize(pixels[np.array(IMAGES)], config.data.mean, config.data.std)


def accuracies(run: pathlib.Path) -> list[float]:
    """Test accuracy in each orientation, in the order of the group's elements."""
    each = json.loads((run / "evaluation.json").read_text())["orientation"]["accuracy"]
    return [each[g] for g in OCTIC.elements]


def field_panels(embed, images: jax.Array) -> dict[str, list[np.ndarray]]:
    """The panels of each row of the picture: one image in its eight orientations.

    "image": [H, W].  Of each irrep the channel that is largest on this image: [h, w] of a 1-D irrep, [2, h, w] of E,
    the components to the right and upwards.
    """
    size = tuple(side // patch for side, patch in zip(images.shape[1:3], embed.patch_size, strict=True))
    run = jax.jit(lambda embed, images: embed(images))
    upright, rows = run(embed, images), {"image": []}
    strongest = {irrep.name: int(jnp.abs(upright.lines[i]).sum((0, 1)).argmax()) for i, irrep in enumerate(OCTIC.lines)}
    strongest["E"] = int(jnp.abs(upright.planes).sum((0, 1, 2)).argmax())
    for g in OCTIC.elements:
        version = fields.act_on_image(g, images)
        field, grid = run(embed, version), size if version.shape == images.shape else size[::-1]
        rows["image"].append(np.asarray(version[0, ..., 0]))
        for i, irrep in enumerate(OCTIC.lines):
            line = np.asarray(field.lines[i, 0, :, strongest[irrep.name]])
            rows.setdefault(irrep.name, []).append(line.reshape(grid))
        rows.setdefault("E", []).append(np.asarray(field.planes[:, 0, :, strongest["E"]]).reshape(2, *grid))
    return rows


def draw_fields(rows: dict[str, list[np.ndarray]], path: pathlib.Path) -> None:
    figure = Figure(figsize=(8.6, 5.8), layout="constrained")
    title = "An image in its eight orientations, and the field that the patch embedding makes of it"
    figure.suptitle(title, fontsize=11)
    grid = figure.subplots(len(rows), len(OCTIC.elements))
    for line, (name, panels) in zip(grid, rows.items(), strict=True):
        largest = max(np.abs(panel).max() for panel in panels)
        for axes, panel in zip(line, panels, strict=True):
            _panel(axes, name, panel, largest)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(LABELS.get(name, name), fontsize=8, rotation=0, ha="right", va="center", linespacing=1.3)
    for axes, title in zip(grid[0], ORIENTATIONS, strict=True):
        axes.set_title(title, fontsize=9)
    figure.savefig(path, dpi=100)


def _panel(axes, name, panel, largest):
    if name == "image":
        axes.imshow(panel, cmap="gray_r", interpolation="nearest")
    elif name == "E":
        h, w = panel.shape[1:]
        axes.quiver(range(w), range(h), *panel, angles="uv", pivot="mid", scale=5 * largest, width=0.018, color="0.15")
        axes.set(xlim=(-0.7, w - 0.3), ylim=(h - 0.3, -0.7), aspect="equal")
    else:
        axes.imshow(panel, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")


def draw_orientation(rows: dict[str, list[float]], path: pathlib.Path) -> None:
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    axes = figure.subplots()
    width, places = 0.8 / len(rows), np.arange(len(OCTIC.elements))
    for k, (name, each) in enumerate(rows.items()):
        axes.bar(places + (k - (len(rows) - 1) / 2) * width, 100 * np.array(each), width, label=LEGEND[name])
    axes.set_title("Test accuracy in the eight orientations, trained on upright digits", fontsize=11)
    axes.set(xlabel="orientation of the test images", ylabel="accuracy, percent", ylim=(0, 115))
    axes.set_yticks(range(0, 101, 20))
    axes.set_xticks(places, ORIENTATIONS)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(loc="upper right", ncols=len(rows), frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)


def reconstructions(model, images: jax.Array) -> dict[str, np.ndarray]:
    """Images [B, H, W, C], the patches that the encoder sees, and predicted patches in the other places."""
    return reconstructed(model, images, random_mask(model, images))


def random_mask(model, images: jax.Array) -> np.ndarray:
    """A mask [B, h, w] that removes three quarters of the patches."""
    grid = tuple(s // p for s, p in zip(images.shape[1:3], model.config.encoder.patch_size, strict=True))
    number = grid[0] * grid[1]
    _, mask = masking.random_keep(jax.random.key(0), len(images), number, masking.number_kept(number, 0.75))
    return np.asarray(mask).reshape(-1, *grid)


def reconstructed(model, images: jax.Array, mask: np.ndarray) -> dict[str, np.ndarray]:
    """As `reconstructions`, with the patches removed where the mask [B, h, w] is 1."""
    patch_size, (_, *grid) = model.config.encoder.patch_size, mask.shape
    flat = mask.reshape(len(mask), -1)
    predicted = _predict(model, images, np.stack([np.flatnonzero(row == 0) for row in flat]))
    patches = np.asarray(patchify(images, patch_size))
    back = functools.partial(unpatchify, grid=tuple(grid), patch_size=patch_size)
    seen, whole = (back(np.where(flat[..., None] > 0, hidden, patches)) for hidden in (np.nan, np.asarray(predicted)))
    return {"image": np.asarray(images), "seen": seen, "seen and\npredicted": whole}


_predict = jax.jit(lambda model, images, keep: model(images, keep))


def draw_reconstructions(rows: dict[str, np.ndarray], path: pathlib.Path) -> None:
    images = next(iter(rows.values()))
    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    title = "Test digits, the quarter of their patches that is seen, and the prediction of the rest"
    figure.suptitle(title, fontsize=11)
    for line, (name, row) in zip(figure.subplots(len(rows), len(images)), rows.items(), strict=True):
        for axes, image in zip(line, row, strict=True):
            axes.imshow(image[..., 0], cmap="gray_r", vmin=images.min(), vmax=images.max())
            axes.set(xticks=[], yticks=[], facecolor="tab:gray")
        line[0].set_ylabel(name, fontsize=9)
    figure.savefig(path, dpi=100)
