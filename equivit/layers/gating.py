"""Gates that are learned: the relaxed choice of a subset, and attention that is partly convolution.

Source: Differentiable Subset Pruning (Li et al. 2021), after Xie and Ermon (2019); depthwise attention, Eq. 17 and 18.
"""

import jax
import jax.numpy as jnp


def relaxed_top_k(weights: jax.Array, number: int, temperature: float | jax.Array, uniform: jax.Array) -> jax.Array:
    """Gates in [0, `number`] that add up to `number`: those of a random subset as the temperature goes to 0.

    The sum of `number` relaxed draws without replacement: softmax(r / temperature), where r are the weights with Gumbel
    noise, and after each draw with log(1 - what was drawn).

    Shapes: weights [n], uniform [n] in (0, 1) -> [n].
    """
    tiny = jnp.finfo(weights.dtype).tiny

    def draw(scores, _):
        logs = jax.nn.log_softmax(scores / temperature)
        rest = jnp.maximum(-jnp.expm1(logs), tiny)  # 1 - p, exact where p is near 0
        return scores + jnp.log(rest), jnp.exp(logs)

    noise = -jnp.log(-jnp.log(jnp.clip(uniform, tiny)))
    return jax.lax.scan(draw, weights + noise, length=number)[1].sum(0)


def temperature(step: int | jax.Array, start: float, end: float, steps: int) -> jax.Array:
    """Geometric from `start` to `end` over so many steps, then `end`."""
    return start * (end / start) ** jnp.minimum(step / steps, 1.0)


def hard_top_k(weights: jax.Array, number: int) -> jax.Array:
    """1 for the `number` largest weights [n], of equal ones the first, and 0 for the others."""
    return jnp.zeros_like(weights).at[jax.lax.top_k(weights, number)[1]].set(1)
