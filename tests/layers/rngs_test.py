"""Keys of parameters: those of `nnx.Rngs`, with no counter in the trace."""

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, models
from equivit.layers.rngs import Keys


def drawn(rngs):
    return jax.random.key_data(jax.numpy.stack([rngs.params() for _ in range(3)]))


@pytest.mark.parametrize("through", [lambda f: f, jax.jit, lambda f: lambda key: jax.vmap(f)(key[None])[0]])
def test_the_keys_of_nnx(through):
    """Eagerly, in a compiled program, and for each of several blocks."""
    key = jax.random.key(3)
    np.testing.assert_array_equal(
        through(lambda key: drawn(Keys(key)))(key), through(lambda key: drawn(nnx.Rngs(params=key)))(key)
    )
    np.testing.assert_array_equal(drawn(Keys(3)), drawn(nnx.Rngs(3)))


def test_a_model_is_the_same():
    ours, theirs = (logical.to_logical(models.create("octic_vit_pico16", rngs=rngs)) for rngs in (None, nnx.Rngs(0)))
    assert ours.keys() == theirs.keys()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def test_a_trace_has_no_counter():
    """Each draw of `nnx.Rngs` adds operations to the program; the test looks for them."""
    key = jax.random.key(0)
    ours = jax.make_jaxpr(lambda key: drawn(Keys(key)))(key)
    assert len(ours.eqns) < len(jax.make_jaxpr(lambda key: drawn(nnx.Rngs(params=key)))(key).eqns)
