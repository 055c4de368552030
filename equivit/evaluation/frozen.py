"""Features of a frozen model, computed once for all protocols of a suite, for upright and turned images.

The features of an image are the class tokens of the last blocks after the final norm, and the mean patch token.  Models
without a class token use mean patch tokens.  Models that end with fields use the invariants that their head reads, so
turns do not change them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import logical
from equivit.constraints import Size
from equivit.data.loader import EvaluationPipeline
from equivit.data.pixels import normalize
from equivit.evaluation.predictions import Batch, by_example, turned
from equivit.evaluation.protocol import Line, Protocol, Run, percent
from equivit.layers.readout import ClassReadout, MeanReadout
from equivit.models.features import Grid
from equivit.models.model import ModelModule, abstract_model
from equivit.models.vit.config import ViTConfig
from equivit.precision import cast
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

Extract = Callable[[jax.Array], tuple[jax.Array, jax.Array]]
UPRIGHT = ("e",)


class Images(NamedTuple):
    """The features of images."""

    tokens: np.ndarray  # float32 [N, n, D], the class tokens of the last n blocks, the oldest first
    average: np.ndarray  # float32 [N, D], the mean patch token of the last block
    labels: np.ndarray  # int32 [N]
    index: np.ndarray  # int64 [N], the positions of the images in the split, without unreadable ones


class Patches(NamedTuple):
    """The patch tokens of images, and their label maps."""

    grid: Grid  # float32 [N, h, w, D], of the last block
    maps: np.ndarray  # int32 [N, H, W], on the images; `grid.to_grid(maps)` has the pixels of each token
    index: np.ndarray  # as of `Images`


class Opened(NamedTuple):
    """The number of training examples, and the shapes of the features and of the entry of a batch of test images."""

    examples: int
    features: Any
    truth: Any


def check(config: ConfigDict) -> None:
    """As `check_splits`; also ValueError if images are not read at one size."""
    check_splits(config)
    if config.data.eval_crop == "whole":
        raise ValueError("config.data.eval_crop='whole': features are read at one size; use 'centre' or 'squash'.")


def check_splits(config: ConfigDict) -> None:
    """ValueError if the training split is also the test split."""
    data = config.data
    if data.split == data.eval_split:
        raise ValueError(
            f"config.data.eval_split={data.eval_split!r} must not be data.split: test features are compared with "
            "training features; name two splits."
        )


def inputs(config: ConfigDict, size: Size) -> dict[str, Size]:
    """The sizes of the model's input images, upright and turned."""
    name, (height, width) = "config.data.image_size", size
    return {name: size, f"{name}, turned by a quarter": (width, height)}


# A protocol on frozen features: images at one size, upright and turned.
protocol = functools.partial(Protocol, needs=frozenset({"features"}), check=check, inputs=inputs)
# One that squashes its images (`squashed`), whatever `data.eval_crop` is.
squashing = functools.partial(protocol, check=check_splits)


def squashed(config: ConfigDict, interpolation: str) -> ConfigDict:
    """The `data` section with images squashed to `image_size`."""
    data = config.data.copy_and_resolve_references().unlock()
    data.update(eval_crop="squash", interpolation=interpolation)
    return data.lock()


def opens(run: Run, entry: str = "label", least: int = 1) -> Opened:
    """Open both splits and trace the model, so that a run fails before training rather than at its evaluation.

    Args:
      run: its model may be abstract.
      entry: the required entry of each example, "label" or "map".
      least: the smallest number of training examples.

    Raises ValueError if the examples lack the entry or are too few, or the model lacks a feature.
    """
    train, test = (_opened(run, split, entry) for split in (run.data.split, run.data.eval_split))
    if train.num_examples < least:
        raise ValueError(
            f"evaluation: {run.stream} needs at least {least} training examples, and split {run.data.split!r} of "
            f"{run.data.source!r} has {train.num_examples}."
        )
    shapes = test.shapes()
    features, *_ = jax.eval_shape(functools.partial(_traced, run, entry), run.model, shapes["image"])
    return Opened(train.num_examples, features, shapes[entry])


