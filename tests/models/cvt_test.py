"""CvT: stages as scans, statistics, rates of stochastic depth, and padding around the torus."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, models
from equivit.layers import dense
from equivit.layers.batch_stats import recording
from equivit.layers.grid import Layout
from equivit.models import zoo
from equivit.testing import assert_shift_equivariant
from tests.models.backbones import CVT, images, model, near


@jax.jit
def run(model, x):
    """Logits, the features with those at the end of each stage, and the statistics after that."""
    return model(x), model.features(x, blocks=(1, 2)), logical.to_logical(model, nnx.BatchStat)


def test_a_scan_equals_its_blocks_one_by_one():
    """In training, where each block moves its statistics, those of the map alone; otherwise `run` has to leave them."""
    m, x = model("cvt_13"), images((32, 48))

    @jax.jit
    @recording()
    def both_ways(m, x):
        first, second = m.stages
        y, statistics = first.tokens(m.patch_embed(x).reshape(2, 96, 8)), {}
        for i in range(2):
            y = (block := first.blocks[i])(y, Layout((8, 12)), train=True)
            statistics |= {f"stages.0.blocks.{i}.{n}": t for n, t in logical.to_logical(block, nnx.BatchStat).items()}
        y = second.tokens(second.embed(y.reshape(2, 8, 12, 8)).reshape(2, 24, 12))
        block = second.blocks[0]
        keys = block.attention.conv_k.conv(block.norm1(y)[:, 1:].reshape(2, 4, 6, 12))
        y = block(y, Layout((4, 6), prefix=1), train=True)
        statistics |= {f"stages.1.blocks.0.{n}": t for n, t in logical.to_logical(block, nnx.BatchStat).items()}
        tokens = m.trunk(x, train=True)[0].tokens
        return (y, statistics), (tokens, logical.to_logical(m, nnx.BatchStat)), keys

    (tokens, statistics), again, keys = jax.device_get(both_ways(m, x))
    chex.assert_trees_all_close((tokens, statistics), again, rtol=1e-5, atol=1e-5)
    before = logical.to_logical(m, nnx.BatchStat)
    assert len(before) == 3 * 2 * 3 and all(np.abs(before[n] - statistics[n]).max() > 1e-3 for n in before)
    name, rows = "stages.1.blocks.0.attention.conv_k.norm", keys.reshape(-1, 12)
    near(statistics[f"{name}.mean"], 0.9 * before[f"{name}.mean"] + 0.1 * rows.mean(0))
    near(statistics[f"{name}.variance"], 0.9 * before[f"{name}.variance"] + 0.1 * rows.var(0, ddof=1))
    chex.assert_trees_all_equal(jax.device_get(run(m, x)[2]), before)


def test_stochastic_depth_grows_in_each_stage():
    rates = zoo.configuration("cvt_13", drop_path=(0.0, 0.0, 0.1)).rates
    np.testing.assert_allclose(rates, [0, 0, 0, *np.linspace(0, 0.1, 10)], rtol=1e-6)
    assert zoo.configuration("cvt_13", drop_path=0.2).rates.tolist() == pytest.approx([0.2] * 13)
    assert zoo.configuration("cvt_13", drop_path=(0.0, 0.0, 0.0)).rates is None


def test_circular_padding_follows_shifts_by_whole_strides():
    """By 16 pixels: 8 between tokens of the last stage, of which keys take every second one."""
    zeros, x, shifts = model("cvt_13"), images((32, 48)), [(16, 0), (0, 16), (-16, 32)]
    circular, changes = models.reconfigure(zeros, padding="circular")
    assert not any(changes)
    for output in ("invariant", "grid"):

        def fn(m, x, output=output):
            logits, features, _ = run(m, x)
            return logits if output == "invariant" else features.patches

        assert_shift_equivariant(functools.partial(fn, circular), x, shifts=shifts, output=output)
        with pytest.raises(AssertionError, match=r"shift \(8, 0\)"):
            assert_shift_equivariant(functools.partial(fn, circular), x, shifts=[(8, 0)], output=output, tol=1e-2)
        with pytest.raises(AssertionError, match=r"shift \(16, 0\)"):
            assert_shift_equivariant(functools.partial(fn, zeros), x, shifts=shifts, output=output, tol=1e-2)


def test_shapes_do_not_depend_on_the_padding():
    """For the smallest height there is, of one row of tokens, and a width of an odd number of columns in each stage."""
    x = jax.ShapeDtypeStruct((2, 3, 3, 37, 3), jnp.float32)
    both = [zoo.abstract("cvt_13", **CVT, padding=padding) for padding in ("zeros", "circular")]
    zeros, circular = (jax.eval_shape(run, m, x) for m in both)
    chex.assert_trees_all_equal_shapes_and_dtypes(zeros, circular)
    assert zeros[0].shape == (2, 3, 5)
    grids = tuple(zeros[1].blocks[index].patches.values.shape[2:4] for index in (1, 2))
    assert grids == both[0].config.grids((3, 37)) == ((1, 9), (1, 5))


def test_quick_gelu():
    x = np.linspace(-5, 5, 101, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(dense.quick_gelu)(x), x / (1 + np.exp(-1.702 * x)), rtol=0, atol=1e-6)
