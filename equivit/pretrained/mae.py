"""The official masked autoencoders (facebookresearch/mae): encoders alone, or with their decoder.

`pretrained.load("mae", file)` gives the encoder, `load_autoencoder(file)` both.  Positions are the fixed sin-cos table,
which is not a parameter of ours, or, in files that were fine-tuned, a learned one with a row for the class token.
"""

import dataclasses
import os
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from equivit import logical
from equivit.layers.grid import check_grid
from equivit.layers.position import SinCos
from equivit.models import zoo
from equivit.models.decoders import MaskedAutoencoder, MaskedAutoencoderConfig
from equivit.models.vit_config import ViTConfig
from equivit.pretrained import inference, mapping, reading, timm
from equivit.pretrained.mapping import Constant, Pair, Table

NAME = "mae"
FLAVOURS = ("encoder",)
OTHERS = ("decoder_", "mask_token")  # beginnings of the names of the decoder's tensors
DECODER_HEADS = 16  # of the published decoders


def infer(
    state: Mapping[str, np.ndarray],
    *,
    num_heads: int | None = None,
    image_size: tuple[int, int] | None = None,
    family: str | None = None,
) -> tuple[ViTConfig, str]:
    """The configuration of the encoder; `image_size` is needed where the grid of positions is not square."""
    config, _ = timm.infer(state, num_heads=num_heads, image_size=image_size, source=NAME)
    config = dataclasses.replace(config, position_antialias=False)
    fixed = _sincos(config.width, config)
    table = state["pos_embed"]
    if fixed is not None and table.shape == fixed.shape and np.abs(table - fixed).max() < 1e-5:
        config = dataclasses.replace(config, position="sincos", class_position=False)
    return config, "encoder"


def default_flavour(config: ViTConfig) -> str:
    """The flavour to write a model in."""
    return "encoder"


def table(config: ViTConfig, flavour: str) -> Table:
    """Pairs and constants of an encoder."""
    inference.require(config, NAME, registers=0, layer_scale=None, mlp="gelu", norm_eps=1e-6)
    whole = timm.table(config, "timm", NAME)
    if config.position == "learned":
        return whole
    inference.require(config, NAME, position="sincos", class_position=False)
    return Table(
        [pair for pair in whole.pairs if pair.theirs != "pos_embed"], [_fixed("pos_embed", config.width, config)]
    )


def load_autoencoder(
    weights: Mapping[str, np.ndarray] | str | os.PathLike,
    *,
    num_heads: int | None = None,
    decoder_heads: int = DECODER_HEADS,
    image_size: tuple[int, int] | None = None,
) -> MaskedAutoencoder:
    """Encoder and decoder of a file that has both, in float32.

    Args:
      weights: a state dict, or the path of a .safetensors, .npz or .pth file; containers and wrappers are taken off.
      num_heads, decoder_heads: heads per block; None: those of the published encoder of that width.
      image_size: (height, width) that the table of positions belongs to; needed where it is not a square.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there is no decoder, or one message with every tensor that is missing, unexpected or misshapen.
    """
    content = reading.read(weights) if isinstance(weights, str | os.PathLike) else weights
    state, _ = reading.state_dict(content)
    width = inference.shape(state, NAME, "decoder_embed.weight", 2)[0]
    encoder, _ = infer(
        {k: t for k, t in state.items() if not k.startswith(OTHERS)}, num_heads=num_heads, image_size=image_size
    )
    decoder = {k.removeprefix("decoder_"): t for k, t in state.items() if k.startswith("decoder_blocks.")}
    config = MaskedAutoencoderConfig(encoder, width, inference.depth(decoder, NAME), decoder_heads)
    abstract = jax.eval_shape(lambda: zoo.build(config, nnx.Rngs(params=0)))
    shapes = {name: t.shape for name, t in jax.eval_shape(logical.to_logical, abstract).items()}
    tensors = mapping.read(_autoencoder_table(config), state, shapes, f"{NAME} with its decoder")
    return logical.from_logical(abstract, tensors)


def _autoencoder_table(config: MaskedAutoencoderConfig) -> Table:
    encoder, width = table(config.encoder, "encoder"), config.decoder_width
    pairs = [_renamed(pair, "", "encoder.") for pair in encoder.pairs]
    pairs += mapping.linear("decoder_embed", "decoder.embed") + mapping.norm("decoder_norm", "decoder.norm")
    pairs += [
        mapping.same("mask_token", "decoder.mask_token", ones=2),
        *mapping.linear("decoder_pred", "decoder.pixels"),
    ]
    for i in range(config.decoder_depth):
        block = mapping.dense_block(i, dataclasses.replace(config.encoder, qkv_bias=True), ())
        pairs += [_renamed(pair, "decoder_", "decoder.") for pair in block]
    return Table(pairs, [*encoder.constants, _fixed("decoder_pos_embed", width, config.encoder)])


def _renamed(pair: Pair, theirs: str, ours: str) -> Pair:
    """The pair of tensors whose names have something before them."""
    return dataclasses.replace(pair, theirs=theirs + pair.theirs, ours=tuple(ours + name for name in pair.ours))


def _fixed(name: str, width: int, config: ViTConfig) -> Constant:
    return Constant(name, _sincos(width, config), "the sin-cos table", fixed=False)


def _sincos(width: int, config: ViTConfig) -> np.ndarray | None:
    """The table [1, 1 + N, width], the class token's row zero; None where 4 does not divide the width."""
    if width % 4:
        return None
    rows = SinCos(width).table(check_grid(config.image_size, config.patch_size, "image_size"))
    return np.concatenate([np.zeros((1, width), np.float32), rows])[None]
