"""CvT: stages as scans, statistics, rates of stochastic depth, and padding around the torus."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, models, testing
from equivit.layers import dense
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.batch_stats import recording
from equivit.layers.grid import Layout
from equivit.models import zoo
from equivit.models.cvt.attention import ConvAttention, ConvEmbed
from equivit.symmetry import shifts
from equivit.testing import assert_shift_equivariant
from tests.models.adaptive import ADAPTIVE, SHIFTS, check_slope, in_float64, noise, small
from tests.models.backbones import CVT, images, model, near


@jax.jit
def run(model, x):
    """Logits, the features with those at the end of each stage, and the statistics after that."""
    return model(x), model.features(x, blocks=(1, 2)), logical.to_logical(model, nnx.BatchStat)


@pytest.mark.slow
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


# Adaptive

SIZE = ADAPTIVE["cvt_13"].size


def test_keys_and_values_share_a_phase(monkeypatch):
    """Apart, each at the phase where it is largest itself, a shift pairs keys with the values of others."""

    def apart(self, x, *, train):
        parts = []
        for part in (self.conv_k, self.conv_v):
            maps = part.norm(part.conv.everywhere(x))
            choice = shifts.strongest(
                jnp.square(maps).sum(-1).reshape(len(x), -1, 2, x.shape[2] // 2, 2).sum((1, 3)).reshape(len(x), 4)
            )
            parts.append(part(shifts.roll(x, -shifts.phases(choice.index, 2)), train=train))
        return parts

    monkeypatch.setattr(ConvAttention, "keys_and_values", apart)
    with jax.enable_x64(True):
        m, x = in_float64(small("cvt_13", anchor=False)), noise(SIZE, 4)
        with pytest.raises(AssertionError, match="shift"):
            testing.assert_shift_equivariant(jax.jit(lambda x: m(x)), x, shifts=SHIFTS[1::7])


@pytest.mark.slow
def test_gradients_and_statistics():
    """Finite on a black image; batch norms record what was chosen, which is as much as the ordinary model's."""
    m, x = small("cvt_13"), np.zeros((1, *SIZE, 3), np.float32)

    @jax.jit
    @recording()
    def step(m, x):
        def loss(arrays):
            model = logical.put(m, arrays)
            return model(x, train=True).sum(), model

        slopes, changed = jax.grad(loss, has_aux=True)(logical.take(m))
        return slopes, changed

    slopes, _ = step(m, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))
    _, changed = step(m, np.random.default_rng(3).normal(size=x.shape).astype(np.float32))
    mean = changed.stages[0].blocks[0].attention.conv_k.norm.mean
    assert np.abs(mean - m.stages[0].blocks[0].attention.conv_k.norm.mean).max() > 1e-4


@pytest.mark.parametrize("select", ["output", "input"])
def test_layers_take_all_phases_around_the_torus(select):
    """One of those that the convolution at stride 1 has there, whatever their own padding."""
    rngs, x = nnx.Rngs(0), jnp.asarray(np.random.default_rng(1).normal(size=(3, 8, 4, 6)), jnp.float32)
    embed = ConvEmbed(6, 8, kernel=(3, 3), stride=(2, 2), padding=(1, 1), mode="zeros", eps=1e-5, rngs=rngs)
    attention = ConvAttention(6, 1, stride=(2, 2), mode="zeros", select=select, rngs=rngs)

    @jax.jit
    def sides(embed, attention, x):
        merged, choice = embed.adaptive(x, select)
        expected = [embed.norm(shifts.component(embed.conv.everywhere(x), shifts.phases(choice.index, (2, 2)), 2))]
        phase = shifts.phases(attention.choice(x).index, (2, 2))
        expected += [shifts.component(conv.everywhere(x), phase, 2) for conv in (attention.conv_k, attention.conv_v)]
        return [merged.reshape(expected[0].shape), *attention.keys_and_values(x, train=False)], expected

    for found, expected in zip(*sides(embed, attention, x), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


ONE = dict(widths=(8,), depths=(1,), num_heads=(1,), kernels=(3,), strides=(2,), paddings=(1,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parts", "options"),
    [
        (("token",), ONE),
        (("pool",), ONE),
        (("merge",), dict(depths=(1, 1))),
        (("merge", "pool"), dict(depths=(1, 1), select="input")),
    ],
    ids=["token", "pool", "merge", "merge and pool"],
)
def test_some_parts_have_one_function_and_its_gradient(parts, options, monkeypatch):
    """For any padding of other convolutions; in training too, with batch norms frozen at their running statistics."""
    m = small("cvt_13", adaptive=parts, **options)
    assert [part for part in m.config.KNOWN_PARTS if m.config.mode(part) == "circular"] == list(parts)
    m, x, logits = check_slope(m, np.random.default_rng(4).normal(size=(1, *SIZE, 3)))
    if "pool" in parts:
        normed = BatchNorm.__call__
        monkeypatch.setattr(BatchNorm, "__call__", lambda self, x, train: normed(self, x))
        with jax.enable_x64(True):
            np.testing.assert_allclose(jax.jit(lambda m, x: m(x, train=True))(m, x), logits, rtol=0, atol=1e-12)
