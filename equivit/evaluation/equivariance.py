"""The equivariance error of a model's equivariant blocks."""

import functools

import jax
import jax.numpy as jnp

from equivit.data.devices import Batch, on_devices
from equivit.data.pixels import normalize
from equivit.layers.grid import check_grid
from equivit.models.model import ModelModule
from equivit.models.vit.model import ViT
from equivit.symmetry import fields


def has_fields(model: ModelModule) -> bool:
    """Whether a model has an equivariant block, whose output `model.fields` returns."""
    return hasattr(model, "fields") and model.config.k > 0


def field_error(model: ViT, batch: Batch, mean: tuple[float, ...], std: tuple[float, ...]) -> float:
    """The largest deviation of f(g x) from g f(x), relative to the largest entry of f(x), over all elements g.

    f(x) is the field after the last equivariant block, so only rounding contributes, even in hybrid models, whose
    logits are not invariant.

    Args:
      model: a ViT of any family.
      batch: "image" uint8 [B, H, W, C].
      mean, std: as in `predictions.predictor`.

    Raises:
      ValueError: the model has no equivariant block.
    """
    config = model.config
    if not has_fields(model):
        raise ValueError(f"field_error: a {config.family} model has no equivariant block; use a family such as H8.")
    images = on_devices({"image": batch["image"]})["image"]
    grid = check_grid(images.shape[1:3], config.patch_size, "image")
    field = functools.partial(_field, tuple(mean), tuple(std), model)
    upright = field(images)
    gaps = [_gap(g, field(_turned(g, images)), upright, grid, config.prefix) for g in config.group.elements]
    return max(map(float, gaps))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _field(mean, std, model, images):
    last = model.config.k - 1
    values = model.fields(normalize(images, mean, std), (last,))[last]
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), values)


_turned = jax.jit(fields.act_on_image, static_argnums=0)


@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _gap(g, turned, upright, grid, prefix):
    difference = jax.tree.map(jnp.subtract, turned, fields.act(g, upright, grid, prefix))
    return _largest(difference) / _largest(upright)


def _largest(field):
    return jnp.max(jnp.stack([jnp.abs(leaf).max() for leaf in jax.tree.leaves(field)]))
