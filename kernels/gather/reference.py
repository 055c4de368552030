"""Each entry is read at its place: the definition."""

import jax


@jax.jit  # traced once for all maps of a shape
def gather(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Rows and columns of each map: [B, H, W, ...] at [B, h] and [B, w] -> [B, h, w, ...]."""
    # Under `vmap` each device reads its own maps; an explicit batch index would move all maps to each device.
    return jax.vmap(of_map)(x, rows % x.shape[1], columns % x.shape[2])


def of_map(x: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """Rows [h] and columns [w] of one map, [H, W, ...] -> [h, w, ...]."""
    return x.at[rows[:, None], columns].get(mode="promise_in_bounds")
