"""The configuration of a ViT, and the checks of its values; `parts.py` builds the model.

| family | blocks 0..k-1    | then                               | blocks k.. | readout                               |
|--------|------------------|------------------------------------|------------|---------------------------------------|
| plain  | (k = 0)          |                                    | dense      | norm, class token, linear             |
| H8, H2 | octic, flip      | the symmetry is dropped            | dense      | norm, class token, linear             |
| I8, I2 | octic, flip      | invariantization, (I8) projection  | dense      | norm, class token, linear             |
| D8     | octic, k = depth |                                    |            | norm, invariantization, mean, MLP     |
| D2     | flip, k = depth  |                                    |            | norm, class token's sym part, linear  |

Octic DINOv2 calls I8 with k = depth "D8": every token is invariantized and projected.
"""

import dataclasses
import functools
from typing import Annotated, Any, Literal, NamedTuple

from flax import nnx

from equivit import constraints
from equivit.constraints import Below1, Depth, NonNegativeFloat, NonNegativeInt, OneOf, PositiveFloat, PositiveInt, Size
from equivit.layers import dense, invariants
from equivit.layers.block import Subsets
from equivit.layers.grid import check_grid
from equivit.models.adaptive import AdaptiveConfig
from equivit.models.image_config import ImageConfig
from equivit.models.vit import parts as vit_parts
from equivit.models.vit.model import ViT
from equivit.models.vit.replaced import Replaced, as_replaced
from equivit.symmetry.groups import FLIP, OCTIC, Group

BY_FAMILY: Any = None  # the default depends on the family; `__post_init__` sets it


