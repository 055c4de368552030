"""PatchTST: a transformer over the patches of a time series, plain, with registers, or with a Jumbo token.

Each channel of a series is a separate sequence.  It is cut into half-overlapping patches, embedded, and passed with a
class token through blocks shared by all channels.  The head reads the concatenated class tokens.
patchtst_public_registers and patchtst_public_jumbo add these global tokens to the blocks of patchtst_public.

| name               | global tokens of a channel                              | what the head reads          |
|--------------------|---------------------------------------------------------|------------------------------|
| patchtst           | a class token                                           | the class token              |
| patchtst_registers | a class token and R registers, R by Proposition 1       | the class token              |
| patchtst_jumbo     | a Jumbo token, J = 4 times as wide, with a shared FFN   | the mean of its J parts      |
| patchtst_public    | none                                                    | the last patch token         |

Sources: PatchTST (arXiv 2211.14730); Jumbo, Section 4.5 and Appendices A.3.2 and A.3.3.
"""

import dataclasses
import functools
import math
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, NonNegativeInt, OneOf, PositiveInt
from equivit.layers import dense
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.dropout import Key, Rate, split
from equivit.layers.dropout import dropout as drop
from equivit.layers.grid import Layout, check_array
from equivit.layers.jumbo import divide, merge
from equivit.layers.prefix import token
from equivit.layers.stack import Indices, Stack, captured, check_blocks
from equivit.models.features import Features, Grid
from equivit.models.model import Preset, Switched, check_head

NORMS = {"layer": dense.LayerNorm, "batch": BatchNorm}
PADDINGS = {"repeat": "edge", "zero": "constant"}  # the modes of jnp.pad


@dataclasses.dataclass(frozen=True)
class PatchTSTConfig:
    """The configuration of a PatchTST.

    The Jumbo paper "closely follows" PatchTST, but does not specify the type and place of the norm, or whether
    attention is residual.  Our defaults follow its vision models: layer norms before each branch and at the end, and
    plain attention.  Public PatchTST (`patchtst_public`) has batch norms after each branch, residual attention, and
    per-series normalisation (RevIN without learned factors).  Its code applies dropout inside the FFN and twice after
    attention; ours after the embedding and once after each branch.

    Attributes:
      length, channels: number of steps and of channels of a series.
      num_classes: None for no head.
      patches: patches per channel, which determines their length (`patch_length`).
      width, depth, num_heads, mlp_dim: sizes of the transformer.
      registers: register tokens per channel; None: the number that costs the same as a Jumbo token of J = 4
        (Proposition 1).
      jumbo: J, the ratio of the global token's width to `width`; with 1 it is a class token, which uses the FFN of the
        patches.
      jumbo_mlp: ratio of hidden width to width in the FFN of the Jumbo token.
      jumbo_ffn: whether that FFN is "shared" by all blocks or "per_layer".
      norm: "layer", or "batch" over all tokens of all series.
      norm_first: whether norms come before the branches, with a final norm; otherwise after each residual sum.
      residual_attention: whether attention scores are accumulated over the blocks, before the softmax.
      pool: the head reads the global token ("class"), or the last patch token ("last"); then there is no global token.
      instance_norm: whether each channel of a series is first normalised to mean 0 and variance 1 over its steps.
      padding: how the series is padded to whole patches: "repeat" (the last value, as in PatchTST) or "zero".
      init: initialisation of the weights (`dense.INITS`); the head's are normal with standard deviation 0.02.
      dropout: probability of zeroing an entry of the embedding or a branch, used when a key is given.
    """

    length: PositiveInt
    channels: PositiveInt
    num_classes: PositiveInt | None
    patches: PositiveInt = 8
    width: PositiveInt = 128
    depth: Depth = 3
    num_heads: PositiveInt = 16
    mlp_dim: PositiveInt = 256
    registers: NonNegativeInt = 0
    jumbo: PositiveInt = 1
    jumbo_mlp: PositiveInt = 2
    jumbo_ffn: Literal["shared", "per_layer"] = "shared"
    norm: Annotated[str, OneOf(NORMS)] = "layer"
    norm_first: bool = True
    residual_attention: bool = False
    pool: Literal["class", "last"] = "class"
    instance_norm: bool = False
    padding: Annotated[str, OneOf(PADDINGS)] = "repeat"
    init: Annotated[str, OneOf(dense.INITS)] = "normal"
    dropout: Below1 = 0.0

    def __post_init__(self):
        if self.registers is None:
            sizes = dataclasses.replace(self, registers=0)  # checks width and patches
            object.__setattr__(self, "registers", equal_cost_registers(sizes.width, sizes.patches, JUMBO))
        constraints.check_fields(self, "PatchTST")
        if self.pool == "last" and (self.jumbo > 1 or self.registers):
            raise ValueError(
                f"PatchTST: pool='last' has patch tokens only, but jumbo={self.jumbo} and registers={self.registers}; "
                "use pool='class'."
            )

    @property
    def patch_length(self) -> int:
        """Steps in a patch: the smallest even p such that n patches, overlapping by half, cover T steps.

        The patches span p (n + 1) / 2 >= T steps; the steps after the end of the series are padding.
        """
        return 2 * math.ceil(self.length / (self.patches + 1))

    @property
    def prefix(self) -> int:
        """Number of tokens before the patches of a channel."""
        return 0 if self.pool == "last" else self.jumbo + self.registers

    @property
    def input_shape(self) -> tuple[int, int]:
        return self.length, self.channels

    def build(self, rngs: nnx.Rngs) -> "PatchTST":
        return PatchTST(self, rngs=rngs)


