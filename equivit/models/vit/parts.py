"""The parts of a ViT: how they are built from its configuration (`config.py`), and those that only ViTs have."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense, invariants
from equivit.layers.block import Block
from equivit.layers.depthwise import replace_attention
from equivit.layers.grid import Layout, check_grid
from equivit.layers.isotypic import channels
from equivit.layers.parts import Parts
from equivit.layers.position import IsotypicPosition, Position, SinCos
from equivit.layers.prefix import Prefix, token
from equivit.layers.readout import AttentionReadout, BlocksReadout, ClassReadout, FcNormReadout, MeanReadout
from equivit.layers.stack import Stack
from equivit.models.vit.model import ViT
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic, TokensT, join, rows
from equivit.symmetry.groups import FLIP, OCTIC

ViTConfig = Any  # `config.ViTConfig`, whose `build` calls this file


def build(config: ViTConfig, rngs: nnx.Rngs) -> ViT:
    """A ViT, with or without class token and registers."""
    parts = parts_of(config, rngs)
    width = learned_width(config)
    names = ("class_token", "class_position", "registers", "token_std", "position_std", "register_std")
    prefix = {name: getattr(config, name) for name in names}
    return ViT(
        config,
        patch_embed=parts.patch_embed(config.patch_size, config.in_channels, config.width),
        position=position(config, rngs),
        prefix=Prefix(width, **prefix, rngs=rngs) if config.prefix else None,
        mask_token=token((width,), 0.0, rngs) if config.mask_token else None,
        pre_norm=parts.norm(config.width) if config.pre_norm else None,
        blocks=stack(config, functools.partial(_block, config), rngs),
        **_exit(config, parts),
    )


def parts_of(config: ViTConfig, rngs: nnx.Rngs) -> Parts:
    """The parts of the first blocks; `.of(None)` gives the parts of the dense blocks."""
    names = ("norm_eps", "isotypic_eps", "isotypic_norm", "layer_scale", "qkv_bias", "qk_norm", "patch_bias")
    names += ("init", "dropout")
    options = {name: getattr(config, name) for name in names}
    return Parts(config.group, rngs, activation=config.mlp, rotary=config.position == "rotary", **options)


def learned_width(config: ViTConfig) -> int:
    """Width of a learned token; among fields, it has only the invariant component."""
    return config.width if config.group is None else channels("ViT", config.width, config.group)


def position(config: ViTConfig, rngs: nnx.Rngs) -> Callable | None:
    """The positions of the patches; None if attention uses relative or rotary positions."""
    if "position" in config.parts or config.position == "rotary":
        return None
    grid = check_grid(config.image_size, config.patch_size, "ViT: image_size")
    if config.group is not None:
        return IsotypicPosition(grid, config.width, group=config.group, std=config.position_std, rngs=rngs)
    if config.position != "learned":
        return SinCos(config.width, inclusive=config.position == "sincos_inclusive")
    resizing: dict[str, Any] = dict(antialias=config.position_antialias, offset=config.position_offset)
    return Position(grid, config.width, std=config.position_std, **resizing, rngs=rngs)


MakeBlock = Callable[[Parts], nnx.Module]


def stack(config: ViTConfig, block: MakeBlock, rngs: nnx.Rngs, last: MakeBlock | None = None) -> Stack:
    """k equivariant blocks, then dense ones; `block` makes a block, and `last`, if given, makes the last one."""
    replaced = {one.block: one._replace(block=0) for one in config.replaced}  # equal blocks share a run

    def sort(i):
        make = block if last is None or i < config.depth - 1 else last
        return config.group if i < config.k else None, replaced.get(i), make

    def maker(group, replaced, make):
        def build(rngs):
            options: dict[str, Any] = dict(torus=config.torus(group))
            if replaced is not None:
                how = {name: value for name, value in replaced._asdict().items() if name != "block"}
                options |= dict(replace_attention=functools.partial(replace_attention, **how, rngs=rngs))
            return make(dataclasses.replace(parts_of(config, rngs).of(group), **options))

        return build

    runs = [(len(list(run)), maker(*how)) for how, run in itertools.groupby(range(config.depth), sort)]
    return Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)


def transition(config: ViTConfig, parts: Parts) -> Callable | None:
    """The layer between the equivariant and the dense blocks, if there is one."""
    match config.leaves:
        case "dropped":
            drop = fields.to_dense if config.group is OCTIC else _values
            if not config.transition_map:
                return drop
            return Invariantize(drop, parts.of(None).linear(config.width, config.width))
        case "invariant" if config.group is not None:
            invariant = invariants.create(config.invariant, config.width, group=config.group, rngs=parts.rngs)
            if config.group is FLIP and invariant.out_features == config.width:
                return Invariantize(invariant, None)
            return Invariantize(invariant, parts.of(None).linear(invariant.out_features, config.width))
    return None


def _values(x: Isotypic) -> jax.Array:
    """The concatenated values on the group, as in the official H2."""
    return jnp.concatenate(list(fields.to_regular(x)), axis=-1)


class Invariantize(nnx.Module):
    """Maps every token to invariants, and projects them if their number is not the width (I8, I2).

    With `transition_map`, H8 and H2 project their components, in place of invariants.

    Shapes: a field of [*B, N, width] -> [*B, N, width].
    """

    def __init__(self, invariant: Callable, projection: nnx.Module | None):
        self.invariant, self.projection = invariant, projection

    def __call__(self, x: Isotypic) -> jax.Array:
        y = self.invariant(x)
        return y if self.projection is None else self.projection(y).astype(y.dtype)


class SplitMlp(nnx.Module):
    """Prefix tokens from index `first` on go through `special`, all other tokens through `common`.

    Shapes: [*B, N, C] or a field -> the same.  Source: Jumbo, Section 4.7.
    """

    def __init__(self, common: nnx.Module, special: nnx.Module, first: int):
        self.common, self.special, self.first = common, special, first

    def __call__(self, x: TokensT, layout: Layout) -> TokensT:
        first, stop = self.first, layout.prefix
        special = self.special(rows(x, first, stop))
        others = self.common(join(rows(x, 0, first), rows(x, stop)))
        return join(rows(others, 0, first), special, rows(others, first))


def _block(config: ViTConfig, parts: Parts) -> nnx.Module:
    """A block; with `register_mlp`, some of the tokens before the patches have their own MLP."""
    width, hidden, subsets = config.width, config.hidden, config.subsets(parts.group)
    if config.register_mlp is None:
        return Block(**parts.branches(width, config.num_heads, hidden), subsets=subsets)
    first = int(config.class_token) if config.register_mlp == "registers" else 0

    def mlp():
        return SplitMlp(parts.mlp(width, hidden), parts.mlp(width, hidden), first)

    return Block(**parts.branches(width, config.num_heads, hidden, mlp), subsets=subsets)


def _exit(config: ViTConfig, parts: Parts) -> dict[str, Any]:
    """Transition, readout and head."""
    width, rngs = config.width, parts.rngs
    leave = transition(config, parts)
    invariant = None
    if config.group is not None and config.ends_with_fields:
        invariant = invariants.create(config.invariant, width, group=config.group, rngs=rngs)
    norm = (parts if config.ends_with_fields else parts.of(None)).norm(width)
    options: dict[str, Any] = dict(class_token=config.class_token, invariant=invariant)
    if config.pool == "class_and_mean" or config.pool_blocks > 1:
        readout = BlocksReadout(norm, patches=config.pool == "class_and_mean", class_token=True)
    elif config.pool == "class":
        readout = ClassReadout(norm, **options)
    elif config.pool == "attention":
        readout = _attention_readout(config, parts.of(None), norm)
    elif config.fc_norm:
        readout = FcNormReadout(norm, class_token=config.class_token)
    else:
        readout = MeanReadout(norm, pool_first=config.pool_first, **options)
    features = width * (config.pool_blocks + (config.pool == "class_and_mean"))
    features = features if invariant is None else invariant.out_features
    return dict(transition=leave, readout=readout, head=make_head(config, features, config.family == "D8", rngs))


def _attention_readout(config: ViTConfig, parts: Parts, norm: nnx.Module) -> AttentionReadout:
    width, rngs = config.width, parts.rngs
    return AttentionReadout(
        norm,
        query=token((width,), config.token_std, rngs),
        qkv=parts.linear(width, 3 * width, bias=config.qkv_bias),
        proj=parts.linear(width, width),
        num_heads=config.num_heads,
        mlp_norm=parts.norm(width),
        mlp=parts.mlp(width, config.hidden),
    )


def make_head(config: ViTConfig, features: int, hidden: bool, rngs: nnx.Rngs) -> nnx.Module | None:
    """The projection or the classifier, which may have a hidden layer; None for neither."""
    classes, init = config.num_classes, nnx.initializers.normal(config.head_std)
    if config.projection is not None:
        return dense.Linear(features, config.projection, bias=False, init=init, rngs=rngs)
    if classes is None:
        return None
    if hidden:
        head = dense.MlpHead(features, config.width, classes, init=init, rngs=rngs)
    else:
        head = dense.Linear(features, classes, init=init, rngs=rngs)
    if config.head_bias == "prior":
        bias = head.fc2.bias if isinstance(head, dense.MlpHead) else head.bias
        bias.set_value(jnp.full(classes, -math.log(classes), float))
    return head
