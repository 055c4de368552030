"""The official masked autoencoders (facebookresearch/mae): "mae" is the encoder, "mae_autoencoder" has the decoder too.

Positions are the fixed sin-cos table, which is not a parameter in our model, or, in fine-tuned files, a learned table
with a row for the class token.
"""

import dataclasses
from typing import Any

import numpy as np

from equivit.layers.grid import check_grid
from equivit.layers.position import SinCos
from equivit.models.decoders import MaskedAutoencoderConfig
from equivit.models.vit.config import ViTConfig
from equivit.pretrained import mapping, plain
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Constant, Table
from equivit.pretrained.plain import Spelling

NAME = "mae"
AUTOENCODER_NAME = "mae_autoencoder"
SPELLING = Spelling(registers=None, mask_token=None, scales=(), class_position=True)
DECODER = {"decoder.embed": "decoder_embed", "decoder.norm": "decoder_norm", "decoder.pixels": "decoder_pred"}
DECODER |= {"decoder.mask_token": mapping.reshaped("mask_token", lambda x: x[None, None])}
DECODER_HEADS = 16  # of the published decoders


def infer(state: State, hints: Hints) -> tuple[ViTConfig, str]:
    """The configuration of the encoder; `image_size` is required if the grid of positions is not square."""
    config = ViTConfig(**plain.fields(state, SPELLING, hints))
    stored, fixed = state["pos_embed"], _sincos(config.width, config)
    if fixed is not None and stored.shape == fixed.shape and np.abs(stored - fixed).max() < 1e-5:
        config = dataclasses.replace(config, position="sincos", class_position=False)
    return config, "encoder"


def table(config: ViTConfig, flavour: str) -> Table:
    """All tensors of an encoder."""
    require(config, NAME, mlp="gelu", norm_eps=1e-6)
    if config.position == "learned":
        return plain.table(config, SPELLING, NAME)
    require(config, NAME, position="sincos", class_position=False)
    tokens_and_blocks = plain.table(config, SPELLING._replace(position=None), NAME)
    return tokens_and_blocks + Table([], [_fixed("pos_embed", config.width, config)])


def infer_autoencoder(state: State, hints: Hints) -> tuple[MaskedAutoencoderConfig, str]:
    """The configuration of both; no file determines the option `decoder_heads`."""
    width = state.out("decoder_embed")
    depth = state.depth("decoder_blocks")
    return MaskedAutoencoderConfig(infer(state, hints)[0], width, depth, DECODER_HEADS), "autoencoder"


def autoencoder_table(config: MaskedAutoencoderConfig, flavour: str) -> Table:
    """All tensors of an encoder and its decoder."""
    require(config, AUTOENCODER_NAME, decoder="dense")
    rows = mapping.inside("decoder.blocks.#", "decoder_blocks.#", mapping.BLOCK) | DECODER
    position = _fixed("decoder_pos_embed", config.decoder_width, config.encoder)
    return table(config.encoder, "encoder").inside("encoder") + mapping.table(config, rows, [position])


def _fixed(name: str, width: int, config: ViTConfig) -> Constant:
    return Constant(name, _sincos(width, config), "the sin-cos table", fixed=False)


def _sincos(width: int, config: ViTConfig) -> Any:
    """The table [1, 1 + N, width], zero for the class token; None if 4 does not divide the width."""
    if width % 4:
        return None
    rows = SinCos(width).table(check_grid(config.image_size, config.patch_size, "image_size"))
    return np.concatenate([np.zeros((1, width), np.float32), rows])[None]


FORMAT = Format(NAME, ("encoder",), ViTConfig, infer, table, ignored=("^decoder_", "^mask_token"))
AUTOENCODER = Format(
    AUTOENCODER_NAME,
    ("autoencoder",),
    MaskedAutoencoderConfig,
    infer_autoencoder,
    autoencoder_table,
    mark=r"decoder_embed\.weight",
)
