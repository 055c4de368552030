"""Window attention, shifted in every second block: Swin (arXiv 2103.14030) and SwinV2 (arXiv 2111.09883).

A block cuts the map into windows (`Windows`: roll, pad, cut), attends within each window with a bias by relative
position (`RelativeTable`, `ContinuousTable`) and, if the map was rolled, a mask between tokens that are not adjacent
(`Windows.mask`).  The three parts are independent.

On a torus ("Making Vision Transformers Truly Shift-Equivariant") the content chooses the origin of the windows
(`spread`), no mask is needed, and if one window spans the map, distances wrap around it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import Initializer

from equivit.kernels.attention import attend
from equivit.kernels.product import add_bias
from equivit.layers import dense
from equivit.layers.grid import Layout, required
from equivit.layers.position import resize

Pair = tuple[int, int]
APART = -100.0  # the official mask; not -inf for cosine logits, which reach 100, so official outputs need this value
LARGEST_SCALE = math.log(100)  # of cosine logits (SwinV2, Section 3.3)
STEEPNESS = 16  # continuous biases lie between 0 and this


class Windows(NamedTuple):
    """The partition of a token map into windows.

    The map is rolled by `shift` up and to the left, then zero-padded at the bottom and on the right to whole windows,
    as in timm.  Padding tokens act as keys like any token.

    Attributes:
      grid: (h, w) of the map.
      size: (h, w) of a window.
      shift: (rows, columns).
    """

    grid: Pair
    size: Pair
    shift: Pair = (0, 0)

    @property
    def number(self) -> Pair:
        """Windows along each axis."""
        return -(-self.grid[0] // self.size[0]), -(-self.grid[1] // self.size[1])

    def cut(self, x: jax.Array) -> jax.Array:
        """The tokens of each window, row by row: [*B, h w, C] -> [*B, windows, tokens, C]."""
        (n, m), (p, q) = self.number, self.size
        x = roll(x.reshape(*x.shape[:-2], *self.grid, x.shape[-1]), (-self.shift[0], -self.shift[1]))
        x = fill_up(x, self.size)
        x = jnp.swapaxes(x.reshape(*x.shape[:-3], n, p, m, q, x.shape[-1]), -3, -4)
        return x.reshape(*x.shape[:-5], n * m, p * q, x.shape[-1])

    def joined(self, x: jax.Array) -> jax.Array:
        """The inverse of `cut`: [*B, windows, tokens, C] -> [*B, h w, C]."""
        (n, m), (p, q), (h, w) = self.number, self.size, self.grid
        x = jnp.swapaxes(x.reshape(*x.shape[:-3], n, m, p, q, x.shape[-1]), -3, -4)
        x = x.reshape(*x.shape[:-5], n * p, m * q, x.shape[-1])[..., :h, :w, :]
        return roll(x, self.shift).reshape(*x.shape[:-3], h * w, x.shape[-1])

    def mask(self) -> jax.Array:
        """The mask added to the logits, [windows, 1, tokens, tokens]: `APART` between tokens that are not adjacent.

        After the roll, the last windows of an axis hold tokens from both ends of the map.
        """
        (n, m), (p, q) = self.number, self.size
        rows, columns = (_apart(*axis) for axis in zip((n, m), self.size, self.shift, strict=True))
        apart = jnp.asarray(rows)[:, None, :, None, :, None] | jnp.asarray(columns)[None, :, None, :, None, :]
        return jnp.where(apart, APART, 0.0).reshape(n * m, 1, p * q, p * q)


def roll(x: jax.Array, shift: Pair) -> jax.Array:
    """Roll a map [*B, h, w, C] down and to the right."""
    return jnp.roll(x, shift, axis=(-3, -2)) if any(shift) else x


def fill_up(x: jax.Array, unit: Pair) -> jax.Array:
    """Zero-pad a map [*B, h, w, C] at the bottom and on the right to multiples of `unit`."""
    ends = [(0, -size % u) for size, u in zip(x.shape[-3:-1], unit, strict=True)]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [*ends, (0, 0)]) if any(map(any, ends)) else x


def _apart(number: int, size: int, shift: int) -> np.ndarray:
    """Along one axis: whether two positions of a window are not adjacent, [windows, positions, positions].

    As in timm's mask, the last `shift` positions of the padded axis count as rolled, although with padding they are not
    exactly the rolled positions.
    """
    end = np.arange(number * size) >= number * size - shift
    end = end.reshape(number, size)
    return end[:, :, None] != end[:, None, :]


def spread(x: jax.Array, size: Pair) -> tuple[jax.Array, Pair]:
    """The variance of window energies for each possible origin of the windows: [B, h, w, C] -> [B, p q] (A-WSA).

    The energy of a window is the mean norm of its tokens (Eq. 17).  The variance over windows has the same maximum as
    the l2 norm, because their mean is the same for all origins, but loses no digits to that mean.  An axis spanned by
    one window offers no choice.

    Returns:
      The scores of origins (row, column) in row-major order, and the number of origins (p, q) along each axis.
    """
    (h, w), (p, q) = x.shape[1:3], size
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    energy = jnp.sqrt(jnp.square(x).sum(-1))
    energy = energy - energy.mean((1, 2), keepdims=True)  # a common offset would cost digits in each sum
    for axis, length in ((1, p), (2, q)):
        if energy.shape[axis] == length:
            energy = energy.mean(axis, keepdims=True)
        else:
            energy = sum((jnp.roll(energy, -k, axis) for k in range(1, length)), energy) / length
    p, q = 1 if h == p else p, 1 if w == q else q
    windows = energy.reshape(len(x), energy.shape[1] // p, p, energy.shape[2] // q, q)
    return windows.var((1, 3)).reshape(len(x), p * q), (p, q)


def _between(size: Pair, circular: tuple[bool, bool] = (False, False)) -> np.ndarray:
    """Index of query minus key in a flat table [(2h-1) (2w-1)] for all pairs of a window, [h w, h w].

    On an axis in `circular`, distances are modulo its size and use the table's entries from 0 on.
    """
    rows, columns = np.divmod(np.arange(size[0] * size[1]), size[1])
    down, right = (
        (place[:, None] - place) % n if wraps else place[:, None] - place
        for place, n, wraps in zip((rows, columns), size, circular, strict=True)
    )
    return (down + size[0] - 1) * (2 * size[1] - 1) + right + size[1] - 1


class RelativeTable(nnx.Module):
    """A learned bias for each distance within a window (Swin, Eq. 4).

    Along an axis in `circular`, distances are modulo its size (A-RPE, Eq. 24).

    Shapes: (circular) -> [heads, tokens, tokens], queries by keys.

    Args:
      grid: (h, w) of a window; the table has 2 h - 1 by 2 w - 1 distances.
    """

    def __init__(self, grid: Pair, num_heads: int, *, rngs: nnx.Rngs):
        shape = (2 * grid[0] - 1, 2 * grid[1] - 1, num_heads)
        self.table = nnx.Param(dense.WEIGHT_INIT(rngs.params(), shape), decay=False)
        self.grid = grid

    def __call__(self, circular: tuple[bool, bool] = (False, False)) -> jax.Array:
        return _of_pairs(self.table[...], _between(self.grid, circular))

    def tables(self, grid: Pair) -> dict[str, jax.Array]:
        """The parameters, by name, of this table resized to another window: bicubic, as in Microsoft's loader."""
        return {"table": resize(self.table[...], (2 * grid[0] - 1, 2 * grid[1] - 1))}


