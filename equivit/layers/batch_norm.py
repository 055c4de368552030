"""Batch normalisation with running statistics."""

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.batch_stats import check_taken


class BatchNorm(nnx.Module):
    """Normalises each channel to mean 0 and variance 1 over all other axes; then applies scale and bias, if affine.

    With `train` it uses the statistics of x, and moves the running statistics towards them by `momentum` (with the
    unbiased variance, as in PyTorch).  Otherwise it uses the running statistics.  Batch statistics cover the whole
    batch, over all devices; with `optimizer.accumulation`, each micro-batch.

    Shapes: [*B, C] -> the same.

    Args:
      affine: whether to apply a scale and a bias.
      scale: initial scale of each channel.
      groups: number of runs of consecutive images with separate statistics, as if each were one device's batch; the
        running statistics move towards their mean.  The number is independent of the device count; if it is a multiple
        of that, devices exchange no statistics.
      rngs: unused; nothing is drawn.

    Raises:
      ValueError: with `train`, groups that do not divide the first axis of x, groups of fewer than two entries, which
        have no variance, or a call within a traced function outside `batch_stats.recording`, which would lose the
        running statistics.
    """

    def __init__(
        self,
        width: int,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        rngs: nnx.Rngs | None = None,
    ):
        self.scale = nnx.Param(jnp.full(width, scale, float)) if affine else None
        self.bias = nnx.Param(jnp.zeros(width)) if affine else None
        self.mean = nnx.BatchStat(jnp.zeros(width))
        self.variance = nnx.BatchStat(jnp.ones(width))
        self.eps, self.momentum, self.groups = eps, momentum, groups

    def __call__(self, x: jax.Array, *, train: bool = False) -> jax.Array:
        with jax.named_scope("norm"):
            y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            if train:
                y = self._in_groups(y)
                mean, variance = self._measured(y)
            else:
                mean, variance = self.mean[...], self.variance[...]
            y = (y - mean) * jax.lax.rsqrt(variance + self.eps)
            y = y if self.scale is None or self.bias is None else y * self.scale[...] + self.bias[...]
            return y.reshape(x.shape).astype(x.dtype if jnp.issubdtype(x.dtype, jnp.floating) else y.dtype)

    def affine(self) -> tuple[jax.Array, jax.Array]:
        """The factor and shift [C] that the running statistics amount to: y = factor x + shift."""
        factor = jax.lax.rsqrt(self.variance[...] + self.eps)
        shift = -self.mean[...] * factor
        if self.scale is None or self.bias is None:
            return factor, shift
        return factor * self.scale[...], shift * self.scale[...] + self.bias[...]

    def _in_groups(self, y: jax.Array) -> jax.Array:
        """[B, ..., C] -> [groups, entries, C]."""
        if y.shape[0] % self.groups:
            raise ValueError(
                f"BatchNorm: {self.groups} groups do not divide a batch of {y.shape[0]}; take a multiple of them."
            )
        return y.reshape(self.groups, -1, y.shape[-1])

    def _measured(self, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Mean and variance of each group, [groups, 1, C]."""
        count = y.shape[1]
        if count < 2:
            raise ValueError(
                f"BatchNorm: a channel has {'1 entry' if count else 'no entries'} in a group (groups={self.groups}), "
                "which has no variance to train with; take more images in a micro-batch, or fewer groups."
            )
        mean, variance = y.mean(1, keepdims=True), y.var(1, keepdims=True)
        unbiased = variance * (count / (count - 1))
        for running, new in ((self.mean, mean), (self.variance, unbiased)):
            old = running[...]
            moved = old + self.momentum * (jax.lax.stop_gradient(new.mean((0, 1))) - old)
            check_taken("BatchNorm", moved)
            running.set_value(moved.astype(old.dtype))  # `running[...] = ` searches all traced operations
        return mean, variance
