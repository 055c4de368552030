"""Classifiers and batches made by hand, whose results are known, and small random models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from equivit import logical
from equivit.models import zoo


def batches(images, labels, size=3):
    """Evaluation batches of `size`, the last one padded, as the loader makes them."""
    padding = -len(images) % size
    images = np.concatenate([images, np.zeros((padding, *images.shape[1:]), np.uint8)]).astype(np.uint8)
    rows = {
        "image": images,
        "label": np.concatenate([labels, np.zeros(padding)]).astype(np.int32),
        "weight": np.repeat([1, 0], [len(labels), padding]).astype(np.float32),
        "index": np.concatenate([np.arange(len(labels)), np.full(padding, -1)]),
    }
    return [{name: rows[name][i : i + size] for name in rows} for i in range(0, len(images), size)]


def corner(images):
    """Two logits, by whether the upper left pixel is the largest of all: not symmetric under any element but "e"."""
    top = images[:, 0, 0, 0].astype(jnp.float32) - images.astype(jnp.float32).max((1, 2, 3))
    return jnp.stack([-1 - 4 * top, jnp.ones_like(top)], axis=-1)


def brightness(images):
    """Three logits that no turn or mirror changes: the counts of pixels equal to 0, 1 and 2."""
    return jnp.stack([(images == value).sum((1, 2, 3)) for value in range(3)], axis=-1).astype(jnp.float32)


def marked(corners, shape=(4, 4, 1)):
    """An image for each name: black, with one white corner."""
    height, width, _ = shape
    places = {
        "upper left": (0, 0),
        "upper right": (0, width - 1),
        "lower left": (height - 1, 0),
        "lower right": (height - 1, width - 1),
    }
    images = np.zeros((len(corners), *shape), np.uint8)
    for image, name in zip(images, corners, strict=True):
        image[places[name]] = 1
    return images


@functools.cache
def random_model(family, **options):
    """A small ViT of a family, every parameter random, biases too.  Drawn by numpy: nothing has to be compiled."""
    name = {"plain": "vit_ti16", "H2": "flip_vit_ti16"}.get(family, "octic_vit_ti16")
    sizes = dict(width=32, depth=2, num_heads=2, patch_size=4, image_size=(16, 16), num_classes=10, in_channels=1)
    model = zoo.abstract(name, family=family, **sizes | options)
    rng, arrays = np.random.default_rng(0), {}
    for leaf, shape in jax.eval_shape(logical.take, model).items():
        noise = 0.2 * rng.normal(size=shape.shape)  # 0.2 is about the unit gain of 32 channels
        arrays[leaf] = (noise + ("scale" in leaf)).astype(shape.dtype)
    return logical.put(model, jax.device_put(arrays))
