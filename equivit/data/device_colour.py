"""Colour changes on the accelerator; on the host they take most of the time of making views.

With `data.augment.device=True` the host draws the changes and writes them as numbers into the batch, which thus still
depends only on the seed and the batch number: "global_colours" float32 [B, 2, 11] with the unchanged "global_crops"
uint8 [B, 2, H, W, C], and "local_colours" [B, L, 11] with "local_crops".  The objective applies them in its `prepare`:

    crops = device_colour.apply(batch["global_crops"], batch["global_colours"])

Results equal `colour.changed` exactly: each step rounds to 8 bits as Pillow does.  The exceptions are ties in
the blur, which differ by one level, and hues exactly on one of Pillow's 255 steps (3 in 1,000 colours): Pillow's
float32 may fall one step below, which is 1.4 degrees, or at most 6 levels for the purest colours.
"""

import jax
import jax.numpy as jnp

from equivit.data import colour


def apply(crops: jax.Array, numbers: jax.Array) -> jax.Array:
    """Apply the changes encoded by `colour.packed`.  For use inside a compiled function.

    Shapes: uint8 [*B, H, W, C], float32 [*B, 11] -> uint8 [*B, H, W, C]; C is 1 or 3.
    """
    numbers = jnp.moveaxis(numbers, -1, 0)[..., None, None, None]  # [11, *B, 1, 1, 1], to broadcast with images
    names, values, rest = jnp.split(numbers, (colour.MOST, 2 * colour.MOST))
    images, _ = jax.lax.scan(_jitter, crops.astype(jnp.float32), (names, values))
    grey, sigma, solarise = rest
    images = jnp.where(grey > 0, _grey(images), images)
    images = _blurred(images, sigma)
    return jnp.where(solarise > 0, jnp.minimum(images, 255 - images), images).astype(jnp.uint8)


def _jitter(images: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    """One step of each crop's jitter.  Steps differ between crops, so compute all changes and select one."""
    names, values = step
    changed = images
    for index, name in enumerate(colour.JITTERS):
        changed = jnp.where(names == index, JITTERS[name](images, values), changed)
    return changed, None


def _blended(images: jax.Array, base: jax.Array | float, factor: jax.Array) -> jax.Array:
    return jnp.clip(jnp.floor(base + factor * (images - base)), 0, 255)


def _grey(images: jax.Array) -> jax.Array:
    """ITU-R 601 in 16-bit arithmetic, exact in float32: [..., C] -> [..., 1]."""
    if images.shape[-1] == 1:
        return images
    red, green, blue = jnp.split(images, 3, -1)
    return jnp.floor((19595 * red + 38470 * green + 7471 * blue + 32768) / 65536)


def _mean_grey(images: jax.Array) -> jax.Array:
    """The mean of all pixels, rounded; sums are exact integers."""
    pixels = images.shape[-3] * images.shape[-2]
    total = _grey(images).astype(jnp.int32).sum((-3, -2), keepdims=True)
    return ((2 * total + pixels) // (2 * pixels)).astype(jnp.float32)


def _turned(images: jax.Array, share: jax.Array) -> jax.Array:
    """Rotate the hue in Pillow's 8-bit HSV.  An added quarter keeps whole quotients from rounding down."""
    if images.shape[-1] == 1:
        return images
    red, green, blue = jnp.split(images, 3, -1)
    value = images.max(-1, keepdims=True)
    chroma = value - images.min(-1, keepdims=True)
    sixths = jnp.where(value == green, blue - red + 2 * chroma, red - green + 4 * chroma)
    sixths = jnp.where(value == red, green - blue, sixths) % jnp.maximum(6 * chroma, 1)
    hue = jnp.floor((255 * sixths + 0.25) / jnp.maximum(6 * chroma, 1))
    saturation = jnp.floor((255 * chroma + 0.25) / jnp.maximum(value, 1))
    hue = (hue + jnp.trunc(255 * share)) % 256
    # Along the hue circle of 6 x 255, a channel is high for a third, falls in a sixth, is low for a third, and rises.
    place = (6 * hue - 510 * jnp.arange(3)) % 1530
    fall = jnp.clip(jnp.minimum(place - 255, 1275 - place), 0, 255)
    return value - jnp.round(value * saturation * fall / 65025)


def _blurred(images: jax.Array, sigma: jax.Array) -> jax.Array:
    """The blur of nine taps; at sigma = 0 the centre has all the weight."""
    places = [jnp.exp(-0.5 * jnp.square(k / jnp.maximum(sigma, 0.01))) for k in range(colour.REACH + 1)]
    weights = [place / (2 * sum(places) - places[0]) for place in places]
    for axis in (images.ndim - 3, images.ndim - 2):
        length, margin = images.shape[axis], (colour.REACH, colour.REACH)
        padded = jnp.pad(images, [margin if i == axis else (0, 0) for i in range(images.ndim)], mode="reflect")
        at = [jax.lax.slice_in_dim(padded, k, k + length, axis=axis) for k in range(2 * colour.REACH + 1)]
        pairs = (weights[k] * (at[colour.REACH - k] + at[colour.REACH + k]) for k in range(1, colour.REACH + 1))
        images = weights[0] * images + sum(pairs)
    return jnp.round(images)


# As `colour.JITTERS`, for whole numbers in float32 [*B, H, W, C].
JITTERS = {
    "brightness": lambda images, factor: _blended(images, 0.0, factor),
    "contrast": lambda images, factor: _blended(images, _mean_grey(images), factor),
    "saturation": lambda images, factor: _blended(images, _grey(images), factor),
    "hue": _turned,
}
