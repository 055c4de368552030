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

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers import dense, invariants, isotypic
from equivit.layers.block import Block
from equivit.layers.grid import check_grid, check_images
from equivit.layers.position import IsotypicPosition, Position, SinCos
from equivit.layers.split_mlp import SplitMlp
from equivit.layers.stack import Stack
from equivit.models.features import Features, Grid
from equivit.models.vit_config import ViTConfig
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC, Group


class ViT(nnx.Module):
    """A vision transformer of any family.

    Raises:
      ValueError: widths, patches or heads that the group's order does not divide.
    """

    before = ("patch_embed", "position", "class_token", "class_position", "registers", "mask_token")

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        group, width = config.group, config.width
        token_width = width if group is None else isotypic.channels("ViT", width, group)
        kind, options = (dense, {}) if group is None else (isotypic, {"group": group})
        self.patch_embed = kind.PatchEmbed(config.patch_size, config.in_channels, width, **options, rngs=rngs)
        self.position = _position(config, rngs)
        self.class_token = token(config.class_token, (token_width,), config.token_std, rngs)
        self.class_position = token(config.class_position, (token_width,), config.position_std, rngs)
        self.registers = token(config.registers > 0, (config.registers, token_width), config.register_std, rngs)
        self.mask_token = token(config.mask_token, (token_width,), 0.0, rngs)
        self.blocks = Stack(self._runs(), remat=config.remat, unroll=config.unroll, rngs=rngs)
        self.invariant = self._invariant(rngs) if config.family[0] in "ID" else None
        project = config.family[0] == "I" and (group is OCTIC or self.invariant.out_features != width)
        self.projection = dense.Linear(self.invariant.out_features, width, rngs=rngs) if project else None
        self.norm = self._final_norm()
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
        pooled = model._pool(x)
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
        each = {i: model._features(y, norm, grid, keep, {}) for i, y in captured.items()}
        return model._features(x, norm, grid, keep, each)

    def tokens(self, images, *, key=None, keep=None) -> jax.Array:
        """All tokens after the last block and the final norm, [*B, prefix + N or K, width], dense.

        They are in the order class token, registers (of a Jumbo model the J rows), patches.
        """
        model = self._in_compute_type()
        return to_dense(model._normed(model._tokens(images, key, keep, None, ())[0]))

    def fields(self, images, blocks: tuple[int, ...], *, key=None, keep=None, mask=None) -> dict[int, fields.Isotypic]:
        """The fields after the given blocks, tokens in the order class, registers, patches.

        Raises:
          ValueError: a block is not equivariant.
        """
        wrong = [i for i in blocks if not 0 <= i < self.config.k]
        if wrong:
            raise ValueError(f"ViT.fields: blocks {wrong} carry no field; blocks 0 to {self.config.k - 1} do.")
        return self._in_compute_type()._tokens(images, key, keep, mask, blocks)[1]

    def attention_weights(self, images, block: int, *, rows: int | None = None) -> jax.Array:
        """Softmax weights of a block's attention, [*B, heads, rows, N]; tokens in the order class, registers, patches.

        Args:
          block: 0 to depth - 1.
          rows: the weights of the first rows only; None: of all N.
        """
        self.blocks.check(block)
        model, k = self._in_compute_type(), self.config.k
        x, _ = model._run(model._embed(images, None, None)[0], self.config.group, stop=min(block, k))
        if block >= k:
            x, _ = model._run(model._transition(x), None, start=k, stop=block)
        return model.blocks[block].attention_weights(x, rows)

    def _in_compute_type(self) -> "ViT":
        if self.config.dtype is None:
            return self
        return jax.tree.map(lambda a: a.astype(self.config.dtype) if jnp.isdtype(a.dtype, "real floating") else a, self)

    def _tokens(self, images, key, keep, mask, capture):
        """Tokens after all blocks, tokens after the blocks in `capture`, and the patch grid."""
        self.blocks.check(*capture)
        config = self.config
        x, grid = self._embed(images, keep, mask)
        x, captured = self._run(x, config.group, stop=config.k, capture=capture, key=key)
        if config.family[0] != "D":
            x = self._transition(x)
            x, later = self._run(x, None, start=config.k, capture=capture, key=key)
            captured |= later
        return x, captured, grid

    def _embed(self, images, keep, mask):
        """The tokens that the first block is given, and the patch grid."""
        config = self.config
        grid = check_images(images, config.in_channels, config.patch_size)
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
        return x, grid

    def _run(self, x, group, **options):
        """Blocks of one kind, between fields of `group` or dense."""
        return self.blocks(x, **options)

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

    def _normed(self, x):
        """All tokens after the final norm."""
        return self.norm(x)

    def _roles(self, x, norm: bool):
        """Class token, or None, registers and patches of tokens that a block left, dense."""
        config = self.config
        if norm:
            x = self.norm(x if config.family[0] == "D" else self._transition(x))
        x = to_dense(x)
        first = int(config.class_token)
        return (x[..., 0, :] if first else None), x[..., first : config.prefix, :], x[..., config.prefix :, :]

    def _pool(self, x):
        """What the head reads, [*B, features], of tokens after the last block."""
        x, prefix = self.norm(x), self.config.prefix
        if self.config.pool == "class":
            x = jax.tree.map(lambda leaf: leaf[..., 0, :], x)
            return x if self.invariant is None or isinstance(x, jax.Array) else self.invariant(x)
        x = jax.tree.map(lambda leaf: leaf[..., prefix:, :], x)
        if isinstance(x, jax.Array):
            return x.mean(-2)
        if self.config.pool_first:
            return self.invariant(jax.tree.map(lambda leaf: leaf.mean(-2), x))
        return self.invariant(x).mean(-2)

    def _features(self, x, norm, grid, keep, blocks) -> Features:
        cls, registers, patches = self._roles(x, norm)
        *batch, number, width = patches.shape
        shape, stride = (grid, self.config.patch_size) if keep is None else ((number,), (1,))
        patches = Grid(patches.reshape(*batch, *shape, width), stride, jnp.zeros((*batch, len(shape))))
        return Features(cls, registers, patches, blocks)

    def _invariant(self, rngs) -> nnx.Module:
        config = self.config
        return invariants.create(config.invariant, config.width, group=config.group, rngs=rngs)

    def _final_norm(self) -> nnx.Module:
        return self._norm(self.config.group if self.config.family[0] == "D" else None)

    def _head(self, rngs) -> nnx.Module:
        config = self.config
        if config.family == "D8":
            return dense.MlpHead(self.invariant.out_features, config.width, config.num_classes, rngs=rngs)
        features = self.invariant.out_features if config.family == "D2" else config.width
        return dense.Linear(features, config.num_classes, rngs=rngs)

    def _kinds(self) -> list[tuple[int, Group | None]]:
        """Number of blocks and their group, in order."""
        config = self.config
        kinds = ((config.k, config.group), (config.depth - config.k, None))
        return [(length, group) for length, group in kinds if length]

    def _runs(self):
        """(length, make) of each run of like blocks."""
        return [(length, functools.partial(self._block, group)) for length, group in self._kinds()]

    def _block(self, group: Group | None, rngs) -> nnx.Module:
        return Block(**self._parts(group, rngs))

    def _parts(self, group: Group | None, rngs) -> dict:
        """The parts of a block between fields of `group`, or of a dense one."""
        config, width = self.config, self.config.width
        kind, options = (dense, {}) if group is None else (isotypic, {"group": group})
        attention = kind.Attention(width, config.num_heads, qkv_bias=config.qkv_bias, **options, rngs=rngs)
        return dict(
            norm1=self._norm(group),
            attention=attention,
            scale1=self._scale(group),
            norm2=self._norm(group),
            mlp=self._mlp(group, rngs),
            scale2=self._scale(group),
            drop_path=config.drop_path,
            dropout=config.dropout,
            drop=kind.dropout,
        )

    def _mlp(self, group, rngs) -> nnx.Module:
        """The MLP of a block; with `register_mlp` another beside it for some of the tokens before the patches."""
        config = self.config
        make = functools.partial(mlp, config.mlp, config.width, config.mlp_dim or 4 * config.width, group, rngs)
        if config.register_mlp is None:
            return make()
        first = int(config.class_token) if config.register_mlp == "registers" else 0
        return SplitMlp(make(), make(), first, config.prefix)

    def _norm(self, group, width: int | None = None) -> nnx.Module:
        config, width = self.config, width or self.config.width
        if group is None:
            return dense.LayerNorm(width, eps=config.norm_eps)
        return isotypic.LayerNorm(width, group=group, eps=config.isotypic_eps, weighting=config.isotypic_norm)

    def _scale(self, group, width: int | None = None) -> nnx.Module | None:
        config, width = self.config, width or self.config.width
        if config.layer_scale is None:
            return None
        if group is None:
            return dense.LayerScale(width, config.layer_scale)
        return isotypic.LayerScale(width, config.layer_scale, group=group)


