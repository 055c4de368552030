"""The configuration of a ViT, the checks of its values, and how the parts of the model are built from it.

| family | blocks 0..k-1    | then                               | blocks k.. | readout                               |
|--------|------------------|------------------------------------|------------|---------------------------------------|
| plain  | (k = 0)          |                                    | dense      | norm, class token, linear             |
| H8, H2 | octic, flip      | the symmetry is dropped            | dense      | norm, class token, linear             |
| I8, I2 | octic, flip      | invariantization, (I8) projection  | dense      | norm, class token, linear             |
| D8     | octic, k = depth |                                    |            | norm, invariantization, mean, MLP     |
| D2     | flip, k = depth  |                                    |            | norm, class token's sym part, linear  |

I8 with k = depth is what octic DINOv2 calls D8: every token is invariantized and projected.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import constraints
from equivit.constraints import (
    Below1,
    Depth,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Size,
)
from equivit.layers import dense, invariants
from equivit.layers.block import Block, Subsets
from equivit.layers.grid import check_grid
from equivit.layers.isotypic import channels
from equivit.layers.parts import Parts
from equivit.layers.position import IsotypicPosition, Position, SinCos
from equivit.layers.prefix import Prefix, token
from equivit.layers.readout import BlocksReadout, ClassReadout, FcNormReadout, MeanReadout
from equivit.layers.split_mlp import SplitMlp
from equivit.layers.stack import REMAT, Stack
from equivit.layers.transition import Invariantize, components, values
from equivit.models.adaptive import SELECT
from equivit.models.adaptive import parts_of as parts_of_adaptive
from equivit.models.vit import ViT
from equivit.symmetry.groups import FLIP, OCTIC, Group

BY_FAMILY: Any = None  # the default depends on the family; `__post_init__` sets it


class Family(NamedTuple):
    """The symmetry of the first blocks, and how it ends.

    Attributes:
      group: of the first k blocks; None for plain models.
      leaves: after block k - 1 the symmetry is "dropped" or the tokens are made "invariant"; None: the model ends with
        fields.
    """

    group: Group | None
    leaves: str | None


FAMILIES = {
    "plain": Family(None, None),
    "H8": Family(OCTIC, "dropped"),
    "I8": Family(OCTIC, "invariant"),
    "D8": Family(OCTIC, None),
    "H2": Family(FLIP, "dropped"),
    "I2": Family(FLIP, "invariant"),
    "D2": Family(FLIP, None),
}
HEAD_BIASES = ("zero", "prior")
PARTS = ("token", "position")  # that may be adaptive


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The configuration of a ViT.

    Attributes:
      width, depth, num_heads: embedding width, number of blocks, heads per block.
      patch_size: (height, width) of a patch in pixels; an int for a square.
      image_size: (height, width) at which the positional table is learned; the model takes any size that the patch
        divides.
      mlp_dim: hidden width of the MLP; None: four times the width.
      mlp: "gelu", "gelu_tanh" (the tanh approximation, Flax's default), "quick_gelu" (x sigmoid(1.702 x), OpenAI's
        CLIP) or "swiglu" (DINOv2 giant); equivariant families take only "gelu".
      norm_eps: epsilon of the dense layer norms.
      family: a key of `FAMILIES`.
      equivariant_blocks: k in the table above; None: half of the depth (rounded down) for H and I, all for D.
      invariant: the invariantization of I and D (`layers/invariants.py`); None: the sym part for D2, else the power
        spectrum.
      pool_first: D8 averages over tokens before the invariantization, not after it.
      isotypic_norm: "official" or "balanced" (`layers/isotypic.py`).
      isotypic_eps: epsilon of the isotypic norms.
      num_classes: None for no classifier.
      projection: entries of the image's embedding: the head is a linear map without a bias, as in CLIP; None for no
        such head.
      pool: the head reads the "class" token, the "mean" of the patch tokens or, as DINOv2's linear heads, both, in this
        order ("class_and_mean"); None: "class" if there is a class token.
      pool_blocks: of how many of the last blocks the head reads the class token, the earliest first, each after the
        final norm; of the patches it always reads those of the last block.
      fc_norm: the final norm is applied after the mean over tokens, as in MAE's fine-tuning, not before it; for
        pool="mean" of dense tokens.
      class_token: whether the model has a class token; None: yes, unless the family is D8.
      class_position: whether the class token has its own position (DINOv2, ViT).
      registers: number of register tokens.
      mask_token: whether the model has a mask token, for `mask=`.
      register_mlp: the tokens that get their own MLP in each block: None, "registers" or "class_and_registers" (Jumbo,
        Section 4.7, alternatives 2 and 1).
      init: initialisation of the weights of plain models (`dense.INITS`): "normal" with standard deviation 0.02, and
        PyTorch's uniform default for the patch embedding; "truncated_normal", the same truncated at two standard
        deviations (the JAX version of MAE); "xavier_uniform" (MAE).
      head_std: initial standard deviation of the head's weights (of its last layer if it is an MLP).
      head_bias: initial bias of the head: "zero", or "prior", -log(num_classes), for equally likely classes.
      token_std, position_std: initial standard deviations of the class token and of the positions.
      register_std: initial standard deviation of the registers.  The default is that of the official codes (DINOv2,
        timm).  Registers then begin almost equal and stay so for a long time: in a short run, all registers act as one.
      position: "learned", or for plain models one of the fixed tables "sincos" (MAE) and "sincos_inclusive" (the JAX
        version of MAE).
      position_antialias, position_offset: how learned positions of plain models are resized (`layers/position.py`);
        pretrained weights expect certain values.
      patch_bias: whether the patch embedding of a plain model has a bias; CLIP's has none.
      pre_norm: a layer norm of all tokens before the first block (CLIP).
      qkv_bias: whether queries, keys and values have biases.
      layer_scale: initial layer scale; None for no layer scale.
      drop_path: probability of dropping a residual branch of a block for a sample, used when a key is given; a pair
        gives the rates of the first and the last block, with linear growth in between.
      drop_path_groups: in place of each sample by itself, exactly that share of each of so many runs of consecutive
        images drops a branch, which is computed for the others alone (DINOv2); None: each by itself.
      drop_path_fields: what equivariant blocks then do: "subsets" as well, or "samples", each by itself, as in the
        public code of octic ViTs.
      dropout: probability of dropping an entry, used when a key is given.
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (patches begin where the content
        decides) and "position" (in place of positions, attention knows distances around the torus; dense blocks after
        an invariantization know none).  Of an octic family it is equivariant under all symmetries of p4m.
      select: how the phase of the patches is chosen, by the norm of their tokens ("output") or of their first pixels
        ("input").
      anchor: in models of no symmetry group, settles ties and rounding (`models/adaptive.py`).
      remat, unroll: how the blocks are run (`layers/stack.py`).
    """

    width: PositiveInt
    depth: Depth
    num_heads: PositiveInt
    patch_size: Size = (16, 16)
    image_size: Size = (224, 224)
    in_channels: PositiveInt = 3
    mlp_dim: PositiveInt | None = None
    mlp: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    norm_eps: PositiveFloat = 1e-6
    family: Annotated[str, OneOf(FAMILIES)] = "plain"
    equivariant_blocks: NonNegativeInt | None = None
    invariant: Annotated[str, OneOf(invariants.KINDS)] = BY_FAMILY
    pool_first: bool = False
    isotypic_norm: Literal["official", "balanced"] = "official"
    isotypic_eps: PositiveFloat = 1e-5
    num_classes: PositiveInt | None = 1000
    projection: PositiveInt | None = None
    pool: Annotated[str, OneOf(("class", "mean", "class_and_mean"))] = BY_FAMILY
    pool_blocks: PositiveInt = 1
    fc_norm: bool = False
    class_token: bool = BY_FAMILY
    class_position: bool = False
    registers: NonNegativeInt = 0
    register_mlp: Literal["registers", "class_and_registers"] | None = None
    mask_token: bool = False
    init: Annotated[str, OneOf(dense.INITS)] = "normal"
    head_std: NonNegativeFloat = 0.02
    head_bias: Annotated[str, OneOf(HEAD_BIASES)] = "zero"
    token_std: NonNegativeFloat = 0.02
    register_std: NonNegativeFloat = 1e-6
    position: Literal["learned", "sincos", "sincos_inclusive"] = "learned"
    position_std: NonNegativeFloat = 0.02
    position_antialias: bool = False
    position_offset: NonNegativeFloat = 0.0
    patch_bias: bool = True
    pre_norm: bool = False
    qkv_bias: bool = True
    layer_scale: NonNegativeFloat | None = 1e-4
    drop_path: Below1 | tuple[Below1, Below1] = 0.0
    drop_path_groups: PositiveInt | None = None
    drop_path_fields: Literal["subsets", "samples"] = "subsets"
    dropout: Below1 = 0.0
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # in this order a message names the wrong part
    select: Annotated[str, OneOf(SELECT)] = "output"
    anchor: bool = True
    remat: Annotated[str, OneOf(REMAT)] = "none"
    unroll: bool = False

    def __post_init__(self):
        if isinstance(self.patch_size, int):
            self._set(patch_size=(self.patch_size, self.patch_size))
        self._choose_by_family()
        constraints.check_fields(self, "ViT")
        self._check_readout()
        for name, plain in (("mlp", "gelu"), ("position", "learned"), ("init", "normal"), ("patch_bias", True)):
            if self.group is not None and (value := getattr(self, name)) != plain:
                raise ValueError(f"ViT: {name}={value!r} is for plain models; family {self.family} takes {plain!r}.")
        if self.drop_path_groups is not None and isinstance(self.drop_path, tuple):
            raise ValueError(
                f"ViT: drop_path_groups={self.drop_path_groups} needs one drop_path for all blocks, not "
                f"{self.drop_path}; take {self.drop_path[1]}."
            )
        check_grid(self.image_size, self.patch_size, "ViT: image_size")
        self._check_blocks()

    def _set(self, **values):
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _choose_by_family(self):
        if self.class_token is None:
            self._set(class_token=self.family != "D8")
        if self.pool is None:
            self._set(pool="class" if self.class_token else "mean")
        if self.invariant is None:
            self._set(invariant="linear_signed" if self.family == "D2" else "power_spectrum")

    def _check_readout(self):
        if self.pool in ("class", "class_and_mean") and not self.class_token:
            raise ValueError(f"ViT: pool={self.pool!r} needs class_token=True; without one use pool='mean'.")
        self._check_pooled_blocks()
        if self.num_classes is not None and self.projection is not None:
            raise ValueError(
                f"ViT: num_classes={self.num_classes} and projection={self.projection} are two heads; set one to None."
            )
        if self.fc_norm and (self.pool != "mean" or self.ends_with_fields):
            raise ValueError(
                f"ViT: fc_norm=True is for the mean of dense tokens, not for family {self.family} with "
                f"pool={self.pool!r}; take pool='mean' of another family, or fc_norm=False."
            )
        if self.register_mlp is not None and not self.registers:
            raise ValueError(f"ViT: register_mlp={self.register_mlp!r} needs registers, such as registers=16.")

    def _check_pooled_blocks(self):
        if self.pool_blocks == 1 and self.pool != "class_and_mean":
            return
        if self.ends_with_fields:
            raise ValueError(
                f"ViT: pool={self.pool!r} with pool_blocks={self.pool_blocks} reads dense tokens, and family "
                f"{self.family} ends with fields; take pool='class' or 'mean' and pool_blocks=1, or a family H or I."
            )
        if self.pool not in ("class", "class_and_mean"):
            raise ValueError(f"ViT: pool_blocks={self.pool_blocks} is of class tokens; pool={self.pool!r} takes 1.")
        if self.pool_blocks > self.depth:
            raise ValueError(f"ViT: pool_blocks={self.pool_blocks} is more than the depth, {self.depth}.")

    def _check_blocks(self):
        k = self.equivariant_blocks
        if k is None:
            return
        if not 0 <= k <= self.depth:
            raise ValueError(f"ViT: equivariant_blocks={k} must lie between 0 and the depth, {self.depth}.")
        if self.group is None and k:
            raise ValueError(f"ViT: equivariant_blocks={k} needs a family with a symmetry, such as H8; this is plain.")
        if FAMILIES[self.family].leaves == "dropped" and k == self.depth:
            whole = "D" + self.family[1]
            raise ValueError(
                f"ViT: {self.family} with equivariant_blocks={k} of {self.depth} has no dense block; {whole} is that."
            )
        if self.ends_with_fields and k != self.depth:
            raise ValueError(
                f"ViT: {self.family} has all {self.depth} blocks equivariant, not {k}; families H and I have fewer."
            )

    @property
    def group(self) -> Group | None:
        """The symmetry group of the first k blocks."""
        return FAMILIES[self.family].group

    @property
    def ends_with_fields(self) -> bool:
        """Whether the input of the readout is a field (D8, D2)."""
        return self.group is not None and FAMILIES[self.family].leaves is None

    @property
    def k(self) -> int:
        """Number of equivariant blocks."""
        if self.equivariant_blocks is not None:
            return self.equivariant_blocks
        if self.group is None:
            return 0
        return self.depth if self.ends_with_fields else self.depth // 2

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are adaptive."""
        return parts_of_adaptive(self.adaptive, PARTS)

    @property
    def anchored(self) -> bool:
        """Whether images are rolled into a frame of their content, which would follow no turn and no mirror."""
        return self.anchor and self.parts == PARTS and self.group is None

    def torus(self, group: Group | None) -> tuple[int, int] | None:
        """The grid of the distances that blocks of a group know, None for none."""
        if "position" not in self.parts or (group is None and FAMILIES[self.family].leaves == "invariant"):
            return None
        return check_grid(self.image_size, self.patch_size, "ViT: image_size")

    @property
    def prefix(self) -> int:
        """Number of tokens before the patch tokens."""
        return int(self.class_token) + self.registers

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Shape of one image: (height, width, channels)."""
        return *self.image_size, self.in_channels

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return self.mlp_dim or 4 * self.width

    @property
    def rates(self) -> np.ndarray | None:
        """The rate of stochastic depth of each block, [depth]; None if all rates are zero."""
        first, last = self.drop_path if isinstance(self.drop_path, tuple) else (self.drop_path,) * 2
        return np.linspace(first, last, self.depth, dtype=np.float32) if first or last else None

    def subsets(self, group: Group | None) -> Subsets | None:
        """Those of blocks of a group; None if each sample drops branches by itself, or none does."""
        if self.drop_path_groups is None or isinstance(self.drop_path, tuple) or not self.drop_path:
            return None
        if group is not None and self.drop_path_fields == "samples":
            return None
        return Subsets(self.drop_path, self.drop_path_groups)

    def build(self, rngs: nnx.Rngs) -> ViT:
        """The model, with parameters drawn from `rngs`.

        Raises:
          ValueError: the order of the group does not divide a width, the patch size or the heads.
        """
        return build(self, rngs)


