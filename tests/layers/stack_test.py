"""Stacks and logical tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.layers import isotypic
from equivit.layers.stack import Stack
from equivit.symmetry.groups import OCTIC


class Toy(nnx.Module):
    """A block that adds a random number when it has a key."""

    def __init__(self, width, hidden, *, rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (width, hidden)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (hidden, width)))

    def __call__(self, x, *, key=None):
        noise = 0 if key is None else jax.random.normal(key)
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...] + noise


def stack(**kwargs):
    runs = [(3, lambda r: Toy(4, 8, rngs=r)), (2, lambda r: Toy(4, 6, rngs=r))]
    return Stack(runs, rngs=nnx.Rngs(0), **kwargs)


X = jnp.linspace(-1, 1, 8).reshape(2, 4)
CLOSE = dict(rtol=1e-5, atol=1e-6)  # scanned and separate programs may round differently


def one_by_one(blocks, key=None):
    x, outputs = X, []
    for i in range(len(blocks)):
        x = blocks[i](x, key=None if key is None else jax.random.fold_in(key, i))
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("key", [None, jax.random.key(1)], ids=["still", "random"])
@pytest.mark.parametrize("kwargs", [{}, {"remat": "full"}, {"remat": "dots"}, {"unroll": True}], ids=str)
def test_equals_its_blocks_one_after_the_other(kwargs, key):
    blocks = stack(**kwargs)
    expected = one_by_one(blocks, key)
    y, captured = blocks(X, capture=(1, 2, 4), key=key)
    np.testing.assert_allclose(y, expected[-1], **CLOSE)
    assert sorted(captured) == [1, 2, 4]
    for i, value in captured.items():
        np.testing.assert_allclose(value, expected[i], **CLOSE)


def test_parts_compose():
    blocks, key = stack(), jax.random.key(2)
    x, _ = blocks(X, stop=2, key=key)
    x, _ = blocks(x, start=2, key=key)
    np.testing.assert_allclose(x, blocks(X, key=key)[0], **CLOSE)


def test_replace_splits_and_regroups_runs():
    blocks = stack()
    other = Toy(4, 6, rngs=nnx.Rngs(9))
    changed = blocks.replace(1, other)
    assert changed.lengths == (1, 1, 1, 2)
    np.testing.assert_array_equal(changed[1].up[...], other.up[...])
    assert changed.replace(1, blocks[1]).lengths == (3, 2)
    assert blocks.replace(2, other).lengths == (2, 3)  # joins the run after it
    np.testing.assert_allclose(changed(X)[0], one_by_one(changed)[-1], **CLOSE)


def test_depth_costs_no_program():
    """The jaxpr of a deep stack has as many equations as that of a shallow one."""

    def equations(length):
        blocks = Stack([(length, lambda r: Toy(4, 8, rngs=r))], rngs=nnx.Rngs(0))
        return len(str(jax.make_jaxpr(lambda b, x: b(x)[0])(blocks, X)).splitlines())

    assert equations(48) == equations(2)


def test_index_out_of_range_is_refused():
    with pytest.raises(IndexError, match="block 5 of 5; the blocks are 0 to 4"):
        stack()[5]
    with pytest.raises(ValueError, match="remat='some' is not one of"):
        stack(remat="some")


class Octic(nnx.Module):
    """Two scanned linear maps and one more."""

    def __init__(self):
        def make(rngs):
            return isotypic.Linear(16, 16, group=OCTIC, rngs=rngs)

        self.blocks = Stack([(2, make)], rngs=nnx.Rngs(0))
        self.head = make(nnx.Rngs(1))


def test_logical_names_and_shapes():
    tensors = logical.to_logical(Octic())
    shapes = {"A1": (2, 2), "A2": (2, 2), "B1": (2, 2), "B2": (2, 2), "E": (4, 4), "bias": (2,)}
    prefixes = ("blocks.0", "blocks.1", "head")
    assert {k: v.shape for k, v in tensors.items()} == {f"{p}.{n}": s for p in prefixes for n, s in shapes.items()}
    assert logical.stack_axes(Octic())["blocks.runs.0.lines"] == 2


def test_logical_tensors_are_slices_and_come_back():
    model = Octic()
    tensors = logical.to_logical(model)
    np.testing.assert_array_equal(tensors["blocks.1.B1"], model.blocks[1].lines[2])
    skeleton = jax.eval_shape(lambda: model)
    again = logical.take(logical.from_logical(skeleton, tensors))
    for leaf, array in logical.take(model).items():
        np.testing.assert_array_equal(again[leaf], array)


def test_rules_are_computed_per_slice():
    model = Octic()
    table, leaf = logical.tensors(model)["blocks.runs.0.lines"], logical.take(model)["blocks.runs.0.lines"]
    values = logical.per_tensor(table, leaf, lambda t: float(t.name == "blocks.1.A2") + len(t.shape))
    assert values.shape == (2, 4, 1, 1)
    np.testing.assert_array_equal(values[..., 0, 0], [[2, 2, 2, 2], [2, 3, 2, 2]])
