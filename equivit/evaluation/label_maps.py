"""Predict label maps from logits: on whole images or sliding windows, at several scales, with optional flips.

A view is the prediction at one scale, optionally flipped and flipped back.  The logits of overlapping windows are
averaged.  Each view is resized to the size of the labels.  With several views, the class has the largest mean softmax.

This follows MMSegmentation: windows start at the upper left corner in steps of the stride, the last ones are moved back
into the image, and windows are cut to smaller images; softmax comes before the mean; resizing is bilinear without
antialiasing (align_corners=False).
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from equivit import constraints
from equivit.constraints import PositiveFloat, PositiveInt, Size
from equivit.data import crops
from equivit.data.config import LARGEST_SIDE
from equivit.evaluation.predictions import Batch, Predict
from equivit.layers import resizing
from equivit.symmetry import fields

Array = np.ndarray | jax.Array


@dataclasses.dataclass(frozen=True)
class Views:
    """The views of an image: windows, scales and flips.

    Raises ValueError for an invalid value, a stride that leaves gaps, or a stride without a window.
    """

    window: Size | None = None  # (height, width) of the windows in pixels; None: the whole image
    stride: Size | None = None  # from one window to the next, (down, right); None: the window size, without overlap
    scales: tuple[PositiveFloat, ...] = (1.0,)  # factors of the image's sides, which are then rounded
    flip: bool = False  # also predict the mirror image

    multiple = 1  # divides the sides of scaled images

    def __post_init__(self):
        constraints.check_fields(self, "views")
        if self.stride is None:
            return
        if self.window is None:
            raise ValueError(
                f"config.evaluation.segmentation.stride={self.stride} needs a window; set "
                "config.evaluation.segmentation.window too, such as (512, 512)."
            )
        if self.stride[0] > self.window[0] or self.stride[1] > self.window[1]:
            nearest = min(self.stride[0], self.window[0]), min(self.stride[1], self.window[1])
            raise ValueError(
                f"config.evaluation.segmentation.stride={self.stride} must not exceed window={self.window}, or pixels "
                f"between windows would have no class; the nearest is {nearest}."
            )

    @property
    def turned(self) -> "Views":
        """The views of images after a quarter turn: the sides of windows are swapped."""
        window, stride = self.window, self.stride
        return dataclasses.replace(self, window=window and window[::-1], stride=stride and stride[::-1])


@dataclasses.dataclass(frozen=True)
class WholeViews(Views):
    """Views of whole images."""

    multiple: PositiveInt = 1  # the sides of scaled images are rounded up to its multiples (`data.multiple`)


def settings(config: ConfigDict) -> Views:
    """The views of `config.evaluation.segmentation`; ValueError if windows do not fit the images of `config.data`.

    Whole images keep their sizes: windows are cut to fit, and scaled sides stay multiples of `config.data.multiple`.
    """
    section, data = config.evaluation.segmentation.to_dict(), config.data
    if data.eval_crop == "whole":
        return WholeViews(**section, multiple=data.multiple)
    views = Views(**section)
    for scale in views.scales:
        scaled = _times(data.image_size, scale, 1)
        if views.window is not None and _within(scaled, views.window) != views.window:
            raise ValueError(
                f"config.evaluation.segmentation.window={views.window} must not be larger than the images, "
                f"{scaled[0]}x{scaled[1]} at scale {scale:g}; the nearest is {_within(scaled, views.window)}."
            )
    sizes(views, tuple(data.image_size))
    return views


def check_model(model: nnx.Module, views: Views) -> None:
    """ValueError for windows or scales with a model without logits for pixels (`SegmenterConfig.own_size`)."""
    if _own_size(model) and (views.window is not None or views.scales != (1.0,)):
        raise ValueError(
            f"config.evaluation.segmentation: window={views.window} and scales={views.scales} do not fit a model with "
            "own_size=True, which has no logits for pixels; set window=None and scales=(1.0,)."
        )


def _own_size(model):
    return getattr(getattr(model, "config", None), "own_size", False)


def comparable(model: nnx.Module, predict: Predict, batch: Batch) -> Batch:
    """Resize the label maps of a batch to the size of the logits if the model has `own_size`; else keep them."""
    if not _own_size(model):
        return batch
    size = jax.eval_shape(predict, batch["image"]).shape[1:3]
    maps = _nearest(size, batch["map"], batch.get("map_size"))
    return {name: value for name, value in batch.items() if name != "map_size"} | {"map": maps}


def sizes(views: Views, size: Size) -> dict[str, Size]:
    """The sizes of the model's input images, by key of the config: windows, or the image at each scale.

    Raises ValueError for a scale that makes the image too large.
    """
    found = {}
    for scale in views.scales:
        if max(size) * scale > LARGEST_SIDE:
            raise ValueError(
                f"config.evaluation.segmentation.scales={scale:g} makes images of {size[0]}x{size[1]} larger than "
                f"{LARGEST_SIDE} pixels a side; the largest is {LARGEST_SIDE / max(size):.4g}."
            )
        scaled, key = _times(size, scale, views.multiple), "config.data.image_size"
        if scale != 1:
            key = f"config.evaluation.segmentation.scales={scale:g}"
        if views.window is None:
            found[key] = scaled
        else:
            found["config.evaluation.segmentation.window"] = _within(scaled, views.window)
    return found


def logits(predict: Predict, images: Array, views: Views) -> Iterator[jax.Array]:
    """Yield the logits of each view, [B, h, w, classes] float32, at the image size of the view's scale.

    The images are uint8 [B, H, W, C]; `predict` maps them to logits [B, H, W, classes].
    """
    for scale in views.scales:
        scaled = _scaled(_times(images.shape[1:3], scale, views.multiple), images)
        yield _windowed(predict, scaled, views)
        if views.flip:
            yield _mirrored(_windowed(predict, _mirrored(scaled), views))


def classes(
    views: Iterator[jax.Array], size: tuple[int, ...], valid: Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Predict the class of each pixel, int32 [B, H, W], and whether each image's logits are finite, bool [B].

    Args:
      views: the logits of one or more views, [B, h, w, classes].
      size: (H, W) of the labels.
      valid: int [B, 2]: the sizes of the labels, if they differ and are padded to `size` on the right and below.
        Classes in the padding are meaningless.
    """
    first, second = next(views), next(views, None)
    if second is None:
        return _largest(size, first, valid)  # no softmax: its rounding could create ties
    total = _added(_shares(size, first, valid), _shares(size, second, valid))
    for view in views:
        total = _added(total, _shares(size, view, valid))
    return _largest(size, total, None)