def build(config: ViTConfig, rngs: nnx.Rngs) -> ViT:
    """A ViT, with or without class token and registers."""
    parts = parts_of(config, rngs)
    width = learned_width(config)
    prefix: dict[str, Any] = dict(
        class_token=config.class_token,
        class_position=config.class_position,
        registers=config.registers,
        token_std=config.token_std,
        position_std=config.position_std,
        register_std=config.register_std,
    )
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
    """Makes the layers of the first blocks; `.of(None)` makes those of the dense blocks."""
    return Parts(
        config.group,
        rngs,
        norm_eps=config.norm_eps,
        isotypic_eps=config.isotypic_eps,
        isotypic_norm=config.isotypic_norm,
        layer_scale=config.layer_scale,
        activation=config.mlp,
        qkv_bias=config.qkv_bias,
        patch_bias=config.patch_bias,
        init=config.init,
        dropout=config.dropout,
    )


def learned_width(config: ViTConfig) -> int:
    """Width of a learned token; among fields, it has only the invariant component."""
    return config.width if config.group is None else channels("ViT", config.width, config.group)


def position(config: ViTConfig, rngs: nnx.Rngs) -> Callable | None:
    """The positions of the patches; none where attention knows distances."""
    if "position" in config.parts:
        return None
    grid = check_grid(config.image_size, config.patch_size, "ViT: image_size")
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


