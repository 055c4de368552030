"""Plain ViTs and Swin transformers under Hugging Face's names (transformers), with separate queries, keys and values.

Plain: ViT, DeiT and the encoder of ViTMAE.  A distillation token of DeiT becomes a register that includes its position;
the two heads of a distilled classifier, whose logits are averaged, are dropped.  Swin: versions 1 and 2.

CLIP, CvT and DINOv2 under these names are read by the sources of these models.
"""

import re
from typing import Any

import numpy as np

from equivit.layers.grid import check_grid
from equivit.models.swin.model import SwinConfig
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain, swin
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Pair, Table
from equivit.pretrained.plain import Spelling

NAME = "transformers"
EPS = 1e-12  # of ViT, DeiT and ViTMAE, unless their config.json has another
SPELLING = Spelling(
    patch_embed="embeddings.patch_embeddings.projection",
    class_token="embeddings.cls_token",
    registers="embeddings.distillation_token",
    mask_token=None,
    position="embeddings.position_embeddings",
    blocks="encoder.layer",
    norm1="layernorm_before",
    qkv=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    proj="attention.output.dense",
    norm2="layernorm_after",
    fc=("intermediate.dense", "output.dense"),
    scales=(),
    norm="layernorm",
    head="classifier",
    class_position=True,
)
# A layer between the class token and tanh that no classifier has, heads of distillation, decoders.
UNUSED = (r"^pooler\.", r"^(cls|distillation)_classifier\.", r"^decoder\.", r"^embeddings\.mask_token$")
BLOCK, OURS = "encoder.layers.#.blocks.#", "stages.#.blocks.#"
SELF = f"{BLOCK}.attention.self"
SWIN_ROWS = {
    "patch_embed": "embeddings.patch_embeddings.projection",
    "patch_norm": "embeddings.norm",
    "norm": "layernorm",
    "head": "classifier",
    f"{OURS}.norm1": f"{BLOCK}.layernorm_before",
    f"{OURS}.attention.qkv": (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"),
    f"{OURS}.attention.proj": f"{BLOCK}.attention.output.dense",
    f"{OURS}.norm2": f"{BLOCK}.layernorm_after",
    f"{OURS}.mlp.fc1": f"{BLOCK}.intermediate.dense",
    f"{OURS}.mlp.fc2": f"{BLOCK}.output.dense",
    **swin.attention_rows(OURS, SELF, mlp="continuous_position_bias_mlp"),
    f"{OURS}.attention.q_bias": f"{SELF}.query.bias",
    f"{OURS}.attention.v_bias": f"{SELF}.value.bias",
}
# The official names that the configuration is inferred from, by patterns of these.
OFFICIAL = {
    r"^embeddings\.patch_embeddings\.projection": "patch_embed.proj",
    r"^encoder\.": "",
    r"\.attention\.self\.": ".attn.",
    r"\.intermediate\.dense": ".mlp.fc1",
    r"^classifier": "head",
}


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration of a plain ViT; `image_size` is required if the grid of positions is not square."""
    if SPELLING.registers in state:  # its position is the second row of the table
        rows = state[str(SPELLING.position)]
        state = State(state | {str(SPELLING.position): np.delete(rows, 1, axis=1)}, state.source)
    return ViTConfig(**plain.fields(state, SPELLING, hints), norm_eps=EPS), "vit"


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a plain ViT."""
    require(config, NAME, class_token=True, class_position=True)
    if not config.registers:
        return plain.table(config, SPELLING._replace(registers=None), NAME)
    require(config, NAME, registers=1)
    rest = plain.table(config, SPELLING._replace(registers=None, position=None), NAME)
    return Table([_distilled(config)]) + rest


def _distilled(config: ViTConfig) -> Pair:
    """The distillation token [1, 1, D] and the table [1, 2 + h w, D] with its position in the second row."""
    size = check_grid(config.image_size, config.patch_size, "image_size")

    def read(token, rows):
        return rows[0, 0], token[0] + rows[0, 1], rows[0, 2:].reshape(*size, -1)

    def write(position, token, patches):
        rows = [position[None], np.zeros_like(token), patches.reshape(-1, token.shape[-1])]
        return token[None], np.concatenate(rows)[None]

    theirs = str(SPELLING.registers), str(SPELLING.position)
    return Pair(theirs, ("prefix.class_position", "prefix.registers", "position.table"), write, read)


def infer_swin(state: State, hints: Hints) -> tuple[SwinConfig, str]:
    """The configuration of a Swin transformer, as in `swin.infer`."""
    official: dict[str, Any] = {}
    for name, tensor in state.items():
        for pattern, replacement in OFFICIAL.items():
            name = re.sub(pattern, replacement, name)
        official[name] = tensor
    return swin.infer(State(official, state.source), hints)[0], "swin"


def swin_table(config: SwinConfig, flavour: str) -> Table:
    """All tensors of a Swin transformer."""
    rows: dict[str, Any] = dict(SWIN_ROWS)
    for i in range(1, len(config.depths)):
        rows |= mapping.inside(f"stages.{i}.merge", f"encoder.layers.{i - 1}.downsample", swin.MERGE)
    return mapping.table(config, rows)


def _written(name: str, config: Any, model: str) -> str:
    """The name in a file: a classifier has the names of its backbone after "vit."."""
    return name if config.num_classes is None or name.startswith("classifier.") else f"{model}.{name}"


SWIN = Format(
    NAME,
    ("swin",),
    SwinConfig,
    infer_swin,
    swin_table,
    ignored=swin.CONSTANTS,
    written=lambda name, config, flavour: _written(name, config, "swinv2" if config.version == 2 else "swin"),
    mark=r"encoder\.layers\.0\.blocks\.0\.layernorm_before\.weight",
)
FORMAT = Format(
    NAME,
    ("vit",),
    ViTConfig,
    infer,
    table,
    ignored=UNUSED,
    written=lambda name, config, flavour: _written(name, config, "deit" if config.registers else "vit"),
    mark=r"encoder\.layer\.0\.layernorm_before\.weight",
)
