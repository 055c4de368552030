"""SigLIP's image encoders, in two flavours; the text encoder is left out.

"transformers": Hugging Face's names; "timm": timm's.  The files of big_vision are read by "vit_jax".  A learned query
pools the patches (`pool="attention"`): `model.pooled(images)` is the unnormalised embedding of an image.  GELU is the
tanh approximation, as in the authors' code; for a file of a code with the exact one, pass mlp="gelu" to `load`.
"""

from typing import Any

import numpy as np

from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Pair, Table
from equivit.pretrained.plain import Spelling

NAME = "siglip"
TIMM = Spelling(class_token=None, registers=None, mask_token=None, scales=())
SPELLINGS = {
    "transformers": TIMM._replace(
        patch_embed="embeddings.patch_embedding",
        position="embeddings.position_embedding.weight",
        blocks="encoder.layers",
        norm1="layer_norm1",
        qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        proj="self_attn.out_proj",
        norm2="layer_norm2",
        norm="post_layernorm",
        head=None,
        batched=False,
    ),
    "timm": TIMM,
}
HEAD, POOL = "head", "attn_pool"
# The modules of the pooling, beside its query and its map to queries, keys and values.
MODULES = {
    "transformers": {"proj": "attention.out_proj", "mlp_norm": "layernorm"},
    "timm": {"proj": "proj", "mlp_norm": "norm"},
}
TEXT = (r"^text_model\.", r"^logit_(scale|bias)$", r"\.position_ids$")


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration and the flavour; `image_size` is required if the grid of positions is not square."""
    flavour = "timm" if f"{POOL}.latent" in state else "transformers"
    fields: dict[str, Any] = plain.fields(state, SPELLINGS[flavour], hints)
    fields |= dict(pool="attention", mlp="gelu_tanh")
    return ViTConfig(**fields, position_antialias=flavour == "timm"), flavour


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of an image encoder."""
    require(config, NAME, pool="attention", norm_eps=1e-6)
    at = HEAD if flavour == "transformers" else POOL
    query = "probe" if flavour == "transformers" else "latent"
    rows: dict[str, Any] = {"readout.query": mapping.reshaped(f"{at}.{query}", lambda x: x[None, None])}
    modules = MODULES[flavour] | {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    rows |= mapping.inside("readout", at, modules)
    if flavour == "transformers":
        rows["readout.qkv"] = f"{at}.attention.in_proj_{{}}"
    else:
        rows |= {f"readout.qkv.{last}": _query_and_rest(last) for last in ("weight", "bias")}
    return plain.table(config, SPELLINGS[flavour], NAME, rows)


def _query_and_rest(last: str) -> Pair:
    """timm's map to the query, and its map to keys and values."""

    def write(whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = whole.T
        return rows[: len(rows) // 3], rows[len(rows) // 3 :]

    return Pair((f"{POOL}.q.{last}", f"{POOL}.kv.{last}"), (), write, lambda *rows: np.concatenate(rows).T)


FORMAT = Format(
    NAME,
    tuple(SPELLINGS),
    ViTConfig,
    infer,
    table,
    default_flavour=lambda config: "transformers" if config.num_classes is None else "timm",  # which has a head
    written=lambda name, config, flavour: f"vision_model.{name}" if flavour == "transformers" else name,
    ignored=TEXT,
    mark=r"head\.probe|attn_pool\.latent",
)