class ContinuousTable(nnx.Module):
    """A bias computed by a small MLP from the log-spaced distance (SwinV2, Section 3.3).

    16 sigmoid(W2 relu(W1 d + b)), d = sign(r) log2(1 + |r|) / 3 with r = 8 for the largest distance of the window.
    Along an axis in `circular`, the distance takes the shorter way, and half of the axis counts as positive.

    Shapes: (circular) -> [heads, tokens, tokens], queries by keys.
    """

    HIDDEN = 512

    def __init__(self, grid: Pair, num_heads: int, *, rngs: nnx.Rngs):
        init = dense.WEIGHT_INIT
        self.weight1 = nnx.Param(init(rngs.params(), (2, self.HIDDEN)), decay=False)
        self.bias1 = nnx.Param(jnp.zeros(self.HIDDEN), decay=False)
        self.weight2 = nnx.Param(init(rngs.params(), (self.HIDDEN, num_heads)), decay=False)
        self.grid = grid

    def __call__(self, circular: tuple[bool, bool] = (False, False)) -> jax.Array:
        weight1 = self.weight1[...]
        distances = _distances(self.grid, circular)
        hidden = jax.nn.relu(jnp.asarray(distances, weight1.dtype) @ weight1 + self.bias1[...])
        return _of_pairs(STEEPNESS * jax.nn.sigmoid(hidden @ self.weight2[...]), _between(self.grid))


