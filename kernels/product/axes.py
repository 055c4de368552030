"""The axes of a product, such as "nc,cd->nd"."""

import jax
import jax.numpy as jnp


def split(axes: str) -> tuple[str, str, str]:
    """The axes of the factors and of the result."""
    factors, result = axes.split("->")
    of_x, of_y = factors.split(",")
    return of_x, of_y, result


def only(letters: str, others: str) -> str:
    """The letters that are not among the others."""
    return "".join(letter for letter in letters if letter not in others)


def joined(x: jax.Array, y: jax.Array, *, axes: str, precision: str | None, last: int | None = None) -> jax.Array:
    """The product, with the summed axes as one axis if they are adjacent in both factors.

    The gradient of a weight is a sum over images and tokens.  XLA transposes both arrays to sum over two axes.

    Args:
      last: the number of axes to join, from the right; None joins all.  On several devices the batch must be the first
        of them, or all of it would move to each device.
    """
    of_x, of_y, of_z = split(axes)
    summed = only(of_x, of_z)[-(last or len(of_x)) :]
    if len(summed) > 1 and summed in of_x and summed in of_y:
        x, y = (jax.lax.collapse(a, i, i + len(summed)) for a, i in ((x, of_x.index(summed)), (y, of_y.index(summed))))
        axes = axes.replace(summed, summed[0])
    return jnp.einsum(axes, x, y, precision=precision)
