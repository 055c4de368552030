"""SHViT in timm's layout, read by the source "timm"."""

from equivit.models.shvit.model import SHViTConfig
from equivit.pretrained import inference, mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Pair, Table

NAME = "timm"


def infer(state: State, hints: Hints) -> tuple[SHViTConfig, str]:
    """The configuration and the flavour; a file determines all but the image size.

    Raises:
      ValueError: a required tensor is absent.
    """
    stages = 1 + max((int(name.split(".")[1]) for name in state if name.startswith("stages.")), default=0)
    partial = tuple(_partial(state, stage) for stage in range(stages))
    qk_width = 16
    for stage in range(stages):
        if partial[stage]:
            qkv = inference.shape(state, NAME, f"stages.{stage}.blocks.0.mixer.m.qkv.c.weight", 4)[0]
            qk_width = (qkv - partial[stage]) // 2
    config = SHViTConfig(
        widths=tuple(
            inference.shape(state, NAME, f"stages.{stage}.blocks.0.conv.m.c.weight", 4)[0] for stage in range(stages)
        ),
        depths=tuple(inference.depth(state, NAME, f"stages.{stage}.blocks") for stage in range(stages)),
        partial_widths=partial,
        qk_width=qk_width,
        image_size=hints.image_size or (224, 224),
        in_channels=inference.shape(state, NAME, "patch_embed.0.c.weight", 4)[1],
        num_classes=inference.shape(state, NAME, "head.l.weight", 2)[0] if "head.l.weight" in state else None,
    )
    return config, "timm"


def table(config: SHViTConfig, flavour: str) -> Table:
    """All tensors of a file."""
    pairs = []
    for i in range(4):
        pairs += _unit(f"patch_embed.{2 * i}", f"patch_embed.{i}")
    for stage, depth in enumerate(config.depths):
        if stage:
            pairs += _downsampling(f"stages.{stage}.downsample", f"stages.{stage}.downsampling")
        for i in range(depth):
            pairs += _block(
                f"stages.{stage}.blocks.{i}", f"stages.{stage}.blocks.{i}", bool(config.partial_widths[stage])
            )
    if config.num_classes is not None:
        pairs += mapping.batch_norm("head.bn", "head.norm") + mapping.linear("head.l", "head.linear")
    return Table(pairs)


def _block(theirs: str, ours: str, attention: bool) -> list[Pair]:
    pairs = _unit(f"{theirs}.conv.m", f"{ours}.conv.conv") + _mlp(f"{theirs}.ffn.m", f"{ours}.mlp")
    if not attention:
        return pairs
    mixer, ours = f"{theirs}.mixer.m", f"{ours}.attention"
    pairs += mapping.norm(f"{mixer}.pre_norm", f"{ours}.norm")
    return pairs + _unit(f"{mixer}.qkv", f"{ours}.qkv") + _unit(f"{mixer}.proj.1", f"{ours}.proj")


def _downsampling(theirs: str, ours: str) -> list[Pair]:
    pairs = _unit(f"{theirs}.0.m", f"{ours}.conv1.conv") + _mlp(f"{theirs}.1.m", f"{ours}.mlp1")
    for i, name in enumerate(("expand", "depthwise", "reduce"), 1):
        pairs += _unit(f"{theirs}.2.conv{i}", f"{ours}.merge.{name}")
    for name in ("fc1", "fc2"):
        pairs += mapping.conv(f"{theirs}.2.se.{name}", f"{ours}.merge.gate.{name}", bias=True)
    return pairs + _unit(f"{theirs}.3.m", f"{ours}.conv2.conv") + _mlp(f"{theirs}.4.m", f"{ours}.mlp2")


def _mlp(theirs: str, ours: str) -> list[Pair]:
    return _unit(f"{theirs}.pw1", f"{ours}.fc1") + _unit(f"{theirs}.pw2", f"{ours}.fc2")


def _unit(theirs: str, ours: str) -> list[Pair]:
    """A convolution and its batch norm."""
    return [
        *mapping.conv(f"{theirs}.c", f"{ours}.conv", bias=False),
        *mapping.batch_norm(f"{theirs}.bn", f"{ours}.norm"),
    ]


def _partial(state: State, stage: int) -> int:
    """Number of attending channels in a stage; 0 without attention."""
    name = f"stages.{stage}.blocks.0.mixer.m.pre_norm.weight"
    return inference.shape(state, NAME, name, 1)[0] if name in state else 0


FORMAT = Format(
    NAME,
    ("timm",),
    SHViTConfig,
    infer,
    table,
    ignored=(r"\.num_batches_tracked$",),
    mark=r"^patch_embed\.0\.c\.weight$",
)
