"""Learned gates that select attention to replace: relaxed subset selection, and a ViT with gated attention.

Source: Differentiable Subset Pruning (Li et al. 2021), after Xie and Ermon (2019); depthwise attention, Eq. 17 and 18;
github.com/cscribano/DWConv_VFM.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import errors, logical
from equivit.depthwise import replacement
from equivit.kernels.attention import attend, side_by_side
from equivit.layers import dense
from equivit.layers.depthwise import (
    BY_HEAD,
    ReplacedAttention,
    channels_of_heads,
    convolved,
    replace_attention,
    taps_by_channel,
)
from equivit.layers.folded_attention import linear
from equivit.layers.grid import Layout
from equivit.models.model import abstract_model
from equivit.models.vit.model import ViT

KINDS = (*BY_HEAD, "spvit")
STARTS = ("uniform", "xavier")

# ---- Subset selection


def relaxed_top_k(weights: jax.Array, number: int, temperature: float | jax.Array, uniform: jax.Array) -> jax.Array:
    """Gates that sum to `number`; as the temperature goes to 0, they become 1 for a random subset and 0 elsewhere.

    The gates are the sum of `number` relaxed draws without replacement: softmax(r / temperature), where r starts as the
    weights plus Gumbel noise, and each draw p adds log(1 - p) to r.

    Shapes: weights [n], uniform [n] in (0, 1) -> [n].
    """
    tiny = jnp.finfo(weights.dtype).tiny

    def draw(scores, _):
        logs = jax.nn.log_softmax(scores / temperature)
        rest = jnp.maximum(-jnp.expm1(logs), tiny)  # 1 - p, exact where p is near 0
        return scores + jnp.log(rest), jnp.exp(logs)

    noise = -jnp.log(-jnp.log(jnp.clip(uniform, tiny)))
    return jax.lax.scan(draw, weights + noise, length=number)[1].sum(0)


def start_weights(start: str, key: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The weights before training, [depth, heads].

    - "uniform": between 0 and 1, as in the code of depthwise attention;
    - "xavier": Xavier's uniform distribution for a matrix of this shape, as in Differentiable Subset Pruning.
    """
    draw = {"uniform": jax.random.uniform, "xavier": nnx.initializers.xavier_uniform()}
    return draw[start](key, shape)


def temperature(step: int | jax.Array, start: float, end: float, steps: float) -> jax.Array:
    """Geometric schedule from `start` to `end` over `steps`, then constant."""
    return start * (end / start) ** jnp.minimum(step / steps, 1.0)


def hard_top_k(weights: np.ndarray, number: int) -> np.ndarray:
    """1 for the `number` largest weights [n], 0 for the others; ties go to the first."""
    gates = np.zeros_like(weights)
    gates[np.argsort(-weights, kind="stable")[:number]] = 1
    return gates


# ---- The model


class Gate(nnx.Variable):
    """The share of the convolution in each head, [H], recomputed at every step (`objectives/gated.py`)."""


