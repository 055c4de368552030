"""BiXT: a few latent vectors and all tokens attend to each other, at a cost linear in tokens.

A block is bidirectional cross-attention, then self-attention of the latents alone.  The head reads the mean latent, so
the last block does not update the tokens.  Positions are a code of the relative place in the image, computed for any
grid: the parameters serve all sizes.

Source: BiXT (arXiv 2402.12138); details that it omits are from its public code.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints, errors
from equivit.constraints import Depth, PositiveFloat, PositiveInt, Size
from equivit.layers import dense
from equivit.layers.block import Block
from equivit.layers.convolution import Conv
from equivit.layers.dropout import Key, Rate, split
from equivit.layers.grid import Layout, check_grid, check_images
from equivit.layers.parts import Parts
from equivit.layers.position import FourierCode
from equivit.layers.prefix import token
from equivit.layers.stack import Indices, Stack, captured, check_blocks
from equivit.models.bixt.attention import CrossAttention, CrossBlock
from equivit.models.features import Features, Grid
from equivit.models.image_config import ImageConfig
from equivit.models.model import Preset, Switched, check_head

Both = tuple[jax.Array, jax.Array]  # latents and tokens
CODE = FourierCode(64)
INIT = nnx.initializers.xavier_uniform()


@dataclasses.dataclass(frozen=True)
class BiXTConfig(ImageConfig):
    """The configuration of a BiXT: the fields of its base and these.

    Attributes:
      latents: number of latent vectors.
      num_heads: heads of both kinds of attention.
      patch_size: (height, width) of a token's patch in pixels.
      kernel: (height, width) of a token's receptive field, centred on its patch; the image is zero-padded.
      image_size: (height, width); the model takes any size that the patch divides.
      mlp_ratio: hidden width of the MLPs in units of the width.
      norm_eps: epsilon of layer norms.
    """

    width: PositiveInt = 192
    depth: Depth = 12
    latents: PositiveInt = 64
    num_heads: PositiveInt = 6
    patch_size: Size = (16, 16)
    kernel: Size = (16, 16)
    mlp_ratio: PositiveFloat = 4.0
    norm_eps: PositiveFloat = 1e-6
    unroll: bool | None = None

    def __post_init__(self):
        constraints.check_fields(self, "BiXT")
        errors.divides("BiXT: num_heads", self.num_heads, self.width, f"width={self.width}")
        for kernel, patch in zip(self.kernel, self.patch_size, strict=True):
            if kernel < patch or (kernel - patch) % 2:
                nearest = max(kernel + (kernel - patch) % 2, patch)
                raise ValueError(
                    f"BiXT: kernel={self.kernel} must be patch_size={self.patch_size} or larger by even numbers, with "
                    f"the patch in its middle; the nearest to {kernel} is {nearest}."
                )
        if not self.hidden:
            raise ValueError(
                f"BiXT: mlp_ratio={self.mlp_ratio} leaves no hidden channel of width={self.width}; "
                f"{1 / self.width:.2g} leaves one."
            )
        check_grid(self.image_size, self.patch_size, "BiXT: image_size")

    @property
    def hidden(self) -> int:
        """Hidden width of the MLPs."""
        return round(self.mlp_ratio * self.width)

    @property
    def padding(self) -> tuple[int, int]:
        """Zero padding (rows, columns) on each side of an image."""
        return (self.kernel[0] - self.patch_size[0]) // 2, (self.kernel[1] - self.patch_size[1]) // 2

    def build(self, rngs: nnx.Rngs) -> "BiXT":
        return BiXT(self, rngs=rngs)


class BiXT(Switched):
    """A BiXT; see `BiXTConfig`."""

    before = ("latents", "patch_embed", "position")

    def __init__(self, config: BiXTConfig, *, rngs: nnx.Rngs):
        self.config, width = config, config.width
        self.latents = token((config.latents, width), 0.02, rngs)
        self.patch_embed = _patch_embed(config, rngs)
        self.position = dense.Linear(CODE.width, width, init=nnx.initializers.lecun_normal(), rngs=rngs)
        runs = [(config.depth - 1, functools.partial(BiXTBlock, config, True))]
        runs += [(1, functools.partial(BiXTBlock, config, False))]
        self.blocks = Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.norm, classes = dense.LayerNorm(width, eps=config.norm_eps), config.num_classes
        zeros = nnx.initializers.zeros
        self.head: Any = None if classes is None else dense.Linear(width, classes, init=zeros, rngs=rngs)

    def __call__(self, images: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C]; arguments and errors as in `Model`."""
        check_head(self)
        return self.head(self.pooled(images, key=key, train=train))

    def pooled(self, images: jax.Array, *, key: Key = None, train: bool = False) -> jax.Array:
        """The input of the head, [*B, width]: the norm of the mean latent."""
        (latents, _), _ = self.trunk(*self.embed(images), key=key, train=train)
        return self.norm(latents.mean(-2))

    def features(
        self, images: jax.Array, *, blocks: Indices = (), norm: bool = True, key: Key = None, train: bool = False
    ) -> Features:
        """The features as in `Model`: latents, as `registers`, and patch tokens.

        The last block does not update the tokens, so its tokens come from the previous block.  `norm` has no effect:
        the model normalises only the mean latent.
        """
        check_blocks("BiXT", blocks, len(self.blocks))
        x, layout = self.embed(images)
        x, seen = self.trunk(x, layout, capture=blocks, key=key, train=train)
        return self._features(x, layout, {i: self._features(y, layout, {}) for i, y in seen.items()})

    def embedding(self, images: jax.Array) -> Features:
        """The features before the first block, as in `Model`."""
        return self._features(*self.embed(images), {})

    def embed(self, images: jax.Array) -> tuple[Both, Layout]:
        """The input of the first block: latents [*B, L, width], tokens [*B, h w, width] and their layout."""
        grid = check_images(images, self.config.in_channels, self.config.patch_size)
        x = self.patch_embed(images).reshape(*images.shape[:-3], grid[0] * grid[1], self.config.width)
        x = x + self.position(CODE(grid)).astype(x.dtype)
        latents = self.latents[...].astype(x.dtype)
        return (jnp.broadcast_to(latents, (*x.shape[:-2], *latents.shape)), x), Layout(grid)

    def trunk(
        self, x: Both, layout: Layout, *, capture: Indices = (), key: Key = None, train: bool = False
    ) -> tuple[Both, dict[int, Both]]:
        """Latents and tokens after the last block, and those after the blocks in `capture`."""
        key, train = self.switched(key, train)
        options: dict[str, Any] = dict(rates=self.config.rates, train=train, key=key)

        def apply(x, start, stop):
            return self.blocks(x, layout, start=start, stop=stop, **options)[0]

        return captured(apply, x, capture, 0, len(self.blocks))

    def _features(self, x, layout: Layout, blocks: dict[int, Features]) -> Features:
        latents, tokens = x
        *batch, _, width = tokens.shape
        offset = jnp.zeros((*batch, 2), jnp.int32)
        patches = Grid(tokens.reshape(*batch, *layout.grid, width), self.config.patch_size, offset)
        return Features(None, latents, patches, blocks)


