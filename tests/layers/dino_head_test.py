"""The head of DINO: its parts, how it starts, what it declares, and its type."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical, precision
from equivit.layers.dino_head import DinoHead, unit
from equivit.objectives.objective import usual_rule
from tests.drawing import normal


def make():
    return DinoHead(24, 300, hidden=64, bottleneck=16, rngs=nnx.Rngs(0))


HEAD = jax.jit(make)()


def test_logits_are_gains_times_cosines():
    head = logical.put(HEAD, {"gains": normal(300), "directions": 3 * HEAD.directions[...]})
    x = normal(2, 5, 24, seed=1)
    features, y = jax.jit(lambda head, x: (head.mlp(x), head(x)))(head, x)
    np.testing.assert_allclose(np.linalg.norm(features, axis=-1), 1, rtol=1e-6)
    v = np.asarray(HEAD.directions[...], np.float64)
    rows = np.asarray(normal(300))[:, None] * v / np.linalg.norm(v, axis=-1, keepdims=True)
    chex.assert_trees_all_close(y, np.asarray(features) @ rows.T, atol=1e-5)


def test_how_it_starts():
    """The MLP normal with deviation 0.02 and no bias; prototypes uniform as PyTorch's linear maps, gains 1."""
    tensors = logical.to_logical(HEAD)
    np.testing.assert_allclose(tensors["mlp.fc2.weight"].std(), 0.02, rtol=0.05)  # 4,096 draws
    assert not any(tensors[f"mlp.fc{i}.bias"].any() for i in (1, 2, 3))
    assert (tensors["gains"] == 1).all()
    largest = np.abs(tensors["directions"]).max()
    assert 0.99 / 4 < largest <= 1 / 4
    np.testing.assert_allclose(tensors["directions"].std(), 1 / 4 / np.sqrt(3), rtol=0.05)


def test_what_decays():
    table = [t for leaf in logical.tensors(nnx.eval_shape(make)).values() for t in leaf.flat]
    assert {t.name for t in table if usual_rule(t).decay} == {"directions", *(f"mlp.fc{i}.weight" for i in (1, 2, 3))}
    assert [t.name for t in table if not t.decay] == ["gains"]


def test_mixed_precision_ends_in_float32():
    mixed = precision.cast(HEAD, "mixed")
    assert mixed.directions[...].dtype == jnp.bfloat16 and mixed.gains[...].dtype == jnp.float32
    x = normal(7, 24, seed=2)
    run = jax.jit(lambda head, x: head(x))
    rounded, exact = run(mixed, x), run(HEAD, x)
    assert rounded.dtype == jnp.float32
    chex.assert_trees_all_close(rounded, exact, atol=3e-2)  # cosines of vectors rounded to 8 bits, in five products
    assert (rounded != exact).any()


def test_a_vector_of_zeros_has_a_finite_gradient():
    y, gradient = jax.jit(jax.value_and_grad(lambda x: unit(x, 1e-12).sum()))(np.zeros((2, 3), np.float32))
    assert y == 0 and np.isfinite(gradient).all()
