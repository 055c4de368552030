"""Pooling attention and its block: MViTv2 (arXiv 2112.01526), Section 4.1.

Tokens are a prefix, which is not pooled, and a map.  If queries are pooled with a stride, the block's output map is
smaller, and the shortcut is pooled likewise.

In adaptive pooling (arXiv 2305.16316) the content chooses the phase of the stride: one for queries and the shortcut,
another for keys and values.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer

from equivit.kernels.attention import attend
from equivit.kernels.convolution import wrap_pad
from equivit.layers import dense
from equivit.layers.block import branch_path
from equivit.layers.convolution import DepthwiseConv, Pair
from equivit.layers.dropout import Key, Rate, split
from equivit.layers.grid import Layout, required
from equivit.models.mvit import pooling as adaptive_pooling
from equivit.models.mvit.pooling import Maps, Pools
from equivit.models.mvit.position import CircularPosition, DecomposedPosition
from equivit.models.staged import join_prefix, split_prefix
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

State = tuple[jax.Array, dict[str, Choice]]  # tokens, and the chosen phases by name
KERNEL, PADDING = (3, 3), (1, 1)  # of all pooling convolutions


class PoolingAttention(dense.Attention):
    """Attention with pooled queries, keys and values and relative positions; the queries are added to the result.

    A depthwise convolution shared by all heads pools the map of each head, and a norm follows.  Positions are
    multiplied with unscaled queries.  Tokens before the map are not pooled and have no position.

    Shapes: [*B, P + H W, in_features] -> [*B, P + h w, width].

    Args:
      stride, kv_stride: strides of queries, and of keys and values, (rows, columns).
      grid: (h, w) of the position tables: the finer grid of queries and keys, or on a torus the grid before pooling.
      padding: "zeros" or "circular".
      eps: epsilon of the norms.
      adaptive: the content chooses the phase of strided pooling, by the rule `select` (`pooling.py`); inputs then have
        one batch axis.
      circular: whether distances wrap around the torus.
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        num_heads: int,
        *,
        stride: Pair,
        kv_stride: Pair,
        grid: Pair,
        padding: str,
        eps: float,
        adaptive: bool = False,
        select: str = "output",
        circular: bool = False,
        init: Initializer = dense.WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        super().__init__(width, num_heads, in_features=in_features, init=init, rngs=rngs)
        channels = width // num_heads
        self.pool_q, self.pool_k, self.pool_v = (
            DepthwiseConv(channels, kernel=KERNEL, stride=step, padding=PADDING, mode=padding, rngs=rngs)
            for step in (stride, kv_stride, kv_stride)
        )
        self.norm_q, self.norm_k, self.norm_v = (dense.LayerNorm(channels, eps=eps) for _ in range(3))
        if circular:
            self.position = CircularPosition(grid, channels, stride=stride, kv_stride=kv_stride, rngs=rngs)
        else:
            self.position = DecomposedPosition(grid, channels, rngs=rngs)
        self.adaptive, self.select = adaptive, select

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        return self.attended(x, layout)[0]

    def attended(self, x: jax.Array, layout: Layout | None) -> State:
        """The attended tokens, and the chosen phases of queries ("q") and of keys and values ("kv")."""
        layout = required(layout, type(self).__name__)
        first, maps = zip(*(split_prefix(part, layout) for part in self.heads(x)), strict=True)
        (q,), chosen = self._pooled("q", (self.pool_q,), (maps[0],))
        (k, v), others = self._pooled("kv", (self.pool_k, self.pool_v), (maps[1], maps[2]))
        chosen |= others
        queries, keys = (q.shape[-3], q.shape[-2]), (k.shape[-3], k.shape[-2])
        norms = (self.norm_q, self.norm_k, self.norm_v)
        q, k, v = (norm(join_prefix(*part)) for norm, *part in zip(norms, first, (q, k, v), strict=True))
        bias = self.position(q[..., layout.prefix :, :], queries, keys, self._ahead(chosen))
        if layout.prefix:
            bias = jnp.pad(bias, [(0, 0)] * (bias.ndim - 2) + [(layout.prefix, 0)] * 2)
        return self.projected(attend(q, k, v, bias) + q), chosen

    def _pooled(self, name: str, pools: Pools, maps: Maps) -> tuple[Maps, dict[str, Choice]]:
        """Pool maps that share a phase; return the choice under `name`."""
        if not self.adaptive or pools[0].stride == (1, 1):
            return tuple(pool(x) for pool, x in zip(pools, maps, strict=True)), {}
        maps, choice = adaptive_pooling.pooled(pools, maps, self.select)
        return maps, {name: choice}

    def _ahead(self, chosen: dict[str, Choice]) -> jax.Array | None:
        """The phase of the queries minus the phase of the keys, [B, 2]; None if no phase was chosen."""
        if not chosen:
            return None
        strides = {"q": self.pool_q.stride, "kv": self.pool_k.stride}
        phases = {name: shifts.phases(choice.index, strides[name]) for name, choice in chosen.items()}
        return phases.get("q", jnp.zeros(2, jnp.int32)) - phases.get("kv", jnp.zeros(2, jnp.int32))


