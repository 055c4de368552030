"""Accuracy in all eight orientations and under random rotation, consistency, equivariance error.

Every image is evaluated in all eight orientations.  The random-rotation protocol of octic ViTs (Table 2, last column,
and Appendix D) uses one of the four rotations for each image.
"""

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.data.devices import on_devices
from equivit.data.pixels import normalize
from equivit.evaluation import frozen
from equivit.evaluation.classification import hits
from equivit.evaluation.predictions import Batch, Predict, by_example, turned
from equivit.evaluation.protocol import Line, Protocol, Run, percent
from equivit.layers.grid import check_grid
from equivit.models.vit.model import ViT
from equivit.precision import cast
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

TURNS = ("e", "r", "rr", "rrr")
TIE = 1e-4  # rounding may decide between two best logits that are closer than this


def run(run: Run) -> dict[str, Any]:
    """The results of `orientation`; if the model has equivariant blocks, also its "field_error"."""
    batches = iter(run.batches())
    first = next(batches)
    result = orientation(run.predict, itertools.chain([first], batches), seed=run.config.seed)
    if hasattr(run.model, "fields") and run.model.config.k > 0:
        model = cast(run.model, run.precision)
        result["field_error"] = field_error(model, first, run.data.mean, run.data.std)
    return result


def lines(result: dict[str, Any]) -> list[Line]:
    """Accuracies, then the consistency of predictions and logits."""
    each, turns = result["accuracy"], ("", *TURNS[1:])
    found = [
        ("rotated by 0, 90, 180, 270 degrees", "  ".join(percent(each[turn or "e"]) for turn in turns)),
        ("and mirrored", "  ".join(percent(each["m" + turn]) for turn in turns)),
        ("mean of the eight orientations", percent(result["accuracy_mean"])),
        ("randomly rotated", f"{percent(result['rotated'])} ({100 * result['delta']:+.1f} points against upright)"),
        ("same prediction in all eight", _in_words(result)),
        ("equivariance error of the logits", f"{result['equivariance_error']:.2g} of the largest logit"),
    ]
    if "field_error" in result:
        found.append(("... of the equivariant blocks", f"{result['field_error']:.2g} of the largest entry"))
    return found


def orientation(predict: Predict, batches: Iterable[Batch], *, seed: int = 0) -> dict:
    """Measure accuracy, consistency and deviation over the eight orientations.

    Args:
      predict: uint8 images [B, H, W, C] to logits [B, classes]; also called on quarter turns [B, W, H, C].
      batches: with "image", "label" (as in `classification.accuracy`), "weight" [B] (0 for padding) and "index" [B],
        the position in the split.
      seed: seed of the random rotations; an image's rotation depends only on the seed and its index.

    Returns:
      "accuracy": top-1 in each orientation, by element of the group; "accuracy_mean" over the eight.
      "upright", "rotated", "delta": top-1 of the original images, top-1 after rotating each by a random multiple of 90
        degrees, and the difference.
      "consistency": the fraction of images with the same prediction in all eight.
      "ties": indices of the images whose best two logits differ by at most `TIE` in one of the eight.
      "decided", "identical": the number of images without ties, and of those with the same prediction in all eight; an
        exactly invariant model has identical = decided.
      "deviation": for each element, the largest change of a logit over all images, relative to the largest logit.
      "equivariance_error": the largest deviation.

    Raises ValueError if there are no examples, or logits are not finite.
    """

    def compare(batch):
        logits = jnp.stack([predict(turned(g, batch["image"])) for g in OCTIC.elements])
        return _compare(logits, batch["label"], batch["index"], seed)

    images = by_example(compare, batches)
    return _accuracies(images) | _constancy(images) | _deviations(images)


@jax.jit
def _compare(logits, label, index, seed):
    """The results for each image, from its logits in all orientations [8, B, classes]."""
    best = jax.lax.top_k(logits, min(2, logits.shape[-1]))[0]
    prediction = logits.argmax(-1)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), index.astype(jnp.uint32))
    return {
        "right": hits(prediction[..., None], label)[..., 0],
        "same": (prediction == prediction[0]).all(0),
        "margin": (best[..., 0] - best[..., -1]).min(0),
        "turn": jax.vmap(lambda key: jax.random.randint(key, (), 0, len(TURNS)))(keys),
        "index": index,
        "change": jnp.abs(logits - logits[0]).max(-1),
        "size": jnp.abs(logits[0]).max(-1),
        "finite": jnp.isfinite(logits).all(-1),
    }


def _accuracies(images):
    each = dict(zip(OCTIC.elements, images["right"].mean(1).tolist(), strict=True))
    rows = np.array([OCTIC.elements.index(g) for g in TURNS])[images["turn"]]
    rotated = float(images["right"][rows, np.arange(len(rows))].mean())
    return {
        "accuracy": each,
        "accuracy_mean": float(images["right"].mean()),
        "upright": each["e"],
        "rotated": rotated,
        "delta": rotated - each["e"],
    }


def _constancy(images):
    same, decided = images["same"], images["margin"] > TIE
    return {
        "consistency": float(same.mean()),
        "decided": int(decided.sum()),
        "identical": int((same & decided).sum()),
        "ties": sorted(images["index"][~decided].tolist()),
    }


def _deviations(images):
    change, size = images["change"].max(-1), images["size"].max()
    relative = change / size if size else np.where(change > 0, np.inf, 0.0)
    deviation = dict(zip(OCTIC.elements, relative.tolist(), strict=True))
    return {"deviation": deviation, "equivariance_error": max(deviation.values())}


def field_error(model: ViT, batch: Batch, mean: tuple[float, ...], std: tuple[float, ...]) -> float:
    """The largest deviation of f(g x) from g f(x), relative to the largest entry of f(x), over all elements g.

    f(x) is the field after the last equivariant block, so only rounding contributes, even in hybrid models, whose
    logits are not invariant.
    The batch has "image" uint8 [B, H, W, C]; `mean` and `std` are as in `predictions.predictor`.

    Raises ValueError if the model has no equivariant block.
    """
    config = model.config
    if not config.k:
        raise ValueError(f"field_error: a {config.family} model has no equivariant block; use a family such as H8.")
    images = on_devices({"image": batch["image"]})["image"]
    grid = check_grid(images.shape[1:3], config.patch_size, "image")
    field = functools.partial(_field, tuple(mean), tuple(std), model)
    upright = field(images)
    gaps = [_gap(g, field(turned(g, images)), upright, grid, config.prefix) for g in config.group.elements]
    return max(map(float, gaps))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _field(mean, std, model, images):
    last = model.config.k - 1
    values = model.fields(normalize(images, mean, std), (last,))[last]
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), values)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _gap(g, found, upright, grid, prefix):
    difference = jax.tree.map(jnp.subtract, found, fields.act(g, upright, grid, prefix))
    largest, scale = (
        jnp.max(jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(field)])) for field in (difference, upright)
    )
    return largest / scale


def _in_words(result):
    ties = ", ".join(map(str, result["ties"][:10])) + (", ..." if len(result["ties"]) > 10 else "")
    undecided = f"; {len(result['ties'])} with a tie, by index: {ties}" if ties else "; no ties"
    return f"{result['identical']} of {result['decided']} images{undecided}"


PROTOCOL = Protocol(needs=frozenset({"logits"}), run=run, lines=lines, inputs=frozen.inputs, curve="accuracy_mean")
