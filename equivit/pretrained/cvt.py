"""CvT in the layouts of two codes, with different names and activations.

"transformers": Hugging Face's names, with the exact GELU; "microsoft": the official names, with the quick GELU.  A file
determines neither activation nor strides: for others pass `activation=`, `strides=`, `paddings=` and `kv_stride=` to
`pretrained.load`.  A model may be written under the names of either code, which then runs it with that code's
activation.
"""

from typing import Any

from equivit import constraints
from equivit.constraints import PositiveInt
from equivit.models.cvt.model import CvTConfig
from equivit.pretrained import inference, mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Pair, Table

NAME = "cvt"
HEAD_CHANNELS = 64  # of all published models
OFFICIAL = "stage0.patch_embed.proj.weight"  # in every official file

# Foreign names in a stage, a block and the model, by our names.
NAMES = {
    "transformers": {
        "stage": "cvt.encoder.stages.{}",
        "blocks": "layers",
        "embed.conv": "embedding.convolution_embeddings.projection",
        "embed.norm": "embedding.convolution_embeddings.normalization",
        "conv": "attention.attention.convolution_projection_{}.convolution_projection.convolution",
        "batch_norm": "attention.attention.convolution_projection_{}.convolution_projection.normalization",
        "linear": "attention.attention.projection_{}",
        "attention.proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
        "norm1": "layernorm_before",
        "norm2": "layernorm_after",
        "norm": "layernorm",
        "head": "classifier",
        "q": "query",
        "k": "key",
        "v": "value",
    },
    "microsoft": {
        "stage": "stage{}",
        "blocks": "blocks",
        "embed.conv": "patch_embed.proj",
        "embed.norm": "patch_embed.norm",
        "conv": "attn.conv_proj_{}.conv",
        "batch_norm": "attn.conv_proj_{}.bn",
        "linear": "attn.proj_{}",
        "attention.proj": "attn.proj",
        "mlp.fc1": "mlp.fc1",
        "mlp.fc2": "mlp.fc2",
        "norm1": "norm1",
        "norm2": "norm2",
        "norm": "norm",
        "head": "head",
        "q": "q",
        "k": "k",
        "v": "v",
    },
}
ACTIVATIONS = {"transformers": "gelu", "microsoft": "quick_gelu"}


def infer(state: State, hints: Hints) -> tuple[CvTConfig, str]:
    """The configuration and the flavour, which implies the activation.

    Heads have 64 channels unless `num_heads` is given; strides are as published.

    Raises:
      ValueError: a required tensor is absent, or a hint is missing or wrong.
    """
    flavour = "microsoft" if OFFICIAL in state else "transformers"
    their = NAMES[flavour]
    stages = [their["stage"].format(0)]
    while any(name.startswith(f"{their['stage'].format(len(stages))}.") for name in state):
        stages.append(their["stage"].format(len(stages)))
    kernels = [inference.shape(state, NAME, f"{stage}.{their['embed.conv']}.weight", 4) for stage in stages]
    widths = tuple(kernel[0] for kernel in kernels)
    hidden = inference.shape(state, NAME, f"{stages[0]}.{their['blocks']}.0.{their['mlp.fc1']}.weight", 2)[0]
    head = f"{their['head']}.weight"
    config = CvTConfig(
        widths=widths,
        depths=tuple(inference.depth(state, NAME, f"{stage}.{their['blocks']}") for stage in stages),
        num_heads=_heads(widths, hints),
        kernels=tuple(kernel[2] for kernel in kernels),
        strides=(4, *(2 for _ in stages[1:])),
        paddings=(2, *(1 for _ in stages[1:])),
        class_token=f"{stages[-1]}.cls_token" in state,
        activation=ACTIVATIONS[flavour],
        image_size=hints.image_size or (224, 224),
        in_channels=kernels[0][1],
        num_classes=inference.shape(state, NAME, head, 2)[0] if head in state else None,
        mlp_ratio=hidden / widths[0],
    )
    return config, flavour


def table(config: CvTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    their, pairs = NAMES[flavour], []
    for stage, depth in enumerate(config.depths):
        at, ours = their["stage"].format(stage), f"stages.{stage}.embed" if stage else "patch_embed"
        pairs += mapping.conv(f"{at}.{their['embed.conv']}", f"{ours}.conv", bias=True)
        pairs += mapping.norm(f"{at}.{their['embed.norm']}", f"{ours}.norm")
        if config.prefix(stage):
            pairs.append(mapping.same(f"{at}.cls_token", f"stages.{stage}.class_token", ones=2))
        for i in range(depth):
            pairs += _block(f"{at}.{their['blocks']}.{i}", f"stages.{stage}.blocks.{i}", their)
    pairs += mapping.norm(their["norm"], "norm")
    if config.num_classes is not None:
        pairs += mapping.linear(their["head"], "head")
    return Table(pairs)


def _block(theirs: str, ours: str, their: dict[str, str]) -> list[Pair]:
    pairs = []
    for name in ("norm1", "norm2"):
        pairs += mapping.norm(f"{theirs}.{their[name]}", f"{ours}.{name}")
    for name in "qkv":
        conv, norm, linear = (
            f"{theirs}.{their[part].format(their[name])}" for part in ("conv", "batch_norm", "linear")
        )
        at = f"{ours}.attention.conv_{name}"
        pairs += mapping.conv(conv, f"{at}.conv", bias=False)
        pairs += mapping.batch_norm(norm, f"{at}.norm")
        pairs += mapping.linear(linear, f"{ours}.attention.{name}")
    for name in ("attention.proj", "mlp.fc1", "mlp.fc2"):
        pairs += mapping.linear(f"{theirs}.{their[name]}", f"{ours}.{name}")
    return pairs


def _heads(widths: tuple[int, ...], hints: Hints) -> tuple[int, ...]:
    """The heads of each stage."""
    heads: Any = hints.num_heads
    if heads is not None:
        constraints.check(f"{NAME}: num_heads", heads, tuple[PositiveInt, ...])
        return heads
    for stage, width in enumerate(widths):
        if width % HEAD_CHANNELS:
            raise inference.MissingHint(
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
    ignored=(r"\.num_batches_tracked$",),
)
