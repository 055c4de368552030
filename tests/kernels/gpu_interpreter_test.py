"""The Mosaic GPU kernels: values in the GPU interpreter, which the newest JAX has, and lowering for cuda on any."""

import functools

import jax
import jax.numpy as jnp
import pytest

from equivit.kernels.d8_gelu import d8_gelu
from equivit.kernels.d8_gelu import gpu as d8_gelu_gpu
from equivit.kernels.d8_gelu import reference as d8_gelu_reference
from equivit.kernels.octic_linear_gelu import gpu as octic_linear_gelu_gpu
from equivit.kernels.octic_linear_gelu import octic_linear_gelu
from equivit.kernels.octic_linear_gelu import reference as octic_linear_gelu_reference
from experiments.benchmarks.field_shapes import REALISTIC, Shape
from tests.kernels.comparison import assert_near, draw, draw_arguments, value_and_gradient, widen

FIELDS = (  # by what is awkward; with one block, which has to walk over all tiles
    Shape("fewer rows than a tile", (), 1, 8, 8),
    Shape("a ring used again", (3,), 37, 96, 96),
    Shape("channels past the last tile", (1,), 5, 200, 200),
)
MAPS = (  # two blocks, one cluster
    Shape("one step and tile", (), 8, 16, 64),
    Shape("rows that are padded", (2,), 69, 48, 128),
    Shape("depth of 32", (1,), 137, 64, 64),
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", FIELDS, ids=lambda shape: shape.name)
def test_d8_gelu_and_its_gradient_are_the_reference_s(shape, dtype, interpreter):
    field, gradient = draw(shape.field(shape.hidden), dtype), draw(shape.field(shape.hidden), dtype, seed=1)
    op = functools.partial(d8_gelu, implementation="gpu")
    expected = value_and_gradient(d8_gelu_reference.d8_gelu, widen(field), widen(gradient))
    assert_near(value_and_gradient(op, field, gradient), expected)


@pytest.mark.parametrize("shape", MAPS, ids=lambda shape: shape.name)
def test_octic_linear_gelu_is_the_reference_s(shape, interpreter):
    arguments = draw_arguments(shape, "bfloat16")
    op = functools.partial(octic_linear_gelu, implementation="gpu")
    with jax.default_matmul_precision("highest"):
        expected = octic_linear_gelu_reference.octic_linear_gelu(*widen(arguments))
    assert_near(jax.jit(op)(*arguments), expected)


@pytest.mark.parametrize("shape", [REALISTIC[0], REALISTIC[5], REALISTIC[-1]], ids=lambda shape: shape.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_lower_for_cuda(shape, dtype):
    def abstract(*shapes):
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    rows = Shape("", (), shape.batch[0] * shape.tokens, shape.channels, shape.hidden)
    field = abstract(*rows.field(shape.hidden))
    programs = [(d8_gelu_gpu.forward, field, "d8_gelu"), (d8_gelu_gpu.backward, field * 2, "d8_gelu_backward")]
    if octic_linear_gelu_gpu.supported(shape.channels, shape.hidden, dtype):
        arguments = (*abstract(*rows.field(shape.channels)), *abstract(*shape.weights()))
        programs.append((octic_linear_gelu_gpu.forward, arguments, "octic_linear_gelu"))
    assert len(programs) == 2 + (dtype == "bfloat16")
    for function, arguments, kernel in programs:
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @mosaic_gpu" in text
        assert f"{kernel}_mosaic_gpu" in text


def test_what_is_supported():
    assert d8_gelu_gpu.supported(8, jnp.bfloat16) and d8_gelu_gpu.supported(4, jnp.float32)
    assert not d8_gelu_gpu.supported(4, jnp.bfloat16)  # rows of 8 bytes
    assert not d8_gelu_gpu.supported(8, jnp.float16)
    for shape in REALISTIC:
        assert d8_gelu_gpu.supported(shape.hidden, jnp.bfloat16) and d8_gelu_gpu.supported(shape.hidden, jnp.float32)
        assert octic_linear_gelu_gpu.supported(shape.channels, shape.hidden, jnp.bfloat16)
        assert not octic_linear_gelu_gpu.supported(shape.channels, shape.hidden, jnp.float32)