def mlp(name: str, width: int, hidden: int, group: Group | None, rngs: nnx.Rngs) -> nnx.Module:
    """An MLP of the kind `ViTConfig.mlp` names, dense or between fields of `group`."""
    if group is not None:
        return isotypic.Mlp(width, hidden, group=group, rngs=rngs)
    if name == "swiglu":
        return dense.SwiGlu(width, hidden, rngs=rngs)
    return dense.Mlp(width, hidden, activation=dense.gelu_tanh if name == "gelu_tanh" else dense.gelu, rngs=rngs)


def _position(config: ViTConfig, rngs: nnx.Rngs) -> nnx.Module:
    grid = check_grid(config.image_size, config.patch_size, "image_size")
    if config.group is not None:
        return IsotypicPosition(grid, config.width, group=config.group, std=config.position_std, rngs=rngs)
    if config.position != "learned":
        return SinCos(config.width, inclusive=config.position == "sincos_inclusive")
    return Position(
        grid,
        config.width,
        std=config.position_std,
        antialias=config.position_antialias,
        offset=config.position_offset,
        rngs=rngs,
    )


def token(wanted: bool, shape: tuple[int, ...], std: float, rngs: nnx.Rngs) -> nnx.Param | None:
    """A learned token, normal with deviation `std`, if there is to be one."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape), decay=False) if wanted else None


def to_dense(x) -> jax.Array:
    """A dense array as it is; of a field the concatenation of its components."""
    return x if isinstance(x, jax.Array) else fields.to_dense(x)


def _lead(position: jax.Array, leaf: jax.Array) -> jax.Array:
    """[4, N, C] -> [4, 1, ..., N, C], so that the irreps line up and the batch broadcasts."""
    extra = leaf.ndim - position.ndim
    return position.reshape(*position.shape[:-2], *(1,) * extra, *position.shape[-2:]).astype(leaf.dtype)


def _gather(leaf: jax.Array, keep: jax.Array) -> jax.Array:
    index = jnp.broadcast_to(keep[..., None], (*leaf.shape[: leaf.ndim - keep.ndim - 1], *keep.shape, 1))
    return jnp.take_along_axis(leaf, index, axis=-2)
