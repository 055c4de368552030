"""What every model's `features` returns."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """Features on a grid of positions.

    Attributes:
      values: [B, *grid, D]: two grid axes for images, one for series or for a kept subset of tokens.
      stride: pixels (samples) between neighbours along each grid axis.
      offset: [B, axes], where each grid begins, in pixels; zero unless the model chooses its grid.
    """

    values: jax.Array
    stride: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    offset: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Features:
    """Tokens of one image by their role.

    Attributes:
      cls: [B, D], or None where the model has no class token.
      registers: [B, R, D].
      patches: the grid of patch tokens.
      blocks: the same for each block that was asked for, by its index.
    """

    cls: jax.Array | None
    registers: jax.Array
    patches: Grid
    blocks: dict[int, "Features"]