def predicted(predict: Predict, batch: Batch, views: Views) -> tuple[jax.Array, jax.Array]:
    """Predict `classes` of a batch, at the sizes of its labels.

    A batch has "image" uint8 [B, H, W, C] and "map" [B, H', W']; "map_size" int [B, 2] if maps of different sizes are
    padded.
    """
    return classes(logits(predict, batch["image"], views), batch["map"].shape[1:], batch.get("map_size"))


def _times(size: tuple[int, ...], scale: float, multiple: int) -> Size:
    height, width = (max(1, math.floor(side * scale + 0.5)) for side in size)
    return crops.rounded_up(height, width, multiple)


def _within(size: tuple[int, ...], window: Size) -> Size:
    return min(size[0], window[0]), min(size[1], window[1])


def _windowed(predict: Predict, images: jax.Array, views: Views) -> jax.Array:
    """Predict the logits of images [B, H, W, C], averaged over the windows of each pixel."""
    size = (images.shape[1], images.shape[2])
    window = size if views.window is None else _within(size, views.window)
    if window == size:
        return predict(images)
    starts = _starts(size, window, views.stride or window)
    parts = tuple(predict(_cut(window, images, start)) for start in np.array(starts, np.int32))
    number = np.zeros((*size, 1), np.float32)
    for top, left in starts:
        number[top : top + window[0], left : left + window[1]] += 1
    return _averaged(starts, parts, number)


def _starts(size: tuple[int, ...], window: Size, stride: Size) -> tuple[tuple[int, int], ...]:
    """The upper left corners of the windows."""
    down, right = (
        [min(step * number, whole - part) for number in range(-(-(whole - part) // step) + 1)]
        for whole, part, step in zip(size, window, stride, strict=True)
    )
    return tuple((top, left) for top in down for left in right)


@functools.partial(jax.jit, static_argnums=0)  # one program for all windows
def _cut(window, images, start):
    return jax.lax.dynamic_slice(images, (0, start[0], start[1], 0), (len(images), *window, images.shape[-1]))


@functools.partial(jax.jit, static_argnums=0)
def _averaged(starts, parts, number):
    size, (height, width) = number.shape[:2], parts[0].shape[1:3]

    def padded(part, top, left):
        return jnp.pad(part, ((0, 0), (top, size[0] - height - top), (left, size[1] - width - left), (0, 0)))

    return sum(padded(part, *start) for part, start in zip(parts, starts, strict=True)) / number


_nearest = jax.jit(lambda size, maps, valid: resizing.nearest(maps, size, valid), static_argnums=0)
_mirrored = jax.jit(functools.partial(fields.act_on_image, "m"))
_added = jax.jit(jnp.add)


@functools.partial(jax.jit, static_argnums=0)
def _scaled(size, images):
    """Resize images and round them to whole levels."""
    if images.shape[1:3] == size:
        return images
    return jnp.round(resized(images.astype(jnp.float32), size)).astype(images.dtype)


@functools.partial(jax.jit, static_argnums=0)
def _shares(size, view, valid):
    return jax.nn.softmax(resized(view, size, valid))


@functools.partial(jax.jit, static_argnums=0)
def _largest(size, scores, valid):
    scores = resized(scores, size, valid)
    return scores.argmax(-1).astype(jnp.int32), jnp.isfinite(scores).all((1, 2, 3))


def resized(x: jax.Array, size: tuple[int, ...], valid: Array | None = None) -> jax.Array:
    """Resize maps [B, h, w, C] to [B, H, W, C] bilinearly, without antialiasing (align_corners=False).

    Args:
      x: floating-point maps.
      size: (H, W).
      valid: int [B, 2], the size of each resized map, within `size`; None: `size`.  The rest, on the right and below,
        repeats the border.
    """
    if valid is None:
        if x.shape[1:3] == size:
            return x
        valid = np.array([size] * len(x), np.int32)
    for k, length in enumerate(size):
        x = _interpolated(x, 1 + k, length, jnp.asarray(valid[:, k], x.dtype))
    return x


def _interpolated(x, axis, length, valid):
    """Interpolate along an axis: position i + 1/2 of `valid` maps to the same fraction of the old length."""
    old = x.shape[axis]
    place = (jnp.arange(length) + 0.5) * (old / valid)[:, None] - 0.5
    place = jnp.clip(place, 0, old - 1)
    below = jnp.floor(place).astype(jnp.int32)
    others = tuple(k for k in range(1, x.ndim) if k != axis)
    share, below, above = (
        jnp.expand_dims(part, others) for part in (place - below, below, jnp.minimum(below + 1, old - 1))
    )
    low, high = (jnp.take_along_axis(x, rows, axis, mode="promise_in_bounds") for rows in (below, above))
    return low + share * (high - low)
