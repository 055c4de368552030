"""Plain ViTs in timm's layout, in three flavours.

"timm": timm's own; "deit3": the official DeiT III files, with layer scales `gamma_1`; "dinov2": the official DINOv2
files, with a mask token, `register_tokens`, and `mlp.w12` and `mlp.w3` for the maps of a SwiGLU.  They also resize
positions differently.
"""

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import dinov2, mapping, plain, reading
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Table
from equivit.pretrained.plain import Spelling

NAME = "timm"
TIMM = Spelling(swiglu=Spelling().fc)
SPELLINGS = {
    "timm": TIMM,
    "deit3": TIMM._replace(scales=("gamma_1", "gamma_2"), class_position=False),
    "dinov2": dinov2.SPELLINGS["hub"]._replace(head=TIMM.head),
}


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is required if the grid of positions is not square."""
    flavour = _flavour(state)
    fields = plain.fields(state, _spelling(flavour, "cls_token" in state), hints)
    fields["qk_norm"] = state.count("attn.q_norm.weight") > 0
    if flavour == "dinov2":
        fields |= dinov2.resizing(fields["registers"])
    else:
        fields |= dict(position_antialias=flavour == "timm")
    return ViTConfig(**fields), flavour


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of a file of that flavour."""
    norms = {f"attention.{name}": f"attn.{name}" for name in ("q_norm", "k_norm")}
    rows = mapping.inside("blocks.#", "blocks.#", norms)
    return plain.table(config, _spelling(flavour, config.class_token), NAME, rows)


def _spelling(flavour: str, class_token: bool) -> Spelling:
    """timm's models with the mean of patches, such as `vit_base_patch16_siglip_gap_224`, have no class token."""
    return SPELLINGS[flavour] if class_token else SPELLINGS[flavour]._replace(class_token=None)


def _flavour(state):
    if state.count("gamma_1"):
        return "deit3"
    return "dinov2" if dinov2.is_hub(state) else "timm"


def _default(config):
    return "dinov2" if config.mask_token else "timm"


FORMAT = Format(
    NAME,
    tuple(SPELLINGS),
    ViTConfig,
    infer,
    table,
    _default,
    rename=reading.unchunked,
    ignored=reading.DINOV2_HEADS,
    mark=r"patch_embed\.proj\.weight",
)
