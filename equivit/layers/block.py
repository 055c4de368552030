"""The transformer block, dense or equivariant depending on the parts it is given."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import isotypic
from equivit.layers.absorbed import absorbed
from equivit.layers.dropout import Key, Rate, dropout
from equivit.layers.grid import Layout
from equivit.layers.parts import identity
from equivit.layers.stochastic_depth import drop_path, on_subset, subset
from equivit.symmetry.fields import Isotypic, Tokens, TokensT
from equivit.symmetry.groups import OCTIC
from kernels.dispatch import AUTO, FUSED
from kernels.octic_branch import Weights, octic_attention, octic_mlp


class Branch(NamedTuple):
    """scale(body(norm(x))).

    Shapes: [*B, N, width] or a field -> the same.
    """

    norm: Callable
    body: Callable
    scale: Callable

    def __call__(self, x: Any, layout: Layout | None = None) -> Any:
        if hasattr(self.body, "MAPS") and isinstance(self.norm, nnx.Module):
            scale = None if self.scale is identity else self.scale
            return _branch(layout, (self.norm, self.body, scale), x)
        return self.scale(self.body(self.norm(x), layout))

    def added(self, x: Any, layout: Layout | None = None) -> Any:
        """x + scale(body(norm(x))), in one operation for an octic block if `kernels.using` selects it."""
        kernel = self._kernel(x) if AUTO.get() in FUSED else None
        return x + self(x, layout) if kernel is None else Isotypic(*kernel(x.lines, x.planes))

    def _kernel(self, x: Any) -> Callable | None:
        """`added` as one operation on the arrays of a field, if the parts belong to an octic block."""
        norm, body, scale = self
        if not isinstance(norm, isotypic.LayerNorm) or not isinstance(scale, isotypic.LayerScale):
            return None
        if not isinstance(x, Isotypic) or x.group is not OCTIC:
            return None
        if type(body) is isotypic.Attention and body.qkv.bias is not None:
            attention = Weights(*isotypic.branch_arrays(norm, body.qkv, body.proj, scale))
            options: dict[str, Any] = dict(weights=attention, heads=body.num_heads, norm=norm.constants)
            return functools.partial(octic_attention, **options)
        if isinstance(body, isotypic.Mlp):
            mlp = Weights(*isotypic.branch_arrays(norm, body.fc1, body.fc2, scale))
            return functools.partial(octic_mlp, weights=mlp, norm=norm.constants)
        return None


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _branch(layout, parts, x):
    norm, body, scale = parts
    y = body(norm(x), layout)
    return y if scale is None else scale(y)


@_branch.defjvp
def _derivative(layout, primals, tangents):
    def equal(parts, x):
        norm, body = absorbed(*parts)
        y, scale = body(norm(x), layout), parts[-1]
        return y if scale is None else y.astype(jnp.result_type(y.dtype, scale.scales[0].dtype))

    return jax.jvp(equal, primals, tangents)


def branch_path(branch: Any, entries: float, rate: Rate, key: Key) -> Any:
    """A residual branch of tokens after dropout of `entries`, then stochastic depth at `rate`."""
    if key is None:
        return branch
    dropout_key, path_key = jax.random.split(key)
    return drop_path(dropout(branch, entries, dropout_key), rate, path_key)


def added(branch: Branch, x: Any, layout: Layout | None, entries: float, rate: Rate, key: Key) -> Any:
    """x plus a residual branch of it after `branch_path`."""
    return branch.added(x, layout) if key is None else x + branch_path(branch(x, layout), entries, rate, key)


class Subsets(NamedTuple):
    """Stochastic depth by subsets (`layers/stochastic_depth.py`).

    Attributes:
      rate: the share of images for which a branch is dropped.
      groups: number of runs of consecutive images; the same number is dropped in each.
    """

    rate: float
    groups: int


class Block(nnx.Module):
    """x + path(attention(x)), then x + path(mlp(x)), where both are branches scale(body(norm(x))).

    `path` is dropout, then stochastic depth, which drops a whole branch per sample, independently for the two branches.
    With `subsets`, a branch is computed only for the samples that keep it.

    Shapes: [*B, N, width] or a field -> the same.

    Args:
      norm1, attention, scale1, norm2, mlp, scale2: the parts, all dense or all equivariant under one group
        (`layers/parts.py` builds them).
      dropout: probability of zeroing an entry of a branch.
      subsets: replaces the `rate` of a call; x then has one batch axis.
    """

    def __init__(
        self, *, norm1, attention, scale1, norm2, mlp, scale2, dropout: float = 0.0, subsets: Subsets | None = None
    ):
        self.norm1, self.attention, self.scale1 = norm1, attention, scale1
        self.norm2, self.mlp, self.scale2 = norm2, mlp, scale2
        self.dropout, self.subsets = dropout, subsets

    def __call__(
        self, x: TokensT, layout: Layout | None = None, *, rate: Rate = 0.0, train: bool = False, key: Key = None
    ) -> TokensT:
        """The tokens after the block; arguments as in `Stack`, where `train` is unused here."""
        attention, mlp = self.branches()
        if key is not None and self.subsets is not None:
            return self.on_subsets(x, layout, key, self.subsets)
        keys = (None, None) if key is None else jax.random.split(key)
        x = added(attention, x, layout, self.dropout, rate, keys[0])
        return added(mlp, x, layout, self.dropout, rate, keys[1])

    def branches(self) -> tuple[Branch, Branch]:
        """Attention and MLP, each with its norm and scale."""
        return Branch(self.norm1, self.attention, self.scale1), Branch(self.norm2, self.mlp, self.scale2)

    def on_subsets(self, x: Any, layout: Layout | None, key: jax.Array, subsets: Subsets) -> Any:
        """The block, with each branch computed for a subset of the images."""
        for branch, one in zip(self.branches(), jax.random.split(key), strict=True):
            dropout_key, path_key = jax.random.split(one)
            kept = subset(path_key, x.shape[-3], *subsets)
            x = on_subset(lambda x, b=branch, k=dropout_key: dropout(b(x, layout), self.dropout, k), x, kept)
        return x

    def attention_weights(self, x: Tokens, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        """The attention weights [*B, heads, rows, N] of the block for its input tokens x; `rows` as in `Attention`."""
        return self.attention.weights(self.norm1(x), rows, layout)
