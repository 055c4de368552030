"""SHViT in timm's layout, read by the source "timm"."""

from equivit.models.shvit.model import SHViTConfig
from equivit.pretrained import mapping, reading
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Table

NAME = "timm"
BLOCK, DOWN = "stages.#.blocks.#", "stages.#.downsample"
# Convolutions, each with a batch norm.
UNITS = {
    **{f"patch_embed.{i}": f"patch_embed.{2 * i}" for i in range(4)},
    f"{BLOCK}.conv.conv": f"{BLOCK}.conv.m",
    f"{BLOCK}.attention.qkv": f"{BLOCK}.mixer.m.qkv",
    f"{BLOCK}.attention.proj": f"{BLOCK}.mixer.m.proj.1",
    f"{BLOCK}.mlp.fc1": f"{BLOCK}.ffn.m.pw1",
    f"{BLOCK}.mlp.fc2": f"{BLOCK}.ffn.m.pw2",
    "stages.#.downsampling.conv1.conv": f"{DOWN}.0.m",
    "stages.#.downsampling.mlp1.fc1": f"{DOWN}.1.m.pw1",
    "stages.#.downsampling.mlp1.fc2": f"{DOWN}.1.m.pw2",
    "stages.#.downsampling.merge.expand": f"{DOWN}.2.conv1",
    "stages.#.downsampling.merge.depthwise": f"{DOWN}.2.conv2",
    "stages.#.downsampling.merge.reduce": f"{DOWN}.2.conv3",
    "stages.#.downsampling.conv2.conv": f"{DOWN}.3.m",
    "stages.#.downsampling.mlp2.fc1": f"{DOWN}.4.m.pw1",
    "stages.#.downsampling.mlp2.fc2": f"{DOWN}.4.m.pw2",
}
ROWS = mapping.normed(UNITS, conv="c", norm="bn") | {
    f"{BLOCK}.attention.norm": f"{BLOCK}.mixer.m.pre_norm",
    "stages.#.downsampling.merge.gate.fc1": f"{DOWN}.2.se.fc1",
    "stages.#.downsampling.merge.gate.fc2": f"{DOWN}.2.se.fc2",
    "head.norm": "head.bn",
    "head.linear": "head.l",
}


def infer(state: State, hints: Hints) -> tuple[SHViTConfig, str]:
    """The configuration and the flavour; a file determines all but the image size."""
    stages = [f"stages.{stage}.blocks" for stage in range(state.depth("stages"))]
    norms = [f"{blocks}.0.mixer.m.pre_norm" for blocks in stages]
    partial = tuple(state.out(norm, 1) if f"{norm}.weight" in state else 0 for norm in norms)  # 0 without attention
    qk_width = 16
    for blocks, width in zip(stages, partial, strict=True):
        if width:
            qk_width = (state.out(f"{blocks}.0.mixer.m.qkv.c", 4) - width) // 2
    config = SHViTConfig(
        widths=tuple(state.out(f"{blocks}.0.conv.m.c", 4) for blocks in stages),
        depths=tuple(state.depth(blocks) for blocks in stages),
        partial_widths=partial,
        qk_width=qk_width,
        image_size=hints.image_size or (224, 224),
        in_channels=state.shape("patch_embed.0.c.weight", 4)[1],
        num_classes=state.classes("head.l"),
    )
    return config, "timm"


def table(config: SHViTConfig, flavour: str) -> Table:
    """All tensors of a file."""
    return mapping.table(config, ROWS)


FORMAT = Format(NAME, (NAME,), SHViTConfig, infer, table, ignored=reading.COUNTS, mark=r"patch_embed\.0\.c\.weight")
