"""How near an octic model is to its teacher, and how equivariant both are."""

import functools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import costs, profile
from equivit.depthwise.equations import streamed
from equivit.models.vit.model import ViT
from equivit.objectives import feature_matching
from equivit.precision import cast
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

ROUNDS = 20  # of timing


class Agreement(NamedTuple):
    """The agreement of a model's last features, after the final norm, with the teacher's, as in the loss.

    From both the teacher's mean over images is subtracted, at each token.

    Attributes:
      patches, prefix: mean cosine of the patch tokens, and of the tokens before them (None if there are none).
      patches_left, prefix_left: squared distance of these tokens, relative to the teacher's squares.
    """

    patches: float
    prefix: float | None
    patches_left: float
    prefix_left: float | None


def agreement(teacher: ViT, model: ViT, batches: Iterable[np.ndarray], *, orientations: bool) -> Agreement:
    """Compare the features; the teacher's are averaged over the eight orientations if these count."""
    total, images = streamed(functools.partial(_total, orientations), batches, teacher, model)
    mean = np.asarray(total / images, np.float32)
    sums = streamed(functools.partial(_sums, orientations), batches, mean, teacher, model)
    cosines: list[Any] = [None, None]
    errors: list[Any] = [None, None]
    for index, part in enumerate(feature_matching.parts(model.config.prefix)):
        near, left, squares = (np.asarray(a)[part] for a in sums)
        cosines[index], errors[index] = float(near.mean() / images), float(left.sum() / squares.sum())
    return Agreement(*cosines, *errors)


@functools.partial(jax.jit, static_argnums=0)
def _total(orientations, teacher, model, images, weight):
    """The sum of the teacher's tokens over images, and the number of images."""
    wanted = feature_matching.targets(teacher, images, "last", model.config.k, orientations)
    return (wanted * weight[:, None, None]).sum(0), weight.sum()


@functools.partial(jax.jit, static_argnums=0)
def _sums(orientations, mean, teacher, model, images, weight):
    """By token: sums over images of cosines, squared distances and the teacher's squares."""
    wanted = feature_matching.targets(teacher, images, "last", model.config.k, orientations) - mean
    found = model.tokens(images).astype(jnp.float32) - mean
    each = feature_matching.cosine(found, wanted), jnp.square(found - wanted).sum(-1), jnp.square(wanted).sum(-1)
    return tuple((part * weight[:, None]).sum(0) for part in each)


def deviation(model: ViT, images: Any) -> float:
    """The largest deviation over the group of turned features, moved back, from the upright ones; relative.

    The features are all tokens after the final norm: 0 for an invariant model, up to rounding.
    """
    upright = np.asarray(_tokens(model, images))
    worst, (ph, pw) = 0.0, model.config.patch_size
    for g in OCTIC.elements[1:]:
        turned = np.ascontiguousarray(fields.act_on_image(g, images))
        grid = turned.shape[1] // ph, turned.shape[2] // pw
        found: Any = np.asarray(_tokens(model, turned))
        back = fields.act_on_tokens(OCTIC.inverse(g), found, grid, model.config.prefix)
        worst = max(worst, float(np.linalg.norm(back - upright) / np.linalg.norm(upright)))
    return worst


_tokens = jax.jit(lambda model, images: model.tokens(images).astype(jnp.float32))


def gigaflops(model: ViT, size: tuple[int, int]) -> float:
    """Multiply-adds of the features of one image, in billions, counted as in octic ViTs."""
    image = jax.ShapeDtypeStruct((1, *size, model.config.in_channels), jnp.float32)
    return costs.count(lambda model, x: model.tokens(x), model, image).fvcore / 1e9


def milliseconds(models: Mapping[str, ViT], images: Any, precision: str) -> dict[str, float]:
    """The median time of the features of an image, by model, timed alternately on batches of these images."""

    def call(model):
        program = jax.jit(lambda model, images: model.tokens(images)).lower(model, images).compile()
        return lambda: jax.block_until_ready(program(model, images))

    images = jnp.asarray(images)
    calls = {name: call(cast(model, precision)) for name, model in models.items()}
    seconds = profile.interleaved(calls, runs=ROUNDS, warmup=2)
    return {name: 1e3 * statistics.median(times) / len(images) for name, times in seconds.items()}
