"""Swin transformers of both versions in timm's layout, in two flavours, read by the source "timm".

"timm": timm's own; "microsoft": the official files, where each stage ends with its patch merging, the head has another
name, and tables that follow from the sizes are also stored.
"""

import math
from typing import Any

from equivit import constraints
from equivit.models.swin.model import SwinConfig, Window
from equivit.pretrained import mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Table

NAME = "timm"
TABLE = "attn.relative_position_bias_table"
# Files of version 2 determine neither; all three sizes were published with windows of 8 and images of 256 pixels.
WINDOW, IMAGE = (8, 8), (256, 256)
MERGE = {"norm": "norm", "reduction": "reduction"}
OURS, THEIRS = "stages.#.blocks.#", "layers.#.blocks.#"
CONSTANTS = (r"\.relative_position_index$", r"\.relative_coords_table$", r"\.attn_mask$")  # stored in official files


def attention_rows(ours: str, theirs: str, mlp: str) -> dict[str, Any]:
    """Rows of the positions and the scales in an attention; `mlp` is the foreign name of version 2's small MLP."""
    at = f"{ours}.attention"
    return {
        f"{at}.position.table": mapping.reshaped(
            f"{theirs}.relative_position_bias_table", lambda x: x.reshape(-1, x.shape[-1])
        ),
        f"{at}.logit_scale": mapping.reshaped(f"{theirs}.logit_scale", lambda x: x[:, None, None]),
        f"{at}.position.weight1": mapping.moved(f"{theirs}.{mlp}.0.weight", (1, 0)),
        f"{at}.position.bias1": f"{theirs}.{mlp}.0.bias",
        f"{at}.position.weight2": mapping.moved(f"{theirs}.{mlp}.2.weight", (1, 0)),
    }


ROWS = {
    "patch_embed": "patch_embed.proj",
    "patch_norm": "patch_embed.norm",
    "norm": "norm",
    **mapping.inside(OURS, THEIRS, mapping.BLOCK),
    **mapping.inside(f"{OURS}.attention", f"{THEIRS}.attn", {"q_bias": "q_bias", "v_bias": "v_bias"}),
    **attention_rows(OURS, f"{THEIRS}.attn", mlp="cpb_mlp"),
}


def infer(state: State, hints: Hints) -> tuple[SwinConfig, str]:
    """The configuration and the flavour.

    Files determine the heads, and in version 1 the windows, by their tables of positions; the image size is such that
    the last map is one window.
    """
    width, in_channels, *kernel = state.shape("patch_embed.proj.weight", 4)
    patch = kernel[0], kernel[1]
    stages = state.depth("layers")
    version = 2 if "layers.0.blocks.0.attn.logit_scale" in state else 1
    name, axes, axis = (TABLE, 2, 1) if version == 1 else ("attn.logit_scale", 3, 0)
    if hints.window_size is not None:
        constraints.check(f"{NAME}: window_size", hints.window_size, Window)
    window = hints.window_size or (_window(state) if version == 1 else WINDOW)
    image = IMAGE if version == 2 else tuple(w * p * 2 ** (stages - 1) for w, p in zip(window, patch, strict=True))
    official = "layers.0.downsample.reduction.weight" in state or "head.weight" in state
    config = SwinConfig(
        width=width,
        depths=tuple(state.depth(f"layers.{i}.blocks") for i in range(stages)),
        num_heads=tuple(state.shape(f"layers.{i}.blocks.0.{name}", axes)[axis] for i in range(stages)),
        version=version,
        window_size=window,
        image_size=hints.image_size or image,
        patch_size=patch,
        in_channels=in_channels,
        num_classes=state.classes("head" if official else "head.fc"),
        mlp_ratio=state.out("layers.0.blocks.0.mlp.fc1") / width,
    )
    if version == 1:
        _check_tables(state, config)
    return config, "microsoft" if official else "timm"


def table(config: SwinConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    official = flavour == "microsoft"
    rows = ROWS | {"head": "head" if official else "head.fc"}
    for i in range(1, len(config.depths)):
        rows |= mapping.inside(f"stages.{i}.merge", f"layers.{i - official}.downsample", MERGE)
    return mapping.table(config, rows)


def _window(state: State) -> tuple[int, int]:
    """The square window that matches the first stage's table."""
    rows = state.shape(f"layers.0.blocks.0.{TABLE}", 2)[0]
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
        if (rows := state.shape(name, 2)[0]) != (2 * h - 1) * (2 * w - 1):
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
    ignored=CONSTANTS,
    mark=r"layers\.0\.blocks\.0\.attn\.qkv\.weight",
)
