"""Vision transformers, composed of a patch embedding, a prefix, blocks, a readout and a head.

    logits = head(readout(trunk(embed(images))))

`parts.py` builds plain, octic and flip models; `jumbo.py` builds models with a Jumbo token.

Sources: octic ViTs (arXiv 2505.15441), Sections 3.2 and 4.2; Flopping for FLOPs (arXiv 2502.05169); DeiT III; DINOv2.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.layers.dropout import Key, dropout
from equivit.layers.grid import Frame, Layout, check_images
from equivit.layers.position import add_positions
from equivit.layers.prefix import JumboRows, Prefix
from equivit.layers.readout import BlocksReadout, Readout, to_dense
from equivit.layers.stack import Fold, Indices, Stack, captured, check_blocks, collecting
from equivit.models.adaptive import aligned
from equivit.models.features import Features, Grid
from equivit.models.model import Switched
from equivit.symmetry import fields
from equivit.symmetry.fields import Tokens
from equivit.symmetry.shifts import Choice


class ViT(Switched):
    """A vision transformer of any family.

    The first `config.k` blocks map fields of `config.group` to fields; the others work on dense tokens.

    Args:
      config: the configuration that the parts were built from.
      patch_embed: maps images to tokens; `affine()` gives its kernel and bias.
      position: maps a grid (h, w) to the positions of its tokens; None if attention has them.
      prefix: the tokens before the patches, or None.
      mask_token: replaces masked patches, or None.
      pre_norm: norm of all tokens before the first block, or None.
      blocks: all blocks.
      transition: maps fields to dense tokens after block k - 1; None if the model ends with fields or has no fields.
      readout: the final norm and the features that the head reads (`layers/readout.py`).
      head: computes the logits or the image embedding; or None.
      jumbo_mlp, isotypic_jumbo_mlp: the Jumbo MLPs shared by all dense and by all equivariant blocks.
    """

    before = ("patch_embed", "position", "prefix", "mask_token", "pre_norm")
    throughout = ("jumbo_mlp", "isotypic_jumbo_mlp")

    def __init__(
        self,
        config,
        *,
        patch_embed: Any,
        position: Callable[[tuple[int, int]], Any] | None,
        prefix: Prefix | JumboRows | None,
        mask_token: nnx.Param | None,
        pre_norm: nnx.Module | None,
        blocks: Stack,
        transition: Callable | None,
        readout: Readout,
        head: nnx.Module | None,
        jumbo_mlp: nnx.Module | None = None,
        isotypic_jumbo_mlp: nnx.Module | None = None,
    ):
        self.config = config
        self.patch_embed, self.position, self.prefix, self.mask_token = patch_embed, position, prefix, mask_token
        self.pre_norm = pre_norm
        self.blocks, self.transition, self.readout, self.head = blocks, transition, readout, head
        self.jumbo_mlp, self.isotypic_jumbo_mlp = jumbo_mlp, isotypic_jumbo_mlp

    def __call__(self, images: jax.Array, *, key: Key = None, **options: Any) -> jax.Array:
        """Class logits [*B, num_classes] of images [*B, H, W, C], or their embeddings [*B, projection].

        Args:
          key: as in `Model`, like the errors.
          options: for this and the methods below, `train` as in `Model`, `keep` and `mask` as in `embed`.
        """
        if self.head is None:
            raise ValueError("ViT: the model has no head (num_classes=None); call features, or create it with classes.")
        if key is None or self.deterministic:
            return self.head(self.pooled(images, **options))
        trunk_key, head_key = jax.random.split(key)
        pooled = self.pooled(images, key=trunk_key, **options)
        return self.head(dropout(pooled, self.config.dropout, head_key))

    def pooled(
        self, images: jax.Array, *, keep: jax.Array | None = None, mask: jax.Array | None = None, **options: Any
    ) -> jax.Array:
        """The input of the head, [*B, features]; `keep` and `mask` are as in `embed`."""
        x, layout = self.embed(images, keep, mask)
        if not isinstance(self.readout, BlocksReadout):
            return self.readout(self.trunk(x, layout, **options)[0], layout)
        earlier = range(len(self.blocks) - self.config.pool_blocks, len(self.blocks) - 1)
        x, seen = self.captured(x, layout, tuple(earlier), **options)
        return self.readout(x, layout, [self._dense(seen[i]) for i in earlier])

    def features(
        self,
        images: jax.Array,
        *,
        blocks: Indices = (),
        norm: bool = True,
        keep: jax.Array | None = None,
        mask: jax.Array | None = None,
        **options: Any,
    ) -> Features:
        """The features as in `Model`; `keep` and `mask` are as in `embed`.

        With `norm`, the tokens of a block pass through the transition (if it comes later) and the final norm, as if
        the remaining blocks were the identity.  Patches pass through norm and last MLP even if no logit depends on
        them; a Jumbo model with `wide_norm` standardises them.  Without `norm`, the raw output of the block is
        returned.  A field is returned as the concatenation of its components, A1 to E22.
        """
        images, frame, _ = self.place(images)
        x, layout = self._embed(images, keep, mask)
        layout = layout._replace(reads_patches=norm)
        x, seen = self.captured(x, layout, blocks, **options)
        each = {i: self._features(y, layout, frame, norm, {}) for i, y in seen.items()}
        return self._features(x, layout, frame, norm, each)

    def embedding(self, images: jax.Array) -> Features:
        """The features before the first block, as in `Model`; a field as in `features`."""
        images, frame, _ = self.place(images)
        return self._features(*self._embed(images, None, None), frame, False, {})

    def selections(self, images: jax.Array) -> dict[str, Choice]:
        """The origin of patches chosen for each image: {"patch_embed": (index [B], relative gap [B])}.

        Batch axes are flattened into B; the index is row-major in the pixels of a patch.
        """
        return self.place(images)[2]

    def tokens(self, images: jax.Array, *, keep: jax.Array | None = None, **options: Any) -> jax.Array:
        """All tokens after the last block and the final norm, as dense tokens [*B, prefix + N or K, width].

        The order is class token, registers (in a Jumbo model the J rows), patches.  `keep` is as in `embed`.
        """
        x, layout = self.embed(images, keep)
        layout = layout._replace(reads_patches=True)
        x, _ = self.trunk(x, layout, **options)
        return to_dense(self.readout.normed(x, layout))

    def fields(
        self,
        images: jax.Array,
        blocks: tuple[int, ...],
        *,
        key: Key = None,
        keep: jax.Array | None = None,
        mask: jax.Array | None = None,
    ) -> dict[int, fields.Isotypic]:
        """The fields after the given blocks; the order of tokens is class, registers, patches.

        `keep` and `mask` are as in `embed`.

        Raises:
          ValueError: a block is not equivariant.
        """
        if wrong := [i for i in blocks if not 0 <= i < self.config.k]:
            those = f"blocks 0 to {self.config.k - 1} do" if self.config.k else "no block of this model does"
            raise ValueError(f"ViT.fields: blocks {wrong} carry no field; {those}.")
        x, layout = self.embed(images, keep, mask)
        return self.captured(x, layout, blocks, key=key)[1]

    def collected(
        self, images: jax.Array, collect: Callable[[nnx.Module, Any, Layout], Any], *, keep: jax.Array | None = None
    ) -> Any:
        """`collect(block, x, layout)` for every block and its input x, stacked over the blocks, in one pass."""
        x, layout = self.embed(images, keep)
        x = x if self.config.k else self._dense(x)  # the input of the first block
        looks = collecting(lambda block, x: collect(block, x, layout), len(self.blocks), self.blocks[0], x)
        return self.evaluated().trunk(x, layout, **looks)[1]

    def folded(self, images: jax.Array, fold: Callable[[Any, Any, nnx.Module, Any, Layout], Any], carry: Any) -> Any:
        """`carry = fold(carry, index, block, x, layout)` for every block and its input x, in one pass."""
        x, layout = self.embed(images)
        look = dict(fold=lambda carry, i, block, x: fold(carry, i, block, x, layout), carry=carry)
        return self.evaluated().trunk(x, layout, **look)[1]

    def attention_weights(self, images: jax.Array, block: int, *, rows: int | None = None) -> jax.Array:
        """Softmax weights of a block's attention, [*B, heads, rows, N]; the order is class, registers, patches.

        Args:
          block: 0 to depth - 1.
          rows: number of leading rows to return; None: all N.
        """
        self.blocks.check(block)
        x, layout = self.embed(images)
        x, _ = self.evaluated().trunk(x, layout, stop=block)
        return self.blocks[block].attention_weights(x, rows, layout)

    def embed(
        self, images: jax.Array, keep: jax.Array | None = None, mask: jax.Array | None = None
    ) -> tuple[Any, Layout]:
        """The input tokens of the first block, and their layout.

        Args:
          keep: int [*B, K], indices of the patch tokens to keep, row by row over the grid; None keeps all.  They must
            lie between 0 and N - 1, which is not checked.
          mask: bool [*B, N], True where a patch token is replaced by the mask token.
        """
        return self._embed(self.place(images)[0], keep, mask)

    def place(self, images: jax.Array) -> tuple[jax.Array, Frame, dict[str, Choice]]:
        """The images for the patch embedding, their frame, and the choices of an adaptive model."""
        config = self.config
        check_images(images, config.in_channels, config.patch_size)
        size = images.shape[-3:]
        if not config.adaptive:
            number = math.prod(images.shape[:-3])
            return images, Frame(jnp.zeros((number, 2), jnp.int32), (1, 1), (size[0], size[1])), {}
        rolled, frame, chosen = aligned(
            images.reshape(-1, *size), config, *self.patch_embed.affine(), stride=config.patch_size
        )
        return rolled.reshape(images.shape), frame, chosen

    def _embed(self, images: jax.Array, keep: jax.Array | None, mask: jax.Array | None) -> tuple[Any, Layout]:
        (height, width), (rows, columns) = images.shape[-3:-1], self.config.patch_size
        full, x = (height // rows, width // columns), self.patch_embed(images)
        if mask is not None:
            _check_patches("mask", mask, jnp.bool_, (*images.shape[:-3], math.prod(full)))
            x = self._masked(x, mask)
        if self.position is not None:
            x = add_positions(x, self.position(full))
        if keep is not None:
            _check_patches("keep", keep, jnp.integer, (*images.shape[:-3], "K"))
            x = jax.tree.map(lambda leaf: _gather(leaf, keep), x)
        layout = Layout(full if keep is None else (), 0 if self.prefix is None else self.prefix.number)
        if self.prefix is not None:
            first = self.prefix().astype(x.dtype)
            first = self._lift(jnp.broadcast_to(first, (*x.shape[:-2], *first.shape)))
            x = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-2), first, x)
        return x if self.pre_norm is None else self.pre_norm(x), layout

    def trunk(
        self,
        x: Tokens,
        layout: Layout,
        *,
        start: int = 0,
        stop: int | None = None,
        fold: Fold | None = None,
        carry: Any = None,
        key: Key = None,
        train: bool = False,
    ) -> tuple[Any, Any]:
        """The tokens after blocks start <= i < stop and the transition, if it comes by then; and the last carry."""
        stop = len(self.blocks) if stop is None else stop
        x, carry = self._through(x, layout, start, stop, carry, fold=fold, key=key, train=train)
        return x if stop < self.config.k else self._dense(x), carry

    def captured(self, x: Tokens, layout: Layout, capture: Indices, **options: Any) -> tuple[Any, dict[int, Any]]:
        """The tokens after the last block, and after the blocks in `capture` by index; options are `key`, `train`."""
        check_blocks("ViT", capture, len(self.blocks))

        def apply(x, start, stop):
            return self._through(x, layout, start, stop, **options)[0]

        x, outputs = captured(apply, x, capture, 0, len(self.blocks))
        return self._dense(x), outputs

    def _through(self, x, layout: Layout, start: int, stop: int, carry: Any = None, *, key=None, **options: Any):
        """The tokens after blocks start <= i < stop, and the last carry."""
        if self.deterministic is not None:
            key, options["train"] = self.switched(key, options.get("train", False))
        options |= dict(key=key, rates=None if key is None else self.config.rates)
        if start < self.config.k:
            last, shared = min(self.config.k, stop), _modules(self.isotypic_jumbo_mlp)
            x, carry = self.blocks(x, layout, start=start, stop=last, shared=shared, carry=carry, **options)
        if stop > self.config.k:
            x, start, shared = self._dense(x), max(start, self.config.k), _modules(self.jumbo_mlp)
            x, carry = self.blocks(x, layout, start=start, stop=stop, shared=shared, carry=carry, **options)
        return x, carry

    def _dense(self, x):
        """Apply the transition, if there is one and the tokens are not dense yet."""
        return x if self.transition is None or isinstance(x, jax.Array) else self.transition(x)

    def _features(self, x, layout: Layout, frame: Frame, norm: bool, blocks) -> Features:
        x = self.readout.normed(self._dense(x), layout) if norm else x
        cls, registers, patches = self.readout.roles(x, layout)
        *batch, number, width = patches.shape
        grid, stride = (layout.grid, self.config.patch_size) if layout.grid else ((number,), (1,))
        offset = frame.offset.reshape(*batch, 2) if layout.grid else jnp.zeros((*batch, 1), jnp.int32)
        return Features(cls, registers, Grid(patches.reshape(*batch, *grid, width), stride, offset), blocks)

    def _masked(self, x, mask):
        if self.mask_token is None:
            raise ValueError("ViT: mask= needs a mask token; create the model with mask_token=True.")
        token = self.mask_token[...]
        token = self._lift(token.reshape(*(1,) * len(x.shape[:-1]), -1))
        return jax.tree.map(lambda leaf, t: jnp.where(mask[..., None], t, leaf), x, token)

    def _lift(self, tokens):
        """Learned tokens as fields: they have only the invariant component, which the group does not change."""
        return tokens if self.config.group is None else fields.invariant_part(tokens, self.config.group)


def _modules(module: nnx.Module | None) -> tuple[nnx.Module, ...]:
    return () if module is None else (module,)


def _check_patches(name: str, value: Any, kind: Any, shape: tuple[Any, ...]) -> None:
    """Raise ValueError unless `keep` or `mask` is an array of this kind and shape, whose last axis may be "K"."""
    found = getattr(value, "shape", ())
    wanted = (*shape[:-1], *found[-1:]) if shape[-1] == "K" else shape
    if not hasattr(value, "dtype") or not jnp.issubdtype(value.dtype, kind) or found != wanted:
        has = f"{value.dtype} {list(found)}" if hasattr(value, "dtype") else f"a {type(value).__name__}"
        noun = "booleans" if kind is jnp.bool_ else "integers"
        axes = ", ".join(map(str, shape))
        raise ValueError(f"ViT: {name} is {has}; it must be an array of {noun} [{axes}].")


def _gather(leaf: jax.Array, keep: jax.Array) -> jax.Array:
    index = jnp.broadcast_to(keep[..., None], (*leaf.shape[: leaf.ndim - keep.ndim - 1], *keep.shape, 1))
    return jnp.take_along_axis(leaf, index, axis=-2)
