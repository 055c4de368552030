"""Batch normalisation with running statistics."""

import math

import jax
import jax.numpy as jnp
from flax import nnx


class BatchNorm(nnx.Module):
    """Normalises each channel to mean 0 and variance 1 over all other axes; then scale and bias, if affine.

    With `train` it uses the statistics of x, and moves the running statistics towards them by `momentum` (with the
    unbiased variance, as in PyTorch).  Otherwise it uses the running statistics.

    Shapes: [*B, C] -> the same.
    """

    def __init__(self, width: int, *, eps: float = 1e-5, momentum: float = 0.1, affine: bool = True):
        self.scale = nnx.Param(jnp.ones(width)) if affine else None
        self.bias = nnx.Param(jnp.zeros(width)) if affine else None
        self.mean = nnx.BatchStat(jnp.zeros(width))
        self.variance = nnx.BatchStat(jnp.ones(width))
        self.eps, self.momentum = eps, momentum

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        with jax.named_scope("norm"):
            y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            mean, variance = self._measured(y) if train else (self.mean[...], self.variance[...])
            y = (y - mean) * jax.lax.rsqrt(variance + self.eps)
            y = y if self.scale is None or self.bias is None else y * self.scale[...] + self.bias[...]
            return y.astype(x.dtype)

    def _measured(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes, count = tuple(range(y.ndim - 1)), math.prod(y.shape[:-1])
        mean, variance = y.mean(axes), y.var(axes)
        unbiased = variance * (count / max(count - 1, 1))
        for running, new in ((self.mean, mean), (self.variance, unbiased)):
            running[...] += self.momentum * (jax.lax.stop_gradient(new) - running[...])
        return mean, variance
