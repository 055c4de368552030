"""Small models of patch tokens alone, with every parameter random, and images for them."""

import functools
import math

import numpy as np

from equivit import logical
from equivit.models import zoo

# Grids of 3x5 tokens.
SMALL = dict(width=16, depth=3, num_heads=2, patch_size=4, image_size=(12, 20), class_token=False, pool="mean")
SMALL |= dict(num_classes=None, layer_scale=0.5, mlp_dim=24)
OCTIC = SMALL | dict(name="octic_vit_b16", family="D8", width=32, depth=2, image_size=(16, 16), mlp_dim=32)


@functools.cache
def model(name="vit_b16", **options):
    """Drawn by NumPy: scales near 1, matrices of gain 2, so that attention is uneven, biases of 1/2."""
    abstract, random = zoo.abstract(name, **options), np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if len(tensor.shape) > 1:
            noise *= 2 * math.prod(tensor.shape[:-1]) ** -0.5
        else:
            noise = 1 + 0.2 * noise if "scale" in tensor.name else 0.5 * noise
        return noise.astype(np.float32)

    tensors = {t.name: draw(t) for table in logical.tensors(abstract).values() for t in table.flat}
    return logical.from_logical(abstract, tensors)


def images(number=6, size=(12, 20), seed=1):
    return np.random.default_rng(seed).normal(size=(number, *size, 3)).astype(np.float32)
