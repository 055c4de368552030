"""CvT in the layouts of two codes, with different names and activations.

"transformers": Hugging Face's names, with the exact GELU; "microsoft": the official names, with the quick GELU.  A file
determines neither activation nor strides: for others pass `activation=`, `strides=`, `paddings=` and `kv_stride=` to
`pretrained.load`.  A model may be written under the names of either code, which then runs it with that code's
activation.
"""

import re
from typing import Any

from equivit import constraints
from equivit.constraints import PositiveInt
from equivit.models.cvt.model import CvTConfig
from equivit.pretrained import mapping, reading
from equivit.pretrained.format import Format, Hints, MissingHint, State
from equivit.pretrained.mapping import Table

NAME = "cvt"
HEAD_CHANNELS = 64  # of all published models
OFFICIAL = "stage0.patch_embed.proj.weight"  # in every official file

# Foreign names of stages, and in a stage and the model, by our names.
NAMES = {
    "transformers": {
        "stage": "cvt.encoder.stages.{}",
        "blocks": "layers",
        "embed.conv": "embedding.convolution_embeddings.projection",
        "embed.norm": "embedding.convolution_embeddings.normalization",
        "norm": "layernorm",
        "head": "classifier",
    },
    "microsoft": {
        "stage": "stage{}",
        "blocks": "blocks",
        "embed.conv": "patch_embed.proj",
        "embed.norm": "patch_embed.norm",
        "norm": "norm",
        "head": "head",
    },
}
# Foreign names in a block, by our names, and of q, k and v.
BLOCKS = {
    "transformers": {
        "attention.conv_{}.conv": "attention.attention.convolution_projection_{}.convolution_projection.convolution",
        "attention.conv_{}.norm": "attention.attention.convolution_projection_{}.convolution_projection.normalization",
        "attention.{}": "attention.attention.projection_{}",
        "attention.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
    },
    "microsoft": {
        **mapping.BLOCK,
        "attention.conv_{}.conv": "attn.conv_proj_{}.conv",
        "attention.conv_{}.norm": "attn.conv_proj_{}.bn",
        "attention.{}": "attn.proj_{}",
    },
}
QKV = {"transformers": ("query", "key", "value"), "microsoft": ("q", "k", "v")}
ACTIVATIONS = {"transformers": "gelu", "microsoft": "quick_gelu"}


def infer(state: State, hints: Hints) -> tuple[CvTConfig, str]:
    """The configuration and the flavour, which implies the activation.

    Heads have 64 channels unless `num_heads` is given; strides are as published.
    """
    flavour = "microsoft" if OFFICIAL in state else "transformers"
    their = NAMES[flavour]
    stages = [their["stage"].format(0)]
    while any(name.startswith(f"{their['stage'].format(len(stages))}.") for name in state):
        stages.append(their["stage"].format(len(stages)))
    kernels = [state.shape(f"{stage}.{their['embed.conv']}.weight", 4) for stage in stages]
    widths = tuple(kernel[0] for kernel in kernels)
    hidden = state.out(f"{stages[0]}.{their['blocks']}.0.{BLOCKS[flavour]['mlp.fc1']}")
    config = CvTConfig(
        widths=widths,
        depths=tuple(state.depth(f"{stage}.{their['blocks']}") for stage in stages),
        num_heads=_heads(widths, hints),
        kernels=tuple(kernel[2] for kernel in kernels),
        strides=(4, *(2 for _ in stages[1:])),
        paddings=(2, *(1 for _ in stages[1:])),
        class_token=f"{stages[-1]}.cls_token" in state,
        activation=ACTIVATIONS[flavour],
        image_size=hints.image_size or (224, 224),
        in_channels=kernels[0][1],
        num_classes=state.classes(their["head"]),
        mlp_ratio=hidden / widths[0],
    )
    return config, flavour


def table(config: CvTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    their = NAMES[flavour]
    first, stage = their["stage"].format(0), their["stage"].format("#")
    rows: dict[str, Any] = {"norm": their["norm"], "head": their["head"]}
    for part in ("conv", "norm"):
        rows[f"patch_embed.{part}"] = f"{first}.{their[f'embed.{part}']}"
        rows[f"stages.#.embed.{part}"] = f"{stage}.{their[f'embed.{part}']}"
    rows["stages.#.class_token"] = mapping.reshaped(f"{stage}.cls_token", lambda x: x[None, None])
    for q, query in zip("qkv", QKV[flavour], strict=True):
        block = {ours.format(q): theirs.format(query) for ours, theirs in BLOCKS[flavour].items()}
        rows |= mapping.inside("stages.#.blocks.#", f"{stage}.{their['blocks']}.#", block)
    return mapping.table(config, rows)


def _heads(widths: tuple[int, ...], hints: Hints) -> tuple[int, ...]:
    """The heads of each stage."""
    heads: Any = hints.num_heads
    if heads is not None:
        constraints.check(f"{NAME}: num_heads", heads, tuple[PositiveInt, ...])
        return heads
    for stage, width in enumerate(widths):
        if width % HEAD_CHANNELS:
            raise MissingHint(
                "num_heads",
                f"{NAME}: stage {stage} is {width} wide, not a multiple of the {HEAD_CHANNELS} channels per head of "
                "published models; give num_heads=, one number per stage, which no file determines.",
            )
    return tuple(width // HEAD_CHANNELS for width in widths)


def _flavour(config: CvTConfig) -> str:
    """The flavour whose models have this activation."""
    return next(flavour for flavour, activation in ACTIVATIONS.items() if activation == config.activation)


FORMAT = Format(
    NAME,
    ("transformers", "microsoft"),
    CvTConfig,
    infer,
    table,
    default_flavour=_flavour,
    rename=lambda name: re.sub(r"^encoder\.stages\.", "cvt.encoder.stages.", reading.unwrapped(name)),  # without a head
    ignored=reading.COUNTS,
    mark=r"stage0\.patch_embed\.proj\.weight|"
    r"cvt\.encoder\.stages\.0\.embedding\.convolution_embeddings\.projection\.weight",
)
