"""BiXT's official files.

They store the Fourier code of their grid, which our model computes: reading checks it, writing recomputes it.
"""

from typing import Any

import numpy as np

from equivit import constraints
from equivit.models.bixt.model import CODE, BiXTConfig
from equivit.pretrained import mapping
from equivit.pretrained.format import Format, Hints, State, require
from equivit.pretrained.mapping import Constant, Table

NAME = "bixt"
CODE_NAME = "fourier_pos_encode.pos"
# The modules of a cross block; the last block does not update tokens, and has another name for the first linear map.
CROSS_BLOCK = {
    "norm1_latents": "norm1_lat",
    "norm1_tokens": "norm1_pat",
    "attention.latents": "attn.rv_latents",
    "attention.tokens": "attn.rv_patches",
    "attention.proj_latents": "attn.proj_lat",
    "attention.proj_tokens": "attn.proj_pat",
    "norm2_latents": "norm2_lat",
    "norm2_tokens": "norm2_pat",
    "mlp_latents.fc1": "mlp_lat.fc1",
    "mlp_latents.fc2": "mlp_lat.fc2",
    "mlp_tokens.fc1": "mlp_pat.fc1",
    "mlp_tokens.fc2": "mlp_pat.fc2",
}
LAST_BLOCK = CROSS_BLOCK | {"attention.latents": "attn.r_latents"}
ROWS = {
    "latents": mapping.reshaped("latents", lambda x: x[None]),
    "patch_embed": "patch_embed.proj",
    "position.weight": mapping.pointwise("fourier_pos_encode.token_projection.weight"),
    "position.bias": "fourier_pos_encode.token_projection.bias",
    **mapping.inside("blocks.#.cross", "blocks.#.cross_attention_latents_token", CROSS_BLOCK),
    **mapping.inside("blocks.#.own", "blocks.#.self_attention_latents", mapping.BLOCK),
    "norm": "fc_norm",
    "head": "head",
}
HEAD_CHANNELS = 32  # of the published models
IMAGE = (224, 224)  # of the published models
ROUNDING = 1e-5  # their code is computed in float32


def infer(state: State, hints: Hints) -> tuple[BiXTConfig, str]:
    """The configuration.

    A file determines the input size of a token and the number of tokens.  Without `image_size`, it is 224 pixels if
    patches then overlap by halves or quarters; otherwise patches do not overlap.
    """
    width, in_channels, *kernel = state.shape("patch_embed.proj.weight", 4)
    _, *grid = state.shape(CODE_NAME, 3)
    width_fits = state[CODE_NAME].shape[0] == CODE.width
    if not width_fits or not np.abs(state[CODE_NAME] - _code((grid[0], grid[1]))).max() <= ROUNDING:  # or it is NaN
        raise ValueError(
            f"{NAME}: {CODE_NAME} is not the Fourier code of {CODE.width} channels on {grid[0]}x{grid[1]}."
        )
    image = hints.image_size or _image(grid, kernel)
    if image[0] % grid[0] or image[1] % grid[1]:
        raise ValueError(f"{NAME}: image_size={image} must be a multiple of the file's {grid[0]}x{grid[1]} tokens.")
    hidden = state.out("blocks.0.self_attention_latents.mlp.fc1")
    heads: Any = max(width // HEAD_CHANNELS, 1) if hints.num_heads is None else hints.num_heads
    constraints.check(f"{NAME}: num_heads", heads, constraints.PositiveInt)
    config = BiXTConfig(
        width=width,
        depth=state.depth(),
        latents=state.shape("latents", 3)[1],
        num_heads=heads,
        patch_size=(image[0] // grid[0], image[1] // grid[1]),
        kernel=(kernel[0], kernel[1]),
        image_size=image,
        in_channels=in_channels,
        num_classes=state.classes(),
        mlp_ratio=hidden / width,
    )
    return config, "official"


def table(config: BiXTConfig, flavour: str) -> Table:
    """All tensors of a file."""
    require(config, NAME, norm_eps=1e-6)
    last = f"blocks.{config.depth - 1}"
    rows = ROWS | mapping.inside(f"{last}.cross", f"{last}.cross_attention_latents_token", LAST_BLOCK)
    (h, w), (ph, pw) = config.image_size, config.patch_size
    code = Constant(CODE_NAME, _code((h // ph, w // pw)), "the Fourier code", fixed=False)
    return mapping.table(config, rows, [code])


def _image(grid: list[int], kernel: list[int]) -> tuple[int, int]:
    """The image size of a file with this number of tokens."""
    published = [
        kernel[0] // overlap * grid[0] for overlap in (1, 2, 4) if kernel[0] == kernel[1] and grid[0] == grid[1]
    ]
    return IMAGE if IMAGE[0] in published else (kernel[0] * grid[0], kernel[1] * grid[1])


def _code(grid: tuple[int, int]) -> np.ndarray:
    """The stored code [channels, h, w]."""
    return CODE.table(grid).reshape(*grid, CODE.width).transpose(2, 0, 1)


FORMAT = Format(NAME, ("official",), BiXTConfig, infer, table, mark=r"fourier_pos_encode\.pos")
