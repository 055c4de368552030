"""Random keys for parameters, counted in Python."""

import jax
from flax import nnx


class Keys(nnx.Rngs):
    """Draws the same keys as `nnx.Rngs(params=key)`, for models built within a trace.

    `nnx.Rngs` counts its draws in an array.  Under tracing, each count searches all earlier operations, so the time to
    build a model grows with the square of its depth.

    Args:
      key: a key of `jax.random.key`, or a seed.
    """

    def __init__(self, key: jax.Array | int):
        super().__init__()
        self.params = _Stream(jax.random.key(key) if isinstance(key, int) else key)


class _Stream:
    def __init__(self, key: jax.Array):
        self._key, self._count = key, 0

    def __call__(self) -> jax.Array:
        key = jax.random.fold_in(self._key, self._count)
        self._count += 1
        return key
