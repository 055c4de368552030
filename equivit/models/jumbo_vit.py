"""ViTs with a Jumbo token, plain or equivariant: a global token J times as wide as the patches, with an MLP of its own.

All families of `vit.py` take it.  In equivariant blocks the Jumbo token is a wide field ("steerable"), or holds the
invariant component alone ("invariant"): J times width / order channels, with a dense MLP.

`PRESETS` name what four public versions do: the paper's tables, the released code and checkpoints, the code of 2025,
and the JAX version of Jumbo's MAE.

Source: Jumbo (arXiv 2502.15021), Sections 3 and 4.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import errors
from equivit.layers import dense, invariants, isotypic
from equivit.layers.jumbo import JumboBlock, LinearLora, MlpLora, merge, split
from equivit.models.vit import ViT, mlp, to_dense, token
from equivit.models.vit_config import ViTConfig
from equivit.symmetry import fields
from equivit.symmetry.fields import join, rows
from equivit.symmetry.groups import Group

JUMBO_MLPS = ("shared", "per_layer", "none", "lora", "linear_lora")
POOLS = ("jumbo", "jumbo_and_patches")


@dataclasses.dataclass(frozen=True)
class JumboViTConfig(ViTConfig):
    """The choices that make one Jumbo ViT, beside those of `ViTConfig`.

    Attributes:
      jumbo: J, how many times wider than a patch token the Jumbo token is.
      jumbo_mlp: "shared" by all layers; one "per_layer"; "none": the J rows go through the MLP of the patches; "lora"
        and "linear_lora": shared with a low-rank addition per layer, around the MLP or beside its linear maps.
      jumbo_multiplier: hidden width of that MLP over its width (Table 12).
      lora_rank: rank of the additions.
      normed_residual: the residual of that MLP is taken after its norm.
      last_patch_mlp: whether the last block feeds the patches too, on which no logit depends if `pool` is "jumbo".
      wide_norm: the final norm is over the merged Jumbo token; patches then leave without one.  Else over each row.
      pool: what the head reads, the "jumbo" token alone or "jumbo_and_patches", the mean patch token beside it.
      field: in equivariant blocks, "steerable" or "invariant".
    """

    class_token: bool = False
    pool: str = "jumbo"
    norm_eps: float = 1e-5
    position_antialias: bool = True
    jumbo: int = 6
    jumbo_mlp: str = "shared"
    jumbo_multiplier: float = 4.0
    lora_rank: int = 8
    normed_residual: bool = False
    last_patch_mlp: bool = False
    wide_norm: bool = True
    field: str = "steerable"

    def __post_init__(self):
        super().__post_init__()
        errors.one_of("ViT: jumbo_mlp", self.jumbo_mlp, JUMBO_MLPS)
        errors.one_of("ViT: field", self.field, ("steerable", "invariant"))
        if self.jumbo < 1 or self.jumbo_multiplier <= 0:
            raise ValueError(f"JumboViT: jumbo={self.jumbo} must be at least 1, {self.jumbo_multiplier=} positive.")
        if self.class_token or self.registers or self.register_mlp is not None:
            raise ValueError("JumboViT: the Jumbo token replaces class token and registers; leave them out.")
        if self.jumbo_mlp == "linear_lora" and self.mlp != "gelu":
            raise ValueError(
                f"JumboViT: jumbo_mlp='linear_lora' is for mlp='gelu', not {self.mlp!r}; 'lora' is for all."
            )
        if self.field == "invariant" and self.jumbo_mlp == "none":
            raise ValueError("JumboViT: field='invariant' needs a Jumbo MLP; jumbo_mlp='none' keeps whole fields.")
        if self.family[0] == "D" and (self.pool != "jumbo" or not self.wide_norm):
            raise ValueError(
                f"JumboViT: family {self.family} reads the merged Jumbo token: pool='jumbo', wide_norm=True."
            )

    def _check_readout(self):
        errors.one_of("ViT: pool", self.pool, POOLS)

    @property
    def prefix(self) -> int:
        """Number of tokens before the patch tokens."""
        return self.jumbo


PAPER = dict(layer_scale=1e-4)
PRESETS = {
    "paper": PAPER,
    "release": dict(layer_scale=None, last_patch_mlp=True, wide_norm=False, pool="jumbo_and_patches"),
    "legacy": dict(PAPER, jumbo_mlp="per_layer"),
    "mae_jax": dict(
        layer_scale=None,
        last_patch_mlp=True,
        wide_norm=False,
        normed_residual=True,
        norm_eps=1e-6,
        mlp="gelu_tanh",
        position="sincos_inclusive",
        token_std=0.0,
    ),
}


class JumboViT(ViT):
    """A vision transformer with a Jumbo token.  `features` gives the merged token as `cls`, [*B, J width]."""

    before = (*ViT.before, "jumbo_token")
    throughout = ("jumbo_mlp", "isotypic_jumbo_mlp")

    def __init__(self, config: JumboViTConfig, *, rngs: nnx.Rngs):
        group, width = config.group, config.width
        token_width = width if group is None else isotypic.channels("JumboViT", width, group)
        super().__init__(config, rngs=rngs)
        self.jumbo_token = token(True, (config.jumbo, token_width), config.token_std, rngs)
        shared = config.jumbo_mlp not in ("none", "per_layer")
        dense_too = shared and config.k < config.depth
        self.jumbo_mlp = self._jumbo_mlp(None, rngs) if dense_too else None
        self.isotypic_jumbo_mlp = self._jumbo_mlp(group, rngs) if shared and config.k else None

    def _run(self, x, group, **options):
        if self.config.jumbo_mlp == "none":
            return self.blocks(x, **options)
        shared = self.jumbo_mlp if group is None else self.isotypic_jumbo_mlp
        return self.blocks(x, shared=(shared,), **options)

    def _prefix(self, batch):
        tokens = self.jumbo_token[...]
        return self._lift(jnp.broadcast_to(tokens, (*batch, *tokens.shape)))

    def _runs(self):
        """As in a ViT; the last block is a run of its own where it lacks the MLP of the patches."""
        runs = super()._runs()
        if self.config.last_patch_mlp or self.config.jumbo_mlp == "none":
            return runs
        (length, make), group = runs.pop(), self._kinds()[-1][1]
        return [*runs, (length - 1, make), (1, functools.partial(self._block, group, last=True))]

    def _block(self, group: Group | None, rngs, last: bool = False) -> nnx.Module:
        config = self.config
        if config.jumbo_mlp == "none":
            return super()._block(group, rngs)
        parts = self._parts(group, rngs)
        wide_group, width = self._merged(group)
        return JumboBlock(
            **parts,
            tokens=config.jumbo,
            norm3=self._norm(wide_group, width),
            scale3=self._scale(wide_group, width),
            jumbo_mlp=self._jumbo_mlp(group, rngs) if config.jumbo_mlp == "per_layer" else None,
            lora=self._lora(wide_group, width, rngs),
            jumbo_drop=dense.dropout if wide_group is None else isotypic.dropout,
            normed_residual=config.normed_residual,
            invariant=config.field == "invariant",
            feeds_patches=not last,
        )

    def _merged(self, group) -> tuple[Group | None, int]:
        """Group and width of the merged Jumbo token in a block between fields of `group`."""
        config = self.config
        if group is not None and config.field == "invariant":
            return None, config.jumbo * config.width // group.order
        return group, config.jumbo * config.width

    def _jumbo_mlp(self, group, rngs) -> nnx.Module:
        group, width = self._merged(group)
        return mlp(self.config.mlp, width, round(self.config.jumbo_multiplier * width), group, rngs)

    def _lora(self, group, width, rngs) -> nnx.Module | None:
        config = self.config
        if config.jumbo_mlp not in ("lora", "linear_lora"):
            return None
        kind, options = (dense, {}) if group is None else (isotypic, {"group": group})
        linear = functools.partial(kind.Linear, bias=False, **options, rngs=rngs)
        if config.jumbo_mlp == "lora":
            return MlpLora(linear, width, config.lora_rank)
        hidden = round(config.jumbo_multiplier * width)
        return LinearLora(linear, width, hidden, config.lora_rank, kind.gelu)

    def _invariant(self, rngs) -> nnx.Module | None:
        """Family D: of the merged token; an invariant token needs none."""
        if self.config.family[0] != "D":
            return super()._invariant(rngs)
        group, width = self._merged(self.config.group)
        return None if group is None else invariants.create(self.config.invariant, width, group=group, rngs=rngs)

    def _final_norm(self) -> nnx.Module:
        config = self.config
        if not config.wide_norm:
            return self._norm(None)
        return self._norm(*self._merged(config.group if config.family[0] == "D" else None))

    def _head(self, rngs) -> nnx.Module:
        """Zero weights and the bias of equal probabilities, as in the public code; an MLP after an invariantization."""
        config = self.config
        if config.family[0] == "D":
            features = self._merged(config.group)[1] if self.invariant is None else self.invariant.out_features
            return dense.MlpHead(features, config.width, config.num_classes, rngs=rngs)
        head = dense.Linear((config.jumbo + (config.pool != "jumbo")) * config.width, config.num_classes, rngs=rngs)
        head.weight.set_value(jnp.zeros_like(head.weight[...]))
        head.bias.set_value(jnp.full_like(head.bias[...], -math.log(config.num_classes)))
        return head

    def _normed(self, x):
        """As in a ViT, but a wide norm is over the merged Jumbo token and leaves the patches as they are."""
        if not self.config.wide_norm:
            return super()._normed(x)
        token, patches = self._read(x, norm=True)
        token = split(token, self.config.jumbo)
        lift = isinstance(patches, fields.Isotypic) and self.config.field == "invariant"
        return join(self._lift(token) if lift else token, patches)

    def _roles(self, x, norm: bool):
        """The merged token [*B, J width], no registers, and the patches, dense."""
        if norm and self.config.family[0] != "D":
            x = self._transition(x)
        wide, patches = self._read(x, norm)
        return to_dense(wide)[..., 0, :], jnp.zeros((*patches.shape[:-2], 0, self.config.width)), to_dense(patches)

    def _read(self, x, norm: bool):
        """The merged token, one row, and the patches."""
        config = self.config
        if norm and not config.wide_norm:
            x = self.norm(x)
        wide = rows(x, 0, config.jumbo)
        if isinstance(wide, fields.Isotypic) and config.field == "invariant":
            wide = fields.take_invariant(wide)
        wide = merge(wide)
        return self.norm(wide) if norm and config.wide_norm else wide, rows(x, config.jumbo)

    def _pool(self, x):
        wide, patches = self._read(x, norm=True)
        wide = wide if isinstance(wide, jax.Array) else self.invariant(wide)
        if self.config.pool == "jumbo":
            return wide[..., 0, :]
        return jnp.concatenate([wide[..., 0, :], patches.mean(-2)], axis=-1)
