"""Adaptive patch merging: what it chooses, and that its gradient is that of merging there and nowhere else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import precision, testing
from equivit.models.swin.merge import PatchMerging

GRID, WIDTH = (6, 10), 4  # halves are odd
SLOPES = np.random.default_rng(2).normal(size=(4, 15, 2 * WIDTH))
both = pytest.mark.parametrize("norm_first", [True, False], ids=["v1", "v2"])


@functools.cache
def layer(norm_first):
    abstract = jax.eval_shape(lambda: PatchMerging(WIDTH, norm_first=norm_first, eps=1e-5, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda a: np.asarray(a, np.float64), testing.randomise(abstract, jax.random.key(1)))


def begun(x, p, q):
    """Maps [B, h, w, ...] that begin at another token."""
    return np.roll(x, (-p, -q), (-3, -2))


def maps():
    """One map begun at each of its four places, so that each phase is chosen for one of them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*GRID, WIDTH)) * np.exp(rng.normal(size=(*GRID, 1)))  # tokens of unlike norms
    return np.stack([begun(x, p, q) for p, q in np.ndindex(2, 2)])


@functools.partial(jax.jit, static_argnums=3)
def adaptive(merge, x, slopes, select):
    """The merged map, the choice, and the gradient of sum(slopes * merged) by layer and map."""

    def apply(merge, x):
        y, _, choice = merge.adaptive(x.reshape(4, -1, WIDTH), GRID, select)
        return y, choice

    y, pull, choice = jax.vjp(apply, merge, x, has_aux=True)
    return y, choice, pull(slopes)


@jax.jit
def directly(merge, x, slopes):
    """The same, merged where the maps begin."""
    y, pull = jax.vjp(lambda merge, x: merge(x.reshape(4, -1, WIDTH), GRID)[0], merge, x)
    return y, pull(slopes)


def strongest(merge, x, select):
    """The phase with the largest norm, by the definition."""

    def kept(p, q):
        y = begun(x, p, q)
        four = np.concatenate([y[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        if select == "input":
            return four[..., :WIDTH]
        if merge.norm_first:
            four = (four - four.mean(-1, keepdims=True)) / np.sqrt(four.var(-1, keepdims=True) + merge.norm.eps)
            four = four * merge.norm.scale[...] + merge.norm.bias[...]
        return four @ merge.reduction.weight[...]

    return np.stack([np.linalg.norm(kept(p, q).reshape(4, -1), axis=1) for p, q in np.ndindex(2, 2)]).argmax(0)


@both
@pytest.mark.parametrize("select", ["output", "input"])
def test_merging_and_its_gradient_are_those_at_the_chosen_phase(norm_first, select):
    merge, x = layer(norm_first), maps()
    with jax.enable_x64(True):
        y, choice, (by_layer, by_map) = jax.device_get(adaptive(merge, x, SLOPES, select))
        index = choice.index
        assert sorted(index) == [0, 1, 2, 3] and (choice.gap > 1e-5).all()
        np.testing.assert_array_equal(index, strongest(merge, x, select))

        def at(index):
            places = [divmod(k, 2) for k in index]
            moved = np.stack([begun(one, *place) for one, place in zip(x, places, strict=True)])
            y, (by_layer, by_map) = jax.device_get(directly(merge, moved, SLOPES))
            back = [begun(one, -p, -q) for one, (p, q) in zip(by_map, places, strict=True)]
            return y, by_layer, np.stack(back)

        close = functools.partial(jax.tree.map, functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12))
        close((y, by_layer, by_map), at(index))
        other = at((index + 1) % 4)
        assert np.abs(by_map - other[2]).max() > 0.1
        assert np.abs(by_layer.reduction.weight[...] - other[1].reduction.weight[...]).max() > 0.1


@both
@pytest.mark.parametrize("select", ["output", "input"])
@pytest.mark.parametrize(("kind", "dtype"), [("mixed", "float32"), ("bfloat16", "bfloat16")])
def test_the_stream_keeps_its_type(norm_first, select, kind, dtype):
    """Merging ends with a linear map without bias, whose bfloat16 must not become the stream's."""
    merge = precision.cast(jax.tree.map(lambda a: a.astype("float32"), layer(norm_first)), kind)
    x = jax.ShapeDtypeStruct((2, 60, WIDTH), dtype)
    y, choice = jax.eval_shape(lambda merge, x: merge.adaptive(x, GRID, select)[::2], merge, x)
    assert (y.dtype, choice.gap.dtype) == (jnp.dtype(dtype), jnp.dtype("float32"))


def test_an_odd_map_is_told():
    merge = PatchMerging(WIDTH, norm_first=True, eps=1e-5, rngs=nnx.Rngs(0))
    for select in ("output", "input"):
        with pytest.raises(
            ValueError, match="the width 5 of the map is not a multiple of 2, .* the nearest are 4 and 6"
        ):
            merge.adaptive(jnp.zeros((1, 20, WIDTH)), (4, 5), select)
