"""Swin transformers of both versions in timm's layout, in two flavours, read by the source "timm".

"timm": timm's own; "microsoft": the official files, where each stage ends with its patch merging, the head has another
name, and tables that follow from the sizes are also stored.
"""

import math

from equivit import constraints
from equivit.models.swin.model import SwinConfig, Window
from equivit.pretrained import inference, mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Pair, Table

NAME = "timm"
TABLE = "attn.relative_position_bias_table"
# Files of version 2 determine neither; all three sizes were published with windows of 8 and images of 256 pixels.
WINDOW, IMAGE = (8, 8), (256, 256)


def infer(state: State, hints: Hints) -> tuple[SwinConfig, str]:
    """The configuration and the flavour.

    Files determine the heads, and in version 1 the windows, by their tables of positions; the image size is such that
    the last map is one window.

    Raises:
      ValueError: a required tensor is absent, or a hint is missing or wrong.
    """
    width, in_channels, *kernel = inference.shape(state, NAME, "patch_embed.proj.weight", 4)
    patch = kernel[0], kernel[1]
    stages = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    version = 2 if "layers.0.blocks.0.attn.logit_scale" in state else 1
    name, axes, axis = (TABLE, 2, 1) if version == 1 else ("attn.logit_scale", 3, 0)
    if hints.window_size is not None:
        constraints.check(f"{NAME}: window_size", hints.window_size, Window)
    window = hints.window_size or (_window(state) if version == 1 else WINDOW)
    image = IMAGE if version == 2 else tuple(w * p * 2 ** (stages - 1) for w, p in zip(window, patch, strict=True))
    official = "layers.0.downsample.reduction.weight" in state or "head.weight" in state
    head = "head.weight" if official else "head.fc.weight"
    config = SwinConfig(
        width=width,
        depths=tuple(inference.depth(state, NAME, f"layers.{i}.blocks") for i in range(stages)),
        num_heads=tuple(inference.shape(state, NAME, f"layers.{i}.blocks.0.{name}", axes)[axis] for i in range(stages)),
        version=version,
        window_size=window,
        image_size=hints.image_size or image,
        patch_size=patch,
        in_channels=in_channels,
        num_classes=inference.shape(state, NAME, head, 2)[0] if head in state else None,
        mlp_ratio=inference.shape(state, NAME, "layers.0.blocks.0.mlp.fc1.weight", 2)[0] / width,
    )
    if version == 1:
        _check_tables(state, config)
    return config, "microsoft" if official else "timm"


def table(config: SwinConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    official = flavour == "microsoft"
    pairs = [
        mapping.moved("patch_embed.proj.weight", "patch_embed.kernel", (2, 3, 1, 0)),
        mapping.same("patch_embed.proj.bias", "patch_embed.bias"),
        *mapping.norm("patch_embed.norm", "patch_norm"),
    ]
    for stage, depth in enumerate(config.depths):
        if stage:
            theirs, ours = f"layers.{stage - official}.downsample", f"stages.{stage}.merge"
            pairs += mapping.norm(f"{theirs}.norm", f"{ours}.norm")
            pairs += mapping.linear(f"{theirs}.reduction", f"{ours}.reduction", bias=False)
        for i in range(depth):
            pairs += _block(f"layers.{stage}.blocks.{i}", f"stages.{stage}.blocks.{i}", config, stage)
    pairs += mapping.norm("norm", "norm")
    if config.num_classes is not None:
        pairs += mapping.linear("head" if official else "head.fc", "head")
    return Table(pairs)


def _block(theirs: str, ours: str, config: SwinConfig, stage: int) -> list[Pair]:
    pairs = mapping.norm(f"{theirs}.norm1", f"{ours}.norm1") + mapping.norm(f"{theirs}.norm2", f"{ours}.norm2")
    pairs += mapping.linear(f"{theirs}.attn.qkv", f"{ours}.attention.qkv", bias=config.version == 1)
    for name, our_name in (("attn.proj", "attention.proj"), ("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2")):
        pairs += mapping.linear(f"{theirs}.{name}", f"{ours}.{our_name}")
    if config.version == 1:
        h, w = config.window(stage)
        at = f"{ours}.attention.position.table"
        return [*pairs, mapping.grid(f"{theirs}.{TABLE}", at, (2 * h - 1, 2 * w - 1), ones=0)]
    pairs += [mapping.same(f"{theirs}.attn.{name}", f"{ours}.attention.{name}") for name in ("q_bias", "v_bias")]
    pairs += [
        Pair(
            f"{theirs}.attn.logit_scale",
            (f"{ours}.attention.logit_scale",),
            lambda x: (x.reshape(-1),),
            lambda x: x.reshape(-1, 1, 1),
        ),
        mapping.moved(f"{theirs}.attn.cpb_mlp.0.weight", f"{ours}.attention.position.weight1", (1, 0)),
        mapping.same(f"{theirs}.attn.cpb_mlp.0.bias", f"{ours}.attention.position.bias1"),
        mapping.moved(f"{theirs}.attn.cpb_mlp.2.weight", f"{ours}.attention.position.weight2", (1, 0)),
    ]
    return pairs


def _window(state: State) -> tuple[int, int]:
    """The square window that matches the first stage's table."""
    rows = inference.shape(state, NAME, f"layers.0.blocks.0.{TABLE}", 2)[0]
    side = math.isqrt(rows)
    if side * side != rows or side % 2 == 0:
        raise ValueError(
            f"{NAME}: layers.0.blocks.0.{TABLE} has {rows} rows, not those of a square window; give "
            "window_size=(height, width) with (2 height - 1) (2 width - 1) rows."
        )
    return (side + 1) // 2, (side + 1) // 2


def _check_tables(state: State, config: SwinConfig) -> None:
    """ValueError unless each stage's table matches its window."""
    for stage in range(len(config.depths)):
        name, (h, w) = f"layers.{stage}.blocks.0.{TABLE}", config.window(stage)
        if (rows := inference.shape(state, NAME, name, 2)[0]) != (2 * h - 1) * (2 * w - 1):
            size, window = ("x".join(map(str, pair)) for pair in (config.image_size, config.window_size))
            raise ValueError(
                f"{NAME}: {name} has {rows} rows; with windows of {window} in images of {size} that stage has windows "
                f"of {h}x{w}, {(2 * h - 1) * (2 * w - 1)} rows.  Give image_size= and window_size= of the file."
            )


FORMAT = Format(
    NAME,
    ("timm", "microsoft"),
    SwinConfig,
    infer,
    table,
    ignored=(r"\.relative_position_index$", r"\.relative_coords_table$", r"\.attn_mask$"),
    mark=r"^layers\.0\.blocks\.0\.attn\.",
)
