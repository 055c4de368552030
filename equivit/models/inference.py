"""Models for inference: folded batch norms (`fold`), and forms for exporters and runtimes (`deployed`).

With running statistics a batch norm is y = f x + s per channel, so f and s fold into the kernel and bias of a preceding
convolution.  A module with a batch norm defines its own folded form: `folded()` returns a module of the same function
up to rounding.  If a fold would not be exact, as with a shift before zero padding, the norm stays.

`deployed` also fixes the image size:

| part                        | deployed form                                                                       |
|-----------------------------|-------------------------------------------------------------------------------------|
| replaced attention          | its folded form: plain matrices, and one convolution (`layers/depthwise.py`)        |
| batch norm                  | folded into the convolution before it                                               |
| attention of ViTs           | three products around a plain softmax, which runtimes know as one operation         |
| layer norm of dense tokens  | Flax's, which exporters know as one operation                                       |
| stack of blocks             | the blocks one after the other, since a scan would become a loop                    |
| learned and fixed positions | a table for the one grid                                                            |
| mask token                  | left out                                                                            |

Only softmax, layer norm and batch norm are computed differently; they agree with the model up to rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.kernels.attention import head_by_head, side_by_side
from equivit.layers import dense, depthwise, isotypic
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.folded_attention import DenseValues, FoldedAttention, linear
from equivit.layers.grid import Layout, check_grid
from equivit.layers.rngs import Keys
from equivit.layers.stack import Stack
from equivit.models.model import ModelModule
from equivit.models.vit.model import ViT


def fold(model: ModelModule) -> ModelModule:
    """Copy the model with every module that has a batch norm and a `folded()` method folded.

    Outer modules are folded first, then the modules left inside them.  Stacks remain scans.  A model without batch
    norms is unchanged.  The copy is for inference: with `train=True` it records no statistics.
    """
    return _with_folded_parts(jax.tree.map(lambda leaf: leaf, model))


def _folded(module: Any) -> Any:
    """The folded replacement of a module (may modify it in place)."""
    if not any(isinstance(part, BatchNorm) for _, part in nnx.iter_modules(module)):
        return module
    return _with_folded_parts(module.folded() if hasattr(module, "folded") else module)


def _with_folded_parts(module: Any) -> Any:
    if type(module) is Stack:
        module.runs = nnx.List([jax.vmap(_folded)(run) for run in module.runs])  # over the blocks of a run
        return module
    return _with_parts(module, _folded)


def _with_parts(module: Any, replacement: Callable[[Any], Any]) -> Any:
    """The module with each of its submodules replaced in place."""
    for name, part in list(vars(module).items()):
        if isinstance(part, nnx.List):
            setattr(module, name, nnx.List([replacement(each) for each in part]))
        elif isinstance(part, nnx.Module):
            setattr(module, name, replacement(part))
    return module


def deployed(model: ModelModule, image_size: tuple[int, int]) -> ModelModule:
    """Copy the model in the forms above, for images of `image_size` (height, width), without drop path or masks.

    The copy is for images of this size alone; a ViT refuses others.
    The exported parameters are `nnx.state(deployed(model, size), nnx.Param)`.

    Raises:
      ValueError: the patch size of a ViT does not divide the image size.
    """
    patch_size = getattr(model.config, "patch_size", None)
    grid = None if patch_size is None else check_grid(image_size, patch_size, "image_size")
    return deployed_part(fold(model), grid)


def deployed_part(module: Any, grid: Any) -> Any:
    """The deployed form of a part of a model, such as an attention, or the part with all its submodules deployed.

    Args:
      grid: (h, w) of its tokens; None without a grid or with several.
    """
    match module:
        case dense.LayerNorm():
            return _layer_norm(module)
        case depthwise.ReplacedAttention():
            return deployed_part(module.folded(), grid)
        case FoldedAttention() if module.qkv is not None:
            values = deployed_part(module.values, grid)
            return Attention(module.qkv, module.proj, module.num_heads, values)
        case DenseValues() if module.bias is not None:
            return ValuesOnGrid(module, grid)
        case Stack():
            return Blocks([deployed_part(module[i], grid) for i in range(len(module))], module.lengths)
        case _ if type(module) is dense.Attention:  # not subclasses with relative positions
            return Attention(module.qkv, module.proj, module.num_heads)
        case _ if type(module) is isotypic.Attention:
            return IsotypicAttention(module)
        case isotypic.PatchEmbed():
            return UnfoldedPatchEmbed(module)
        case ViT():
            module.mask_token = None
            if module.position is not None:
                module.position = nnx.data(Table(module.position(grid), grid))  # a sin-cos table was static
    return _with_parts(module, lambda part: deployed_part(part, grid))


class Attention(nnx.Module):
    """Attention heads as three products around a softmax, then convolved heads, and the projection.

    Shapes: [*B, N, in_features] -> [*B, N, width].

    Args:
      qkv: columns (q | k | v) x heads x channels.
      proj: the projection of all heads.
      values: the convolved heads, called with the grid; None if there are none.
    """

    def __init__(self, qkv: dense.Linear, proj: dense.Linear, num_heads: int, values: Any = None):
        self.query, self.key, self.value = _thirds(qkv)
        self.proj, self.values, self.num_heads = proj, values, num_heads

    def __call__(self, x: jax.Array, layout: Layout | None = None) -> jax.Array:
        q, k, v = (head_by_head(part(x), self.num_heads) for part in (self.query, self.key, self.value))
        y = side_by_side(attend(q, k, v))
        if self.values is not None:
            y = jnp.concatenate([y, self.values(x, layout)], axis=-1)
        return self.proj(y)


class ValuesOnGrid(DenseValues):
    """One dense convolution, with the sum of the biases at each position of one grid."""

    def __init__(self, values: DenseValues, grid: Any):
        self.kernel, self.bias = values.kernel, nnx.Param(values.bias_on(grid))
        self.relu, self.padding = values.relu, values.padding

    def bias_on(self, grid: tuple[int, int]) -> jax.Array:
        return self.bias[...]


class UnfoldedPatchEmbed(isotypic.PatchEmbed):
    """An equivariant patch embedding that stores its unfolded kernels."""

    def __init__(self, embed: isotypic.PatchEmbed):
        self.unfolded, self.bias = nnx.Param(embed.kernels()), embed.bias
        self.patch_size, self.group = embed.patch_size, embed.group

    def kernels(self) -> Any:
        return self.unfolded.get_value()


class IsotypicAttention(nnx.Module):
    """An equivariant attention with a plain softmax."""

    def __init__(self, attention: isotypic.Attention):
        self.attention = attention

    def __call__(self, x: Any, layout: Layout | None = None) -> Any:
        return self.attention.projected(attend(*self.attention.heads(x)))


class Blocks(Stack):
    """The blocks of a stack with these run lengths, each with its own parameters; training options are ignored."""

    def __init__(self, blocks: list[nnx.Module], lengths: tuple[int, ...]):
        self.blocks, self.lengths = nnx.List(blocks), lengths

    def __getitem__(self, index: int) -> Any:
        self.check(index)
        return self.blocks[index]

    def apply(self, run, offset, begin, end, period, carried, rates, block):
        block = dataclasses.replace(block, train=False, key=None)
        for i in range(begin, end):
            carried, _ = block(carried, (i, None, self.blocks[i]), phase=i)
        return carried


class Table(nnx.Module):
    """The positions for one grid, with the interface of the module that computed them."""

    def __init__(self, positions: Any, grid: tuple[int, int]):
        self.positions, self.grid = nnx.Param(positions), grid  # positions are an array, or a field

    def __call__(self, grid: tuple[int, int]) -> Any:
        if grid != self.grid:
            (h, w), (height, width) = self.grid, grid
            raise ValueError(
                f"deployed: the model has the positions of {h}x{w} patches, and these images have {height}x{width}; "
                "call deployed again with their size."
            )
        return self.positions.get_value()


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """`kernels.attention.attend` with weights normalised before the second product, in the dtype of q."""
    weights = jax.nn.softmax(jnp.matmul(q * q.shape[-1] ** -0.5, jnp.swapaxes(k, -1, -2)))
    return jnp.matmul(weights, v)


def _thirds(qkv: dense.Linear) -> list[dense.Linear]:
    biases = (None,) * 3 if qkv.bias is None else jnp.split(qkv.bias[...], 3)
    return [linear(w, b) for w, b in zip(jnp.split(qkv.weight[...], 3, axis=1), biases, strict=True)]


def _layer_norm(norm: dense.LayerNorm) -> Callable:
    width = norm.scale[...].shape[-1]
    layer: Any = nnx.LayerNorm(width, epsilon=norm.eps, use_fast_variance=False, rngs=Keys(0))
    layer.scale, layer.bias = nnx.Param(norm.scale[...]), nnx.Param(norm.bias[...])
    layer.eps = norm.eps  # adaptive patch merging reads it
    return layer
