"""The token mixers of the efficient baselines take any number of images, none included."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from equivit.models.bixt.attention import CrossAttention
from equivit.models.efficientvit.attention import LinearAttention
from equivit.models.mobilenetv4.attention import MultiQueryAttention
from equivit.models.shvit.attention import SingleHeadAttention

INIT = nnx.initializers.xavier_uniform()
MAPS = {
    "linear": lambda rngs: LinearAttention(8, head_channels=4, rngs=rngs),
    "multi-query": lambda rngs: MultiQueryAttention(8, num_heads=3, head_channels=4, kv_stride=2, rngs=rngs),
    "single-head": lambda rngs: SingleHeadAttention(8, 5, rngs=rngs),
}
BATCHES = [(), (2,), (2, 3), (0,), (2, 0)]


def shape(module, *arrays):
    abstract = jax.eval_shape(lambda: module(nnx.Rngs(0)))
    arrays = [jax.ShapeDtypeStruct(a, jnp.float32) for a in arrays]
    return jax.tree.map(lambda a: a.shape, jax.eval_shape(lambda m, *x: m(*x), abstract, *arrays))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("name", MAPS)
def test_maps(name, batch):
    assert shape(MAPS[name], (*batch, 3, 5, 8)) == (*batch, 3, 5, 8)


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("both", [True, False])
def test_latents_and_tokens(both, batch):
    found = shape(lambda rngs: CrossAttention(8, 2, both=both, init=INIT, rngs=rngs), (*batch, 3, 8), (*batch, 5, 8))
    assert found == ((*batch, 3, 8), (*batch, 5, 8) if both else None)
