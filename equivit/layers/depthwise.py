"""Attention replaced by convolution: what a block with local, input-independent attention computes, without Q and K.

Of the H heads the values V_h = x W_V[h] + b_V[h] and the output projection stay:

| kind   | taps        | computes, before the projection                                                 | Eq.    |
|--------|-------------|---------------------------------------------------------------------------------|--------|
| conv   | [H, k, k]   | each V_h convolved with the taps of its head; deployed as one dense convolution | 9, 10  |
| dw     | [k, k, D]   | each channel of V convolved with its own taps                                   | 11     |
| spvit  | [H, k, k]   | the heads averaged, at each tap by softmax(taps) over the heads                 | A.4    |
| ens_dw | [k, k, D/H] | the heads averaged by softmax(gamma), then each channel with its own taps       | 12, 13 |

Outside of the grid there are zeros, not biases: a token at the border has less of b_V.

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution".
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors
from equivit.layers import dense, isotypic
from equivit.layers.attention import attend
from equivit.layers.depthwise_conv import Grid, check_taps, depthwise_conv, isotypic_depthwise_conv
from equivit.layers.depthwise_folded import DenseValues, DepthwiseValues, FoldedAttention, linear
from equivit.layers.grid import Layout
from equivit.layers.replaced import BY_HEAD, KINDS, Replaced, checked_heads
from equivit.layers.rngs import Keys
from equivit.symmetry.fields import Isotypic

__all__ = [
    "KINDS",
    "IsotypicReplacedAttention",
    "Replaced",
    "ReplacedAttention",
    "ScatteredAttention",
    "depthwise_conv",
    "isotypic_depthwise_conv",
    "replace_attention",
]

TAPS_INIT = nnx.initializers.normal(0.02)  # the paper: a normal of mean zero, without its deviation


class _Replaced(nnx.Module):
    """The base of the modules: the taps, and errors for what they do not have."""

    def __init__(self, value: Any, proj: Any, taps: jax.Array, *, kind: str, num_heads: int, padding: str):
        self.value, self.proj = value, proj
        # Low precision rounds factors of products; those of spvit go through a softmax first.
        self.taps = nnx.Param(taps, decay=False, product=kind != "spvit")
        self.kind, self.num_heads, self.padding, self.kernel_size = kind, num_heads, padding, taps.shape[1]

    def weights(self, x: Any, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        """Raises: there are no attention weights."""
        raise ValueError(
            f"attention_weights: the attention of this block is replaced by a convolution ({self.kind}), which has no "
            "weights; take another block."
        )

    def by_channel(self, channels: int) -> jax.Array:
        """The taps of each channel, [k, k, heads channels], for a kind of BY_HEAD."""
        taps = self.taps[...]
        return jnp.repeat(jnp.moveaxis(taps, 0, -1), channels, axis=-1) if self.kind == "conv" else taps


class ReplacedAttention(_Replaced):
    """The attention of a block replaced, all heads.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      value, proj: of the attention, in_features to width and width to width.
      taps: as in the table above.
      gamma: [H] for "ens_dw", else None.
      padding: what lies outside of the grid: "zeros", or "wrap", its other side.
    """

    def __init__(
        self,
        value: dense.Linear,
        proj: dense.Linear,
        taps: jax.Array,
        gamma: jax.Array | None = None,
        *,
        kind: str,
        num_heads: int,
        padding: str = "zeros",
    ):
        super().__init__(value, proj, taps, kind=kind, num_heads=num_heads, padding=padding)
        self.gamma: Any = None if gamma is None else nnx.Param(gamma, decay=False)

    def __call__(self, x: jax.Array, grid: Grid = None) -> jax.Array:
        """The tokens after the projection; `grid` is (h, w), or the layout that blocks get."""
        if self.kind not in BY_HEAD:
            return self.folded()(x, grid)
        v = self.value(x)
        taps = self.by_channel(v.shape[-1] // self.num_heads)
        return self.proj(depthwise_conv(v, taps, grid, padding=self.padding))

    def folded(self, *, implementation: str = "auto") -> FoldedAttention:
        """The deployed form, equal to this module also at borders: the heads averaged, and one kernel.

        Args:
          implementation: of depthwise convolutions (`depthwise_conv`).
        """
        weight, bias = _split(self.value, self.num_heads)
        out = self.proj.weight[...].reshape(self.num_heads, -1, self.proj.weight.shape[-1])
        options: dict[str, Any] = dict(padding=self.padding)
        match self.kind:
            case "dw":
                values = DepthwiseValues(self.value, self.taps[...], implementation=implementation, **options)
                return FoldedAttention(values, self.proj)
            case "conv":
                return FoldedAttention(_by_head(weight, bias, self.taps[...], self.padding), self.proj)
            case "spvit":
                share = jax.nn.softmax(self.taps[...], axis=0)
                kernel = jnp.einsum("hrs,ihd->rsid", share, weight).astype(weight.dtype)
                bias = None if bias is None else jnp.einsum("hrs,hd->rsd", share, bias)
                values, share = DenseValues(kernel, bias, **options), share.sum((1, 2))
            case _:
                share = jax.nn.softmax(self.gamma[...])
                bias = None if bias is None else jnp.einsum("h,hd->d", share, bias)
                value = linear(jnp.einsum("h,ihd->id", share, weight).astype(weight.dtype), bias)
                values = DepthwiseValues(value, self.taps[...], implementation=implementation, **options)
        out = jnp.einsum("h,hdo->do", share, out).astype(out.dtype)
        return FoldedAttention(values, linear(out, _array(self.proj.bias)))


class ScatteredAttention(_Replaced):
    """An attention some heads of which are replaced.  Parameters keep the order of heads that the attention had.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      query_key: of the a heads that stay, in_features to 2 a d, with columns (q | k) x heads x channels.
      value, proj: of the attention.
      taps: of the heads that are replaced, in ascending order: conv [len(heads), k, k], dw [k, k, len(heads) d].
      heads: those that are replaced, ascending.
      padding: as in `ReplacedAttention`.
    """

    def __init__(
        self,
        query_key: dense.Linear,
        value: dense.Linear,
        proj: dense.Linear,
        taps: jax.Array,
        *,
        kind: str,
        num_heads: int,
        heads: tuple[int, ...],
        padding: str = "zeros",
    ):
        super().__init__(value, proj, taps, kind=kind, num_heads=num_heads, padding=padding)
        self.query_key, self.heads = query_key, heads

    @property
    def kept(self) -> tuple[int, ...]:
        """The heads that stay attention."""
        return tuple(h for h in range(self.num_heads) if h not in self.heads)

    def __call__(self, x: jax.Array, grid: Grid = None) -> jax.Array:
        """The tokens after the projection; `grid` is (h, w), or the layout that blocks get."""
        qk, v = self.query_key(x), self.value(x)
        channels = v.shape[-1] // self.num_heads
        q, k = jnp.einsum("...nqhd->q...hnd", qk.reshape(*x.shape[:-1], 2, len(self.kept), channels))
        v = v.reshape(*x.shape[:-1], self.num_heads, channels)
        (attended,) = attend((q,), (k,), (jnp.einsum("...nhd->...hnd", v[..., self.kept, :]),))
        replaced = jax.lax.collapse(v[..., self.heads, :], v.ndim - 2)
        replaced = depthwise_conv(replaced, self.by_channel(channels), grid, padding=self.padding)
        replaced = replaced.reshape(*x.shape[:-1], len(self.heads), channels)
        y = jnp.concatenate([jnp.einsum("...hnd->...nhd", attended), replaced], axis=-2)
        y = y[..., np.argsort((*self.kept, *self.heads)), :]
        return self.proj(jax.lax.collapse(y, y.ndim - 2))

    def folded(self, *, implementation: str = "auto") -> FoldedAttention:
        """The deployed form, equal to this module: as `ReplacedAttention.folded`, remaining heads first."""
        weight, bias = _split(self.value, self.num_heads)
        qk, qk_bias = self.query_key.weight[...], _array(self.query_key.bias)
        kept, heads = (_heads(weight, bias, which) for which in (self.kept, self.heads))
        qkv = linear(
            jnp.concatenate([qk, jax.lax.collapse(kept[0], 1)], axis=-1),
            None if qk_bias is None or kept[1] is None else jnp.concatenate([qk_bias, kept[1].reshape(-1)]),
        )
        if self.kind == "conv":
            values: Any = _by_head(*heads, self.taps[...], self.padding)
        else:
            value = linear(jax.lax.collapse(heads[0], 1), None if heads[1] is None else heads[1].reshape(-1))
            values = DepthwiseValues(value, self.taps[...], padding=self.padding, implementation=implementation)
        out = self.proj.weight[...]
        out = out.reshape(self.num_heads, -1, out.shape[-1])[(*self.kept, *self.heads),]
        proj = linear(jax.lax.collapse(out, 0, 2), _array(self.proj.bias))
        return FoldedAttention(values, proj, qkv=qkv, num_heads=len(self.kept))


class IsotypicReplacedAttention(_Replaced):
    """The attention of an equivariant block replaced, each channel by its own taps (`isotypic_depthwise_conv`).

    It has no folded form: the Fourier transforms of an octic block take 8 D multiply-adds a token each, but folded into
    the value and output maps they would make these dense, D D in place of 3/16 D D.

    Shapes: a field of h w tokens -> the same.

    Args:
      value, proj: of the attention, isotypic.
      taps: [k, k, width / order].
      padding: as in `ReplacedAttention`.
    """

    def __init__(
        self, value: isotypic.Linear, proj: isotypic.Linear, taps: jax.Array, *, num_heads: int, padding: str = "zeros"
    ):
        super().__init__(value, proj, taps, kind="dw", num_heads=num_heads, padding=padding)

    def folded(self, *, implementation: str = "auto") -> FoldedAttention:
        """Raises: there is no folded form."""
        raise ValueError(
            "folded: the replaced attention of an equivariant block has no folded form; models.inference.deployed "
            "takes it as it is."
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
) -> ReplacedAttention | ScatteredAttention | IsotypicReplacedAttention:
    """The attention with some or all heads replaced: values and projection are inherited, new taps are drawn.

    Args:
      attention: a `dense.Attention`, or for "dw" of all heads an `isotypic.Attention`.
      kind: one of KINDS.
      kernel_size: k, odd; the grid may be smaller.
      heads: those to replace, for "conv" and "dw"; None for all.
      padding: what lies outside of the grid: "zeros", or "wrap", its other side.
      rngs: draws the taps, normal with deviation 0.02; seed 0 if None.  gamma starts at 0.

    Raises:
      ValueError: k is even or no whole number, an unknown kind or padding, heads that there are not, or an attention of
        another sort.
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
                f"replace_attention: {kind=}, {heads=}: of equivariant blocks only 'dw' of all heads is possible; take "
                "kind='dw' and heads=None."
            )
        value = _isotypic_value(attention.qkv)
        taps = TAPS_INIT(rngs.params(), (kernel_size, kernel_size, value.lines.shape[-1]))
        return IsotypicReplacedAttention(value, attention.proj, taps, **options)
    width = attention.proj.weight.shape[0]
    value = _columns(attention.qkv, slice(2 * width, None))
    number = attention.num_heads if heads is None else len(heads)
    taps = TAPS_INIT(rngs.params(), taps_shape(kind, kernel_size, number, width // attention.num_heads))
    if heads is None:
        gamma = jnp.zeros(attention.num_heads) if kind == "ens_dw" else None
        return ReplacedAttention(value, attention.proj, taps, gamma, kind=kind, **options)
    kept = [h for h in range(attention.num_heads) if h not in heads]
    columns = np.arange(2 * width).reshape(2, attention.num_heads, -1)[:, kept].ravel()
    query_key = _columns(attention.qkv, columns)
    return ScatteredAttention(query_key, value, attention.proj, taps, kind=kind, heads=heads, **options)


def taps_shape(kind: str, kernel_size: int, heads: int, channels: int) -> tuple[int, int, int]:
    """The shape of the taps, for a number of heads and of channels in each."""
    if kind in ("conv", "spvit"):
        return heads, kernel_size, kernel_size
    return kernel_size, kernel_size, channels if kind == "ens_dw" else heads * channels


def _columns(layer: dense.Linear, which: Any) -> dense.Linear:
    return linear(layer.weight[...][:, which], None if layer.bias is None else layer.bias[...][which])


def _isotypic_value(qkv: isotypic.Linear) -> isotypic.Linear:
    """The last third of the columns in each irrep."""

    def last(leaf):
        return leaf[..., 2 * leaf.shape[-1] // 3 :]

    return jax.tree.map(last, qkv)


def _array(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _split(value: dense.Linear, num_heads: int) -> tuple[jax.Array, jax.Array | None]:
    """Weight [in, H, d] and bias [H, d] by head."""
    weight, bias = value.weight[...], _array(value.bias)
    return weight.reshape(len(weight), num_heads, -1), None if bias is None else bias.reshape(num_heads, -1)


def _heads(weight: jax.Array, bias: jax.Array | None, which: tuple[int, ...]) -> tuple[jax.Array, jax.Array | None]:
    index = np.array(which)
    return weight[:, index], None if bias is None else bias[index]


def _by_head(weight: jax.Array, bias: jax.Array | None, taps: jax.Array, padding: str) -> DenseValues:
    """Each head with its taps [H, k, k], as one dense kernel (Eq. 9)."""
    kernel = jnp.einsum("hrs,ihd->rsihd", taps, weight).astype(weight.dtype)
    bias = None if bias is None else jnp.einsum("hrs,hd->rshd", taps, bias)
    return DenseValues(
        jax.lax.collapse(kernel, 3), None if bias is None else jax.lax.collapse(bias, 2), padding=padding
    )
