"""MIT's EfficientViT in timm's layout, read by the source "timm"."""

from equivit.models.efficientvit.model import ATTENTION, STAGES, EfficientViTConfig
from equivit.pretrained import inference, mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Pair, Table

NAME = "timm"
# The parts of an inverted bottleneck, theirs and ours.
PARTS = (("inverted_conv", "expand"), ("depth_conv", "depthwise"), ("point_conv", "reduce"))


def infer(state: State, hints: Hints) -> tuple[EfficientViTConfig, str]:
    """The configuration and the flavour; a file determines all but the image size.

    Raises:
      ValueError: a required tensor is absent.
    """

    def out(name):
        return inference.shape(state, NAME, f"{name}.weight", 4)[0]

    width, in_channels, *_ = inference.shape(state, NAME, "stem.in_conv.conv.weight", 4)
    blocks = [inference.depth(state, NAME, f"stages.{stage}.blocks") for stage in range(STAGES)]
    heads = inference.shape(state, NAME, f"stages.{ATTENTION[0]}.blocks.1.context_module.main.aggreg.0.1.weight", 4)
    stem = len({name.split(".")[1] for name in state if name.startswith("stem.res")})
    head = "head.classifier.4.weight"
    config = EfficientViTConfig(
        widths=(width, *(out(f"stages.{stage}.blocks.0.main.point_conv.conv") for stage in range(STAGES))),
        depths=(stem, *(number - (stage in ATTENTION) for stage, number in enumerate(blocks))),
        neck_widths=(out("head.in_conv.conv"), inference.shape(state, NAME, "head.classifier.0.weight", 2)[0]),
        head_channels=heads[1],
        image_size=hints.image_size or (224, 224),
        in_channels=in_channels,
        num_classes=inference.shape(state, NAME, head, 2)[0] if head in state else None,
    )
    return config, "timm"


def table(config: EfficientViTConfig, flavour: str) -> Table:
    """All tensors of a file."""
    pairs = _unit("stem.in_conv", "stem.conv")
    for i in range(config.depths[0]):
        for theirs, ours in PARTS[1:]:
            pairs += _unit(f"stem.res{i}.main.{theirs}", f"stem.blocks.{i}.{ours}")
    for stage in range(STAGES):
        for i in range(config.blocks(stage)):
            pairs += _block(f"stages.{stage}.blocks.{i}", f"stages.{stage}.{i}", stage in ATTENTION, i)
    pairs += _unit("head.in_conv", "neck.conv")
    pairs += mapping.linear("head.classifier.0", "neck.linear", bias=False)
    pairs += mapping.norm("head.classifier.1", "neck.norm")
    if config.num_classes is not None:
        pairs += mapping.linear("head.classifier.4", "head")
    return Table(pairs)


def _block(theirs: str, ours: str, attention: bool, index: int) -> list[Pair]:
    """A block; with `attention`, all but the first block attend, and two parts have biases instead of norms."""
    pairs, local = [], "main"
    if attention and index:
        main, local = f"{theirs}.context_module.main", "local_module.main"
        pairs += mapping.conv(f"{main}.qkv.conv", f"{ours}.attention.qkv", bias=False)
        for i, part in enumerate(("depthwise", "pointwise")):
            pairs += mapping.conv(f"{main}.aggreg.0.{i}", f"{ours}.attention.{part}.0", bias=False)
        pairs += _unit(f"{main}.proj", f"{ours}.attention.proj")
    for i, (name, part) in enumerate(PARTS):
        normed = not attention or i == 2
        pairs += _unit(f"{theirs}.{local}.{name}", f"{ours}.local.{part}", norm=normed)
    return pairs


def _unit(theirs: str, ours: str, *, norm: bool = True) -> list[Pair]:
    """A convolution and its batch norm, or its bias."""
    pairs = mapping.conv(f"{theirs}.conv", f"{ours}.conv", bias=not norm)
    return [*pairs, *mapping.batch_norm(f"{theirs}.norm", f"{ours}.norm")] if norm else pairs


FORMAT = Format(
    NAME,
    ("timm",),
    EfficientViTConfig,
    infer,
    table,
    ignored=(r"\.num_batches_tracked$",),
    mark=r"^stem\.in_conv\.conv\.weight$",
)
