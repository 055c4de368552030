"""A ViT whose blocks mix attention and convolution by gates, and the model that remains when the gates are decided."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from equivit import logical
from equivit.layers.gating import GatedAttention
from equivit.layers.rngs import Keys
from equivit.models import replacement
from equivit.models.vit.model import ViT

MADE = ("taps", "gate")  # of a gated attention, which an attention does not have


def gated(model: ViT, kind: str, *, kernel_size: int = 3, rngs: nnx.Rngs) -> ViT:
    """The model with a `GatedAttention` in each block, of which all else is kept."""
    blocks: list[Any] = [model.blocks[i] for i in range(len(model.blocks))]
    for block in blocks:
        block.attention = GatedAttention(block.attention, kind, kernel_size=kernel_size, rngs=rngs)
    copy: Any = jax.tree.map(lambda a: a, model)
    copy.blocks = model.blocks.from_blocks(blocks, remat=model.blocks.remat, unroll=model.blocks.unroll)
    return copy


def set_gates(model: ViT, gates: jax.Array) -> None:
    """Give each head its gate, [depth, heads]."""
    runs: Any = model.blocks.runs
    for run, (first, length) in zip(runs, model.blocks.spans, strict=True):
        run.attention.gate.set_value(gates[first : first + length])


def decided(model: ViT, where: Mapping[int, tuple[int, ...] | None], kind: str, kernel_size: int) -> Any:
    """The model that a gated one is where the gates of `where` are 1, with their taps, and all others 0.

    Args:
      where: {block: None for all heads, or some}.
      kind, kernel_size: of the gated model.
    """
    tensors = logical.to_logical(model, nnx.Variable)
    own = {name: tensor for name, tensor in tensors.items() if not _is_made(name)}
    plain: Any = logical.from_logical(jax.eval_shape(lambda: model.config.build(Keys(0))), own, nnx.Variable)
    if not where:
        return plain
    after: Any = replacement.replace(plain, where, kind=kind, kernel_size=kernel_size)
    new = logical.to_logical(after, nnx.Variable)
    for one in after.config.replaced:
        name = f"blocks.{one.block}.attention.taps"
        new[name] = _of_heads(tensors[name], one.heads, kind, model.config.num_heads)
    return logical.from_logical(after, new, nnx.Variable)


def _is_made(name: str) -> bool:
    return name.split(".")[-2] == "attention" and name.split(".")[-1] in MADE


def _of_heads(taps: Any, heads: tuple[int, ...] | None, kind: str, num_heads: int) -> Any:
    """The taps of some heads, in their order."""
    if heads is None:
        return taps
    if kind == "conv":
        return taps[np.array(heads)]
    parts = taps.reshape(*taps.shape[:2], num_heads, -1)[:, :, np.array(heads)]
    return parts.reshape(*taps.shape[:2], -1)
