"""The choices that make one ViT, and the checks of its sizes."""

import dataclasses

from equivit import errors
from equivit.layers.grid import check_grid
from equivit.symmetry.groups import FLIP, OCTIC, Group

FAMILIES = {"plain": None, "H8": OCTIC, "I8": OCTIC, "D8": OCTIC, "H2": FLIP, "I2": FLIP, "D2": FLIP}
MLPS = ("gelu", "gelu_tanh", "swiglu")
POSITIONS = ("learned", "sincos", "sincos_inclusive")
REGISTER_MLPS = (None, "registers", "class_and_registers")


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """The choices that make one ViT.

    Attributes:
      width, depth, num_heads: embedding width, number of blocks, heads per block.
      patch_size: (height, width) of a patch in pixels; an int for a square.
      image_size: (height, width) that the positional table is learned at; any size divisible by the patch can be used.
      mlp_dim: hidden width of the MLP; None: four times the width.
      mlp: "gelu", "gelu_tanh" (Flax's approximation of it) or "swiglu" (DINOv2 giant); fields take "gelu" only.
      norm_eps: epsilon of dense layer norms.
      family: a key of `FAMILIES`.
      equivariant_blocks: k of the table above; None: half of the depth (rounded down) for H and I, all for D.
      invariant: the invariantization of I and D (`layers/invariants.py`).
      pool_first: D8 averages over tokens before the invariantization instead of after it.
      isotypic_norm: "official" or "balanced" (`layers/isotypic.py`); isotypic_eps: its epsilon.
      num_classes: None for no head.
      pool: "class" or "mean" over patch tokens; what the head reads.
      class_token: whether there is one; class_position: whether it has a position of its own (DINOv2, ViT).
      registers: number of register tokens; mask_token: whether there is one, for `mask=`.
      register_mlp: tokens with an MLP of their own in each block: None, "registers" or "class_and_registers" (Jumbo,
        Section 4.7, alternatives 2 and 1).
      token_std, position_std: initial deviations of class token and positions.
      register_std: that of registers.  The default is the official codes' (DINOv2, timm), with which registers begin
        next to equal and stay so for long: all registers of a short run are one register, repeated.
      position: "learned", or the fixed "sincos" (MAE) or "sincos_inclusive" (its JAX version) tables, for plain models.
      position_antialias, position_offset: how the weights expect learned plain positions to be resized
        (`layers/position.py`).
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
    mlp: str = "gelu"
    norm_eps: float = 1e-6
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
    register_mlp: str | None = None
    mask_token: bool = False
    token_std: float = 0.02
    register_std: float = 1e-6
    position: str = "learned"
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
        errors.one_of("ViT: family", self.family, FAMILIES)
        errors.one_of("ViT: mlp", self.mlp, MLPS)
        errors.one_of("ViT: position", self.position, POSITIONS)
        errors.one_of("ViT: register_mlp", self.register_mlp, REGISTER_MLPS)
        self._check_readout()
        for name, plain in (("mlp", "gelu"), ("position", "learned")):
            if self.group is not None and (value := getattr(self, name)) != plain:
                raise ValueError(f"ViT: {name}={value!r} is for plain models; family {self.family} takes {plain!r}.")
        check_grid(self.image_size, self.patch_size, "ViT: image_size")
        self._check_blocks()

    def _check_readout(self):
        errors.one_of("ViT: pool", self.pool, ("class", "mean"))
        if self.pool == "class" and not self.class_token:
            raise ValueError("ViT: pool='class' needs class_token=True; without one use pool='mean'.")
        if self.register_mlp is not None and not self.registers:
            raise ValueError(f"ViT: register_mlp={self.register_mlp!r} needs registers, such as registers=16.")

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
