"""The transformer block, dense or equivariant depending on the parts it is given."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.kernels.dispatch import AUTO, FUSED
from equivit.kernels.octic_branch import Weights, octic_attention, octic_mlp
from equivit.layers import isotypic
from equivit.layers.absorbed import absorbed, read_dtype
from equivit.layers.dropout import Key, Rate, dropout
from equivit.layers.grid import Layout
from equivit.layers.parts import identity
from equivit.layers.stochastic_depth import drop_path, on_subset, subset
from equivit.symmetry.fields import Isotypic, Tokens, TokensT
from equivit.symmetry.groups import OCTIC


class Branch(NamedTuple):
    """scale(body(norm(x))); a scale of None is 1.

    Shapes: [*B, N, width] or a field -> the same.
    """

    norm: Callable
    body: Callable
    scale: Callable | None

    def __call__(self, x: Any, layout: Layout | None = None) -> Any:
        return self.forked(x, layout)[1]

    def forked(self, x: Any, layout: Layout | None = None) -> tuple[Any, Any]:
        """x and the branch, the terms of a residual sum; the norm's kernel, if any, adds their gradients."""
        return _forked(layout, self, x) if getattr(self.body, "MAPS", None) else (x, _by_parts(layout, self, x))

    def added(
        self, x: Any, layout: Layout | None = None, entries: float = 0.0, rate: Rate = 0.0, key: Key = None
    ) -> Any:
        """x plus the branch after `branch_path`.

        Without a key it is one operation for an octic block if `kernels.using` selects it.
        """
        if key is None and getattr(self.body, "MAPS", None):
            return _added(layout, self, x)
        x, y = self.forked(x, layout)
        return x + branch_path(y, entries, rate, key)

    def kernel(self, x: Any) -> Callable | None:
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
def _added(layout, branch, x):
    kernel = branch.kernel(x) if AUTO.get() in FUSED else None
    return x + _by_parts(layout, branch, x) if kernel is None else Isotypic(*kernel(x.lines, x.planes))


@_added.defjvp
def _derivative_of_sum(layout, primals, tangents):
    return jax.jvp(lambda branch, x: operator.add(*_forked(layout, branch, x)), primals, tangents)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _forked(layout, branch, x):
    return x, _by_parts(layout, branch, x)


@_forked.defjvp
def _derivative(layout, primals, tangents):
    def equal(branch, x):
        # In float16 diag(1e-4) W would have few bits: below 6e-5 there are only multiples of 6e-8.
        absorbs = read_dtype(branch.body) != jnp.float16
        norm, body = absorbed(branch.norm, branch.body, branch.scale if absorbs else None)
        x, z = norm.fork(x, read_dtype(body))
        y, scale = body(z, layout), branch.scale
        if scale is None:
            return x, y
        return x, y.astype(jnp.result_type(y.dtype, scale.scales[0].dtype)) if absorbs else scale(y)

    return jax.jvp(equal, primals, tangents)


def _by_parts(layout, branch, x):
    norm, body, scale = branch
    y = body(norm(x), layout)
    return y if scale is None else scale(y)


def branch_path(branch: Any, entries: float, rate: Rate, key: Key) -> Any:
    """A residual branch of tokens after dropout of `entries`, then stochastic depth at `rate`."""
    if key is None:
        return branch
    dropout_key, path_key = jax.random.split(key)
    return drop_path(dropout(branch, entries, dropout_key), rate, path_key)


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
        with jax.named_scope("attn"):  # not "attention", which `costs.py` counts
            x = attention.added(x, layout, self.dropout, rate, keys[0])
        with jax.named_scope("mlp"):
            return mlp.added(x, layout, self.dropout, rate, keys[1])

    def branches(self) -> tuple[Branch, Branch]:
        """Attention and MLP, each with its norm and scale."""
        scale1, scale2 = (None if scale is identity else scale for scale in (self.scale1, self.scale2))
        return Branch(self.norm1, self.attention, scale1), Branch(self.norm2, self.mlp, scale2)

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
