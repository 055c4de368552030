"""MobileNetV4 in timm's layout, read by the source "timm".

Names and shapes determine the kind, kernels and widths of each block, but neither strides nor the activation, which are
taken from the published model with these blocks, at any width.  timm's variants with blurred strides have the same
names, but would compute something else.
"""

import dataclasses
import re

from equivit.models.mobilenetv4.model import NAMES, MobileNetV4Config, Spec
from equivit.pretrained import inference, mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Pair, Table

NAME = "timm"
PUBLISHED = {name: MobileNetV4Config(**preset.fields) for name, preset in NAMES.items()}
# Our names of a block's convolutions, with the foreign convolution and batch norm.
CONV = {"conv": ("conv", "bn1")}
FUSED = {"expand": ("conv_exp", "bn1"), "project": ("conv_pwl", "bn2")}
UIB = {ours: (f"{at}.conv", f"{at}.bn") for ours, at in zip(
    ("start", "expand", "mid", "project"), ("dw_start", "pw_exp", "dw_mid", "pw_proj"), strict=True
)}  # fmt: skip


def infer(state: State, hints: Hints) -> tuple[MobileNetV4Config, str]:
    """The configuration, and "timm".

    Raises:
      ValueError: a required tensor is absent, or no published model has these blocks.
    """
    stem, in_channels, *_ = inference.shape(state, NAME, "conv_stem.weight", 4)
    stages, before = [], stem
    for stage in range(1 + max(int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name)))):
        stages.append([])
        for i in range(inference.depth(state, NAME, f"blocks.{stage}")):
            stages[-1].append(_spec(state, f"blocks.{stage}.{i}", before))
            before = stages[-1][-1].width
    head = "classifier.weight"
    config = MobileNetV4Config(
        stages=_with_strides(stages),
        stem_width=stem,
        head_width=inference.shape(state, NAME, "conv_head.weight", 4)[0],
        layer_scale=1e-5 if any(name.endswith(".layer_scale.gamma") for name in state) else None,
        image_size=hints.image_size or (224, 224),
        in_channels=in_channels,
        num_classes=inference.shape(state, NAME, head, 2)[0] if head in state else None,
    )
    return config, NAME


def _spec(state: State, at: str, before: int) -> Spec:
    """The specification of a block with `before` input channels, except for the stride."""

    def shape(name):
        """(width, in, rows, columns) of a kernel; zeros if absent."""
        return inference.shape(state, NAME, f"{at}.{name}.weight", 4) if f"{at}.{name}.weight" in state else (0,) * 4

    if f"{at}.attn.query.proj.weight" in state:
        channels = shape("attn.key.proj")[0]
        heads, kv_stride = shape("attn.query.proj")[0] // max(channels, 1), 2 if shape("attn.key.down_conv")[0] else 1
        return Spec("mqa", shape("attn.output.proj")[0], heads=heads, channels=channels, kv_stride=kv_stride)
    if f"{at}.pw_exp.conv.weight" in state:
        kernels = dict(start=shape("dw_start.conv")[2], kernel=shape("dw_mid.conv")[2])
        return Spec("uib", shape("pw_proj.conv")[0], **kernels, expansion=shape("pw_exp.conv")[0] // before)
    if f"{at}.conv_exp.weight" in state:
        hidden, _, kernel, _ = shape("conv_exp")
        return Spec("fused", shape("conv_pwl")[0], kernel=kernel, expansion=hidden // before)
    width, _, kernel, _ = inference.shape(state, NAME, f"{at}.conv.weight", 4)
    return Spec("conv", width, kernel=kernel)


def _with_strides(stages: list[list[Spec]]) -> tuple[str, ...]:
    """The table with the strides of the published model that has these blocks, at any width."""
    for known in (config.blocks for config in PUBLISHED.values()):
        alike = [[dataclasses.replace(spec, width=1, stride=1) for spec in stage] for stage in known]
        if alike == [[dataclasses.replace(spec, width=1) for spec in stage] for stage in stages]:
            pairs = (zip(ours, theirs, strict=True) for ours, theirs in zip(stages, known, strict=True))
            filled = ([dataclasses.replace(a, stride=b.stride) for a, b in stage] for stage in pairs)
            return tuple(", ".join(map(str, stage)) for stage in filled)
    raise ValueError(
        f"{NAME}: a MobileNetV4 with the blocks of none that is known ({', '.join(PUBLISHED)}); no file determines the "
        "strides and the activation of others."
    )


def table(config: MobileNetV4Config, flavour: str) -> Table:
    """All tensors of a file."""
    pairs = _normed("conv_stem", "bn1", "stem")
    for stage, specs in enumerate(config.blocks):
        for i, spec in enumerate(specs):
            theirs, ours = f"blocks.{stage}.{i}", f"stages.{stage}.{i}"
            pairs += _block(spec, theirs, ours)
            if config.layer_scale is not None and spec.kind in ("uib", "mqa"):
                pairs.append(mapping.same(f"{theirs}.layer_scale.gamma", f"{ours}.scale.scale"))
    pairs += _normed("conv_head", "norm_head", "neck")
    if config.num_classes is not None:
        pairs += mapping.linear("classifier", "head")
    return Table(pairs)


def _block(spec: Spec, theirs: str, ours: str) -> list[Pair]:
    """A block without its layer scale."""
    if spec.kind == "mqa":
        return _attention(spec, theirs, ours)
    there = {"start": spec.start > 0, "mid": spec.kernel > 0}
    convs = {"conv": CONV, "fused": FUSED, "uib": UIB}[spec.kind]
    pairs = []
    for name, (conv, norm) in convs.items():
        if there.get(name, True):
            pairs += _normed(f"{theirs}.{conv}", f"{theirs}.{norm}", f"{ours}.{name}")
    return pairs


def _attention(spec: Spec, theirs: str, ours: str) -> list[Pair]:
    pairs = mapping.batch_norm(f"{theirs}.norm", f"{ours}.norm")
    for name in ("query", "key", "value", "output"):
        pairs.append(_matrix(f"{theirs}.attn.{name}.proj.weight", f"{ours}.attention.{name}.weight"))
    for name in ("key", "value") if spec.kv_stride > 1 else ():
        at = f"{theirs}.attn.{name}"
        pairs += _normed(f"{at}.down_conv", f"{at}.norm", f"{ours}.attention.{name}_conv")
    return pairs


def _normed(conv: str, norm: str, ours: str) -> list[Pair]:
    """A convolution and its batch norm."""
    return [*mapping.conv(conv, f"{ours}.conv", bias=False), *mapping.batch_norm(norm, f"{ours}.norm")]


def _matrix(theirs: str, ours: str) -> Pair:
    """A 1x1 kernel [out, in, 1, 1] as a matrix [in, out]."""
    return Pair(theirs, (ours,), lambda x: (x[:, :, 0, 0].T,), lambda x: x.T[:, :, None, None])


FORMAT = Format(
    NAME,
    (NAME,),
    MobileNetV4Config,
    infer,
    table,
    ignored=(r"\.num_batches_tracked$",),
    mark=r"^blocks\.\d+\.\d+\.pw_exp\.conv\.",
)