class GatedAttention(dense.Attention):
    """(1 - g) attention + g replacement; both share the values (Eq. 18).

    For "dw" and "conv", each head has a gate, and the mix is projected.  "spvit" merges the heads: they share a gate,
    and each branch has its own projection.

    Shapes: [*B, h w, in_features] -> [*B, h w, width].

    Args:
      attention: its parameters are inherited.
      kind: one of KINDS.
      form: as in `replace_attention`.
      kernel_size: k, odd.
      rngs: draws the taps.

    Raises ValueError as `replace_attention`, or for another kind.
    """

    MAPS = None  # "conv" and "spvit" read b_V on its own, so it must not absorb the bias of the norm

    def __init__(self, attention: dense.Attention, kind: str, *, form: str, kernel_size: int, rngs: nnx.Rngs):
        errors.one_of("GatedAttention: kind", kind, KINDS)
        self.qkv, self.proj, self.num_heads = attention.qkv, attention.proj, attention.num_heads
        new: Any = replace_attention(attention, kind, form=form, kernel_size=kernel_size, rngs=rngs)
        self.taps, self.bias, self.bias_follows = new.taps, new.bias, new.bias_follows
        self.gate, self.kind, self.form = Gate(jnp.zeros(attention.num_heads)), kind, form

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        q, k, v = self.heads(x)
        attended = side_by_side(attend(q, k, v))
        if self.kind == "spvit":
            # Once: the released code, by a slip, projects the result of spvit again with the block's projection.
            return self._mixed(self.proj(attended), self._merged()(x, layout))
        return self.proj(self._mixed(attended, self._convolved(side_by_side(v), layout)))

    def _mixed(self, attended: jax.Array, replaced: jax.Array) -> jax.Array:
        """Mix head by head."""
        gate = jnp.repeat(self.gate[...], attended.shape[-1] // self.num_heads).astype(attended.dtype)
        return (1 - gate) * attended + gate * replaced

    def _convolved(self, values: jax.Array, layout: Layout | None) -> jax.Array:
        """The result of "dw" or "conv" before the projection."""
        taps = taps_by_channel(self.kind, self.taps[...], values.shape[-1] // self.num_heads)
        bias = None if self.bias is None else self.bias[...]
        follows = jnp.split(self.qkv.bias[...], 3)[2] if self.bias_follows else None
        return convolved(values, taps, layout, bias=bias, follows=follows)

    def _merged(self) -> ReplacedAttention:
        """The module that replaces all heads, with the values and the projection of the attention."""
        weight, bias = self.qkv.map()
        value = linear(jnp.split(weight, 3, axis=-1)[2], None if bias is None else jnp.split(bias, 3)[2])
        how: dict[str, Any] = dict(num_heads=self.num_heads, kind=self.kind, form=self.form)
        return ReplacedAttention(value, self.proj, self.taps[...], **how)


def with_gates(model: ViT, kind: str, *, form: str, kernel_size: int, rngs: nnx.Rngs) -> ViT:
    """The model with a `GatedAttention` in each block; arguments as there."""
    blocks: list[Any] = [model.blocks[i] for i in range(len(model.blocks))]
    for block in blocks:
        block.attention = GatedAttention(block.attention, kind, form=form, kernel_size=kernel_size, rngs=rngs)
    copy: Any = jax.tree.map(lambda a: a, model)
    copy.blocks = model.blocks.from_blocks(blocks, remat=model.blocks.remat, unroll=model.blocks.unroll)
    return copy


def set_gates(model: ViT, gates: jax.Array) -> None:
    """Set the gate of each head, [depth, heads]."""
    runs: Any = model.blocks.runs
    for run, (first, length) in zip(runs, model.blocks.spans, strict=True):
        run.attention.gate.set_value(gates[first : first + length])


def without_gates(
    model: ViT, where: Mapping[int, tuple[int, ...] | None], kind: str, *, form: str, kernel_size: int
) -> Any:
    """The model with plain attention where its gates are 0, and the replacement with its taps where they are 1.

    `where` gives the heads whose gates are 1, by block; None for all heads of a block.
    """
    tensors = logical.to_logical(model, nnx.Variable)
    gated = (".attention.taps", ".attention.bias", ".attention.gate")  # plain attention has none
    inherited = {name: tensor for name, tensor in tensors.items() if not name.endswith(gated)}
    plain: Any = logical.from_logical(abstract_model(model.config), inherited, nnx.Variable)
    if not where:
        return plain
    after: Any = replacement.replace(plain, where, kind=kind, form=form, kernel_size=kernel_size)
    new = logical.to_logical(after, nnx.Variable)
    for one in after.config.replaced:
        for name in (f"blocks.{one.block}.attention.{part}" for part in ("taps", "bias")):
            if name in new:
                new[name] = _of_heads(tensors[name], one.heads, kind, model.config.num_heads)
    return logical.from_logical(after, new, nnx.Variable)


def _of_heads(tensor: jax.Array, heads: tuple[int, ...] | None, kind: str, num_heads: int) -> jax.Array:
    """The taps or the bias of some heads, in the order of `heads`; None for all."""
    if heads is None:
        return tensor
    return tensor[np.array(heads)] if kind == "conv" else channels_of_heads(tensor, heads, num_heads)
