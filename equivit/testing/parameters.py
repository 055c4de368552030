"""Random parameters for tests."""

import functools
import math

import jax
import numpy as np
from flax import nnx

from equivit import logical

DRAWN = (nnx.Param, nnx.BatchStat)


def randomise(module: nnx.Module, key: jax.Array) -> nnx.Module:
    """A copy with random parameters and running statistics, so that no zero hides an error.

    Scales and variances are near 1, biases, means and tokens have standard deviation 1/2, matrices have unit gain.
    Arrays keep their dtype.  The module may be abstract, as from `models.abstract`.
    """

    def draw(name, index, array):
        # Use numpy: JAX would compile a program for each shape.
        noise = np.random.default_rng([*seed, index]).standard_normal(array.shape)
        if array.ndim >= 2:
            noise = noise * math.prod(array.shape[:-1]) ** -0.5
        elif name.endswith("variance"):
            noise = np.exp(0.2 * noise)
        elif name.endswith("mean"):
            noise = 0.5 * noise
        elif "scale" in name or ("norm" in name and not name.endswith("bias")):
            noise = 1 + 0.2 * noise
        else:
            noise = 0.5 * noise
        return noise.astype(array.dtype)

    seed = jax.random.key_data(key).tolist()
    tensors = jax.eval_shape(functools.partial(logical.to_logical, kind=DRAWN), module)
    return logical.from_logical(module, {n: draw(n, i, a) for i, (n, a) in enumerate(tensors.items())}, DRAWN)