def _traced(run: Run, entry: str, model: ModelModule, images: jax.Array) -> Any:
    """The features of upright images."""
    run = dataclasses.replace(run, model=model)
    if entry == "map":
        (grid,) = _patch_extractor(run)(images, "e")
        return grid.values, grid.offset
    return extractor(run)(images)


def images(run: Run, split: str, elements: Iterable[str] = UPRIGHT) -> dict[str, Images]:
    """Extract the features of a split, by the element of the octic group that turned the images.

    Raises ValueError for examples without one label each, or features that are not finite.
    """
    extract = extractor(run)
    return _read(run, split, tuple(elements), "label", lambda images, g: extract(images), Images)


def patches(run: Run, split: str, elements: Iterable[str] = UPRIGHT) -> dict[str, Patches]:
    """Extract the patch features of a split, turned back, by the element that turned the images.

    Raises ValueError for examples without label maps, or features that are not finite.
    """
    return _read(run, split, tuple(elements), "map", _patch_extractor(run), Patches)


def extractor(run: Run) -> Extract:
    """`extract(images)`: tokens [B, n, D] and averages [B, D] (`Images`) of uint8 images; n is `run.blocks`.

    Raises ValueError if the model has fewer blocks.
    """
    return functools.partial(_image_features, _pixels(run), _captured(run), cast(_backbone(run.model), run.precision))


def classifier(
    model: ModelModule, weight: np.ndarray, bias: np.ndarray, *, blocks: int, average: bool
) -> ModelModule | None:
    """Add a linear head on features (`Images`) to a model; None if that is impossible.

    The model must be a ViT with a class token that ends with dense tokens.  The head, of weight [F, classes] and bias
    [classes], reads the class tokens of the last `blocks` blocks and, with `average`, the mean patch token.
    """
    backbone = _backbone(model)
    config = getattr(backbone, "config", None)
    if not isinstance(config, ViTConfig) or not config.class_token or config.ends_with_fields or config.fc_norm:
        return None
    pool = "class_and_mean" if average else "class"
    reading = dict(pool=pool, pool_blocks=blocks, num_classes=len(bias), projection=None)
    made = abstract_model(dataclasses.replace(config, **reading))
    tensors = jax.device_get(logical.to_logical(backbone, nnx.Variable))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    return logical.from_logical(made, tensors | {"head.weight": weight, "head.bias": bias}, nnx.Variable)


def accuracies(predicted: Mapping[str, np.ndarray], labels: np.ndarray) -> dict[str, Any]:
    """Compute accuracies from the class of each image, [N], by the element of the group that turned it.

    Returns "accuracy", by element; "accuracy_mean" over the orientations; "delta", its difference from the upright
    accuracy; "consistency": the share of images with the same class in all orientations.
    """
    each = {g: float((found == labels).mean()) for g, found in predicted.items()}
    mean = float(np.mean(list(each.values())))
    same = np.all([found == predicted["e"] for found in predicted.values()], axis=0)
    return {"accuracy": each, "accuracy_mean": mean, "delta": mean - each["e"], "consistency": float(same.mean())}


def lines(result: dict[str, Any]) -> list[Line]:
    """`accuracies` as one line."""
    against = f"{100 * result['delta']:+.1f} points against upright"
    same = f"the same class in all for {percent(result['consistency'])} of the images"
    return [("... in eight orientations", f"{percent(result['accuracy_mean'])} in the mean ({against}), {same}")]


def _backbone(model: ModelModule) -> ModelModule:
    """The encoder of a masked autoencoder; any other model itself."""
    return getattr(model, "encoder", model)


def _captured(run: Run) -> tuple[int, ...]:
    """The blocks before the last one whose class tokens are read; ValueError if there are fewer."""
    if run.blocks == 1:
        return ()
    depth = getattr(_backbone(run.model).config, "depth", 1)
    if run.blocks > depth:
        raise ValueError(
            f"evaluation: features of the last {run.blocks} blocks are needed, and the model has {depth}; the "
            f"blocks of config.evaluation must be at most {depth}."
        )
    return tuple(range(depth - run.blocks, depth - 1))