class PoolingBlock(nnx.Module):
    """pool(x) + path(attention(norm1(x))), then x + path(mlp(norm2(x))).

    `pool` is a max-pool if queries are pooled with a stride.  If a branch widens, its shortcut is a linear map of the
    normed input instead of x.  `path` is dropout, then stochastic depth.

    Shapes: tokens [*B, P + H W, in] -> [*B, P + h w, out].

    Args:
      norm1, attention, shortcut, norm2, mlp, mlp_shortcut: the parts; shortcuts are None unless the branch widens.
      dropout: probability of zeroing an entry of a branch.
    """

    def __init__(self, *, norm1, attention: PoolingAttention, shortcut, norm2, mlp, mlp_shortcut, dropout: float = 0.0):
        self.norm1, self.attention, self.shortcut = norm1, attention, shortcut
        self.norm2, self.mlp, self.mlp_shortcut = norm2, mlp, mlp_shortcut
        self.dropout = dropout

    def __call__(
        self, state: State, layout: Layout, *, rate: Rate = 0.0, train: bool = False, key: Key = None
    ) -> State:
        """The tokens after the block, and the phases chosen by its adaptive pooling.

        Arguments as in `Stack`, where `train` and the choices of the previous block are unused here.
        """
        keys, pool = split(key), self.attention.pool_q
        x, _ = state
        y = self.norm1(x)
        branch, chosen = self.attention.attended(y, layout)
        x = x if self.shortcut is None else self.shortcut(y).astype(x.dtype)
        if pool.stride != (1, 1):
            first, maps = split_prefix(x, layout)
            if "q" in chosen:
                maps = shifts.roll(maps, -shifts.phases(chosen["q"].index, pool.stride))
            x = join_prefix(first, max_pool(maps, pool.stride, pool.mode))
        x = x + branch_path(branch, self.dropout, rate, keys[0])
        y = self.norm2(x)
        x = x if self.mlp_shortcut is None else self.mlp_shortcut(y).astype(x.dtype)
        return x + branch_path(self.mlp(y), self.dropout, rate, keys[1]), chosen


def max_pool(x: jax.Array, stride: Pair, mode: str) -> jax.Array:
    """3 x 3 max-pooling: [*B, H, W, C] -> [*B, ceil(H / sh), ceil(W / sw), C].

    Padding is ignored, or with mode "circular" the map wraps around.
    """
    if mode == "circular":
        x = wrap_pad(x, ((1, 1), (1, 1)))
    else:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(1, 1), (1, 1), (0, 0)], constant_values=-jnp.inf)
    for axis, step in zip((-3, -2), stride, strict=True):
        size = x.shape[axis] - 2
        parts = (jax.lax.slice_in_dim(x, start, start + size, step, axis) for start in range(3))
        x = functools.reduce(jnp.maximum, parts)
    return x
