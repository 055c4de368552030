"""Attention replaced by convolution: local and input-independent, without queries and keys.

The values V_h = x W_V[h] + b_V[h] of the H heads and the output projection are inherited from the attention:

| kind   | taps        | computes, before the projection                                                 | Eq.    |
|--------|-------------|---------------------------------------------------------------------------------|--------|
| conv   | [H, k, k]   | each V_h convolved with the taps of its head; folded into one dense convolution | 9, 10  |
| dw     | [k, k, D]   | each channel of V convolved with its own taps                                   | 11     |
| spvit  | [H, k, k]   | the heads averaged, at each tap by softmax(taps) over the heads                 | A.4    |
| ens_dw | [k, k, D/H] | the heads averaged by softmax(gamma), then each channel with its own taps       | 12, 13 |

Positions outside the grid are zero and add no bias, so tokens at the border get less of b_V.

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution".
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors
from equivit.layers import dense, isotypic
from equivit.layers.depthwise_conv import (
    MODES,
    Grid,
    Pair,
    check_taps,
    check_wrap,
    depthwise_conv,
    filled_grid,
    isotypic_depthwise_conv,
)
from equivit.layers.grid import Layout
from equivit.layers.rngs import Keys
from equivit.symmetry.fields import Isotypic
from kernels.attention import attend, head_by_head, side_by_side, split_heads
from kernels.convolution import convolve

KINDS = ("conv", "dw", "spvit", "ens_dw")
BY_HEAD = ("conv", "dw")  # the others average all heads, so no head can stay attention
TAPS_INIT = nnx.initializers.normal(0.02)  # the paper: a zero-mean normal, deviation not given


class _Replaced(nnx.Module):
    """The base class: values, taps and projection, and the error of `weights`."""

    def __init__(
        self, value: Any, proj: Any, taps: jax.Array, *, num_heads: int, kind: str = "dw", padding: str = "zeros"
    ):
        self.value, self.proj = value, proj
        # Low precision rounds factors of products; spvit taps go through a softmax first.
        self.taps = nnx.Param(taps, decay=False, product=kind != "spvit")
        self.kind, self.num_heads, self.padding, self.kernel_size = kind, num_heads, padding, taps.shape[1]

    def weights(self, x: Any, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        """Raises: there are no attention weights."""
        raise ValueError(
            f"attention_weights: the attention of this block is replaced by a convolution ({self.kind}), which has no "
            "weights; take another block."
        )


class ReplacedAttention(_Replaced):
    """Self-attention with some or all heads replaced by convolution.  Parameters keep the order of the heads.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      value, proj: of the attention, in_features to width and width to width.
      taps: of the replaced heads, as in the table above.
      heads: the replaced heads, ascending; None for all.
      query_key: queries and keys of the a remaining heads, in_features to 2 a d, with columns (q | k) x heads x
        channels; None if no head remains.
      gamma: [H] for "ens_dw", else None.
      options: `kind`, `num_heads`, and `padding`, which is "zeros" or "wrap" around the torus.
    """

    def __init__(
        self, value, proj, taps, *, heads: tuple[int, ...] | None = None, query_key=None, gamma=None, **options
    ):
        super().__init__(value, proj, taps, **options)
        self.heads = tuple(range(self.num_heads)) if heads is None else heads
        self.query_key: Any = query_key
        self.gamma: Any = None if gamma is None else nnx.Param(gamma, decay=False)

    @property
    def attending(self) -> tuple[int, ...]:
        """The heads that are not replaced."""
        return tuple(h for h in range(self.num_heads) if h not in self.heads)

    def __call__(self, x: jax.Array, grid: Grid = None) -> jax.Array:
        """The tokens after the projection; `grid` is (h, w), or the layout that blocks get."""
        if self.kind not in BY_HEAD:
            return self.folded()(x, grid)
        if self.query_key is not None:
            return self.proj(self._beside_attention(x, grid))
        return self.proj(self._convolved(self.value(x), grid))

    def _convolved(self, values: jax.Array, grid: Grid) -> jax.Array:
        """The convolved values of the replaced heads."""
        taps = taps_by_channel(self.kind, self.taps[...], values.shape[-1] // len(self.heads))
        return depthwise_conv(values, taps, grid, padding=self.padding)

    def _beside_attention(self, x: jax.Array, grid: Grid) -> jax.Array:
        """The outputs of all heads: some attend, the others are convolved."""
        q, k = (head_by_head(part, len(self.attending)) for part in jnp.split(self.query_key(x), 2, axis=-1))
        values = self.value(x)
        v = head_by_head(channels_of_heads(values, self.attending, self.num_heads), len(self.attending))
        attended = attend(q, k, v)
        convolved = self._convolved(channels_of_heads(values, self.heads, self.num_heads), grid)
        y = jnp.concatenate([side_by_side(attended), convolved], axis=-1)
        return channels_of_heads(y, tuple(np.argsort((*self.attending, *self.heads))), self.num_heads)

    def folded(self) -> "FoldedAttention":
        """The form for inference, equal also at borders: plain matrices and one kernel."""
        return self._folded_by_head() if self.kind in BY_HEAD else self._folded_average()

    def _folded_by_head(self) -> "FoldedAttention":
        """Remaining heads come first."""
        value = _columns(self.value, self._channels(self.heads)) if self.attending else self.value
        if self.kind == "conv":
            weight, bias = _split(value, len(self.heads))  # each head with its taps, as one dense kernel (Eq. 9)
            kernel = jax.lax.collapse(jnp.einsum("hrs,ihd->rsihd", self.taps[...], weight).astype(weight.dtype), 3)
            bias = None if bias is None else jax.lax.collapse(jnp.einsum("hrs,hd->rshd", self.taps[...], bias), 2)
            values: Any = DenseValues(kernel, bias, padding=self.padding)
        else:
            values = DepthwiseValues(value, self.taps[...], padding=self.padding)
        if not self.attending:
            return FoldedAttention(values, self.proj)
        layers = (self.query_key, _columns(self.value, self._channels(self.attending)))
        bias = None if self.value.bias is None else jnp.concatenate([layer.bias[...] for layer in layers])
        qkv = linear(jnp.concatenate([layer.weight[...] for layer in layers], axis=-1), bias)
        order = self._channels((*self.attending, *self.heads))
        proj = linear(self.proj.weight[...][order], _array(self.proj.bias))
        return FoldedAttention(values, proj, qkv=qkv, num_heads=len(self.attending))

    def _folded_average(self) -> "FoldedAttention":
        """One averaged head; the heads of the projection are averaged likewise."""
        weight, bias = _split(self.value, self.num_heads)
        if self.kind == "spvit":
            share = jax.nn.softmax(self.taps[...], axis=0)
            kernel = jnp.einsum("hrs,ihd->rsid", share, weight).astype(weight.dtype)
            bias = None if bias is None else jnp.einsum("hrs,hd->rsd", share, bias)
            values: Any = DenseValues(kernel, bias, padding=self.padding)
            share = share.sum((1, 2))
        else:
            share = jax.nn.softmax(self.gamma[...])
            bias = None if bias is None else jnp.einsum("h,hd->d", share, bias)
            value = linear(jnp.einsum("h,ihd->id", share, weight).astype(weight.dtype), bias)
            values = DepthwiseValues(value, self.taps[...], padding=self.padding)
        out = self.proj.weight[...].reshape(self.num_heads, -1, self.proj.weight.shape[-1])
        out = jnp.einsum("h,hdo->do", share, out).astype(out.dtype)
        return FoldedAttention(values, linear(out, _array(self.proj.bias)))

    def _channels(self, heads: tuple[int, ...]) -> np.ndarray:
        """The channels of some heads, in the order of `heads`."""
        return np.arange(self.value.weight.shape[-1]).reshape(self.num_heads, -1)[np.array(heads)].ravel()


class IsotypicReplacedAttention(_Replaced):
    """Replaced attention of an equivariant block: each channel has its own taps (`isotypic_depthwise_conv`).

    It has no folded form: each Fourier transform of an octic block takes 8 D multiply-adds per token, but folding them
    would make the value and output maps dense, D D instead of 3/16 D D.

    Shapes: a field of h w tokens -> the same.

    Args:
      value, proj: of the attention, isotypic.
      taps: [k, k, width / order].
      num_heads, padding: as in `ReplacedAttention`.
    """

    def folded(self) -> "FoldedAttention":
        """Raises: there is no folded form."""
        raise ValueError(
            "folded: the replaced attention of an equivariant block has no folded form; models.inference.deployed "
            "keeps it unchanged."
        )

    def __call__(self, x: Isotypic, grid: Grid = None) -> Isotypic:
        """The tokens after the projection; `grid` is (h, w), or the layout that blocks get."""
        return self.proj(isotypic_depthwise_conv(self.value(x), self.taps[...], grid, padding=self.padding))


def replace_attention(
    attention: Any,
    kind: str,
    *,
    kernel_size: int = 3,
    heads: tuple[int, ...] | None = None,
    padding: str = "zeros",
    rngs: nnx.Rngs | None = None,
) -> ReplacedAttention | IsotypicReplacedAttention:
    """Replace some or all heads of an attention: values and projection are inherited, new taps are drawn.

    Args:
      attention: a `dense.Attention`; for "dw" of all heads, also an `isotypic.Attention`.
      kind: one of KINDS.
      kernel_size: k, odd; the grid may be smaller.
      heads: the heads to replace, for "conv" and "dw"; None for all.
      padding: "zeros", or "wrap" around the torus.
      rngs: draws the taps, normal with deviation 0.02; seed 0 if None.  gamma starts at 0.

    Raises:
      ValueError: k is even or not an integer, an unknown kind or padding, heads that do not exist, or an unsupported
        type of attention.
    """
    errors.one_of("replace_attention: kind", kind, KINDS)
    check_taps("replace_attention", kernel_size, padding)
    if type(attention) not in (dense.Attention, isotypic.Attention):
        raise ValueError(
            f"replace_attention: {type(attention).__name__} is neither a dense.Attention nor an isotypic.Attention, "
            "which alone can be replaced; take a plain or octic ViT without relative positions."
        )
    heads = checked_heads("replace_attention", kind, heads, attention.num_heads)
    rngs = Keys(0) if rngs is None else rngs
    options: dict[str, Any] = dict(num_heads=attention.num_heads, padding=padding)
    if isinstance(attention, isotypic.Attention):
        if kind != "dw" or heads is not None:
            raise ValueError(
                f"replace_attention: {kind=}, {heads=}: equivariant blocks support only 'dw' of all heads; take "
                "kind='dw' and heads=None."
            )
        value = jax.tree.map(lambda leaf: leaf[..., 2 * leaf.shape[-1] // 3 :], attention.qkv)
        taps = TAPS_INIT(rngs.params(), (kernel_size, kernel_size, value.lines.shape[-1]))
        return IsotypicReplacedAttention(value, attention.proj, taps, **options)
    width = attention.proj.weight.shape[0]
    value = _columns(attention.qkv, slice(2 * width, None))
    number, channels = attention.num_heads if heads is None else len(heads), width // attention.num_heads
    shapes = {"dw": (kernel_size, kernel_size, number * channels), "ens_dw": (kernel_size, kernel_size, channels)}
    taps = TAPS_INIT(rngs.params(), shapes.get(kind, (number, kernel_size, kernel_size)))
    if heads is not None:
        attending = [h for h in range(attention.num_heads) if h not in heads]
        queries_keys = np.arange(2 * width).reshape(2, attention.num_heads, -1)[:, attending].ravel()
        options |= dict(heads=heads, query_key=_columns(attention.qkv, queries_keys))
    elif kind == "ens_dw":
        options |= dict(gamma=jnp.zeros(attention.num_heads))
    return ReplacedAttention(value, attention.proj, taps, kind=kind, **options)


class FoldedAttention(nnx.Module):
    """The inference form of a `ReplacedAttention`: remaining heads, then convolved values, then the projection.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      values: DepthwiseValues or DenseValues.
      qkv: queries, keys and values of the remaining heads, with columns (q | k | v) x heads x channels; None if no head
        remains.
      num_heads: the number of remaining heads.
    """

    def __init__(self, values: Any, proj: dense.Linear, *, qkv: dense.Linear | None = None, num_heads: int = 0):
        self.values, self.proj, self.qkv, self.num_heads = values, proj, qkv, num_heads

    def __call__(self, x: jax.Array, grid: Grid = None) -> jax.Array:
        y = self.values(x, grid)
        if self.qkv is not None:
            q, k, v = split_heads(self.qkv(x), self.num_heads)
            y = jnp.concatenate([side_by_side(attend(q, k, v)), y], axis=-1)
        return self.proj(y)


class DepthwiseValues(nnx.Module):
    """A linear map, then a depthwise convolution.  Shapes: [*B, h w, in_features] -> [*B, h w, C].

    Args:
      taps: [k, k, C].
    """

    def __init__(self, value: dense.Linear, taps: jax.Array, *, padding: str):
        self.value, self.taps = value, nnx.Param(taps, decay=False, product=True)
        self.padding = padding

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        return depthwise_conv(self.value(x), self.taps[...], grid, padding=self.padding)


class DenseValues(nnx.Module):
    """One dense convolution.  Shapes: [*B, h w, in_features] -> [*B, h w, C].

    Args:
      kernel: [k, k, in_features, C].
      bias: [k, k, C], added by each tap inside the grid; or None.
    """

    def __init__(self, kernel: jax.Array, bias: jax.Array | None, *, padding: str):
        self.kernel = nnx.Param(kernel, product=True)
        # Sums over all rows before r and columns before s, [k + 1, k + 1, C].
        sums = None if bias is None else jnp.pad(bias, ((1, 0), (1, 0), (0, 0))).cumsum(0).cumsum(1)
        self.bias: Any = None if sums is None else nnx.Param(sums)
        self.padding = padding

    def __call__(self, x: jax.Array, grid: Grid) -> jax.Array:
        h, w = filled_grid(grid, x.shape[-2], "convolution")
        kernel = self.kernel[...]
        check_wrap((h, w), len(kernel), self.padding, "convolution")
        with jax.named_scope("linear"):
            maps = x.astype(kernel.dtype).reshape(-1, h, w, x.shape[-1])
            p = kernel.shape[0] // 2
            y = convolve(maps, kernel, pads=((p, p), (p, p)), mode=MODES[self.padding])
            y = y if self.bias is None else y + self.bias_on((h, w)).astype(y.dtype)
            return y.reshape(*x.shape[:-1], -1)

    def bias_on(self, grid: Pair) -> jax.Array:
        """The sum of the biases of the taps inside the grid, at each token: [h, w, C], or [C] around a torus."""
        sums = self.bias[...]
        if self.padding == "wrap":
            return sums[-1, -1]
        for axis, size in enumerate(grid):
            first = len(self.kernel) // 2 - np.arange(size)  # the tap on the first row of the grid
            upper, lower = (np.clip(tap, 0, len(self.kernel)) for tap in (first + size, first))
            sums = jnp.take(sums, upper, axis) - jnp.take(sums, lower, axis)
        return sums


def checked_heads(name: str, kind: str, heads: tuple[int, ...] | None, num_heads: int) -> tuple[int, ...] | None:
    """The heads to replace, ascending, or None for all; ValueError unless they are heads of the module."""
    if heads is None:
        return None
    if kind not in BY_HEAD:
        raise ValueError(f"{name}: {kind!r} merges all heads; take heads=None, or the kind 'dw' or 'conv'.")
    is_form = isinstance(heads, tuple | list) and len(heads) > 0 and all(type(head) is int for head in heads)
    if not is_form or not all(0 <= head < num_heads for head in heads) or len(set(heads)) < len(heads):
        shown, last = errors.shown(heads), num_heads - 1
        raise ValueError(
            f"{name}: heads={shown} must be one or more different heads, 0 to {last}; None is all, (0,) the first."
        )
    return None if len(heads) == num_heads else tuple(sorted(heads))


def taps_by_channel(kind: str, taps: jax.Array, channels: int) -> jax.Array:
    """The taps of each channel, [k, k, heads channels], for a kind in BY_HEAD."""
    return jnp.repeat(jnp.moveaxis(taps, 0, -1), channels, axis=-1) if kind == "conv" else taps


def channels_of_heads(x: jax.Array, heads: tuple[int, ...], num_heads: int) -> jax.Array:
    """The channels of some heads, in the order of `heads`: [*B, num_heads d] -> [*B, len(heads) d]."""
    by_head = x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)[..., np.array(heads), :]
    return jax.lax.collapse(by_head, x.ndim - 1)


def linear(weight: jax.Array, bias: jax.Array | None) -> dense.Linear:
    """The linear map with this weight and bias."""

    def init(*_, **__):
        return weight

    layer = dense.Linear(*weight.shape, bias=bias is not None, init=init, rngs=Keys(0))
    if bias is not None:
        layer.bias.set_value(bias)
    return layer


def _columns(layer: dense.Linear, which: Any) -> dense.Linear:
    return linear(layer.weight[...][:, which], None if layer.bias is None else layer.bias[...][which])


def _array(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _split(value: dense.Linear, num_heads: int) -> tuple[jax.Array, jax.Array | None]:
    """Weight [in, H, d] and bias [H, d] by head."""
    weight, bias = value.weight[...], _array(value.bias)
    return weight.reshape(len(weight), num_heads, -1), None if bias is None else bias.reshape(num_heads, -1)