def _distances(grid: Pair, circular: tuple[bool, bool]) -> np.ndarray:
    """(rows, columns) from key to query on SwinV2's scale, [2h-1, 2w-1, 2]."""

    def axis(size, circular):
        d = np.arange(1 - size, size)
        d = -((size // 2 - d) % size - size // 2) if circular else d
        r = 8 * d / max(size - 1, 1)  # a window of one token has only the distance 0
        return np.sign(r) * np.log2(1 + np.abs(r)) / 3

    return np.stack(np.meshgrid(*map(axis, grid, circular), indexing="ij"), axis=-1)


def _of_pairs(table: jax.Array, pairs: np.ndarray) -> jax.Array:
    """A table by distance [2h-1, 2w-1, heads] -> by pairs of tokens [heads, h w, h w]."""
    table = table.reshape(-1, table.shape[-1])
    return jnp.moveaxis(table[pairs], -1, 0)


class WindowAttention(dense.Attention):
    """Attention within windows, with a bias by relative position.

    Shapes: [*B, h w, width] -> the same.

    Args:
      window: (h, w) of a window.
      masked: whether to mask tokens from opposite borders of the map; False on a torus.
      circular: whether distances wrap around the torus along axes spanned by one window.
    """

    TABLE: Any = RelativeTable
    QKV_BIAS = True

    def __init__(
        self,
        width: int,
        num_heads: int,
        window: Pair,
        *,
        masked: bool = True,
        circular: bool = False,
        init: Initializer = dense.WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        super().__init__(width, num_heads, qkv_bias=self.QKV_BIAS, init=init, rngs=rngs)
        self.position = self.TABLE(window, num_heads, rngs=rngs)
        self.window, self.masked, self.circular = window, masked, circular

    def __call__(self, x: jax.Array, layout: Layout | None = None, phase: int = 0, *, train: bool = False) -> jax.Array:
        """The attended tokens; `phase` 1 shifts the windows by `layout.shift`, and `train` is unused."""
        layout = required(layout, type(self).__name__)
        h, w = layout.grid
        windows = Windows((h, w), self.window, layout.shift if phase else (0, 0))
        bias = self.position((self.circular and h == self.window[0], self.circular and w == self.window[1]))
        if self.masked and any(windows.shift):
            bias = bias + windows.mask()
        y = self.attend(windows.cut(x), bias)
        return windows.joined(self.projected(y))

    def attend(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        """Attend within windows: [*B, windows, tokens, width] -> [*B, windows, heads, tokens, channels]."""
        q, k, v = self.heads(x)
        return attend(q, k, v, bias)


class CosineWindowAttention(WindowAttention):
    """Attention within windows by the cosine of queries and keys, times a learned factor per head (SwinV2, Eq. 2).

    Keys have no bias, as in the official code; without normalisation it would not change the softmax.

    Shapes: [*B, h w, width] -> the same.
    """

    TABLE = ContinuousTable
    QKV_BIAS = False

    def __init__(self, width: int, num_heads: int, window: Pair, *, rngs: nnx.Rngs, **options: Any):
        super().__init__(width, num_heads, window, rngs=rngs, **options)
        self.q_bias, self.v_bias = nnx.Param(jnp.zeros(width)), nnx.Param(jnp.zeros(width))
        self.logit_scale = nnx.Param(jnp.full(num_heads, math.log(10.0), float), decay=False)

    def attend(self, x: jax.Array, bias: jax.Array) -> jax.Array:
        q, k, v = self.heads(x)
        q, v = add_bias(q, self._by_head(self.q_bias)), add_bias(v, self._by_head(self.v_bias))
        with jax.named_scope("attention"):
            scale = jnp.exp(jnp.minimum(self.logit_scale[...], LARGEST_SCALE))
            q, k = unit(q, scale[:, None, None]), unit(k)
        return attend(q, k, v, bias, scale=1.0)

    def _by_head(self, bias: nnx.Param) -> jax.Array:
        return bias[...].reshape(self.num_heads, 1, -1)


def unit(x: jax.Array, length: jax.Array | float = 1.0) -> jax.Array:
    """Scale vectors along the last axis to a length, in at least float32; zero stays zero."""
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    square = jnp.square(y).sum(-1, keepdims=True)
    return (y * (length * jax.lax.rsqrt(jnp.maximum(square, 1e-24)))).astype(x.dtype)
