"""Plain ViTs in any spelling: the configuration of a state dict, and its table.

A format of plain ViTs is a `Spelling` with a few exceptions.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from equivit.layers.grid import check_grid
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping
from equivit.pretrained.format import Hints, MissingHint, State, require
from equivit.pretrained.mapping import Pair, Rows, Table, named

USUAL = 14  # patches per side where no tensor determines it: 224 pixels in patches of 16
SMALL = 4  # patches per side; (SMALL - 1) x (SMALL + 1) is too elongated to be likely


class Spelling(NamedTuple):
    """The foreign names of a plain ViT's tensors; the defaults are timm's.

    A map or norm "x" has tensors `x.weight` and `x.bias`; "x_{}" means `x_weight` and `x_bias`.  None: the format has
    none, or its table has them.

    Attributes:
      qkv: one map, or separate maps of queries, keys and values.
      fc, swiglu: the two maps of an MLP and of a gated MLP, whose first may be separate maps of gates and values.
      position: the table of positions; None: rotary positions.
      scales: the layer scales of a block.
      patch_bias: whether the patch embedding has a bias.
      pre_norm: the norm before the first block.
      class_position: whether official files have a position row for the class token; None: some do.
      batched: whether tokens and positions have a leading batch axis: a class token [1, 1, D], not [D].
    """

    patch_embed: str = "patch_embed.proj"
    patch_bias: bool = True
    class_token: str | None = "cls_token"
    registers: str | None = "reg_token"
    mask_token: str | None = "mask_token"
    position: str | None = "pos_embed"
    pre_norm: str | None = None
    blocks: str = "blocks"
    norm1: str = "norm1"
    qkv: str | tuple[str, str, str] = "attn.qkv"
    proj: str = "attn.proj"
    norm2: str = "norm2"
    fc: tuple[str, str] = ("mlp.fc1", "mlp.fc2")
    swiglu: tuple[str | tuple[str, str], str] | None = None
    scales: tuple[str, ...] = ("ls1.gamma", "ls2.gamma")
    norm: str = "norm"
    head: str | None = "head"
    class_position: bool | None = None
    batched: bool = True


def fields(state: State, spelling: Spelling, hints: Hints) -> dict:
    """The configuration fields determined by names and shapes.

    Raises:
      ValueError: a required tensor is absent or has the wrong number of axes, or a hint is missing.
    """
    width, in_channels, *patch = state.shape(named(spelling.patch_embed, "weight"), 4)
    if spelling.position is None:
        size, class_position = hints.image_size or (USUAL * patch[0], USUAL * patch[1]), False
    else:
        size, class_position = _positions(state, spelling, tuple(patch), hints.image_size)
    mlp, mlp_dim = _mlp(state, spelling)
    registers = spelling.registers or ""
    first = spelling.qkv if isinstance(spelling.qkv, str) else spelling.qkv[0]
    mean = dict(pool="mean", fc_norm=True) if "fc_norm.weight" in state else {}
    return mean | dict(
        width=width,
        depth=state.depth(spelling.blocks),
        num_heads=state.heads(width, hints.num_heads),
        patch_size=tuple(patch),
        image_size=size,
        in_channels=in_channels,
        mlp=mlp,
        mlp_dim=mlp_dim,
        num_classes=state.classes(spelling.head) if spelling.head else None,
        class_token=spelling.class_token is not None,
        class_position=class_position,
        registers=state.shape(registers, 2 + spelling.batched)[-2] if registers in state else 0,
        mask_token=spelling.mask_token in state,
        patch_bias=spelling.patch_bias,
        pre_norm=spelling.pre_norm is not None,
        qkv_bias=state.count(named(first, "bias"), spelling.blocks) > 0,
        layer_scale=1e-4 if spelling.scales and state.count(spelling.scales[0], spelling.blocks) else None,
    )


def table(config: ViTConfig, spelling: Spelling, source: str, rows: Rows | None = None) -> Table:
    """All tensors of a file with names in the spelling; `rows` has those that a plain ViT does not have.

    Raises:
      ValueError: the format has no such model.
    """
    _require(config, spelling, source)
    ones = (1,) * spelling.batched
    modules = {
        "patch_embed": spelling.patch_embed,
        "pre_norm": spelling.pre_norm,
        "readout.norm": spelling.norm,
        "readout.fc_norm": "fc_norm",  # of the mean token, in files without `norm`
        "head": spelling.head,
    }
    tensors = {
        "prefix.class_token": (spelling.class_token, lambda x: x.reshape(*ones, *ones, -1)),
        "prefix.registers": (spelling.registers, lambda x: x.reshape(*ones, *x.shape)),
        "mask_token": (spelling.mask_token, lambda x: x.reshape(*ones, *x.shape)),
        "position.table": (spelling.position, lambda x: x.reshape(*ones, -1, x.shape[-1])),
    }
    whole = block(spelling, config.mlp) | dict(rows or {})
    whole |= {name: theirs for name, theirs in modules.items() if theirs is not None}
    whole |= {name: mapping.reshaped(theirs, write) for name, (theirs, write) in tensors.items() if theirs is not None}
    if spelling.position is None or not config.class_position:
        return mapping.table(config, whole)
    del whole["position.table"]
    return Table([position_with_class(config, spelling.position, ones)]) + mapping.table(config, whole)


def block(spelling: Spelling, mlp: str = "gelu") -> dict[str, Any]:
    """The rows of all dense blocks."""
    first, second = spelling.swiglu if spelling.swiglu and mlp == "swiglu" else spelling.fc
    rows = {
        "norm1": spelling.norm1,
        "attention.qkv": spelling.qkv,
        "attention.proj": spelling.proj,
        "norm2": spelling.norm2,
        "mlp.fc1": first,
        "mlp.fc2": second,
    }
    rows |= {f"scale{i}.scale": scale for i, scale in enumerate(spelling.scales, 1)}
    return mapping.inside("blocks.#", f"{spelling.blocks}.#", rows)


def _require(config, spelling, source):
    """Reject choices that `mapping.check` cannot detect: they affect no tensor, or too many to list."""
    values: dict[str, Any] = dict(family="plain", class_token=spelling.class_token is not None, pool_blocks=1)
    values |= dict(pool="mean" if config.fc_norm else "class") if spelling.class_token is not None else {}
    values |= dict(position="learned") if spelling.position is not None else {}
    values |= dict(layer_scale=None) if not spelling.scales else {}
    values |= dict(mlp="gelu") if spelling.swiglu is None and config.mlp == "swiglu" else {}
    values |= dict(patch_bias=spelling.patch_bias, pre_norm=spelling.pre_norm is not None)
    values |= dict(mlp="gelu") if spelling.pre_norm is None and config.mlp == "quick_gelu" else {}
    require(config, source, **values)


def _mlp(state, spelling) -> tuple[str, int]:
    """Kind and hidden width: a SwiGLU's first map gives gates and values, twice the input of its second."""

    def weight(name):
        return named(f"{spelling.blocks}.0.{name}", "weight")

    maps, second = spelling.swiglu or spelling.fc
    first = maps if isinstance(maps, str) else maps[0]
    if spelling.swiglu is None or weight(first) not in state:
        return "gelu", state.shape(weight(spelling.fc[0]), 2)[0]
    width = state.shape(weight(first), 2)[0]
    if first != maps:  # separate maps of gates and values
        return "swiglu", width
    if spelling.swiglu != spelling.fc or width == 2 * state.shape(weight(second), 2)[1]:
        return "swiglu", width // 2
    return "gelu", width


