"""BiXT's official files.

They store the Fourier code of their grid, which our model computes: reading checks it, writing recomputes it.
"""

from typing import Any

import numpy as np

from equivit import constraints
from equivit.models.bixt.model import CODE, BiXTConfig
from equivit.pretrained import inference, mapping
from equivit.pretrained.format import Format, Hints, State
from equivit.pretrained.mapping import Constant, Pair, Table

NAME = "bixt"
CODE_NAME = "fourier_pos_encode.pos"
HEAD_CHANNELS = 32  # of the published models
IMAGE = (224, 224)  # of the published models
ROUNDING = 1e-5  # their code is computed in float32


def infer(state: State, hints: Hints) -> tuple[BiXTConfig, str]:
    """The configuration.

    A file determines the input size of a token and the number of tokens.  Without `image_size`, it is 224 pixels if
    patches then overlap by halves or quarters; otherwise patches do not overlap.

    Raises:
      ValueError: a required tensor is absent, or a hint or the stored code contradicts the rest.
    """
    width, in_channels, *kernel = inference.shape(state, NAME, "patch_embed.proj.weight", 4)
    _, *grid = inference.shape(state, NAME, CODE_NAME, 3)
    width_fits = state[CODE_NAME].shape[0] == CODE.width
    if not width_fits or not np.abs(state[CODE_NAME] - _code((grid[0], grid[1]))).max() <= ROUNDING:  # or it is NaN
        raise ValueError(
            f"{NAME}: {CODE_NAME} is not the Fourier code of {CODE.width} channels on {grid[0]}x{grid[1]}."
        )
    image = hints.image_size or _image(grid, kernel)
    if image[0] % grid[0] or image[1] % grid[1]:
        raise ValueError(f"{NAME}: image_size={image} must be a multiple of the file's {grid[0]}x{grid[1]} tokens.")
    hidden = inference.shape(state, NAME, "blocks.0.self_attention_latents.mlp.fc1.weight", 2)[0]
    heads: Any = max(width // HEAD_CHANNELS, 1) if hints.num_heads is None else hints.num_heads
    constraints.check(f"{NAME}: num_heads", heads, constraints.PositiveInt)
    config = BiXTConfig(
        width=width,
        depth=inference.depth(state, NAME),
        latents=inference.shape(state, NAME, "latents", 3)[1],
        num_heads=heads,
        patch_size=(image[0] // grid[0], image[1] // grid[1]),
        kernel=(kernel[0], kernel[1]),
        image_size=image,
        in_channels=in_channels,
        num_classes=inference.shape(state, NAME, "head.weight", 2)[0] if "head.weight" in state else None,
        mlp_ratio=hidden / width,
    )
    return config, "official"


def table(config: BiXTConfig, flavour: str) -> Table:
    """All tensors of a file."""
    inference.require(config, NAME, norm_eps=1e-6)
    projection = "fourier_pos_encode.token_projection"
    pairs: list[Pair] = [
        mapping.same("latents", "latents", ones=1),
        mapping.moved("patch_embed.proj.weight", "patch_embed.kernel", (2, 3, 1, 0)),
        mapping.same("patch_embed.proj.bias", "patch_embed.bias"),
        Pair(f"{projection}.weight", ("position.weight",), lambda x: (x[..., 0, 0].T,), lambda x: x.T[..., None, None]),
        mapping.same(f"{projection}.bias", "position.bias"),
    ]
    for i in range(config.depth):
        pairs += _block(i, both=i < config.depth - 1)
    pairs += mapping.norm("fc_norm", "norm")
    if config.num_classes is not None:
        pairs += mapping.linear("head", "head")
    (h, w), (ph, pw) = config.image_size, config.patch_size
    return Table(pairs, [Constant(CODE_NAME, _code((h // ph, w // pw)), "the Fourier code", fixed=False)])


def cross_block(theirs: str, ours: str, *, both: bool) -> list[Pair]:
    """The tensors of a `CrossBlock`; `both` as in `CrossAttention`."""
    pairs = mapping.norm(f"{theirs}norm1_lat", f"{ours}norm1_latents")
    pairs += mapping.norm(f"{theirs}norm1_pat", f"{ours}norm1_tokens")
    maps = [("rv_latents" if both else "r_latents", "latents"), ("rv_patches", "tokens"), ("proj_lat", "proj_latents")]
    for name, our_name in maps + [("proj_pat", "proj_tokens")] * both:
        pairs += mapping.linear(f"{theirs}attn.{name}", f"{ours}attention.{our_name}")
    for name, our_name in [("lat", "latents")] + [("pat", "tokens")] * both:
        pairs += mapping.norm(f"{theirs}norm2_{name}", f"{ours}norm2_{our_name}")
        pairs += mapping.linear(f"{theirs}mlp_{name}.fc1", f"{ours}mlp_{our_name}.fc1")
        pairs += mapping.linear(f"{theirs}mlp_{name}.fc2", f"{ours}mlp_{our_name}.fc2")
    return pairs


def _block(index: int, *, both: bool) -> list[Pair]:
    at = f"blocks.{index}"
    pairs = cross_block(f"{at}.cross_attention_latents_token.", f"{at}.cross.", both=both)
    theirs, ours = f"{at}.self_attention_latents", f"{at}.own"
    for name in ("norm1", "norm2"):
        pairs += mapping.norm(f"{theirs}.{name}", f"{ours}.{name}")
    maps = (
        ("attn.qkv", "attention.qkv"),
        ("attn.proj", "attention.proj"),
        ("mlp.fc1", "mlp.fc1"),
        ("mlp.fc2", "mlp.fc2"),
    )
    for name, our_name in maps:
        pairs += mapping.linear(f"{theirs}.{name}", f"{ours}.{our_name}")
    return pairs


def _image(grid: list[int], kernel: list[int]) -> tuple[int, int]:
    """The image size of a file with this number of tokens."""
    published = [
        kernel[0] // overlap * grid[0] for overlap in (1, 2, 4) if kernel[0] == kernel[1] and grid[0] == grid[1]
    ]
    return IMAGE if IMAGE[0] in published else (kernel[0] * grid[0], kernel[1] * grid[1])


def _code(grid: tuple[int, int]) -> np.ndarray:
    """The stored code [channels, h, w]."""
    return CODE.table(grid).reshape(*grid, CODE.width).transpose(2, 0, 1)


FORMAT = Format(NAME, ("official",), BiXTConfig, infer, table)