def _patch_extractor(run: Run) -> Callable:
    return functools.partial(_patch_features, _pixels(run), cast(_backbone(run.model), run.precision))


def _pixels(run: Run) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(run.data.mean), tuple(run.data.std)


@functools.partial(jax.jit, static_argnums=(0, 1))  # shared by all calls, as in predictions.py
def _image_features(pixels, captured, model, images):
    features = model.features(normalize(images, *pixels), blocks=captured)
    tokens = []
    for each in (*(features.blocks[block] for block in captured), features):
        patches = _invariants(model, each.patches.values, MeanReadout | ClassReadout)
        average = patches.astype(jnp.float32).mean(range(1, patches.ndim - 1))
        tokens.append(average if each.cls is None else _invariants(model, each.cls).astype(jnp.float32))
    if len(widths := {token.shape[-1] for token in tokens}) > 1:
        raise ValueError(
            f"evaluation: the last {len(tokens)} blocks have the widths {sorted(widths)}, and must have one; read "
            "fewer blocks (config.evaluation)."
        )
    return jnp.stack(tokens, axis=1), average


def _patch_features(pixels, model, images, g):
    """Turn the patch features back by the inverse of g; all g share the compiled model."""
    return (_turned(_patch_grid(pixels, model, images), OCTIC.inverse(g)),)


@functools.partial(jax.jit, static_argnums=0)
def _patch_grid(pixels, model, images):
    grid = model.features(normalize(images, *pixels)).patches
    if grid.values.ndim != 4:
        shape = list(grid.values.shape)
        raise ValueError(f"evaluation: patch features of shape {shape} must lie on a grid [B, h, w, D].")
    values = _invariants(model, grid.values, MeanReadout | ClassReadout).astype(jnp.float32)
    return dataclasses.replace(grid, values=values)


@functools.partial(jax.jit, static_argnums=1)
def _turned(grid, g):
    return grid.turned(g)


def _invariants(model: ModelModule, tokens: jax.Array, readouts: Any = object) -> jax.Array:
    """Apply the head's readout to tokens that are fields, if it is one of `readouts`; else return them unchanged."""
    readout: Any = getattr(model, "readout", None)
    if getattr(readout, "invariant", None) is None or not isinstance(readout, readouts):
        return tokens
    return readout.invariant(fields.from_dense(tokens, model.config.group))


def _opened(run: Run, split: str, entry: str) -> EvaluationPipeline:
    """A split; ValueError unless its examples have the entry."""
    pipeline = run.open(split=split)
    shape = pipeline.shapes().get(entry)
    if shape is None or (entry == "label" and shape.ndim > 1):
        needed = "a label map each" if entry == "map" else "one label each"
        raise ValueError(
            f"config.data.source={run.data.source!r}: the examples of {split!r} must have {needed}; use another source."
        )
    return pipeline


def _read(
    run: Run, split: str, elements: tuple[str, ...], entry: str, extract: Callable, kind: Callable
) -> dict[str, Any]:
    """The features and the `entry` of all images of a split, by element; cached for other protocols of the suite."""
    key = (entry, split, *elements, run.data.to_json())
    if key in run.frozen:
        return run.frozen[key]
    pipeline = _opened(run, split, entry)

    def measure(batch: Batch) -> dict[str, Any]:
        found = {g: extract(turned(g, batch["image"]), g) for g in elements}
        return {"found": found, entry: batch[entry], "index": batch["index"], "finite": _finite(found)}

    rows = by_example(measure, run.batches(pipeline), axis=0, split=f"split {split!r}")
    run.frozen[key] = {g: kind(*rows["found"][g], rows[entry], rows["index"]) for g in elements}
    return run.frozen[key]


@jax.jit
def _finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all(range(1, leaf.ndim)) for leaf in jax.tree.leaves(tree)]).all(0)
