"""The progress of a run, and schedules that depend on it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Clock(NamedTuple):
    """The position of a step in its run; `step` is traced, so one compiled program serves all steps."""

    step: jax.Array  # finished steps
    total: int  # steps of the whole run
    per_epoch: int  # steps of one epoch

    @property
    def done(self) -> jax.Array:
        """The fraction of the run that is done, in [0, 1]."""
        return self.step / self.total

    def ramp(self, begin: float, end: float, steps: int) -> jax.Array:
        """Linear from `begin` at the first step to `end` at the last of `steps`, then `end`; one step has `begin`."""
        return begin + (end - begin) * jnp.minimum(self.step / max(steps - 1, 1), 1.0)

    def cosine(self, begin: float, end: float) -> jax.Array:
        """A half cosine from `begin` to `end` over the run."""
        # cos^2 (x / 2) is more accurate near the end of the run than (1 + cos x) / 2.
        return end + (begin - end) * jnp.cos(jnp.pi / 2 * self.done) ** 2