def _positions(state, spelling, patch, image_size) -> tuple[tuple[int, int], bool]:
    """The image size of the table of positions, and whether its first row belongs to the class token."""
    rows = state.shape(spelling.position, 2 + spelling.batched)[-2]
    table = f"{state.source}: {spelling.position} has {rows} rows"
    for with_class in (False, True) if spelling.class_token is not None else (False,):
        patches = rows - with_class
        h, w = (image_size[i] // patch[i] for i in (0, 1)) if image_size else (math.isqrt(patches),) * 2
        if patches and h * w == patches:
            if image_size is None and spelling.class_token is not None and not with_class:
                # timm's files with registers have no row for the class token, or also one for each register.
                official = False if spelling.registers in state else None
                _check_square(h, patch, official if spelling.class_position is None else spelling.class_position, table)
            return image_size or (h * patch[0], w * patch[1]), with_class
    if image_size is None:
        raise MissingHint(
            "image_size",
            f"{table}, which form no square grid of patches, with or without a class token; give "
            f"image_size=(height, width) with height/{patch[0]} times width/{patch[1]} patches.",
        )
    raise ValueError(
        f"{table}, which do not fit an image of {image_size[0]}x{image_size[1]} in patches of {patch[0]}x{patch[1]}."
    )


def _check_square(side: int, patch: tuple[int, int], class_position: bool | None, table: str) -> None:
    """ValueError if a square of patches may also be a class token and patches in one row less and one column more.

    Images rarely have an odd number of patches per side.  So if some official files have a row for the class token and
    some do not, an even square is read as patches alone, and a message is printed.
    """
    if side <= SMALL or class_position is False:
        return
    if class_position or side % 2:
        grids = ((side, side), (side - 1, side + 1), (side + 1, side - 1))
        sizes = " or ".join(str((h * patch[0], w * patch[1])) for h, w in grids)
        raise ValueError(
            f"{table}: {side}x{side} patches, or a class token and {side - 1}x{side + 1}; give image_size={sizes} "
            "(python -m equivit.convert: --image_size)."
        )
    print(f"{table}: taken as {side}x{side} patches without a class token.", flush=True)


def position_with_class(config: ViTConfig, name: str, ones: tuple[int, ...]) -> Pair:
    """The table of positions, with the class token in its first row: [*ones, 1 + h w, D] <-> [D] and [h, w, D]."""
    size = check_grid(config.image_size, config.patch_size, "image_size")

    def read(rows):
        rows = rows.reshape(-1, rows.shape[-1])
        return rows[0], rows[1:].reshape(*size, -1)

    def write(token, patches):
        rows = np.concatenate([token[None], patches.reshape(-1, len(token))])
        return rows.reshape(*ones, *rows.shape)

    return Pair((name,), ("prefix.class_position", "position.table"), write, read)
