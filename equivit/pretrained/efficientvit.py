"""MIT's EfficientViT in timm's layout, read by the source "timm"."""

from equivit.models.efficientvit.model import ATTENTION, STAGES, EfficientViTConfig
from equivit.pretrained import mapping, reading
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Table

NAME = "timm"
ATTENDING = "stages.#.blocks.#.context_module.main"
PARTS = {"expand": "inverted_conv", "depthwise": "depth_conv", "reduce": "point_conv"}  # of an inverted bottleneck
UNITS = {"stem.conv": "stem.in_conv", "neck.conv": "head.in_conv", "stages.#.#.attention.proj": f"{ATTENDING}.proj"}
UNITS |= mapping.inside("stem.blocks.#", "stem.res#.main", PARTS)
ROWS = {
    "stages.#.#.attention.qkv": f"{ATTENDING}.qkv.conv",
    "stages.#.#.attention.depthwise.#": f"{ATTENDING}.aggreg.#.0",
    "stages.#.#.attention.pointwise.#": f"{ATTENDING}.aggreg.#.1",
    "neck.linear": "head.classifier.0",
    "neck.norm": "head.classifier.1",
    "head": "head.classifier.4",
}


def infer(state: State, hints: Hints) -> tuple[EfficientViTConfig, str]:
    """The configuration and the flavour; a file determines all but the image size."""
    width, in_channels, *_ = state.shape("stem.in_conv.conv.weight", 4)
    blocks = [state.depth(f"stages.{stage}.blocks") for stage in range(STAGES)]
    stem = len({name.split(".")[1] for name in state if name.startswith("stem.res")})
    config = EfficientViTConfig(
        widths=(width, *(state.out(f"stages.{stage}.blocks.0.main.point_conv.conv", 4) for stage in range(STAGES))),
        depths=(stem, *(number - (stage in ATTENTION) for stage, number in enumerate(blocks))),
        neck_widths=(state.out("head.in_conv.conv", 4), state.out("head.classifier.0")),
        head_channels=state.shape(f"stages.{ATTENTION[0]}.blocks.1.context_module.main.aggreg.0.1.weight", 4)[1],
        image_size=hints.image_size or (224, 224),
        in_channels=in_channels,
        num_classes=state.classes("head.classifier.4"),
    )
    return config, "timm"


def table(config: EfficientViTConfig, flavour: str) -> Table:
    """All tensors of a file."""
    units = dict(UNITS)
    for stage in range(STAGES):
        for i in range(config.blocks(stage)):
            main = "local_module.main" if stage in ATTENTION and i else "main"  # all but the first block attend
            units |= mapping.inside(f"stages.{stage}.{i}.local", f"stages.{stage}.blocks.{i}.{main}", PARTS)
    return mapping.table(config, ROWS | mapping.normed(units))


FORMAT = Format(
    NAME, (NAME,), EfficientViTConfig, infer, table, ignored=reading.COUNTS, mark=r"stem\.in_conv\.conv\.weight"
)
