"""CLIP's image encoders, in four flavours; the text encoder is left out.

"openai": the official files, TorchScript archives in half precision; "openclip": the same names, without the numbers
stored beside the official tensors; "transformers": Hugging Face's names; "timm": timm's names and a head with zero
bias, or, with another bias, a fine-tuned classifier.  OpenAI's models use the quick GELU.  For other files pass the
activation to `load`: mlp="quick_gelu" (converted from OpenAI's) or mlp="gelu" (nearly all others).

Without classes, the model's head is the projection: `model(images)` is the unnormalised embedding of an image, and
`model.features(images)` has the tokens after `ln_post`.  Positions are resized with antialiasing, as in OpenCLIP.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain, reading
from equivit.pretrained.format import Format, Hints, MissingHint, State, require
from equivit.pretrained.mapping import Constant, Table
from equivit.pretrained.plain import Spelling

NAME = "clip"
EPS = 1e-5
OFFICIAL = "input_resolution"  # a number in OpenAI's files
BASE = Spelling(registers=None, mask_token=None, patch_bias=False, head=None, class_position=True, batched=False)
OPENAI = BASE._replace(
    patch_embed="visual.conv1",
    class_token="visual.class_embedding",
    position="visual.positional_embedding",
    pre_norm="visual.ln_pre",
    blocks="visual.transformer.resblocks",
    norm1="ln_1",
    qkv="attn.in_proj_{}",
    proj="attn.out_proj",
    norm2="ln_2",
    fc=("mlp.c_fc", "mlp.c_proj"),
    scales=("ls_1.gamma", "ls_2.gamma"),
    norm="visual.ln_post",
)
SPELLINGS = {
    "openai": OPENAI,
    "openclip": OPENAI,
    "transformers": BASE._replace(
        patch_embed="vision_model.embeddings.patch_embedding",
        class_token="vision_model.embeddings.class_embedding",
        position="vision_model.embeddings.position_embedding.weight",
        pre_norm="vision_model.pre_layrnorm",
        blocks="vision_model.encoder.layers",
        norm1="layer_norm1",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        proj="self_attn.out_proj",
        norm2="layer_norm2",
        scales=(),
        norm="vision_model.post_layernorm",
    ),
    "timm": BASE._replace(pre_norm="norm_pre", batched=True),
}
PROJECTIONS = {
    **dict.fromkeys(("openai", "openclip"), mapping.same("visual.proj")),
    "transformers": mapping.moved("visual_projection.weight", (1, 0)),
    "timm": mapping.moved("head.weight", (1, 0)),
}
# The text encoder and the scalars, in the names of all flavours.
TEXT = (
    r"^(transformer|token_embedding|ln_final|text|text_model|text_projection)\.",
    r"^(positional_embedding|text_projection|logit_scale|logit_bias|context_length|vocab_size)$",
    r"\.position_ids$",
)


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is required if the grid of positions is not square."""
    flavour = _flavour(state)
    (projection,) = PROJECTIONS[flavour].theirs
    fields = plain.fields(state, SPELLINGS[flavour], hints)
    if flavour == "timm" and "head.bias" in state and state["head.bias"].any():
        fields |= dict(num_classes=state.classes())
    elif projection in state:
        fields |= dict(projection=state.shape(projection, 2)[1 if projection == "visual.proj" else 0])
    if flavour == "openai":
        fields |= dict(mlp="quick_gelu")
    return ViTConfig(**fields, norm_eps=EPS, position_antialias=True), flavour


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of an image encoder, or of a classifier under timm's names."""
    require(config, NAME, norm_eps=EPS, class_position=True)
    head: dict[str, Any] = {} if config.projection is None else {"head.weight": PROJECTIONS[flavour]}
    if flavour == "timm" and config.num_classes is not None:
        head = {"head": "head"}
    constants = []
    if flavour == "openai":
        require(config, NAME, mlp="quick_gelu")
        constants = [Constant(OFFICIAL, np.asarray(config.image_size[0]), "the side of the images")]
    if flavour == "timm" and config.projection is not None:
        constants = [Constant("head.bias", np.zeros(config.projection, np.float32), "zeros")]
    return plain.table(config, SPELLINGS[flavour], NAME, head) + Table([], constants)


def check_options(state: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> None:
    """`MissingHint` if neither the file nor the options determine the activation."""
    flavour = _flavour(state)
    known = flavour == "openai" or f"{SPELLINGS[flavour].pre_norm}.weight" not in state  # or it is not a CLIP file
    if not known and "mlp" not in options:
        raise MissingHint(
            "mlp",
            f"{NAME}: the file does not determine its activation; give mlp='quick_gelu' (weights of OpenAI) or "
            "mlp='gelu' (nearly all others).",
        )


def _flavour(state):
    if any(name.startswith("vision_model.") for name in state):
        return "transformers"
    if any(name.startswith("visual.") for name in state):
        return "openai" if OFFICIAL in state else "openclip"
    return "timm"


def _rename(name: str) -> str:
    """Newer files of transformers without the text encoder lack a prefix."""
    alone = r"^(embeddings\.(class|patch|position)_embedding|encoder\.layers|pre_layrnorm|post_layernorm)\b"
    return re.sub(alone, r"vision_model.\1", reading.unwrapped(name))


def _default(config):
    if config.num_classes is not None:
        return "timm"
    return "openai" if config.mlp == "quick_gelu" else "openclip"


FORMAT = Format(
    NAME,
    tuple(SPELLINGS),
    ViTConfig,
    infer,
    table,
    _default,
    rename=_rename,
    ignored=TEXT,
    require=check_options,
    mark=r"visual\.conv1\.weight|vision_model\.pre_layrnorm\.weight|norm_pre\.weight",
)
