"""Vision transformers: plain, and equivariant under the flip or the octic group.

One class serves all families; they differ in what the channels carry and in what happens after block k:

| family | blocks 0..k-1    | then                               | blocks k.. | readout                               |
|--------|------------------|------------------------------------|------------|---------------------------------------|
| plain  | (k = 0)          |                                    | dense      | norm, class token, linear             |
| H8, H2 | octic, flip      | the symmetry is dropped            | dense      | norm, class token, linear             |
| I8, I2 | octic, flip      | invariantization, (I8) projection  | dense      | norm, class token, linear             |
| D8     | octic, k = depth |                                    |            | norm, invariantization, mean, MLP     |
| D2     | flip, k = depth  |                                    |            | norm, class token's sym part, linear  |

I8 with k = depth is what octic DINOv2 calls D8: every token invariantized and projected.

Sources: octic ViTs (arXiv 2505.15441), Sections 3.2 and 4.2; Flopping for FLOPs (arXiv 2502.05169); DeiT III; DINOv2.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense, invariants, isotypic
from equivit.layers.block import Block
from equivit.layers.position import IsotypicPosition, Position
from equivit.layers.stack import Stack
from equivit.models.features import Features, Grid
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC, Group

FAMILIES = {"plain": None, "H8": OCTIC, "I8": OCTIC, "D8": OCTIC, "H2": FLIP, "I2": FLIP, "D2": FLIP}


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The choices that make one ViT.

    Attributes:
      width, depth, num_heads: embedding width, number of blocks, heads per block.
      patch_size: (height, width) of a patch in pixels; an int for a square.
      image_size: (height, width) that the positional table is learned at; any size divisible by the patch can be used.
      mlp_dim: hidden width of the MLP; None: four times the width.
      family: a key of `FAMILIES`.
      equivariant_blocks: k of the table above; None: half of the depth (rounded down) for H and I, all for D.
      invariant: the invariantization of I and D (`layers/invariants.py`).
      pool_first: D8 averages over tokens before the invariantization instead of after it.
      isotypic_norm: "official" or "balanced" (`layers/isotypic.py`); isotypic_eps: its epsilon.
      num_classes: None for no head.
      pool: "class" or "mean" over patch tokens; what the head reads.
      class_token: whether there is one; class_position: whether it has a position of its own (DINOv2, ViT).
      registers: number of register tokens; mask_token: whether there is one, for `mask=`.
      token_std, position_std: initial deviations of class token and positions.
      position_antialias, position_offset: how the weights expect plain positions to be resized (`layers/position.py`).
      qkv_bias: whether queries, keys and values have biases.
      layer_scale: initial layer scale; None for none.
      drop_path, dropout: probabilities, used when a key is given.
      remat, unroll: how blocks are run (`layers/stack.py`).
      dtype: type to compute in, such as "bfloat16"; None: that of parameters and inputs.
    """

    width: int
    depth: int
    num_heads: int
    patch_size: tuple[int, int] | int = 16
    image_size: tuple[int, int] = (224, 224)
    in_channels: int = 3
    mlp_dim: int | None = None
    family: str = "plain"
    equivariant_blocks: int | None = None
    invariant: str = "power_spectrum"
    pool_first: bool = False
    isotypic_norm: str = "official"
    isotypic_eps: float = 1e-5
    num_classes: int | None = 1000
    pool: str = "class"
    class_token: bool = True
    class_position: bool = False
    registers: int = 0
    mask_token: bool = False
    token_std: float = 0.02
    position_std: float = 0.02
    position_antialias: bool = False
    position_offset: float = 0.0
    qkv_bias: bool = True
    layer_scale: float | None = 1e-4
    drop_path: float = 0.0
    dropout: float = 0.0
    remat: str = "none"
    unroll: bool = False
    dtype: str | None = None

    def __post_init__(self):
        if isinstance(self.patch_size, int):
            object.__setattr__(self, "patch_size", (self.patch_size, self.patch_size))
        for name in ("patch_size", "image_size"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.family not in FAMILIES:
            raise ValueError(f"ViT: {self.family=} is not one of {', '.join(FAMILIES)}.")
        if self.pool not in ("class", "mean"):
            raise ValueError(f"ViT: {self.pool=} must be 'class' or 'mean'.")
        if self.pool == "class" and not self.class_token:
            raise ValueError("ViT: pool='class' needs class_token=True; without one use pool='mean'.")
        check_grid(self.image_size, self.patch_size, "image_size")
        self._check_blocks()

    def _check_blocks(self):
        k, letter = self.equivariant_blocks, self.family[0]
        if k is None:
            return
        if not 0 <= k <= self.depth:
            raise ValueError(f"ViT: equivariant_blocks={k} must lie between 0 and the depth, {self.depth}.")
        if letter == "p" and k:
            raise ValueError(f"ViT: equivariant_blocks={k} needs a family with a symmetry, such as H8; this is plain.")
        if letter == "H" and k == self.depth:
            whole = "D" + self.family[1]
            raise ValueError(
                f"ViT: {self.family} with equivariant_blocks={k} of {self.depth} has no dense block; {whole} is that."
            )
        if letter == "D" and k != self.depth:
            raise ValueError(
                f"ViT: {self.family} has all {self.depth} blocks equivariant, not {k}; families H and I have fewer."
            )

    @property
    def group(self) -> Group | None:
        """The symmetry group of the first k blocks."""
        return FAMILIES[self.family]

    @property
    def k(self) -> int:
        """Number of equivariant blocks."""
        if self.equivariant_blocks is not None:
            return self.equivariant_blocks
        return {"p": 0, "H": self.depth // 2, "I": self.depth // 2, "D": self.depth}[self.family[0]]

    @property
    def prefix(self) -> int:
        """Number of tokens before the patch tokens."""
        return int(self.class_token) + self.registers


class ViT(nnx.Module):
    """A vision transformer of any family.

    Raises:
      ValueError: widths, patches or heads that the group's order does not divide.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        group, width = config.group, config.width
        grid = check_grid(config.image_size, config.patch_size, "image_size")
        token_width = width if group is None else isotypic.channels("ViT", width, group)
        if group is None:
            self.patch_embed = dense.PatchEmbed(config.patch_size, config.in_channels, width, rngs=rngs)
            self.position = Position(
                grid,
                width,
                std=config.position_std,
                antialias=config.position_antialias,
                offset=config.position_offset,
                rngs=rngs,
            )
        else:
            self.patch_embed = isotypic.PatchEmbed(config.patch_size, config.in_channels, width, group=group, rngs=rngs)
            self.position = IsotypicPosition(grid, width, group=group, std=config.position_std, rngs=rngs)
        self.class_token = _token(config.class_token, (token_width,), config.token_std, rngs)
        self.class_position = _token(config.class_position, (token_width,), config.position_std, rngs)
        self.registers = _token(config.registers > 0, (config.registers, token_width), 1e-6, rngs)
        self.mask_token = _token(config.mask_token, (token_width,), 0.0, rngs)
        runs = [(config.k, self._isotypic_block), (config.depth - config.k, self._dense_block)]
        self.blocks = Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)
        wanted = config.family[0] in "ID"
        self.invariant = invariants.create(config.invariant, width, group=group, rngs=rngs) if wanted else None
        project = config.family[0] == "I" and (group is OCTIC or self.invariant.out_features != width)
        self.projection = dense.Linear(self.invariant.out_features, width, rngs=rngs) if project else None
        self.norm = self._isotypic_norm() if config.family[0] == "D" else dense.LayerNorm(width)
        self.head = None if config.num_classes is None else self._head(rngs)

    def __call__(self, images, *, key=None, train=False, keep=None, mask=None) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C].

        Args:
          key: drives drop path and dropout; None means neither.
          train: selects batch statistics in models that have them; a ViT has none.
          keep: [*B, K], indices of the patch tokens to keep, row by row over the grid; None keeps all.
          mask: [*B, N], True where a patch token is replaced by the mask token.

        Raises:
          ValueError: the patch does not divide the image, or the model has no head.
        """
        if self.head is None:
            raise ValueError("ViT: the model has no head (num_classes=None); call features, or create it with classes.")
        model, key = self._in_compute_type(), key if key is None else jax.random.split(key)
        x, _, _ = model._tokens(images, None if key is None else key[0], keep, mask, ())
        pooled = model._pool(model.norm(x))
        return model.head(dense.dropout(pooled, model.config.dropout, None if key is None else key[1]))

    def features(
        self, images, *, blocks: tuple[int, ...] = (), norm: bool = True, key=None, train=False, keep=None, mask=None
    ) -> Features:
        """Class, register and patch tokens after the last block, and after each of `blocks`.

        With `norm` a block's tokens go the rest of the way as if the blocks after it were the identity: through the
        transition, if it lies ahead, and the final norm.  Without it they are as the block left them.  A field leaves
        as the concatenation of its components, A1 to E22.
        """
        model = self._in_compute_type()
        x, captured, grid = model._tokens(images, key, keep, mask, blocks)
        finish = model._finish if norm else _dense
        each = {i: model._features(finish(y), grid, keep, {}) for i, y in captured.items()}
        return model._features(finish(x), grid, keep, each)

    def fields(self, images, blocks: tuple[int, ...], *, key=None, keep=None, mask=None) -> dict[int, fields.Isotypic]:
        """The fields after the given blocks, tokens in the order class, registers, patches.

        Raises:
          ValueError: a block is not equivariant.
        """
        wrong = [i for i in blocks if not 0 <= i < self.config.k]
        if wrong:
            raise ValueError(f"ViT.fields: blocks {wrong} carry no field; blocks 0 to {self.config.k - 1} do.")
        return self._in_compute_type()._tokens(images, key, keep, mask, blocks)[1]

    def _in_compute_type(self) -> "ViT":
        if self.config.dtype is None:
            return self
        return jax.tree.map(lambda a: a.astype(self.config.dtype) if jnp.isdtype(a.dtype, "real floating") else a, self)

    def _tokens(self, images, key, keep, mask, capture):
        """Tokens after all blocks, tokens after the blocks in `capture`, and the patch grid."""
        config = self.config
        grid = check_images(images, config)
        x = self.patch_embed(images if config.dtype is None else images.astype(config.dtype))
        batch = x.shape[:-2]
        if mask is not None:
            x = self._masked(x, mask)
        position = self.position(grid)
        x = jax.tree.map(lambda leaf, p: leaf + _lead(p, leaf), x, position)
        if keep is not None:
            x = jax.tree.map(lambda leaf: _gather(leaf, keep), x)
        if config.prefix:
            x = jax.tree.map(lambda a, b: jnp.concatenate([a, b.astype(a.dtype)], axis=-2), self._prefix(batch), x)
        self.blocks.check(*capture)
        x, captured = self.blocks(x, stop=config.k, capture=capture, key=key)
        if config.family[0] != "D":
            x = self._transition(x)
            x, later = self.blocks(x, start=config.k, capture=capture, key=key)
            captured |= later
        return x, captured, grid

    def _masked(self, x, mask):
        if self.mask_token is None:
            raise ValueError("ViT: mask= needs a mask token; create the model with mask_token=True.")
        token = self._lift(
            jnp.broadcast_to(self.mask_token[...], (*(1,) * len(x.shape[:-1]), self.mask_token.shape[0]))
        )
        return jax.tree.map(lambda leaf, t: jnp.where(mask[..., None], t, leaf), x, token)

    def _prefix(self, batch):
        """Class token and registers, [*B, 1 + R, .], as the first block takes them."""
        rows = []
        if self.class_token is not None:
            token = self.class_token[...]
            rows.append((token if self.class_position is None else token + self.class_position[...])[None])
        if self.registers is not None:
            rows.append(self.registers[...])
        tokens = jnp.concatenate(rows)
        return self._lift(jnp.broadcast_to(tokens, (*batch, *tokens.shape)))

    def _lift(self, tokens):
        """A learned token holds the invariant component only, so that the group leaves it as it is."""
        return tokens if self.config.group is None else fields.invariant_part(tokens, self.config.group)

    def _transition(self, x):
        """From field to dense tokens, between blocks k - 1 and k."""
        if self.config.group is None or isinstance(x, jax.Array):
            return x
        if self.invariant is not None:
            x = self.invariant(x)
            return x if self.projection is None else self.projection(x)
        if self.config.group is FLIP:  # the official H2 goes on in the regular representation, H8 in the isotypic one
            return jnp.concatenate(list(fields.to_regular(x)), axis=-1)
        return fields.to_dense(x)

    def _finish(self, x):
        return _dense(self.norm(x if self.config.family[0] == "D" else self._transition(x)))

    def _pool(self, x):
        """What the head reads: [*B, features]."""
        prefix = self.config.prefix
        if self.config.pool == "class":
            x = jax.tree.map(lambda leaf: leaf[..., 0, :], x)
            return x if self.invariant is None or isinstance(x, jax.Array) else self.invariant(x)
        x = jax.tree.map(lambda leaf: leaf[..., prefix:, :], x)
        if isinstance(x, jax.Array):
            return x.mean(-2)
        if self.config.pool_first:
            return self.invariant(jax.tree.map(lambda leaf: leaf.mean(-2), x))
        return self.invariant(x).mean(-2)

    def _features(self, x, grid, keep, blocks) -> Features:
        config, prefix = self.config, self.config.prefix
        shape = grid if keep is None else (x.shape[-2] - prefix,)
        stride = config.patch_size if keep is None else (1,)
        patches = x[..., prefix:, :].reshape(*x.shape[:-2], *shape, x.shape[-1])
        return Features(
            cls=x[..., 0, :] if config.class_token else None,
            registers=x[..., int(config.class_token) : prefix, :],
            patches=Grid(patches, stride, jnp.zeros((*x.shape[:-2], len(shape)))),
            blocks=blocks,
        )

    def _head(self, rngs) -> nnx.Module:
        config = self.config
        if config.family == "D8":
            return dense.MlpHead(self.invariant.out_features, config.width, config.num_classes, rngs=rngs)
        features = self.invariant.out_features if config.family == "D2" else config.width
        return dense.Linear(features, config.num_classes, rngs=rngs)

    def _isotypic_norm(self):
        config = self.config
        return isotypic.LayerNorm(
            config.width, group=config.group, eps=config.isotypic_eps, weighting=config.isotypic_norm
        )

    def _isotypic_block(self, rngs) -> Block:
        config, group, width = self.config, self.config.group, self.config.width
        return Block(
            norm1=self._isotypic_norm(),
            attention=isotypic.Attention(width, config.num_heads, group=group, qkv_bias=config.qkv_bias, rngs=rngs),
            scale1=_scale(isotypic.LayerScale, config, group=group),
            norm2=self._isotypic_norm(),
            mlp=isotypic.Mlp(width, config.mlp_dim or 4 * width, group=group, rngs=rngs),
            scale2=_scale(isotypic.LayerScale, config, group=group),
            drop_path=config.drop_path,
            dropout=config.dropout,
            drop=isotypic.dropout,
        )

    def _dense_block(self, rngs) -> Block:
        config, width = self.config, self.config.width
        return Block(
            norm1=dense.LayerNorm(width),
            attention=dense.Attention(width, config.num_heads, qkv_bias=config.qkv_bias, rngs=rngs),
            scale1=_scale(dense.LayerScale, config),
            norm2=dense.LayerNorm(width),
            mlp=dense.Mlp(width, config.mlp_dim or 4 * width, rngs=rngs),
            scale2=_scale(dense.LayerScale, config),
            drop_path=config.drop_path,
            dropout=config.dropout,
            drop=dense.dropout,
        )


def check_grid(image_size: tuple[int, int], patch_size: tuple[int, int], name: str) -> tuple[int, int]:
    """The token grid (h, w); ValueError when the patch does not divide the image."""
    for axis, size, patch in zip(("height", "width"), image_size, patch_size, strict=True):
        if size % patch or size < patch:
            lower = max(1, size // patch) * patch
            raise ValueError(
                f"ViT: {name} {image_size[0]}x{image_size[1]}: the {axis} {size} is not divisible by the patch {axis} "
                f"{patch}; the nearest are {lower} and {lower + patch}."
            )
    return image_size[0] // patch_size[0], image_size[1] // patch_size[1]


def check_images(images, config: ViTConfig) -> tuple[int, int]:
    """The token grid of images [*B, H, W, C]; ValueError for a wrong rank, type, channel count or size."""
    if images.ndim < 4 or images.shape[-1] != config.in_channels:
        raise ValueError(f"ViT: images {images.shape} must be [*B, H, W, {config.in_channels}].")
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"ViT: images are {images.dtype}; they must be floating point, normalised by mean and deviation."
        )
    return check_grid(images.shape[-3:-1], config.patch_size, "image")


def _token(wanted: bool, shape: tuple[int, ...], std: float, rngs: nnx.Rngs) -> nnx.Param | None:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape)) if wanted else None


def _scale(kind, config: ViTConfig, **group):
    return None if config.layer_scale is None else kind(config.width, config.layer_scale, **group)


def _dense(x) -> jax.Array:
    return x if isinstance(x, jax.Array) else fields.to_dense(x)


def _lead(position: jax.Array, leaf: jax.Array) -> jax.Array:
    """[4, N, C] -> [4, 1, ..., N, C], so that the irreps line up and the batch broadcasts."""
    extra = leaf.ndim - position.ndim
    return position.reshape(*position.shape[:-2], *(1,) * extra, *position.shape[-2:]).astype(leaf.dtype)


def _gather(leaf: jax.Array, keep: jax.Array) -> jax.Array:
    index = jnp.broadcast_to(keep[..., None], (*leaf.shape[: leaf.ndim - keep.ndim - 1], *keep.shape, 1))
    return jnp.take_along_axis(leaf, index, axis=-2)
