"""Attention replaced by convolution: local and input-independent, without queries and keys.

The values V_h = x W_V[h] + b_V[h] of the H heads and the output projection are inherited from the attention:

| kind     | taps        | computes, before the projection                                                 | Eq.    |
|----------|-------------|---------------------------------------------------------------------------------|--------|
| conv     | [H, k, k]   | each V_h convolved with the taps of its head; folded into one dense convolution | 9, 10  |
| dw       | [k, k, D]   | each channel of V convolved with its own taps                                   | 11     |
| spvit    | [H, k, k]   | the heads averaged, at each tap by a softmax of the taps over the heads         | A.4    |
| ens_dw   | [k, k, D/H] | the heads averaged by a softmax of gamma, then each channel with its own taps   | 12, 13 |
| identity | none        | V itself, so that values and projection are one linear map                      |        |

Tokens outside the grid are zero.  The paper and the code that its authors released differ:

|                                 | form="released" (default)               | form="printed" (the paper)               |
|---------------------------------|-----------------------------------------|------------------------------------------|
| depthwise convolutions          | have a bias                             | have none                                |
| b_V in "conv" and "spvit"       | is added behind the convolution         | before, so that border tokens get less   |
| softmax over heads              | has temperature 0.01                    | has temperature 1                        |
| convolution of "spvit"          | is followed by a ReLU                   | is not                                   |
| taps at the start               | a blur; of "ens_dw" uniform             | normal                                   |

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution"; github.com/cscribano/DWConv_VFM, in which
biases of convolutions start as PyTorch draws them.  Here they start at 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors
from equivit.kernels.attention import attend, head_by_head, side_by_side
from equivit.kernels.product import add_bias
from equivit.layers import dense, isotypic
from equivit.layers.depthwise_conv import Grid, check_taps, depthwise_conv, isotypic_depthwise_conv
from equivit.layers.folded_attention import DenseValues, DepthwiseValues, FoldedAttention, linear
from equivit.layers.grid import Layout
from equivit.layers.rngs import Keys
from equivit.layers.taps import check_start, default_start, drawn
from equivit.symmetry.fields import Isotypic

KINDS = ("conv", "dw", "spvit", "ens_dw", "identity")
FORMS = ("released", "printed")
BY_HEAD = ("conv", "dw")  # the others merge all heads, so no head can stay attention
TEMPERATURES = {"released": 0.01, "printed": 1.0}


class _Replaced(nnx.Module):
    """The base class, with the error of `weights`."""

    kind: str
    replacement = "a convolution"

    def weights(self, x: Any, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        """Raises: there are no attention weights."""
        raise ValueError(
            f"attention_weights: the attention of this block is replaced by {self.replacement} ({self.kind}), which "
            "has no weights; take another block."
        )


class LinearAttention(_Replaced):
    """Attention replaced by the kind "identity": each token gets its own value.

    Shapes: [*B, N, in_features], or a field -> the same with `width` channels.

    Args:
      layer: values and projection in one map.
    """

    kind, replacement = "identity", "a linear map"

    def __init__(self, layer: dense.Linear | isotypic.Linear):
        self.linear = layer

    def __call__(self, x: Any, grid: Grid = None) -> Any:
        return self.linear(x)


class _Convolved(_Replaced):
    """The base class of convolutions: values, taps, bias and projection."""

    def __init__(
        self,
        value: Any,
        proj: Any,
        taps: jax.Array,
        bias: jax.Array | None = None,
        *,
        num_heads: int,
        kind: str = "dw",
        form: str = "released",
        padding: str = "zeros",
    ):
        self.value, self.proj = value, proj
        # Low precision rounds factors of products; spvit taps go through a softmax first.
        self.taps = nnx.Param(taps, decay=False, product=kind != "spvit")
        self.bias: Any = None if bias is None else nnx.Param(bias, decay=False)
        self.kind, self.form, self.num_heads, self.padding = kind, form, num_heads, padding
        self.kernel_size = taps.shape[1]


class ReplacedAttention(_Convolved):
    """Self-attention with some or all heads replaced by convolution.  Parameters keep the order of the heads.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      value, proj: of the attention, in_features to width and width to width.
      taps: of the replaced heads, as in the table above.
      bias: of the depthwise convolution, one number a channel, or None.
      heads: the replaced heads, ascending; None for all.
      query_key: queries and keys of the a remaining heads, in_features to 2 a d, with columns (q | k) x heads x
        channels; None if no head remains.
      gamma: [H] for "ens_dw", else None.
      options: `kind`, `form`, `num_heads`, and `padding`, which is "zeros" or "wrap" around the torus.
    """

    def __init__(
        self,
        value,
        proj,
        taps,
        bias=None,
        *,
        heads: tuple[int, ...] | None = None,
        query_key=None,
        gamma=None,
        **options,
    ):
        super().__init__(value, proj, taps, bias, **options)
        self.heads = tuple(range(self.num_heads)) if heads is None else heads
        self.query_key: Any = query_key
        self.gamma: Any = None if gamma is None else nnx.Param(gamma, decay=False)

    @property
    def attending(self) -> tuple[int, ...]:
        """The heads that are not replaced."""
        return tuple(h for h in range(self.num_heads) if h not in self.heads)

    @property
    def bias_follows(self) -> bool:
        """Whether b_V is added behind the convolution."""
        return self.form == "released" and self.kind in ("conv", "spvit") and self.value.bias is not None

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
        follows = channels_of_heads(self.value.bias[...], self.heads, self.num_heads) if self.bias_follows else None
        return convolved(values, taps, grid, bias=_array(self.bias), follows=follows, padding=self.padding)

    def _beside_attention(self, x: jax.Array, grid: Grid) -> jax.Array:
        """The outputs of all heads: some attend, the others are convolved."""
        q, k = (head_by_head(part, len(self.attending)) for part in jnp.split(self.query_key(x), 2, axis=-1))
        values = self.value(x)
        v = head_by_head(channels_of_heads(values, self.attending, self.num_heads), len(self.attending))
        attended = attend(q, k, v)
        convolved = self._convolved(channels_of_heads(values, self.heads, self.num_heads), grid)
        y = jnp.concatenate([side_by_side(attended), convolved], axis=-1)
        return channels_of_heads(y, tuple(np.argsort((*self.attending, *self.heads))), self.num_heads)

    def folded(self) -> FoldedAttention:
        """The form for inference, equal also at borders: plain matrices and one kernel."""
        return self._folded_by_head() if self.kind in BY_HEAD else self._folded_average()

    def _folded_by_head(self) -> FoldedAttention:
        """Remaining heads come first."""
        value = _columns(self.value, self._channels(self.heads)) if self.attending else self.value
        if self.kind == "conv":
            weight, bias = _split(value, len(self.heads))  # each head with its taps, as one dense kernel (Eq. 9)
            values: Any = self._dense(self.taps[...], weight, bias, "hrs,ihd->rsihd")
        else:
            values = DepthwiseValues(value, self.taps[...], _array(self.bias), padding=self.padding)
        if not self.attending:
            return FoldedAttention(values, self.proj)
        layers = (self.query_key, _columns(self.value, self._channels(self.attending)))
        bias = None if self.value.bias is None else jnp.concatenate([layer.bias[...] for layer in layers])
        qkv = linear(jnp.concatenate([layer.weight[...] for layer in layers], axis=-1), bias)
        order = self._channels((*self.attending, *self.heads))
        proj = linear(self.proj.weight[...][order], _array(self.proj.bias))
        return FoldedAttention(values, proj, qkv=qkv, num_heads=len(self.attending))

    def _folded_average(self) -> FoldedAttention:
        """One averaged head; the heads of the projection are averaged likewise."""
        weight, bias = _split(self.value, self.num_heads)
        logits = self.taps if self.kind == "spvit" else self.gamma
        share = jax.nn.softmax(logits[...] / TEMPERATURES[self.form], axis=0)
        if self.kind == "spvit":
            values: Any = self._dense(share, weight, bias, "hrs,ihd->rsid")
            share = share.sum((1, 2))
        else:
            bias = None if bias is None else jnp.einsum("h,hd->d", share, bias)
            value = linear(jnp.einsum("h,ihd->id", share, weight).astype(weight.dtype), bias)
            values = DepthwiseValues(value, self.taps[...], _array(self.bias), padding=self.padding)
        out = self.proj.weight[...].reshape(self.num_heads, -1, self.proj.weight.shape[-1])
        out = jnp.einsum("h,hdo->do", share, out).astype(out.dtype)
        return FoldedAttention(values, linear(out, _array(self.proj.bias)))

    def _dense(self, taps: jax.Array, weight: jax.Array, bias: jax.Array | None, axes: str) -> DenseValues:
        """One dense convolution: taps [H, k, k], weight [C, H, d] and bias [H, d], whose heads `axes` sums or keeps."""
        kernel = jax.lax.collapse(jnp.einsum(axes, taps, weight).astype(weight.dtype), 3)
        if bias is not None:
            bias = jax.lax.collapse(jnp.einsum(axes.replace("i", ""), taps, bias), 2)
            bias = bias.sum((0, 1)) if self.bias_follows else bias
        relu = self.kind == "spvit" and self.form == "released"
        return DenseValues(kernel, bias, relu=relu, padding=self.padding)

    def _channels(self, heads: tuple[int, ...]) -> np.ndarray:
        """The channels of some heads, in the order of `heads`."""
        return np.arange(self.value.weight.shape[-1]).reshape(self.num_heads, -1)[np.array(heads)].ravel()


class IsotypicReplacedAttention(_Convolved):
    """Replaced attention of an equivariant block: each channel has its own taps (`isotypic_depthwise_conv`).

    It has no folded form: each Fourier transform of an octic block takes 8 D multiply-adds per token, but folding them
    would make the value and output maps dense, D D instead of 3/16 D D.

    Shapes: a field of h w tokens -> the same.

    Args:
      value, proj: of the attention, isotypic.
      taps: [k, k, width / order].
      bias: [width / order], of the convolution, the same on every group element; or None.
      num_heads, form, padding: as in `ReplacedAttention`.
    """

    def folded(self) -> FoldedAttention:
        """Raises: there is no folded form."""
        raise ValueError(
            "folded: the replaced attention of an equivariant block has no folded form; models.inference.deployed "
            "keeps it unchanged."
        )

    def __call__(self, x: Isotypic, grid: Grid = None) -> Isotypic:
        """The tokens after the projection; `grid` is (h, w), or the layout that blocks get."""
        options: dict[str, Any] = dict(bias=_array(self.bias), padding=self.padding)
        return self.proj(isotypic_depthwise_conv(self.value(x), self.taps[...], grid, **options))


def replace_attention(
    attention: Any,
    kind: str,
    *,
    form: str = "released",
    kernel_size: int = 3,
    heads: tuple[int, ...] | None = None,
    start: str | None = None,
    padding: str = "zeros",
    rngs: nnx.Rngs | None = None,
) -> ReplacedAttention | IsotypicReplacedAttention | LinearAttention:
    """Replace some or all heads of an attention: values and projection are inherited, taps are new.

    Args:
      attention: a `dense.Attention`; for "dw" of all heads and "identity", also an `isotypic.Attention`.
      kind: one of KINDS.
      form: one of FORMS.
      kernel_size: k, odd; the grid may be smaller.
      heads: the heads to replace, for "conv" and "dw"; None for all.
      start: of the taps of "conv", "dw" and "ens_dw", one of `taps.STARTS`; None for the default of the form.
        Logits of heads start at 1.
      padding: "zeros", or "wrap" around the torus.
      rngs: draws the taps; seed 0 if None.

    Raises:
      ValueError: k is even or not an integer, an unknown kind, form, start or padding, heads that do not exist, or an
        unsupported type of attention.
    """
    errors.one_of("replace_attention: form", form, FORMS)
    check_taps("replace_attention", kernel_size, padding)
    check_start("replace_attention", start, kind)
    heads = _replaceable_heads(attention, kind, heads)
    rngs = Keys(0) if rngs is None else rngs
    options: dict[str, Any] = dict(num_heads=attention.num_heads, kind=kind, form=form, padding=padding)

    def taps(number):
        return drawn(start or default_start(kind, form), rngs.params(), kernel_size, number)

    def biases(number):
        return jnp.zeros(number) if form == "released" else None

    is_field = isinstance(attention, isotypic.Attention)
    width = attention.proj.arrays()[0][0].shape[-1]  # of a field, the channels of an irrep
    value = _columns(attention.qkv, slice(2 * width, None)) if not is_field else _thirds(attention.qkv)
    if kind == "identity":
        return LinearAttention(_composed(value, attention.proj))
    if is_field:
        return IsotypicReplacedAttention(value, attention.proj, taps(width), biases(width), **options)
    number, channels = attention.num_heads if heads is None else len(heads), width // attention.num_heads
    if heads is not None:
        attending = [h for h in range(attention.num_heads) if h not in heads]
        queries_keys = np.arange(2 * width).reshape(2, attention.num_heads, -1)[:, attending].ravel()
        options |= dict(heads=heads, query_key=_columns(attention.qkv, queries_keys))
    match kind:
        case "dw":
            filters = taps(number * channels), biases(number * channels)
        case "ens_dw":
            filters = taps(channels), biases(channels)
            options |= dict(gamma=jnp.ones(number))
        case "spvit" if form == "released":
            filters = (jnp.ones((number, kernel_size, kernel_size)),)
        case _:
            filters = (jnp.moveaxis(taps(number), -1, 0),)
    return ReplacedAttention(value, attention.proj, *filters, **options)


def _replaceable_heads(attention: Any, kind: str, heads: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The checked heads of `replace_attention`; ValueError unless its kind can replace them in this attention."""
    errors.one_of("replace_attention: kind", kind, KINDS)
    if type(attention) not in (dense.Attention, isotypic.Attention):
        raise ValueError(
            f"replace_attention: {type(attention).__name__} is neither a dense.Attention nor an isotypic.Attention, "
            "which alone can be replaced; take a plain or octic ViT without relative positions."
        )
    heads = checked_heads("replace_attention", kind, heads, attention.num_heads)
    if isinstance(attention, isotypic.Attention) and (kind not in ("dw", "identity") or heads is not None):
        raise ValueError(
            f"replace_attention: {kind=}, {heads=}: equivariant blocks support only 'dw' of all heads and 'identity'; "
            "take kind='dw' and heads=None."
        )
    return heads


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


