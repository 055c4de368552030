"""Equivariance check for circular shifts of images."""

import operator
from collections.abc import Callable, Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors
from equivit.models.features import Grid
from equivit.testing import comparison

SMALL = 64  # most pixels of an image for which every shift is tried
# (down, right): one axis and both, odd and even, both directions, larger and smaller than a patch or a window.
NAMED = ((0, 1), (1, 0), (-1, 0), (0, -3), (5, 0), (2, 2), (1, -2), (-4, 7), (13, -6), (-16, 31))


def assert_shift_equivariant(
    fn: Callable,
    x: Any,
    *,
    shifts: Iterable[tuple[int, int]] | None = None,
    output: str = "invariant",
    tol: float | None = None,
) -> float:
    """Check fn(S x) = S fn(x) for circular shifts S of images.

    A periodic image, such as a flat one, equals its shifted copy: it suits `output="invariant"`, but does not determine
    where a grid should begin.

    Args:
      fn: the function to test.  Give it random parameters, biases included: zeros hide errors.
      x: images [*B, H, W, C].  Random images have no ties; two equal objects half a patch apart do.
      shifts: (down, right) in pixels, each for the whole batch; None: all shifts of images of up to 64 pixels, and for
        larger ones eleven of all kinds, the same in every run.
      output: "invariant" (fn(x) does not change), "image" (it has the size of x and moves with it), or "grid" (a `Grid`
        whose values, placed on the image by its stride and offset, move with it).
      tol: largest allowed deviation, relative to the largest entry of the output; None: 1e-5 in float32, 1e-10 in
        float64, 5e-2 in bfloat16 and float16, and 0 for integers and booleans, which must agree exactly.  0 requires
        equal bits.

    Returns the largest relative deviation.

    Raises:
      AssertionError: names the shift and the deviation; also when the output is zero or not finite.
      ValueError: an unknown kind of output, an invalid tolerance, shifts that are invalid or move nothing, or an x or a
        result of fn of another kind.
    """
    errors.one_of("assert_shift_equivariant: output", output, ("invariant", "image", "grid"))
    comparison.check_tolerance("assert_shift_equivariant", tol)
    where = "assert_shift_equivariant: x must be"
    comparison.check_images(where, x)
    comparison.check_not_empty(where, x)
    size = x.shape[-3:-1]
    upright, worst = fn(x), 0.0
    _check_output(upright, output, x.shape)
    scale = comparison.size_of("assert_shift_equivariant", upright.values if output == "grid" else upright)
    for shift in _shifts(shifts, size):
        y, what = fn(_rolled(x, shift)), f"shift {shift}"
        comparison.check_structure(what, y, upright)
        if output == "grid":
            pairs = {"the output": _aligned(what, y, upright, shift)}
        else:
            pairs = comparison.leaves(y, _rolled(upright, shift) if output == "image" else upright)
        worst = max(worst, comparison.compare(what, pairs, scale, tol))
    return worst


def _shifts(shifts: Any, size: tuple[int, int]) -> list[tuple[int, int]]:
    """The shifts to try."""
    height, width = size
    if shifts is None:
        every = height * width <= SMALL
        shifts = list(np.ndindex(height, width))[1:] if every else [*NAMED, (height // 2, width // 2)]
    try:
        pairs = [(operator.index(down), operator.index(right)) for down, right in shifts]
    except (TypeError, ValueError):  # not pairs of integers
        raise ValueError(
            f"assert_shift_equivariant: shifts={errors.shown(shifts)} must be pairs of integers, (down, right)."
        ) from None
    if not any(down % height or right % width for down, right in pairs):
        raise ValueError(
            f"assert_shift_equivariant: shifts={errors.shown(shifts)} leave images of {height}x{width} unmoved, "
            "which shows nothing."
        )
    return pairs


def _rolled(x: Any, shift: tuple[int, int]) -> Any:
    """Shift images on the host: JAX would compile a program for each shift."""
    moved = np.roll(np.asarray(x), shift, (-3, -2))
    return jax.device_put(moved, x.sharding) if isinstance(x, jax.Array) else moved


def _check_output(value: Any, kind: str, shape: tuple[int, ...]) -> None:
    where = f"assert_shift_equivariant: output={kind!r}, so fn(x) must be"
    if kind == "invariant":
        comparison.check_arrays(where, value)
    elif kind == "image":
        comparison.check_images(where, value)
        if value.shape[:-1] != shape[:-1]:
            raise ValueError(f"{where} of the size of x, {list(shape)}; it is {comparison.named(value)}.")
    elif not _is_grid(value, shape):
        raise ValueError(
            f"{where} a Grid of values [*B, h, w, D], with integer offsets [*B, 2], which covers x, {list(shape)}; "
            f"it is {comparison.named(value)}."
        )
    comparison.check_not_empty(where, value)


def _is_grid(value: Any, shape: tuple[int, ...]) -> bool:
    """Whether a value is a grid of two axes that covers an image."""
    if not isinstance(value, Grid) or len(value.stride) != 2 or value.values.ndim != len(shape):
        return False
    covered = tuple(n * step for n, step in zip(value.values.shape[-3:-1], value.stride, strict=True))
    return (
        (*value.values.shape[:-3], *covered) == shape[:-1]
        and value.offset.shape == (*shape[:-3], 2)
        and jnp.issubdtype(value.offset.dtype, jnp.integer)
    )


def _aligned(what: str, y: Grid, upright: Grid, shift: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Values of both grids, with y rolled so that equal indices show the same place of the image."""
    for part, one, other in (("values", y.values, upright.values), ("offset", y.offset, upright.offset)):
        chex.assert_equal_shape((one, other), custom_message=f"{what}: the grid has {part} of a different shape.")
    stride = np.array(upright.stride)
    begins, expected = np.asarray(y.offset).reshape(-1, 2), np.asarray(upright.offset).reshape(-1, 2) + shift
    for k, (found, wanted) in enumerate(zip(begins % stride, expected % stride, strict=True)):
        if (found != wanted).any():
            raise AssertionError(
                f"{what}: the grid of image {k} begins at {tuple(found.tolist())} and not at {tuple(wanted.tolist())}, "
                f"modulo its stride {tuple(upright.stride)}: it does not move with the image."
            )
    a, b = np.asarray(y.values), np.asarray(upright.values)
    steps = (begins - expected) // stride
    moved = [np.roll(one, tuple(k), (0, 1)) for one, k in zip(a.reshape(-1, *a.shape[-3:]), steps, strict=True)]
    return np.stack(moved).reshape(a.shape), b
