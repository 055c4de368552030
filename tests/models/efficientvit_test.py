"""EfficientViT of MIT: its linear attention."""

import jax
import jax.numpy as jnp
import numpy as np

from equivit.models.efficientvit.attention import linear_attention


def test_linear_attention_is_attention_by_products():
    """relu(q) relu(k)^T, of all pairs; in bfloat16 too it is computed in float32."""
    random = np.random.default_rng(0)
    q, k, v = (random.normal(size=(2, 7, 3, 4)).astype(np.float32) for _ in range(3))
    weights = np.einsum("bnhd,bmhd->bhnm", np.maximum(q, 0), np.maximum(k, 0), dtype=np.float64)
    expected = np.einsum("bhnm,bmhd->bnhd", weights / (weights.sum(-1, keepdims=True) + 1e-5), v)
    attend = jax.jit(linear_attention)
    np.testing.assert_allclose(attend(q, k, v), expected, rtol=0, atol=1e-5)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    y = attend(*rounded)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, attend(*(x.astype(jnp.float32) for x in rounded)))
