"""Motions of an image, a turn, mirror or circular shift, and how they move maps of tokens.

All arrays are of NumPy: JAX would compile a program for each operation, motion and shape.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from equivit.models.features import Grid
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC, Group

Pair = tuple[int, int]  # (height, width), or (down, right)
SYMMETRIES = ("octic", "flip", "shift")


class Motion(Protocol):
    """A motion of images and of maps of tokens."""

    @property
    def name(self) -> str:
        """Its name in a report."""
        ...

    @property
    def symmetries(self) -> tuple[str, ...]:
        """The SYMMETRIES that it belongs to."""
        ...

    def of_images(self, images: Any) -> Any:
        """The moved images, [B, H, W, C]."""
        ...

    def of_grid(self, grid: Grid, group: Group | None) -> Grid:
        """The moved map; its channels follow the irreps of `group` if the values are components of its fields."""
        ...

    @property
    def inverse(self) -> "Motion":
        """The motion that undoes this one."""
        ...


@dataclasses.dataclass(frozen=True)
class Turn:
    """An element of the octic group, such as "r" or "m"."""

    element: str

    @property
    def name(self) -> str:
        return f"element '{self.element}'"

    @property
    def symmetries(self) -> tuple[str, ...]:
        return ("octic", "flip") if self.element in ("e", "m") else ("octic",)

    def of_images(self, images: Any) -> Any:
        return fields.act_on_image(self.element, images)

    def of_grid(self, grid: Grid, group: Group | None) -> Grid:
        moved = grid.turned(self.element)
        if group is None or self.element not in group.elements:
            return moved
        field = fields.act_on_channels(self.element, fields.from_dense(moved.values, group))
        return dataclasses.replace(moved, values=fields.to_dense(field))

    @property
    def inverse(self) -> "Turn":
        return Turn(OCTIC.inverse(self.element))


@dataclasses.dataclass(frozen=True)
class Shift:
    """A circular shift by (down, right) pixels; maps keep their tokens, and the origin of their grid moves."""

    offset: Pair

    @property
    def name(self) -> str:
        return f"shift {self.offset}"

    @property
    def symmetries(self) -> tuple[str, ...]:
        return ("shift",)

    def of_images(self, images: Any) -> Any:
        return np.roll(images, self.offset, (1, 2))

    def of_grid(self, grid: Grid, group: Group | None) -> Grid:
        return dataclasses.replace(grid, offset=grid.offset + np.array(self.offset, grid.offset.dtype))

    @property
    def inverse(self) -> "Shift":
        return Shift((-self.offset[0], -self.offset[1]))


def turns(square: bool) -> list[Turn]:
    """All elements of the octic group, or the elements that keep the sides of an image."""
    return [Turn(element) for element in OCTIC.elements if square or element.count("r") % 2 == 0]


def shifts(stride: Pair, period: Pair) -> list[Shift]:
    """Shifts along each axis by every residue of the stride, and by every number of strides up to a period.

    Any shift is a sum of them, up to whole periods.

    Args:
      stride: (height, width) of the largest stride of a model's maps, in pixels.
      period: after which its windows repeat, a multiple of the stride.
    """
    found = []
    for axis in (0, 1):
        small = range(1, stride[axis] + 1)
        large = range(2 * stride[axis], period[axis] + 1, stride[axis])
        found += [Shift((step, 0) if axis == 0 else (0, step)) for step in (*small, *large)]
    return found


def overlaps(found: Grid, expected: Grid) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs (values of `found`, weights [B]): where the grids lie differently, tokens overlap several others.

    `found` is rolled so that equal indices overlap on the image.  Weights are the shares of a token's area.
    """
    stride = np.array(expected.stride)
    size = stride * expected.values.shape[1:3]
    ahead, rest = np.divmod((found.offset - expected.offset) % size, stride)
    for later in itertools.product((0, 1), repeat=2):
        weights = np.where(later, rest, stride - rest) / stride
        if not weights.all(-1).any():
            continue
        values = np.empty_like(found.values)
        for one, place, step in zip(found.values, values, ahead + later, strict=True):
            place[...] = np.roll(one, tuple(step), (0, 1))
        yield values, weights.prod(-1)
