"""The grid of patch tokens: the layout passed to blocks, and checks of image sizes."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from equivit import errors


class Layout(NamedTuple):
    """The layout of a token sequence: everything static about it.

    Attributes:
      grid: (h, w) of the patch tokens, in row-major order; (n,) for a series; () if some patches were removed.
      prefix: number of tokens before them: class token and registers, or Jumbo rows.
      shift: (rows, columns) by which every second block shifts its windows, in models with windows.
      reads_patches: whether the patch tokens are read after the last block.  If not, models whose head ignores them
        skip their last MLP and norm.
    """

    grid: tuple[int, ...]
    prefix: int = 0
    shift: tuple[int, int] = (0, 0)
    reads_patches: bool = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Frame:
    """The position of a token map on its image, a torus: token (i, j) lies at offset + (i, j) stride.

    Attributes:
      offset: [B, 2] int32, (row, column) in pixels modulo the image.
      stride: (rows, columns) in pixels.
      image: (height, width).
    """

    offset: jax.Array
    stride: tuple[int, int] = dataclasses.field(metadata={"static": True})
    image: tuple[int, int] = dataclasses.field(metadata={"static": True})

    def rolled(self, tokens: jax.Array) -> "Frame":
        """The frame of the map rolled by -`tokens` [B, 2]; its origin moves forward by `tokens`."""
        size = jnp.array(self.image, jnp.int32)
        return dataclasses.replace(self, offset=(self.offset + tokens * jnp.array(self.stride, jnp.int32)) % size)

    def every(self, stride: tuple[int, int]) -> "Frame":
        """The frame of a map with every `stride`-th token of this one."""
        return dataclasses.replace(self, stride=(self.stride[0] * stride[0], self.stride[1] * stride[1]))


def required(layout: Layout | None, name: str) -> Layout:
    """The layout of a layer that needs one; ValueError, which names the layer, if there is none."""
    if layout is None:
        raise ValueError(f"{name}: the layer needs the grid of its tokens; pass layout=Layout(grid=(h, w)).")
    return layout


def grid_of(layout: Layout | None, name: str) -> tuple[int, int]:
    """The grid (h, w) of patches; ValueError, which names the layer, without a layout or if patches were removed."""
    grid = required(layout, name).grid
    if len(grid) != 2:
        raise ValueError(f"{name}: patches were removed (keep=), so the others do not fill a grid.")
    return grid[0], grid[1]


def check_grid(image_size: tuple[int, ...], patch_size: tuple[int, int], name: str) -> tuple[int, int]:
    """The token grid (h, w); ValueError if the patch size does not divide the image size."""
    for axis, size, patch in zip(("height", "width"), image_size, patch_size, strict=True):
        if size % patch or size < patch:
            raise ValueError(
                f"{name} {image_size[0]}x{image_size[1]}: the {axis} {size} is not divisible by the patch {axis} "
                f"{patch}; {errors.multiples(size, patch)}."
            )
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


def check_array(name: str, value, axes: str) -> None:
    """Raise ValueError unless a value is a NumPy or JAX array; `axes` is its shape, for the message."""
    if not hasattr(value, "ndim") or not hasattr(value, "dtype"):
        found = "None" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{name} are {found}; they must be an array {axes}, such as the result of jnp.stack.")


def check_images(images: jax.Array, in_channels: int, patch_size: tuple[int, int]) -> tuple[int, int]:
    """The token grid of images [*B, H, W, C]; ValueError for a wrong rank, type, channel count or size."""
    if getattr(images, "ndim", 0) < 4 or images.shape[-1] != in_channels:
        check_array("images", images, f"[*B, H, W, {in_channels}]")
        near = "; images[None] is a batch of one" if getattr(images, "ndim", 0) == 3 else ""
        raise ValueError(f"images {images.shape} must be [*B, H, W, {in_channels}]{near}.")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"images are {images.dtype}; they must be floating point, normalised by mean and standard deviation."
        )
    return check_grid(images.shape[-3:-1], patch_size, "image")
