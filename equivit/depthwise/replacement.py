"""Replace attention in blocks of a pretrained ViT by convolution, and remove the tokens before its patches.

    model = patches_only(pretrained.load("dinov2", file), num_classes=1000)
    model = replace(model, {3: None, 7: None}, kind="dw")

Source: "Accelerating Vision Transformers with Drop-in Depthwise Convolution".
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from equivit import errors, logical
from equivit.layers.depthwise import replace_attention
from equivit.layers.rngs import Keys
from equivit.models.model import ModelModule, abstract_model, rngs_of
from equivit.models.reconfiguration import Changes, reconfigure, switched_as
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.jumbo import JumboViTConfig
from equivit.models.vit.replaced import Replaced, as_replaced

# The fields of a model without tokens before the patches.
PATCHES_ONLY: dict[str, Any] = dict(
    class_token=False,
    class_position=False,
    registers=0,
    register_mlp=None,
    mask_token=False,
    pool="mean",
    pool_blocks=1,
)


def patches_only(model: ModelModule, *, num_classes: int | None = None, seed: int = 0) -> nnx.Module:
    """The model without class, register and mask tokens and their positions; its head reads the mean patch token.

    Everything else stays, including the final norm.  For a masked autoencoder, its encoder is used.
    The new head, for `num_classes`, is drawn with `seed`; None: no head.

    Raises ValueError if the model is not a ViT, or has a Jumbo token.
    """
    model, _ = without_prefix(model)
    if num_classes is None:
        return model
    return reconfigure(model, num_classes=num_classes, rngs=Keys(seed))[0]


def without_prefix(model: ModelModule) -> tuple[nnx.Module, Changes]:
    """`patches_only` without a head, and the changes to its tensors."""
    model = getattr(model, "encoder", model)
    _check_vit("patches_only", model)
    return reconfigure(model, **PATCHES_ONLY, num_classes=None, projection=None)


def replace(
    model: ModelModule,
    where: Mapping[int, tuple[int, ...] | None],
    *,
    kind: str = "dw",
    form: str = "released",
    kernel_size: int = 3,
    start: str | None = None,
    rngs: nnx.Rngs | None = None,
) -> nnx.Module:
    """Replace the attention of some blocks (`layers/depthwise.py`).

    Args:
      where: the heads to replace by block; None for all.
      kind, form, kernel_size, start: shared by these blocks; call this function again for blocks of another kind.
      rngs: draws the taps; seed 0 if None.

    Raises ValueError for blocks or heads that are not integers or do not exist, an unknown kind, form or start, even k,
    a block that is already replaced, or a model with tokens before the patches.
    """
    _check_vit("replace", model)
    config, added = model.config, entries("replace", where, kind, kernel_size, form)
    where = {one.block: one.heads for one in added}
    if twice := sorted(set(where) & {one.block for one in config.replaced}):
        raise ValueError(f"replace: block {twice[0]} is already replaced; start from the original model.")
    config = dataclasses.replace(config, replaced=(*config.replaced, *added))
    rngs = rngs_of("replace", rngs)
    tensors = logical.to_logical(model, nnx.Variable)
    for one in config.replaced:
        if one.block in where:
            attention = model.blocks[one.block].attention
            options: dict[str, Any] = dict(form=form, kernel_size=kernel_size, heads=one.heads, start=start, rngs=rngs)
            new = logical.to_logical(replace_attention(attention, kind, **options), nnx.Variable)
            tensors |= {f"blocks.{one.block}.attention.{name}": tensor for name, tensor in new.items()}
    new = logical.from_logical(abstract_model(config), tensors, nnx.Variable)
    return switched_as(model, new)


def backbone(model: ModelModule) -> ModelModule:
    """The ViT of a model: the model itself, or the backbone of a segmenter."""
    return getattr(model, "backbone", model)


def with_backbone(model: ModelModule, new: ModelModule) -> ModelModule:
    """The model with its ViT replaced by one with the same inputs and outputs."""
    if not hasattr(model, "backbone"):
        return new
    copy: Any = jax.tree.map(lambda leaf: leaf, model)
    copy.backbone, copy.config = new, dataclasses.replace(model.config, backbone=new.config)
    return copy


def entries(name: str, where: Any, kind: str, kernel_size: int, form: str) -> tuple[Replaced, ...]:
    """The entries of `ViTConfig.replaced` for `where` as in `replace`; ValueError if it is malformed."""
    if not isinstance(where, Mapping):
        raise ValueError(f"{name}: where={errors.shown(where)} must give heads by block, such as {{3: None, 7: (0,)}}.")
    return as_replaced(
        name, [(_plain(block), kind, kernel_size, _plain(heads), form) for block, heads in where.items()]
    )


def _plain(value: Any) -> Any:
    """The value with NumPy integers, which score rankings contain, converted to Python integers."""
    if isinstance(value, np.integer | np.ndarray):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value


def _check_vit(name: str, model: Any) -> None:
    config = getattr(model, "config", None)
    if not isinstance(config, ViTConfig) or isinstance(config, JumboViTConfig):
        found = type(model).__name__ if config is None else type(config).__name__.removesuffix("Config")
        raise ValueError(f"{name}: the model is a {found}; it must be a ViT without a Jumbo token, such as vit_b16.")
