"""Eager random numbers equal compiled ones, although tests/conftest.py cuts them from longer draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

DRAWS = {
    "normal": jax.random.normal,
    "uniform": functools.partial(jax.random.uniform, minval=-3.0, maxval=jnp.float32(2.5)),
    "a bound for each column": functools.partial(jax.random.uniform, minval=jnp.arange(3.0), maxval=4.0),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", DRAWS)
def test_eager_equals_compiled(name, dtype):
    with jax.enable_x64(True):
        for shape in ((5, 3), (4, 1, 3), (0, 3), (3,)):
            draw = functools.partial(DRAWS[name], shape=shape, dtype=dtype)
            found, expected = draw(jax.random.key(7)), jax.jit(draw)(jax.random.key(7))
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
