"""Deviations of a model from each symmetry on random inputs, block by block.

A model f is symmetric under a motion g if f(g x) = g f(x).  On the right, g moves tokens with the image.  In blocks
that carry fields, the channels follow their irreps; elsewhere g leaves the channels unchanged.  The output of a
classifier and the pooled features of other models do not change; a segmenter's output moves with the image.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit import precision
from equivit.evaluation.protocol import offers
from equivit.guarantees.motions import Motion, Turn, overlaps
from equivit.models.features import Grid
from equivit.models.model import ModelModule
from equivit.symmetry.groups import Group

BATCH = 2
BOUNDS = {"float64": 1e-10, "float32": 1e-5}  # of deviations; for lower precisions 5e-2, as in `testing`


@dataclasses.dataclass(frozen=True)
class Stage:
    """A place in a model: the embedding, a block, or the output.

    Attributes:
      group: the group of the fields there; None for dense tokens.
    """

    name: str
    group: Group | None = None


@dataclasses.dataclass(frozen=True)
class Break:
    """The first stage whose deviation exceeds the bound, and the motion that deviates most there."""

    symmetry: str
    precision: str
    motion: str
    stage: str
    deviation: float
    bound: float

    def __str__(self) -> str:
        return (
            f"{self.symmetry}: {self.motion} deviates by {self.deviation:.1e} at {self.stage} in {self.precision}; the "
            f"bound is {self.bound:.0e}"
        )


@dataclasses.dataclass(frozen=True)
class Proof:
    """The deviations of a model, computed at one precision.

    Attributes:
      deviations: [motions, stages], the largest difference to the moved features, relative to their largest entry;
        infinite if the maps differ in shape or are not finite.
      correlations: [motions, stages], the correlation of both over tokens (of the output, over its entries): 1 for a
        symmetric model, about 0 for unrelated features.
    """

    precision: str
    size: tuple[int, int]
    stages: tuple[Stage, ...]
    motions: tuple[Motion, ...]
    deviations: np.ndarray
    correlations: np.ndarray

    @property
    def bound(self) -> float:
        """The largest deviation that counts as rounding."""
        return BOUNDS.get(self.precision, 5e-2)

    def rows(self, symmetry: str) -> np.ndarray:
        """The positions of a symmetry's motions."""
        return np.array([k for k, motion in enumerate(self.motions) if symmetry in motion.symmetries], int)

    def moving(self, symmetry: str) -> np.ndarray:
        """The positions of a symmetry's motions, without the identity."""
        return np.array([k for k in self.rows(symmetry) if self.motions[k] != Turn("e")], int)

    def broken(self, symmetry: str) -> Break | None:
        """Where a symmetry breaks first; None if it holds."""
        rows = self.rows(symmetry)
        worst = self.deviations[rows].max(0)
        if (worst <= self.bound).all():
            return None
        first = int(np.argmax(worst > self.bound))
        row = rows[self.deviations[rows, first].argmax()]
        what, where = self.motions[row].name, self.stages[first].name
        return Break(symmetry, self.precision, what, where, float(self.deviations[row, first]), self.bound)


def prove(
    model: ModelModule,
    images: np.ndarray,
    motions: Sequence[Motion],
    *,
    at: str,
) -> Proof:
    """Compare the features of moved images with the moved features of images.

    Args:
      model: with parameters in float32.
      images: normalised, [B, H, W, C]; B is a multiple of BATCH.
      at: "float64", or a precision of `precision.PRECISIONS`.

    Raises ValueError if features are not finite, or zero, which proves nothing.
    """
    stages = stages_of(model)
    with jax.enable_x64(at == "float64"):
        dtype = np.float64 if at == "float64" else np.float32
        cast = _in_float64(model) if at == "float64" else precision.cast(model, at)
        run = functools.partial(features, cast)
        upright = run(images.astype(dtype))
        for stage, grid in zip(stages, upright, strict=True):
            _check(stage.name, grid.values)
        found = []
        for motion in motions:
            moved = run(motion.of_images(images).astype(dtype))
            pairs = zip(stages, moved, upright, strict=True)
            found.append([_compared(there, motion.of_grid(here, stage.group)) for stage, there, here in pairs])
    numbers = np.array(found)
    return Proof(at, images.shape[1:3], stages, tuple(motions), numbers[..., 0], numbers[..., 1])


