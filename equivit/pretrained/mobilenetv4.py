"""MobileNetV4 in timm's layout, read by the source "timm".

Names and shapes determine the kind, kernels and widths of each block, but neither strides nor the activation, which are
taken from the published model with these blocks, at any width.  timm's variants with blurred strides have the same
names, but would compute something else.
"""

import dataclasses

from equivit.models.mobilenetv4.model import NAMES, MobileNetV4Config, Spec
from equivit.pretrained import mapping, reading
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Table

NAME = "timm"
PUBLISHED = {name: MobileNetV4Config(**preset.fields) for name, preset in NAMES.items()}
# By our names of convolutions and their batch norms, the foreign ones.
UIB = {"start": "dw_start", "expand": "pw_exp", "mid": "dw_mid", "project": "pw_proj"}
FUSED = {"expand.conv": "conv_exp", "expand.norm": "bn1", "project.conv": "conv_pwl", "project.norm": "bn2"}
OURS, THEIRS = "stages.#.#", "blocks.#.#"
ROWS = {
    "stem.conv": "conv_stem",
    "stem.norm": "bn1",
    **mapping.normed(mapping.inside(OURS, THEIRS, UIB), norm="bn"),
    f"{OURS}.conv.conv": f"{THEIRS}.conv",
    f"{OURS}.conv.norm": f"{THEIRS}.bn1",
    f"{OURS}.scale.scale": f"{THEIRS}.layer_scale.gamma",
    f"{OURS}.norm": f"{THEIRS}.norm",
    "neck.conv": "conv_head",
    "neck.norm": "norm_head",
    "head": "classifier",
}
ROWS |= {
    f"{OURS}.attention.{part}.weight": mapping.pointwise(f"{THEIRS}.attn.{part}.proj.weight")
    for part in ("query", "key", "value", "output")
}
ROWS |= {f"{OURS}.attention.{part}_conv.conv": f"{THEIRS}.attn.{part}.down_conv" for part in ("key", "value")}
ROWS |= {f"{OURS}.attention.{part}_conv.norm": f"{THEIRS}.attn.{part}.norm" for part in ("key", "value")}


def infer(state: State, hints: Hints) -> tuple[MobileNetV4Config, str]:
    """The configuration, and "timm"."""
    stem, in_channels, *_ = state.shape("conv_stem.weight", 4)
    stages, before = [], stem
    for stage in range(state.depth()):
        stages.append([])
        for i in range(state.depth(f"blocks.{stage}")):
            stages[-1].append(_spec(state, f"blocks.{stage}.{i}", before))
            before = stages[-1][-1].width
    config = MobileNetV4Config(
        stages=_with_strides(stages),
        stem_width=stem,
        head_width=state.out("conv_head", 4),
        layer_scale=1e-5 if any(name.endswith(".layer_scale.gamma") for name in state) else None,
        image_size=hints.image_size or (224, 224),
        in_channels=in_channels,
        num_classes=state.classes("classifier"),
    )
    return config, NAME


def _spec(state: State, at: str, before: int) -> Spec:
    """The specification of a block with `before` input channels, except for the stride."""

    def shape(name):
        """(width, in, rows, columns) of a kernel; zeros if absent."""
        return state.shape(f"{at}.{name}.weight", 4) if f"{at}.{name}.weight" in state else (0,) * 4

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
    width, _, kernel, _ = state.shape(f"{at}.conv.weight", 4)
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
    fused = {}
    for stage, specs in enumerate(config.blocks):
        for i, spec in enumerate(specs):
            if spec.kind == "fused":
                fused |= mapping.inside(f"stages.{stage}.{i}", f"blocks.{stage}.{i}", FUSED)
    return mapping.table(config, ROWS | fused)


FORMAT = Format(
    NAME,
    (NAME,),
    MobileNetV4Config,
    infer,
    table,
    ignored=reading.COUNTS,
    mark=r"blocks\.\d+\.\d+\.pw_exp\.conv\.weight",
)