class BiXTBlock(nnx.Module):
    """Cross-attention between latents and tokens, then self-attention of the latents.

    Shapes: latents [*B, L, width] and tokens [*B, N, width] -> the same two.

    Args:
      both: whether the tokens are updated too.
    """

    def __init__(self, config: BiXTConfig, both: bool, rngs: nnx.Rngs):
        width, heads = config.width, config.num_heads
        norm = functools.partial(dense.LayerNorm, width, eps=config.norm_eps)
        mlp = functools.partial(_mlp, width, config.hidden, rngs)
        self.cross = CrossBlock(
            norm1_latents=norm(),
            norm1_tokens=norm(),
            attention=CrossAttention(width, heads, both=both, init=INIT, rngs=rngs),
            norm2_latents=norm(),
            mlp_latents=mlp(),
            norm2_tokens=norm() if both else None,
            mlp_tokens=mlp() if both else None,
        )
        parts = Parts(None, rngs, norm_eps=config.norm_eps, init="xavier_uniform")
        self.own = Block(**parts.branches(width, heads, config.hidden, mlp))

    def __call__(
        self, x: Both, layout: Layout | None = None, *, rate: Rate = 0.0, train: bool = False, key: Key = None
    ) -> Both:
        """Latents and tokens after the block; arguments as in `Stack`, where `layout` and `train` are unused here."""
        cross_key, own_key = split(key)
        latents, tokens = self.cross(*x, rate=rate, key=cross_key)
        return self.own(latents, rate=rate, key=own_key), tokens


def _patch_embed(config: BiXTConfig, rngs: nnx.Rngs) -> dense.PatchEmbed | Conv:
    """The first convolution, a matrix product if patches do not overlap."""
    init, channels, width = nnx.initializers.lecun_normal(), config.in_channels, config.width
    if config.kernel == config.patch_size:
        embed = dense.PatchEmbed(config.kernel, channels, width, init=init, rngs=rngs)
    else:
        options: dict[str, Any] = dict(kernel=config.kernel, stride=config.patch_size, padding=config.padding)
        embed = Conv(channels, width, **options, init=init, rngs=rngs)
    embed.bias = nnx.Param(jnp.zeros(width))
    return embed


def _mlp(width: int, hidden: int, rngs: nnx.Rngs) -> dense.Mlp:
    """An MLP whose biases start as small noise, as in the public code."""
    mlp = dense.Mlp(width, hidden, init=INIT, rngs=rngs)
    for linear in (mlp.fc1, mlp.fc2):
        linear.bias.set_value(1e-6 * jax.random.normal(rngs.params(), linear.bias.shape))
    return mlp


NAMES = {
    "bixt_ti_p16": Preset(BiXTConfig, {}),
    "bixt_ti_p16s8": Preset(BiXTConfig, dict(patch_size=(8, 8))),
    "bixt_ti_p16s4": Preset(BiXTConfig, dict(patch_size=(4, 4))),
}