def convolved(
    values: jax.Array,
    taps: jax.Array,
    grid: Grid,
    *,
    bias: jax.Array | None = None,
    follows: jax.Array | None = None,
    padding: str = "zeros",
) -> jax.Array:
    """Values convolved channel by channel.  Shapes: [*B, h w, C], taps [k, k, C] -> [*B, h w, C].

    Args:
      bias: [C], added to the result.
      follows: [C], the part b_V of the values that taps outside the grid shall meet too, as if it were added behind.
    """
    y = depthwise_conv(values, taps, grid, padding=padding)
    if follows is not None:
        inside = depthwise_conv(jnp.ones(values.shape[-2:], taps.dtype), taps, grid, padding=padding)
        bias = follows * (taps.sum((0, 1)) - inside)
    return y if bias is None else add_bias(y, bias)


def taps_by_channel(kind: str, taps: jax.Array, channels: int) -> jax.Array:
    """The taps of each channel, [k, k, heads channels], for a kind in BY_HEAD."""
    return jnp.repeat(jnp.moveaxis(taps, 0, -1), channels, axis=-1) if kind == "conv" else taps


def channels_of_heads(x: jax.Array, heads: tuple[int, ...], num_heads: int) -> jax.Array:
    """The channels of some heads, in the order of `heads`: [*B, num_heads d] -> [*B, len(heads) d]."""
    by_head = x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads)[..., np.array(heads), :]
    return jax.lax.collapse(by_head, x.ndim - 1)


