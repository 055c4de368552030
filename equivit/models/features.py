"""The return type of every model's `features`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.symmetry import fields, shifts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """Features on a grid of positions.

    On an image, which is a torus, token (i, j) covers the `stride` pixels from offset + (i, j) stride on.  The methods
    are for images.  Use them to compare tokens with pixels, because adaptive models choose the offsets.

    Attributes:
      values: [*B, *grid, D]: two grid axes for images, one for series or for a kept subset of tokens.
      stride: distance between neighbours along each grid axis, in pixels (samples for series).
      offset: int [*B, axes], the origin of each grid in pixels; zero unless the model chooses its grid.
    """

    values: jax.Array
    stride: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    offset: jax.Array

    def to_image(self, maps: Any) -> Any:
        """Move pixel maps [*B, H, W, ...] from the frame of the grid to the frame of the image.

        NumPy arrays stay on the host.
        """
        return _rolled(maps, self.offset)

    def to_grid(self, maps: Any) -> Any:
        """Move pixel maps [*B, H, W, ...] from the frame of the image to the frame of the grid.

        The inverse of `to_image`.  The pixels of token (i, j) are then those from (i, j) stride on.
        """
        return _rolled(maps, -self.offset)

    def pixels(self) -> jax.Array:
        """The value of each pixel's token, in the frame of the image: [*B, h sh, w sw, D]."""
        values, (height, width) = self.values, self.stride
        return self.to_image(values.repeat(height, axis=-3).repeat(width, axis=-2))

    def turned(self, element: str) -> "Grid":
        """The same tokens on the image transformed by an element of the octic group.

        NumPy arrays stay on the host.
        """
        xp: Any = np if isinstance(self.offset, np.ndarray) else jnp
        stride, offset = self.stride, self.offset
        for letter in reversed(element):
            down, right = offset[..., 0], offset[..., 1]
            if letter == "r":
                stride, offset = stride[::-1], xp.stack([-right, down], axis=-1)
            elif letter == "m":
                offset = xp.stack([down, -right], axis=-1)
        values = fields.act_on_image(element, self.values)
        size = [count * step for count, step in zip(values.shape[-3:-1], stride, strict=True)]
        return Grid(values, stride, offset % xp.array(size, offset.dtype))


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

    @property
    def grids(self) -> list[Grid]:
        """The patches after each requested block, ascending, and after the last."""
        return [*(self.blocks[i].patches for i in sorted(self.blocks)), self.patches]


def _rolled(maps: Any, steps: Any) -> Any:
    """Shift maps [*B, H, W, ...] by (down, right) [*B, 2]; NumPy arrays stay on the host."""
    flat, steps = maps.reshape(-1, *maps.shape[steps.ndim - 1 :]), steps.reshape(-1, 2)
    if not isinstance(maps, np.ndarray):
        return shifts.roll(flat, steps).reshape(maps.shape)
    if not steps.any():
        return maps
    moved = np.empty_like(flat)
    for one, place, step in zip(flat, moved, np.asarray(steps), strict=True):
        place[...] = np.roll(one, tuple(step), (0, 1))
    return moved.reshape(maps.shape)
