"""Calls of single modules and of whole backbones with random weights, in ONNX Runtime and in JAX, for timing."""

import functools
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import models, onnx_files, profile
from equivit.configs import depthwise
from equivit.depthwise.replacement import PATCHES_ONLY
from equivit.kernels import using
from equivit.layers import dense
from equivit.layers.depthwise import replace_attention
from equivit.models.inference import Blocks, deployed, deployed_part

NAMES = {None: "MhSA", "conv": "Conv_all", "dw": "DW", "spvit": "SPViT-style", "ens_dw": "Ens+DW"}
# Of JAX: the dtype of parameters and inputs, and the precision of products.
PRECISIONS = {
    "float32": ("float32", "highest"),
    "tf32": ("float32", "tensorfloat32"),
    "bfloat16": ("bfloat16", "default"),
    "float16": ("float16", "default"),
}


class Subject(NamedTuple):
    """Something to time.

    Attributes:
      module: its parameters.
      function: of the module and a batch; an array, or a tuple of `outputs` arrays.
      shape: of one example.
    """

    module: nnx.Module
    function: Callable[[Any, jax.Array], Any]
    shape: tuple[int, ...]
    outputs: int = 1


def module(width: int, num_heads: int, kind: str | None, *, folded: bool = False) -> nnx.Module:
    """An attention of random weights, replaced in the released form unless `kind` is None; `folded`: for inference."""
    attention = dense.Attention(width, num_heads, rngs=nnx.Rngs(0))
    if kind is None:
        return attention
    replaced = replace_attention(attention, kind)
    return replaced.folded() if folded else replaced


def of_module(grid: tuple[int, int], width: int, num_heads: int, kind: str | None, *, onnx: bool) -> Subject:
    """One module on the tokens of a grid, as ONNX Runtime or JAX has it at inference."""
    made = module(width, num_heads, kind, folded=True)
    form = deployed_part(made, grid) if onnx else made
    return Subject(form, lambda form, x: form(x, grid), (grid[0] * grid[1], width))


def of_backbone(name: str, size: tuple[int, int], replaced: tuple = (), *, onnx: bool, **overrides: Any) -> Subject:
    """A backbone of the zoo without a head, which gives the maps that a decoder reads, after the final norm.

    `replaced` and the overrides are fields of `ViTConfig`.
    """
    options = dict(PATCHES_ONLY, image_size=size, num_classes=None, replaced=replaced) | overrides
    model = models.create(name, **options)
    form = deployed(model, size) if onnx else _folded(model)
    blocks = depthwise.read(model.config.depth)

    def maps(form, images):
        return tuple(grid.values for grid in form.features(images, blocks=blocks).grids)

    return Subject(form, maps, (*size, 3), outputs=1 + len(blocks))


def _folded(model: Any) -> Any:
    """The model with its blocks written out and replaced attention folded; JAX chooses the form of attention."""
    blocks = [model.blocks[i] for i in range(len(model.blocks))]
    for block in blocks:
        if hasattr(block.attention, "folded"):
            block.attention = block.attention.folded()
    model.blocks = Blocks(blocks, model.blocks.lengths)
    return model


def in_onnx(subject: Subject) -> Callable[[], None]:
    """A call on one example in ONNX Runtime, on one thread."""
    shape = jax.ShapeDtypeStruct((1, *subject.shape), jnp.float32)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.onnx"
        with using("reference"):  # the standard's operations have no choice by platform
            names = tuple(f"y{i}" for i in range(subject.outputs))
            onnx_files.write(path, functools.partial(subject.function, subject.module), shape, names, opset=17)
        return profile.bound(onnx_files.session(path))


def in_jax(subject: Subject, precision: str, batch: int, repeats: int) -> Callable[[], jax.Array]:
    """A call that applies the subject `repeats` times in one program, so that its start hardly counts.

    Each input depends on the output before it; equal ones would be computed once.
    """
    dtype, products = PRECISIONS[precision]
    form = jax.tree.map(lambda leaf: leaf.astype(dtype), subject.module)

    def run(form, x):
        def step(_, x):
            y, *others = jax.tree.leaves(subject.function(form, x))
            if y.shape == x.shape:
                return y.astype(dtype)
            return x + (1e-3 * sum(other.mean() for other in (y, *others))).astype(dtype)

        return jax.lax.fori_loop(0, repeats, step, x)

    x = jax.random.normal(jax.random.key(0), (batch, *subject.shape)).astype(dtype)
    with jax.default_matmul_precision(products):
        program = jax.jit(run).lower(form, x).compile()
    return lambda: program(form, x)
