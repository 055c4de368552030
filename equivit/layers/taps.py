"""Taps of replaced attention before training: draws and constants (`layers/depthwise.py`)."""

import jax
import jax.numpy as jnp
import numpy as np

from equivit import errors

STARTS = ("blur", "normal", "uniform")


def default_start(kind: str, form: str) -> str:
    """The start of the released code, or of the paper for the printed form."""
    return "normal" if form == "printed" else "uniform" if kind == "ens_dw" else "blur"


def drawn(start: str, key: jax.Array, kernel_size: int, number: int) -> jax.Array:
    """The taps of a number of channels or heads, [k, k, number].

    - "blur": a Gaussian of deviation 1 token and sum 1, for all alike;
    - "normal": normal with deviation 0.02 (the paper says a zero-mean normal, without a deviation);
    - "uniform": between -1 / k and 1 / k, the default of PyTorch's depthwise convolutions.
    """
    shape = (kernel_size, kernel_size, number)
    if start == "normal":
        return 0.02 * jax.random.normal(key, shape)
    if start == "uniform":
        return jax.random.uniform(key, shape, minval=-1 / kernel_size, maxval=1 / kernel_size)
    line = np.exp(-np.square(np.arange(kernel_size) - kernel_size // 2) / 2)
    blur = np.outer(line, line) / line.sum() ** 2
    return jnp.broadcast_to(jnp.asarray(blur, float)[..., None], shape)


def check_start(name: str, start: str | None, kind: str) -> None:
    """Raise ValueError for an unknown start, or one for a kind whose taps are no filters."""
    if start is None:
        return
    errors.one_of(f"{name}: start", start, STARTS)
    if kind in ("identity", "spvit"):
        reason = "has no taps" if kind == "identity" else "weighs heads equally at the start"
        raise ValueError(f"{name}: start={start!r}, but kind={kind!r} {reason}; leave start out.")
