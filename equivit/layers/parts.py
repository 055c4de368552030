"""Build the parts of a block, dense or equivariant, from one set of options."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.nn.initializers import Initializer

from equivit.layers import dense, isotypic, relative, rotary
from equivit.symmetry.fields import TokensT
from equivit.symmetry.groups import Group


def identity(x: TokensT) -> TokensT:
    """Return x; used for a missing layer scale."""
    return x


@dataclasses.dataclass(frozen=True)
class Parts:
    """Builds layers equivariant under `group`, or dense layers if it is None.

    Attributes:
      rngs: for the initial parameters.
      norm_eps: epsilon of dense layer norms.
      isotypic_eps, isotypic_norm: epsilon and weighting of isotypic layer norms (`layers/isotypic.py`).
      layer_scale: initial layer scale; None for none.
      activation: "gelu", "gelu_tanh", "quick_gelu" or "swiglu"; fields support only "gelu".
      qkv_bias: whether queries, keys and values have biases.
      qk_norm: whether dense attention norms queries and keys.
      rotary: whether dense attention has rotary positions (`layers/rotary.py`).
      patch_bias: whether the dense patch embedding has a bias.
      init: initializer of weights, a key of `dense.INITS`; isotypic layers draw the weights of each irrep by it.
      dropout: rate in the branches of a block.
      torus: the grid (h, w) of relative positions on a torus (`layers/relative.py`); None for no relative positions.
      replace_attention: applied to each attention, such as its replacement by convolution.
    """

    group: Group | None
    rngs: nnx.Rngs
    norm_eps: float = 1e-6
    isotypic_eps: float = 1e-5
    isotypic_norm: str = "official"
    layer_scale: float | None = None
    activation: str = "gelu"
    qkv_bias: bool = True
    qk_norm: bool = False
    rotary: bool = False
    patch_bias: bool = True
    init: str = "normal"
    dropout: float = 0.0
    torus: tuple[int, int] | None = None
    replace_attention: Callable[[Any], nnx.Module] = identity

    def of(self, group: Group | None) -> "Parts":
        """The same options for another group."""
        return dataclasses.replace(self, group=group)

    def patch_embed(self, patch_size: tuple[int, int], in_channels: int, width: int) -> nnx.Module:
        """Images to tokens."""
        init = None if self.init == "normal" else self.weight_init  # "normal" pairs with PyTorch's uniform here
        if self.group is None:
            options: dict[str, Any] = dict(bias=self.patch_bias, init=init, rngs=self.rngs)
            return dense.PatchEmbed(patch_size, in_channels, width, **options)
        return isotypic.PatchEmbed(patch_size, in_channels, width, group=self.group, init=init, rngs=self.rngs)

    def linear(self, in_features: int, out_features: int, *, bias: bool = True) -> nnx.Module:
        """A linear map."""
        options: dict[str, Any] = dict(bias=bias, init=self.weight_init, rngs=self.rngs)
        if self.group is None:
            return dense.Linear(in_features, out_features, **options)
        return isotypic.Linear(in_features, out_features, group=self.group, **options)

    def norm(self, width: int) -> nnx.Module:
        """A layer norm."""
        if self.group is None:
            return dense.LayerNorm(width, eps=self.norm_eps)
        return isotypic.LayerNorm(width, group=self.group, eps=self.isotypic_eps, weighting=self.isotypic_norm)

    @property
    def standardise(self) -> Callable:
        """A layer norm without parameters."""
        if self.group is None:
            return dense.Standardise(self.norm_eps)
        return isotypic.Standardise(isotypic.constants(self.isotypic_eps, self.isotypic_norm))

    def scale(self, width: int) -> Callable:
        """A layer scale, or the identity."""
        if self.layer_scale is None:
            return identity
        if self.group is None:
            return dense.LayerScale(width, self.layer_scale)
        return isotypic.LayerScale(width, self.layer_scale, group=self.group)

    def attention(self, width: int, num_heads: int) -> nnx.Module:
        """Multi-head self-attention, or its replacement."""
        return self.replace_attention(self._attention(width, num_heads))

    def _attention(self, width: int, num_heads: int) -> nnx.Module:
        options: dict[str, Any] = dict(qkv_bias=self.qkv_bias, init=self.weight_init, rngs=self.rngs)
        if self.group is None:
            if self.torus is not None:
                return relative.Attention(width, num_heads, self.torus, **options)
            if self.rotary:
                return rotary.Attention(width, num_heads, **options)
            if self.qk_norm:
                return dense.NormedAttention(width, num_heads, eps=self.norm_eps, **options)
            return dense.Attention(width, num_heads, **options)
        if self.torus is not None:
            return relative.IsotypicAttention(width, num_heads, self.torus, group=self.group, **options)
        return isotypic.Attention(width, num_heads, group=self.group, **options)

    def mlp(self, width: int, hidden: int) -> nnx.Module:
        """An MLP."""
        if self.group is not None:
            return isotypic.Mlp(width, hidden, group=self.group, init=self.weight_init, rngs=self.rngs)
        if self.activation == "swiglu":
            return dense.SwiGlu(width, hidden, init=self.weight_init, rngs=self.rngs)
        return dense.Mlp(width, hidden, activation=self.gelu, init=self.weight_init, rngs=self.rngs)

    @property
    def weight_init(self) -> Initializer:
        """The initializer of weights."""
        return dense.INITS[self.init]

    @property
    def gelu(self) -> Callable:
        """The activation function of an MLP that is not gated."""
        if self.group is not None:
            return isotypic.gelu
        return dense.ACTIVATIONS[self.activation]

    def branches(self, width: int, num_heads: int, hidden: int, mlp: Callable[[], nnx.Module] | None = None) -> dict:
        """The arguments of `Block`; `mlp()` builds an MLP to use instead of the usual one."""
        return dict(
            norm1=self.norm(width),
            attention=self.attention(width, num_heads),
            scale1=self.scale(width),
            norm2=self.norm(width),
            mlp=self.mlp(width, hidden) if mlp is None else mlp(),
            scale2=self.scale(width),
            dropout=self.dropout,
        )