def stages_of(model: ModelModule) -> tuple[Stage, ...]:
    """The embedding, every block, and the output."""
    config = backbone(model).config
    group, fields = getattr(config, "group", None), getattr(config, "k", 0)
    blocks = [Stage(f"block {k}", group if k < fields else None) for k in range(config.depth)]
    return Stage("the embedding", group), *blocks, Stage("the output")  # a field even where no block has one


def backbone(model: ModelModule) -> ModelModule:
    """The part of a model with blocks: the encoder of an autoencoder, the backbone of a segmenter."""
    return getattr(model, "encoder", getattr(model, "backbone", model))


def features(model: ModelModule, images: np.ndarray) -> list[Grid]:
    """The raw patch tokens of every stage; the output, if it does not move, as a map of one token.  On the host.

    Images are taken in batches of BATCH, their number a multiple of it, so that one program serves all calls.
    """
    parts = [jax.device_get(_traced(model, images[k : k + BATCH])) for k in range(0, len(images), BATCH)]
    *grids, output = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
    if output.ndim == 2:
        output = output[:, None, None]
    stride = tuple(size // count for size, count in zip(images.shape[1:3], output.shape[1:3], strict=True))
    offset: Any = np.zeros((len(output), 2), np.int32)
    if output.shape[1:3] == (1, 1):
        stride = (1, 1)  # so that any shift of the image leaves it in place
    return [*grids, Grid(output, stride, offset)]


@jax.jit
def _traced(model: ModelModule, images: jax.Array) -> list[Any]:
    found = model.features(images, blocks=range(backbone(model).config.depth), norm=False)
    return [model.embedding(images).patches, *found.grids[:-1], output(model, images)]


def output(model: ModelModule, images: jax.Array) -> jax.Array:
    """Logits [B, classes], a segmenter's logits [B, h, w, classes], or the pooled features of a model without them."""
    return model(images) if offers(model) & {"logits", "maps"} else model.pooled(images)


def _in_float64(model: ModelModule) -> ModelModule:
    def wide(leaf):
        array = np.asarray(leaf)
        return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array

    return jax.device_put(jax.tree.map(wide, model))


def _check(name: str, values: Any) -> None:
    if not np.isfinite(values).all():
        raise ValueError(f"symmetry: {name} is NaN or infinite on random inputs; check the model's parameters.")
    if not np.any(values):
        raise ValueError(f"symmetry: {name} is zero, which proves nothing; train the model, or randomise it.")


def _compared(found: Grid, expected: Grid) -> tuple[float, float]:
    """The deviation and the correlation of two maps."""
    alike = found.values.shape == expected.values.shape and found.stride == expected.stride
    if not alike or not np.isfinite(found.values).all():
        return np.inf, 0.0
    b = expected.values.astype(np.float64)
    axes = tuple(range(b.ndim - 1)) if b.shape[1] * b.shape[2] > 1 else (-1,)  # the output has too few tokens
    ours = b - b.mean(axes, keepdims=True)
    largest, together = 0.0, 0.0
    for values, weights in overlaps(found, expected):
        a, seen = values.astype(np.float64), weights > 0
        largest = max(largest, float(np.abs(a - b)[seen].max()))
        products = (a - a.mean(axes, keepdims=True)) * ours
        together += float((products.sum((1, 2, 3)) * weights).sum())
    theirs = found.values - found.values.mean(axes, keepdims=True, dtype=np.float64)
    scale = np.sqrt(float(np.square(theirs).sum()) * float(np.square(ours).sum()))
    return largest / float(np.abs(b).max()), together / scale if scale else 1.0
