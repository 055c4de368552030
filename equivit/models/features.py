"""The return type of every model's `features`."""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """Features on a grid of positions.

    Attributes:
      values: [B, *grid, D]: two grid axes for images, one for series or for a kept subset of tokens.
      stride: distance between neighbours along each grid axis, in pixels (samples for series).
      offset: [B, axes], the origin of each grid in pixels; zero unless the model chooses its grid.
    """

    values: jax.Array
    stride: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    offset: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """The tokens of images, grouped by role.

    Attributes:
      cls: [B, D], or None if the model has no class token.
      registers: [B, R, D].
      patches: the grid of patch tokens.
      blocks: the features after each requested block, by its index.
    """

    cls: jax.Array | None
    registers: jax.Array
    patches: Grid
    blocks: dict[int, "Features"]


def of_map(values: jax.Array, stride: int, blocks: dict[int, Features] | None = None) -> Features:
    """The features of a map [*B, h, w, D] without other tokens, whose first entry lies on the first pixel."""
    batch, width = values.shape[:-3], values.shape[-1]
    patches = Grid(values, (stride, stride), jnp.zeros((*batch, 2), jnp.int32))
    return Features(None, jnp.zeros((*batch, 0, width), values.dtype), patches, blocks or {})