def _composed(first: Any, second: Any) -> Any:
    """The map second(first(x)), dense or isotypic."""
    (weights, bias), (outer, outer_bias) = first.arrays(), second.arrays()
    if bias is not None:
        bias = bias @ (outer[0] if outer[0].ndim == 2 else outer[0][0])  # the bias of a field is invariant
        outer_bias = bias if outer_bias is None else bias + outer_bias
    return second.holding(tuple(a @ b for a, b in zip(weights, outer, strict=True)), outer_bias)


def _thirds(qkv: isotypic.Linear) -> isotypic.Linear:
    """The last third of the columns: the values."""
    return jax.tree.map(lambda leaf: leaf[..., 2 * leaf.shape[-1] // 3 :], qkv)


def _columns(layer: dense.Linear, which: Any) -> dense.Linear:
    return linear(layer.weight[...][:, which], None if layer.bias is None else layer.bias[...][which])


def _array(parameter: Any) -> jax.Array | None:
    return None if parameter is None else parameter[...]


def _split(value: dense.Linear, num_heads: int) -> tuple[jax.Array, jax.Array | None]:
    """Weight [in, H, d] and bias [H, d] by head."""
    weight, bias = value.weight[...], _array(value.bias)
    return weight.reshape(len(weight), num_heads, -1), None if bias is None else bias.reshape(num_heads, -1)
