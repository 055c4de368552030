"""ONNX sessions of single modules and of whole backbones with random weights, for the scripts about speed."""

import argparse
import pathlib
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from configs import depthwise
from equivit import models, onnx_files, profile
from equivit.depthwise.replacement import PATCHES_ONLY
from equivit.layers import dense
from equivit.layers.depthwise import replace_attention
from equivit.models.inference import deployed, deployed_part
from experiments import flags
from kernels import using

NAMES = {None: "MhSA", "conv": "Conv_all", "dw": "DW", "spvit": "SPViT-style", "ens_dw": "Ens+DW"}
VIT_L = ("dinov2_vit_l14", 336)  # model and pixels that the paper's numbers are of


def parser(description: str, script: str, **defaults: int) -> argparse.ArgumentParser:
    """`flags.timing_parser` with a backbone and the size of its images."""
    options = flags.timing_parser(description, script, **defaults)
    options.add_argument("--model", default=VIT_L[0], help="the backbone (%(default)s)")
    options.add_argument("--pixels", type=int, default=VIT_L[1], help="side of its images (%(default)s)")
    return options


def module(width: int, num_heads: int, kind: str | None, *, folded: bool = False) -> nnx.Module:
    """An attention of random weights, replaced unless `kind` is None; `folded`: as it is deployed."""
    attention = dense.Attention(width, num_heads, rngs=nnx.Rngs(0))
    if kind is None:
        return attention
    replaced = replace_attention(attention, kind)
    return replaced.folded() if folded else replaced


def module_call(grid: tuple[int, int], width: int, num_heads: int, kind: str | None) -> Callable[[], None]:
    """A call of one module on the tokens of a grid, as it is deployed."""
    form = deployed_part(module(width, num_heads, kind), grid)
    return _call(lambda x: form(x, grid), (1, grid[0] * grid[1], width))


def backbone_call(name: str, size: tuple[int, int], replaced: tuple = (), **overrides) -> Callable[[], None]:
    """A call of a backbone of the zoo without a head, which gives the maps that a decoder reads, after the final norm.

    `replaced` and the overrides are fields of `ViTConfig`.
    """
    options = dict(PATCHES_ONLY, image_size=size, num_classes=None, replaced=replaced) | overrides
    form = deployed(models.create(name, **options), size)
    blocks = depthwise.read(form.config.depth)

    def maps(images):
        return tuple(grid.values for grid in form.features(images, blocks=blocks).grids)

    return _call(maps, (1, *size, 3), outputs=1 + len(blocks))


def _call(function: Callable, shape: tuple[int, ...], *, outputs: int = 1) -> Callable[[], None]:
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.onnx"
        with using("reference"):  # the standard's operations have no choice by platform
            names = tuple(f"y{i}" for i in range(outputs))
            onnx_files.write(path, function, jax.ShapeDtypeStruct(shape, jnp.float32), names, opset=17)
        return profile.bound(onnx_files.session(path))


def milliseconds(calls: Mapping[Any, Callable[[], None]], options) -> dict[Any, float]:
    """The median of each call; `options` has `runs` and `warmup`."""
    seconds = profile.interleaved(calls, runs=options.runs, warmup=options.warmup)
    return {name: 1e3 * sorted(times)[len(times) // 2] for name, times in seconds.items()}
