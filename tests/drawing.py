"""Random arrays for tests, drawn and cast by NumPy: JAX would compile a program for each shape."""

from typing import Any

import jax
import numpy as np


def normal(*shape: int, dtype: Any = "float32", seed: int = 0) -> jax.Array:
    """Standard normal values."""
    return cast(np.random.default_rng(seed).standard_normal(shape), dtype)


def cast(tree: Any, dtype: Any) -> Any:
    """The arrays of a tree in another type."""
    return jax.device_put(jax.tree.map(lambda array: np.asarray(array).astype(dtype), tree))
