"""MViTv2 in timm's layout, in two flavours, read by the source "timm".

"timm": timm's own; "facebook": the official files, which number blocks across all stages and have other names for
shortcuts and the head.
"""

import itertools

from equivit import constraints
from equivit.models.mvit.model import STRIDE, MViTConfig, map_size
from equivit.pretrained import mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Table

NAME = "timm"
HEADS = {"timm": "head.fc", "facebook": "head.projection"}
SHORTCUTS = {"timm": ("shortcut_proj_attn", "shortcut_proj_mlp"), "facebook": ("proj", "proj")}
TABLES = "attn.rel_pos_h", "attn.rel_pos_w"  # of positions along rows and columns
ROWS = {"patch_embed": "patch_embed.proj", "norm": "norm"}
ROWS |= {"class_token": mapping.reshaped("cls_token", lambda x: x[None, None])}
BLOCK = mapping.BLOCK | {f"attention.{at}_{part}": f"attn.{at}_{part}" for at in ("pool", "norm") for part in "qkv"}
BLOCK |= dict(zip(("attention.position.rows", "attention.position.columns"), TABLES, strict=True))
# timm's names, or the official ones.
MARK = r"stages\.0\.blocks\.0\.attn\.pool_q\.weight|(?<!stages\.\d\.)blocks\.0\.attn\.pool_q\.weight"


def infer(state: State, hints: Hints) -> tuple[MViTConfig, str]:
    """The configuration and the flavour.

    The width of the norms determines the heads, and the tables of positions the image size: whole patches, unless
    `image_size` is another size with the same map.
    """
    flavour = "timm" if any(name.startswith("stages.") for name in state) else "facebook"
    width, in_channels, *_ = state.shape("patch_embed.proj.weight", 4)
    depths = _depths(state, flavour)
    blocks = _blocks(depths, flavour)
    first = [blocks[sum(depths[:stage])] for stage in range(len(depths))]
    last = blocks[depths[0] - 1]
    config = MViTConfig(
        width=width,
        depths=depths,
        num_heads=tuple(state.out(f"{at}.attn.proj") // state.out(f"{at}.attn.norm_q", 1) for at in first),
        class_token="cls_token" in state,
        expand_attn=state.out(f"{last}.attn.proj") == state.out(f"{last}.mlp.fc2"),
        image_size=_image_size(state, first[0], hints),
        in_channels=in_channels,
        num_classes=state.classes(HEADS[flavour]),
        mlp_ratio=state.out(f"{first[0]}.mlp.fc1") / width,
    )
    return config, flavour


def table(config: MViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    rows = ROWS | {"head": HEADS[flavour]}
    block = BLOCK | dict(zip(("shortcut", "mlp_shortcut"), SHORTCUTS[flavour], strict=True))
    for ours, theirs in zip(_blocks(config.depths, "timm"), _blocks(config.depths, flavour), strict=True):
        rows |= mapping.inside(ours, theirs, block)
    return mapping.table(config, rows)


def _blocks(depths: tuple[int, ...], flavour: str) -> list[str]:
    """The name of each block in a file."""
    if flavour == "facebook":
        return [f"blocks.{i}" for i in range(sum(depths))]
    return [f"stages.{stage}.blocks.{i}" for stage, depth in enumerate(depths) for i in range(depth)]


def _depths(state: State, flavour: str) -> tuple[int, ...]:
    """The number of blocks per stage; in official files, a stage has blocks of one width."""
    if flavour == "facebook":
        widths = [state.out(f"blocks.{i}.attn.proj") for i in range(state.depth())]
        return tuple(len(list(stage)) for _, stage in itertools.groupby(widths))
    stages = range(state.depth("stages"))
    return tuple(state.depth(f"stages.{stage}.blocks") for stage in stages)


def _image_size(state: State, block: str, hints: Hints) -> tuple[int, int]:
    """The image size that matches the first block's tables of positions."""
    rows, columns = (state.shape(f"{block}.{name}", 2)[0] for name in TABLES)
    h, w = (rows + 1) // 2, (columns + 1) // 2
    if hints.image_size is not None:
        constraints.check(f"{NAME}: image_size", hints.image_size, constraints.Size)
        if map_size(hints.image_size, STRIDE) == (h, w):
            return hints.image_size
    return STRIDE[0] * h, STRIDE[1] * w


FORMAT = Format(NAME, ("timm", "facebook"), MViTConfig, infer, table, mark=MARK)
