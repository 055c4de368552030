"""DINOv3's ViTs under Hugging Face's names (transformers): rotary positions, registers, layer scale, keys without bias.

The plus sizes and the 7B model have gated MLPs, with separate maps of gates and values.
"""

from typing import Any

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Table
from equivit.pretrained.plain import Spelling

NAME = "dinov3"
HEADS = {1280: 20, 4096: 32}  # of H+ and 7B; other widths have the heads of all published models
ATTENTION = "layer.#.attention"
SPELLING = Spelling(
    patch_embed="embeddings.patch_embeddings",
    class_token="embeddings.cls_token",
    registers="embeddings.register_tokens",
    mask_token="embeddings.mask_token",
    position=None,
    blocks="layer",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    proj="attention.o_proj",
    fc=("mlp.up_proj", "mlp.down_proj"),
    swiglu=(("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
    scales=("layer_scale1.lambda1", "layer_scale2.lambda1"),
    head=None,
    class_position=False,
)
# Tensors that other plain ViTs lack, or have in another shape.
ROWS = {
    "mask_token": mapping.reshaped("embeddings.mask_token", lambda x: x[None, None]),
    "blocks.#.attention.q_bias": mapping.same(f"{ATTENTION}.q_proj.bias"),
    "blocks.#.attention.v_bias": mapping.same(f"{ATTENTION}.v_proj.bias"),
}


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration; the size of images, which no tensor determines, affects no output."""
    width = state.out(SPELLING.patch_embed, 4)
    if hints.num_heads is None:
        hints = hints._replace(num_heads=HEADS.get(width))
    fields: dict[str, Any] = plain.fields(state, SPELLING, hints)
    return ViTConfig(**fields, position="rotary", norm_eps=1e-5), "transformers"


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a backbone."""
    require(config, NAME, position="rotary", norm_eps=1e-5, num_classes=None)
    return plain.table(config, SPELLING._replace(mask_token=None), NAME, ROWS)


FORMAT = Format(NAME, ("transformers",), ViTConfig, infer, table, mark=r"layer\.0\.attention\.q_proj\.weight")