class Family(NamedTuple):
    """The symmetry of the first blocks, and how it ends.

    Attributes:
      group: group of the first k blocks; None for plain models.
      leaves: after block k - 1 the symmetry is "dropped" or tokens are made "invariant"; None: the model ends with
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
class ViTConfig(AdaptiveConfig, ImageConfig):
    """The configuration of a ViT: the fields of its bases and these.

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
      transition_map: a linear map of the dense tokens where H8 or H2 drops the symmetry; `equivit.octify` fits it.  I8
        has one after its invariantization in any case.
      pool_first: with pool="mean", D8 and D2 average over tokens before the invariantization instead of after it.
      isotypic_norm: "official" or "balanced" (`layers/isotypic.py`).
      isotypic_eps: epsilon of the isotypic norms.
      projection: size of the image embedding: the head is a linear map without bias, as in CLIP; None for no such head.
      pool: the head reads the "class" token, the "mean" of the patch tokens, or both in this order ("class_and_mean",
        as in DINOv2's linear heads), or a learned query that attends to dense patch tokens ("attention", as in SigLIP,
        without a class token); None: "class" if there is a class token, else "mean".
      pool_blocks: number of last blocks whose class tokens the head reads, earliest first, each after the final norm.
        Patches always come from the last block.
      fc_norm: apply the final norm after the mean over tokens instead of before it, as in MAE's fine-tuning; for
        pool="mean" of dense tokens.
      class_token: whether the model has a class token; None: yes, unless the family is D8.
      class_position: whether the class token, if there is one, has its own position (DINOv2, ViT).
      registers: number of register tokens.
      mask_token: whether the model has a mask token, for `mask=`.
      register_mlp: tokens with a separate MLP in each block: None, "registers" or "class_and_registers" (Jumbo, Section
        4.7, alternatives 2 and 1).
      init: initialisation of the weights (`dense.INITS`): "normal" with standard deviation 0.02, and PyTorch's uniform
        default for the patch embedding; "truncated_normal", the same truncated at two standard deviations (the JAX
        version of MAE); "xavier_uniform" (MAE), in equivariant blocks with the widths of each irrep.
      head_std: initial standard deviation of the head's weights (of its last layer if it is an MLP).
      head_bias: initial bias of the head: "zero", or "prior", -log(num_classes), for equally likely classes.
      token_std, position_std: initial standard deviations of the class token and of the positions.
      register_std: initial standard deviation of the registers.  The default is from the official codes (DINOv2, timm).
        Registers then start almost equal and stay so for long: in a short run, all registers act as one.
      position: "learned", or for plain models one of the fixed tables "sincos" (MAE) and "sincos_inclusive" (the JAX
        version of MAE), or "rotary" in each attention (DINOv3), whose keys then have no bias.
      position_antialias, position_offset: how learned positions of plain models are resized (`layers/position.py`);
        pretrained weights expect certain values.
      patch_bias: whether the patch embedding of a plain model has a bias; CLIP has none.
      pre_norm: a layer norm of all tokens before the first block (CLIP).
      qkv_bias: whether queries, keys and values have biases.
      qk_norm: whether attention norms the queries and the keys of each head, in plain models.
      layer_scale: initial layer scale; None for no layer scale.
      drop_path_groups: number of runs of consecutive images; in each, exactly the share `drop_path` skips a branch,
        which is computed only for the others (DINOv2).  None: samples are drawn independently.
      drop_path_fields: how equivariant blocks then drop: "subsets" too, or independent "samples", as in the public code
        of octic ViTs.
      dropout: probability of dropping an entry, used when a key is given.
      adaptive: True for a truly shift-equivariant model, or some of its parts: "token" (the content chooses the origin
        of patches) and "position" (attention uses distances around the torus instead of positions, except in dense
        blocks after an invariantization).  With True, octic families are equivariant under p4m.  Families D and I
        do not take "token" alone: the grid would begin at other patches, and their positions would stay.
      anchor: without effect in models with a symmetry group.
      replaced: blocks with convolution instead of attention: entries (block, kind, kernel_size, heads, form), all but
        the first optional (`replaced.py`).  Such models have no tokens before the patches.  Dense blocks after an
        invariantization (I8, I2) only take the kind "identity".
    """

    KNOWN_PARTS = PARTS

    width: PositiveInt
    depth: Depth
    num_heads: PositiveInt
    patch_size: Size = (16, 16)
    mlp_dim: PositiveInt | None = None
    mlp: Literal["gelu", "gelu_tanh", "quick_gelu", "swiglu"] = "gelu"
    norm_eps: PositiveFloat = 1e-6
    family: Annotated[str, OneOf(FAMILIES)] = "plain"
    equivariant_blocks: NonNegativeInt | None = None
    invariant: Annotated[str, OneOf(invariants.KINDS)] = BY_FAMILY
    transition_map: bool = False
    pool_first: bool = False
    isotypic_norm: Literal["official", "balanced"] = "official"
    isotypic_eps: PositiveFloat = 1e-5
    projection: PositiveInt | None = None
    pool: Annotated[str, OneOf(("class", "mean", "class_and_mean", "attention"))] = BY_FAMILY
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
    position: Literal["learned", "sincos", "sincos_inclusive", "rotary"] = "learned"
    position_std: NonNegativeFloat = 0.02
    position_antialias: bool = False
    position_offset: NonNegativeFloat = 0.0
    patch_bias: bool = True
    pre_norm: bool = False
    qkv_bias: bool = True
    qk_norm: bool = False
    layer_scale: NonNegativeFloat | None = 1e-4
    drop_path_groups: PositiveInt | None = None
    drop_path_fields: Literal["subsets", "samples"] = "subsets"
    dropout: Below1 = 0.0
    adaptive: tuple[Annotated[str, OneOf(PARTS)], ...] | bool = False  # tuple first: messages then name the wrong part
    replaced: tuple[Replaced, ...] | tuple[()] = ()
    unroll: bool | None = None

    def __post_init__(self):
        if isinstance(self.patch_size, int):
            self._set(patch_size=(self.patch_size, self.patch_size))
        self._choose_by_family()
        self._set(replaced=as_replaced("ViT", self.replaced))
        constraints.check_fields(self, "ViT")
        self._check_readout()
        plain_values = dict(mlp="gelu", position="learned", patch_bias=True, qk_norm=False)
        for name, plain in plain_values.items():
            if self.group is not None and (value := getattr(self, name)) != plain:
                raise ValueError(f"ViT: {name}={value!r} is for plain models; family {self.family} takes {plain!r}.")
        if self.transition_map and self.leaves != "dropped":
            raise ValueError(
                f"ViT: transition_map=True is for families H8 and H2, which drop the symmetry, not for {self.family}."
            )
        self._check_adaptive()
        if self.position == "rotary" and self.qk_norm:
            raise ValueError("ViT: position='rotary' is for attention without norms; take qk_norm=False.")
        if self.drop_path_groups is not None and isinstance(self.drop_path, tuple):
            raise ValueError(
                f"ViT: drop_path_groups={self.drop_path_groups} needs one drop_path for all blocks, not "
                f"{self.drop_path}; take {self.drop_path[1]}."
            )
        check_grid(self.image_size, self.patch_size, "ViT: image_size")
        self._check_blocks()
        self._check_replaced()

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
        if self.pool == "attention" and (self.class_token or self.ends_with_fields):
            raise ValueError(
                f"ViT: pool='attention' needs class_token=False and dense tokens, which family {self.family} with "
                f"class_token={self.class_token} lacks; take pool='mean', or a family H or I without a class token."
            )
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
        if self.pool_first and (self.pool != "mean" or not self.ends_with_fields):
            raise ValueError(
                f"ViT: pool_first=True is for the mean of fields, not for family {self.family} with "
                f"pool={self.pool!r}; take pool='mean' of family D8 or D2, or pool_first=False."
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
            raise ValueError(f"ViT: pool_blocks={self.pool_blocks} is for class tokens; pool={self.pool!r} takes 1.")
        if self.pool_blocks > self.depth:
            raise ValueError(f"ViT: pool_blocks={self.pool_blocks} is more than the depth, {self.depth}.")

    def _check_adaptive(self):
        if self.keeps_symmetry and self.parts == ("token",):
            raise ValueError(
                f"ViT: adaptive=('token',) moves the grid of patches against their positions, which would end the "
                f"symmetry of family {self.family}; take adaptive=True or ('position',)."
            )
        for name, value in dict(qk_norm=True, position="rotary").items():
            if getattr(self, name) == value and "position" in self.parts:
                raise ValueError(
                    f"ViT: {name}={value!r} needs attention without relative positions; take adaptive=('token',)."
                )

    def _check_blocks(self):
        k = self.equivariant_blocks
        if k is None:
            return
        if not 0 <= k <= self.depth:
            raise ValueError(f"ViT: equivariant_blocks={k} must lie between 0 and the depth, {self.depth}.")
        if self.group is None and k:
            raise ValueError(f"ViT: equivariant_blocks={k} needs a family with a symmetry, such as H8; this is plain.")
        if self.leaves == "dropped" and k == self.depth:
            whole = "D" + self.family[1]
            raise ValueError(
                f"ViT: {self.family} with equivariant_blocks={k} of {self.depth} has no dense block; use {whole}."
            )
        if self.ends_with_fields and k != self.depth:
            raise ValueError(
                f"ViT: {self.family} has all {self.depth} blocks equivariant, not {k}; families H and I have fewer."
            )

    def _check_replaced(self):
        self._set(replaced=tuple(one.of("ViT", self.depth, self.num_heads) for one in self.replaced))
        for one in self.replaced:
            if one.block < self.k and (one.kind not in ("dw", "identity") or one.heads is not None):
                raise ValueError(
                    f"ViT: replaced={tuple(one)}: block {one.block} of family {self.family} is equivariant, where only "
                    "'dw' of all heads and 'identity' are replacements."
                )
            if one.block >= self.k and self.leaves == "invariant" and one.kind != "identity":
                raise ValueError(
                    f"ViT: replaced={tuple(one)}: block {one.block} of family {self.family} follows the "
                    "invariantization, where a convolution would end the invariance; replace blocks before it, take "
                    "kind='identity', or another family."
                )
        if self.replaced and self.prefix:
            raise ValueError(
                f"ViT: replaced blocks convolve the grid of patches, but there are {self.prefix} tokens before it; set "
                "class_token=False, registers=0 and pool='mean' (depthwise.replacement.patches_only)."
            )
        if self.replaced and "position" in self.parts:
            fix = "adaptive=False" if self.keeps_symmetry else "adaptive=('token',)"
            raise ValueError(f"ViT: replaced blocks know no distances around the torus; take {fix}, or replaced=().")
        if self.replaced and self.position == "rotary":
            raise ValueError("ViT: attention with position='rotary' has no replacement; take replaced=().")

    @functools.cached_property
    def group(self) -> Group | None:
        """The symmetry group of the first k blocks."""
        return FAMILIES[self.family].group

    @property
    def leaves(self) -> str | None:
        """How the symmetry of the first k blocks ends; see `Family`."""
        return FAMILIES[self.family].leaves

    @property
    def keeps_symmetry(self) -> bool:
        """Whether the logits are invariant under the group (families D and I)."""
        return self.group is not None and self.leaves != "dropped"

    @property
    def ends_with_fields(self) -> bool:
        """Whether the input of the readout is a field (D8, D2)."""
        return self.group is not None and self.leaves is None

    @functools.cached_property
    def k(self) -> int:
        """Number of equivariant blocks."""
        if self.equivariant_blocks is not None:
            return self.equivariant_blocks
        if self.group is None:
            return 0
        return self.depth if self.ends_with_fields else self.depth // 2

    @property
    def anchored(self) -> bool:
        """Whether images are rolled into a frame chosen by content, which does not follow rotations and mirrors."""
        return super().anchored and self.group is None

    def torus(self, group: Group | None) -> tuple[int, int] | None:
        """The grid of relative positions in blocks of a group, or None."""
        if "position" not in self.parts or (group is None and self.leaves == "invariant"):
            return None
        return check_grid(self.image_size, self.patch_size, "ViT: image_size")

    @property
    def prefix(self) -> int:
        """Number of tokens before the patch tokens."""
        return int(self.class_token) + self.registers

    @property
    def hidden(self) -> int:
        """Hidden width of the MLP."""
        return self.mlp_dim or 4 * self.width

    def subsets(self, group: Group | None) -> Subsets | None:
        """The subsets of stochastic depth in a group's blocks; None for independent samples or no dropping."""
        if self.drop_path_groups is None or isinstance(self.drop_path, tuple) or not self.drop_path:
            return None
        if group is not None and self.drop_path_fields == "samples":
            return None
        return Subsets(self.drop_path, self.drop_path_groups)

    def build(self, rngs: nnx.Rngs) -> ViT:
        """As in `Config`; ValueError if the order of the group does not divide a width, the patch size or the heads."""
        return vit_parts.build(self, rngs)