def equal_cost_registers(width: int, patches: int, jumbo: int) -> int:
    """The number of registers with the same cost per block as a Jumbo token: Proposition 1, rounded.

    The proposition has no class token besides the registers; ours costs as much as one more register.
    """
    total = 2 * width + patches
    return round(math.sqrt(total**2 + (1 + 2 * width) * jumbo**2 + 2 * (width + patches) * jumbo) - total)


class PatchTST(Switched):
    """A classifier of time series.

    Raises:
      ValueError: `num_heads` does not divide `width`.
    """

    before = ("embed", "position", "class_token", "registers")
    throughout = ("jumbo_mlp",)

    def __init__(self, config: PatchTSTConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, wide, init = config.width, config.jumbo * config.width, dense.INITS[config.init]
        self.embed = dense.Linear(config.patch_length, width, init=init, rngs=rngs)
        self.position = nnx.Param(dense.uniform(rngs.params(), (config.patches, width), 0.02), decay=False)
        self.class_token = token((config.jumbo, width), 0.02, rngs) if config.pool == "class" else None
        self.registers = token((config.registers, width), 0.02, rngs) if config.registers else None
        self.blocks = Stack([(config.depth, functools.partial(PatchTSTBlock, config))], rngs=rngs)
        shared = config.jumbo > 1 and config.jumbo_ffn == "shared"
        self.jumbo_mlp = dense.Mlp(wide, config.jumbo_mlp * wide, init=init, rngs=rngs) if shared else None
        self.norm = NORMS[config.norm](width) if config.norm_first else None
        classes = config.num_classes
        self.head: Any = None if classes is None else dense.Linear(config.channels * width, classes, rngs=rngs)

    def __call__(self, series: jax.Array, **options: Any) -> jax.Array:
        """Class logits [*B, num_classes] of series [*B, T, channels]; errors as in `Model`.

        Args:
          options: for this and the methods below, `key` and `train` as in `Model`, and `dropout`, which replaces the
            rate of the configuration and may be traced.
        """
        return self.classify(self.cut(series), **options)

    def cut(self, series: jax.Array) -> jax.Array:
        """The patches [*B, channels, patches, patch_length] of series [*B, T, channels], overlapping by half."""
        config = self.config
        check_array("PatchTST: series", series, f"[*B, {config.length}, {config.channels}]")
        if series.ndim < 2 or series.shape[-2:] != (config.length, config.channels):
            raise ValueError(f"PatchTST: series {series.shape} must be [*B, {config.length}, {config.channels}].")
        x, half = jnp.swapaxes(series, -1, -2), config.patch_length // 2
        x = _standardized(x) if config.instance_norm else x
        ends = [(0, 0)] * (x.ndim - 1) + [(0, half * (config.patches + 1) - config.length)]
        halves = jnp.pad(x, ends, PADDINGS[config.padding]).reshape(*x.shape[:-1], config.patches + 1, half)
        return jnp.concatenate([halves[..., :-1, :], halves[..., 1:, :]], axis=-1)

    def pooled(self, series: jax.Array, **options: Any) -> jax.Array:
        """The input of the head, [*B, channels width]: the global token or the last patch token of each channel."""
        return self._pooled(self.cut(series), **options)

    def classify(self, patches: jax.Array, **options: Any) -> jax.Array:
        """Class logits [*B, num_classes] of patches [*B, channels, patches, patch_length], as from `cut`."""
        check_head(self)
        return self.head(self._pooled(patches, **options))

    def features(
        self,
        series: jax.Array,
        *,
        blocks: Indices = (),
        norm: bool = True,
        key: Key = None,
        train: bool = False,
        **options: Any,
    ) -> Features:
        """The features as in `Model`.

        The channels are one more batch axis: `cls` [*B, channels, D] is what the head reads, `registers` is
        [*B, channels, R, D], and the grid of patches has one axis.
        """
        check_blocks("PatchTST", blocks, len(self.blocks))
        key, train = self.switched(key, train)
        x, seen = self.tokens(self.cut(series), capture=blocks, key=key, train=train, **options)
        finish = functools.partial(self._finish, train=train) if norm else lambda x: x
        return self._features(finish(x), {i: self._features(finish(y), {}) for i, y in seen.items()})

    def _pooled(self, patches: jax.Array, *, key: Key = None, train: bool = False, **options: Any) -> jax.Array:
        key, train = self.switched(key, train)
        # The head reads only the global token of the last block, but a batch norm needs all tokens.
        whole = self.config.pool == "last" or self.config.norm == "batch"
        keep = None if whole else self.config.jumbo
        x, _ = self.tokens(patches, key=key, train=train, keep=keep, **options)
        return jax.lax.collapse(self._pool(self._finish(x, train)), -2)

    def tokens(
        self,
        patches: jax.Array,
        *,
        capture: Indices = (),
        key: Key = None,
        train: bool = False,
        dropout: Rate | None = None,
        keep: int | None = None,
    ) -> tuple[jax.Array, dict[int, jax.Array]]:
        """Tokens [*B, channels, prefix + patches, D] after all blocks, and after the blocks in `capture`.

        With `keep`, only the first `keep` tokens pass through the last FFN and are returned.
        """
        config, last = self.config, self.config.depth - 1
        rate = config.dropout if dropout is None else dropout
        x = self.embed(patches) + self.position[...]
        x = drop(x, rate, None if key is None else jax.random.fold_in(key, config.depth))
        prefix = [rows[...] for rows in (self.class_token, self.registers) if rows is not None]
        prefix = [jnp.broadcast_to(rows.astype(x.dtype), (*x.shape[:-2], *rows.shape)) for rows in prefix]
        x = jnp.concatenate([*prefix, x], axis=-2)
        if config.residual_attention:
            x = x, jnp.zeros((*x.shape[:-2], config.num_heads, x.shape[-2], x.shape[-2]), x.dtype)
        layout, shared = Layout((config.patches,), config.prefix), (self.jumbo_mlp,)
        rates = None if key is None else jnp.broadcast_to(rate, (config.depth,))
        options: dict[str, Any] = dict(shared=shared, rates=rates, train=train, key=key)

        def apply(x, start, stop):
            return self.blocks(x, layout, start=start, stop=stop, **options)[0]

        x, seen = captured(apply, x, capture, 0, config.depth if keep is None else last)
        if keep is not None:
            block, key = self.blocks[last], None if key is None else jax.random.fold_in(key, last)
            x = block(x, layout, *shared, rate=rate, train=train, key=key, keep=keep)
        return _without_products(x), {i: _without_products(y) for i, y in seen.items()}

    def _finish(self, x, train):
        return x if self.norm is None else _normalized(self.norm, x, train)

    def _pool(self, x):
        """The head's input from each channel, [*B, channels, D]."""
        return x[..., -1, :] if self.config.pool == "last" else x[..., : self.config.jumbo, :].mean(-2)

    def _features(self, x, blocks) -> Features:
        config = self.config
        offset = jnp.zeros((*x.shape[:-2], 1), jnp.int32)
        patches = Grid(x[..., config.prefix :, :], (config.patch_length // 2,), offset)
        registers = x[..., config.prefix - config.registers : config.prefix, :]
        return Features(cls=self._pool(x), registers=registers, patches=patches, blocks=blocks)


class PatchTSTBlock(nnx.Module):
    """Attention over all tokens, then one FFN for the ordinary tokens and another for the whole Jumbo token.

    Shapes: [*B, N, D] -> the same; the first J tokens are the parts of the Jumbo token.  With residual attention, input
    and output also have the accumulated attention scores, [*B, H, N, N].
    """

    def __init__(self, config: PatchTSTConfig, rngs: nnx.Rngs):
        self.config = config
        norm, width, wide = NORMS[config.norm], config.width, config.jumbo * config.width
        attention: Any = ResidualAttention if config.residual_attention else dense.Attention
        init = dense.INITS[config.init]
        self.norm1, self.attention = norm(width), attention(width, config.num_heads, init=init, rngs=rngs)
        self.norm2, self.mlp = norm(width), dense.Mlp(width, config.mlp_dim, init=init, rngs=rngs)
        self.norm3 = norm(wide) if config.jumbo > 1 else None
        own = config.jumbo > 1 and config.jumbo_ffn == "per_layer"
        self.jumbo_mlp = dense.Mlp(wide, config.jumbo_mlp * wide, init=init, rngs=rngs) if own else None

    def __call__(
        self,
        x: Any,
        layout: Layout,
        shared: nnx.Module | None = None,
        *,
        rate: Rate = 0.0,
        train: bool = False,
        key: Key = None,
        keep: int | None = None,
    ) -> Any:
        """The tokens after the block, and with residual attention the accumulated scores; arguments as in `Stack`.

        Args:
          rate: of dropout after each branch.
          keep: number of leading tokens that pass through the FFN and are returned; None: all.
        """
        keys, products = split(key, 3), None
        add = functools.partial(self._add, train=train, dropout=rate)
        if self.config.residual_attention:
            x, products = x

        def attend(x):
            nonlocal products
            if products is None:
                return self.attention(x)
            x, products = self.attention(x, products)
            return x

        x = add(x, self.norm1, attend, key=keys[0])[..., :keep, :]
        if self.norm3 is None:
            x = add(x, self.norm2, self.mlp, key=keys[1])
            return x if products is None else (x, products)
        jumbo, others = x[..., : self.config.jumbo, :], x[..., self.config.jumbo :, :]
        merged = add(merge(jumbo), self.norm3, self.jumbo_mlp or shared, key=keys[2])
        others = add(others, self.norm2, self.mlp, key=keys[1])
        x = jnp.concatenate([divide(merged, self.config.jumbo), others], axis=-2)
        return x if products is None else (x, products)

    def _add(self, x, norm, branch, *, key, train, dropout):
        """x + branch(norm(x)), or norm(x + branch(x))."""
        y = branch(_normalized(norm, x, train) if self.config.norm_first else x)
        x = x + drop(y, dropout, key)
        return x if self.config.norm_first else _normalized(norm, x, train)


class ResidualAttention(dense.Attention):
    """Attention that accumulates scores over layers, before the softmax (RealFormer).

    Shapes: [*B, N, width] and [*B, H, N, N] -> the same two.
    """

    def __call__(self, x: jax.Array, products: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, k, v = self.heads(x)
        with jax.named_scope("attention"):
            products = products + jnp.einsum("...nd,...md->...nm", q / math.sqrt(q.shape[-1]), k).astype(products.dtype)
            weights = jax.nn.softmax(products.astype(jnp.promote_types(x.dtype, jnp.float32)), axis=-1)
            y = jnp.einsum("...nm,...md->...nd", weights.astype(v.dtype), v)
        return self.projected(y), products


def _without_products(x):
    return x[0] if isinstance(x, tuple) else x


def _standardized(x: jax.Array) -> jax.Array:
    """Normalise series to mean 0 and variance 1 over the last axis; constant series become zero."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def _normalized(norm, x, train):
    return norm(x, train=train) if isinstance(norm, BatchNorm) else norm(x)


JUMBO = 4  # J in the paper's experiments on time series
PUBLIC = dict(norm="batch", norm_first=False, residual_attention=True, instance_norm=True)
NAMES = {
    "patchtst": Preset(PatchTSTConfig, {}),
    "patchtst_registers": Preset(PatchTSTConfig, dict(registers=None)),
    "patchtst_jumbo": Preset(PatchTSTConfig, dict(jumbo=JUMBO)),
    "patchtst_public": Preset(PatchTSTConfig, PUBLIC | dict(pool="last")),
    "patchtst_public_registers": Preset(PatchTSTConfig, PUBLIC | dict(registers=None)),
    "patchtst_public_jumbo": Preset(PatchTSTConfig, PUBLIC | dict(jumbo=JUMBO)),
}
