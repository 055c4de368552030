"""Rows and columns of maps, against indices of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.kernels.gather import gather

ROWS = np.array([[-1, 0, 7, 2], [3, 3, 1, 0]], np.int32)  # of 5
COLUMNS = np.array([[6, -8, 0], [2, 5, 13]], np.int32)  # of 7


def draw(dtype):
    """Two maps of 5 x 7 with two axes of channels; floating-point numbers have all bits."""
    values = np.random.default_rng(0).normal(size=(2, 5, 7, 2, 3)) * 1e3
    return jnp.asarray(values, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
@pytest.mark.parametrize("implementation", ["auto", "reference", "tpu"])
def test_entries_come_from_their_row_and_column(implementation, dtype):
    x = draw(dtype)
    if implementation == "tpu" and dtype not in ("float32", "bfloat16"):
        with pytest.raises(ValueError, match=f"'tpu' multiplies maps of float32, bfloat16, not {dtype}"):
            gather(x, ROWS, COLUMNS, implementation=implementation)
        return
    found = gather(x, ROWS, COLUMNS, implementation=implementation)
    assert found.dtype == x.dtype
    for b in range(2):
        expected = np.asarray(x[b])[np.ix_(ROWS[b] % 5, COLUMNS[b] % 7)]
        np.testing.assert_array_equal(np.asarray(found[b]), expected)


def test_a_tpu_gets_products_at_the_highest_precision():
    """At a lower one a TPU would round the maps to bfloat16."""
    text = jax.jit(gather).trace(draw("float32"), ROWS, COLUMNS).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("precision = [HIGHEST, HIGHEST]") == text.count("stablehlo.dot_general") == 2
    assert "stablehlo.gather" not in text


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="gather: implementation='cuda' is not one of"):
        gather(draw("float32"), ROWS, COLUMNS, implementation="cuda")
