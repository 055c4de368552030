"""MViTv2 in timm's layout, in two flavours, read by the source "timm".

"timm": timm's own; "facebook": the official files, which number blocks across all stages and have other names for
shortcuts and the head.
"""

import itertools

from equivit import constraints
from equivit.models.mvit.model import STRIDE, MViTConfig, map_size
from equivit.pretrained import inference, mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Pair, Table

NAME = "timm"
HEADS = {"timm": "head.fc", "facebook": "head.projection"}
SHORTCUTS = {"timm": ("shortcut_proj_attn", "shortcut_proj_mlp"), "facebook": ("proj", "proj")}
ROWS, COLUMNS = "attn.rel_pos_h", "attn.rel_pos_w"


def infer(state: State, hints: Hints) -> tuple[MViTConfig, str]:
    """The configuration and the flavour.

    The width of the norms determines the heads, and the tables of positions the image size: whole patches, unless
    `image_size` is another size with the same map.

    Raises:
      ValueError: a required tensor is absent, or a hint is wrong.
    """
    flavour = "timm" if any(name.startswith("stages.") for name in state) else "facebook"
    width, in_channels, *_ = inference.shape(state, NAME, "patch_embed.proj.weight", 4)
    depths = _depths(state, flavour)
    blocks = _blocks(depths, flavour)
    first = [blocks[sum(depths[:stage])] for stage in range(len(depths))]
    last = blocks[depths[0] - 1]
    head = f"{HEADS[flavour]}.weight"
    config = MViTConfig(
        width=width,
        depths=depths,
        num_heads=tuple(_out(state, f"{at}.attn.proj") // _norm(state, f"{at}.attn.norm_q") for at in first),
        class_token="cls_token" in state,
        expand_attn=_out(state, f"{last}.attn.proj") == _out(state, f"{last}.mlp.fc2"),
        image_size=_image_size(state, first[0], hints),
        in_channels=in_channels,
        num_classes=_out(state, HEADS[flavour]) if head in state else None,
        mlp_ratio=_out(state, f"{first[0]}.mlp.fc1") / width,
    )
    return config, flavour


def table(config: MViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    pairs = [
        mapping.moved("patch_embed.proj.weight", "patch_embed.kernel", (2, 3, 1, 0)),
        mapping.same("patch_embed.proj.bias", "patch_embed.bias"),
    ]
    if config.class_token:
        pairs.append(mapping.same("cls_token", "class_token", ones=2))
    theirs = iter(_blocks(config.depths, flavour))
    for stage in range(len(config.depths)):
        for i, shape in enumerate(config.shapes(stage)):
            widens = shape.before != shape.width, shape.width != shape.after
            pairs += _block(next(theirs), f"stages.{stage}.blocks.{i}", widens, flavour)
    pairs += mapping.norm("norm", "norm")
    if config.num_classes is not None:
        pairs += mapping.linear(HEADS[flavour], "head")
    return Table(pairs)


def _block(theirs: str, ours: str, widens: tuple[bool, bool], flavour: str) -> list[Pair]:
    pairs = mapping.norm(f"{theirs}.norm1", f"{ours}.norm1") + mapping.norm(f"{theirs}.norm2", f"{ours}.norm2")
    for name, at in (("attn.qkv", "attention.qkv"), ("attn.proj", "attention.proj")):
        pairs += mapping.linear(f"{theirs}.{name}", f"{ours}.{at}")
    for part in "qkv":
        kernel = f"{ours}.attention.pool_{part}.kernel"
        pairs.append(mapping.moved(f"{theirs}.attn.pool_{part}.weight", kernel, (2, 3, 1, 0)))
        pairs += mapping.norm(f"{theirs}.attn.norm_{part}", f"{ours}.attention.norm_{part}")
    pairs.append(mapping.same(f"{theirs}.{ROWS}", f"{ours}.attention.position.rows"))
    pairs.append(mapping.same(f"{theirs}.{COLUMNS}", f"{ours}.attention.position.columns"))
    for name in ("mlp.fc1", "mlp.fc2"):
        pairs += mapping.linear(f"{theirs}.{name}", f"{ours}.{name}")
    for name, at, there in zip(SHORTCUTS[flavour], ("shortcut", "mlp_shortcut"), widens, strict=True):
        pairs += mapping.linear(f"{theirs}.{name}", f"{ours}.{at}") if there else []
    return pairs


def _blocks(depths: tuple[int, ...], flavour: str) -> list[str]:
    """The name of each block in a file."""
    if flavour == "facebook":
        return [f"blocks.{i}" for i in range(sum(depths))]
    return [f"stages.{stage}.blocks.{i}" for stage, depth in enumerate(depths) for i in range(depth)]


def _depths(state: State, flavour: str) -> tuple[int, ...]:
    """The number of blocks per stage; in official files, a stage has blocks of one width."""
    if flavour == "facebook":
        widths = [_out(state, f"blocks.{i}.attn.proj") for i in range(inference.depth(state, NAME))]
        return tuple(len(list(stage)) for _, stage in itertools.groupby(widths))
    stages = range(inference.depth(state, NAME, "stages"))
    return tuple(inference.depth(state, NAME, f"stages.{stage}.blocks") for stage in stages)


def _image_size(state: State, block: str, hints: Hints) -> tuple[int, int]:
    """The image size that matches the first block's tables of positions."""
    rows, columns = (inference.shape(state, NAME, f"{block}.{name}", 2)[0] for name in (ROWS, COLUMNS))
    h, w = (rows + 1) // 2, (columns + 1) // 2
    if hints.image_size is not None:
        constraints.check(f"{NAME}: image_size", hints.image_size, constraints.Size)
        if map_size(hints.image_size, STRIDE) == (h, w):
            return hints.image_size
    return STRIDE[0] * h, STRIDE[1] * w


def _out(state: State, linear: str) -> int:
    return inference.shape(state, NAME, f"{linear}.weight", 2)[0]


def _norm(state: State, norm: str) -> int:
    return inference.shape(state, NAME, f"{norm}.weight", 1)[0]


FORMAT = Format(
    NAME,
    ("timm", "facebook"),
    MViTConfig,
    infer,
    table,
    mark=r"^(stages\.0\.)?blocks\.0\.attn\.pool_q\.",
)