MakeBlock = Callable[[Parts], nnx.Module]


def stack(config: ViTConfig, block: MakeBlock, rngs: nnx.Rngs, last: MakeBlock | None = None) -> Stack:
    """k equivariant blocks, then dense ones; `block` makes a block, and `last`, if given, makes the last one."""
    kinds = ((config.k, config.group), (config.depth - config.k, None))
    runs = [(length, group, block) for length, group in kinds if length]
    if last is not None:
        length, group, _ = runs.pop()
        runs += [(length - 1, group, block), (1, group, last)]

    def maker(group, make):
        torus = config.torus(group)
        return lambda rngs: make(dataclasses.replace(parts_of(config, rngs).of(group), torus=torus))

    runs = [(length, maker(group, make)) for length, group, make in runs]
    return Stack(runs, remat=config.remat, unroll=config.unroll, rngs=rngs)


def transition(config: ViTConfig, parts: Parts) -> Callable | None:
    """The layer between the equivariant and the dense blocks, if there is one."""
    match FAMILIES[config.family].leaves:
        case "dropped":
            return components if config.group is OCTIC else values
        case "invariant" if config.group is not None:
            invariant = invariants.create(config.invariant, config.width, group=config.group, rngs=parts.rngs)
            if config.group is FLIP and invariant.out_features == config.width:
                return Invariantize(invariant, None)
            return Invariantize(invariant, parts.of(None).linear(invariant.out_features, config.width))
    return None


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
    elif config.fc_norm:
        readout = FcNormReadout(norm, class_token=config.class_token)
    else:
        readout = MeanReadout(norm, pool_first=config.pool_first, **options)
    features = width * (config.pool_blocks + (config.pool == "class_and_mean"))
    features = features if invariant is None else invariant.out_features
    return dict(transition=leave, readout=readout, head=make_head(config, features, config.family == "D8", rngs))


def make_head(config: ViTConfig, features: int, hidden: bool, rngs: nnx.Rngs) -> nnx.Module | None:
    """The projection or classifier of `features` entries, this with or without a hidden layer; None for neither."""
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
        bias.set_value(jnp.full(classes, -math.log(classes)))
    return head
