"""Adaptive CvTs: logits and maps under every shift, ties, choices, and what is refused.

The whole stride of the small models, with that of keys and values, is 8 pixels, so 64 shifts are all that differ for
them.  Their maps are 8x4 and 4x2 tokens; the last stage has a class token.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical, models, precision, testing
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.batch_stats import recording
from equivit.models import zoo
from equivit.models.cvt.attention import ConvAttention, ConvEmbed
from equivit.symmetry import shifts
from tests.models.backbones import model
from tests.models.swin_adaptive_test import KINDS, SHIFTS, SIZE, check_slope, everything, picture, run

SMALL = dict(widths=(8, 12), depths=(1, 2), num_heads=(1, 2), kernels=(3, 3), strides=(2, 2), paddings=(1, 1))
SMALL |= dict(image_size=SIZE, adaptive=True)
NUMBERS = dict.fromkeys(("stage0_embed", "stage1_embed", "stage0_layer0_kv", "stage1_layer0_kv", "stage1_layer1_kv"), 4)


@functools.cache
def small(**options):
    return model("cvt_13", **SMALL | options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shift_gives_the_same_bits(dtype):
    m = precision.cast(small(), "bfloat16") if dtype == "bfloat16" else small()
    x = np.stack([picture(kind) for kind in KINDS]).astype(np.float32)
    upright = jax.device_get(run(m, x))
    assert len({row.tobytes() for row in upright[0]}) == len(KINDS)
    for shift in SHIFTS[1:]:
        jax.tree.map(np.testing.assert_array_equal, run(m, np.roll(x, shift, (1, 2))), upright)
    assert {name: len(index) for name, (index, _) in upright[1].items()} == dict.fromkeys(NUMBERS, len(KINDS))
    for index, gap in upright[1].values():
        assert (index >= 0).all() and (index < 4).all() and (gap >= 0).all() and (gap <= 1).all()


def in_float64(**options):
    return jax.tree.map(lambda a: a.astype(jnp.float64), small(anchor=False, **options))


def test_the_layers_follow_every_shift_without_an_anchor():
    """In float64, where a choice is decided by more than rounding."""
    with jax.enable_x64(True):
        m, x = in_float64(), np.random.default_rng(2).normal(size=(2, *SIZE, 3))
        _, chosen, grids = everything(m, x)
        assert min(gap.min() for _, gap in chosen.values()) > 1e-9
        testing.assert_shift_equivariant(lambda x: everything(m, x)[0], x, shifts=SHIFTS[1:])
        for block in range(len(grids)):
            grid = functools.partial(lambda block, x: everything(m, x)[2][block], block)
            testing.assert_shift_equivariant(grid, x, shifts=SHIFTS[1::9], output="grid")


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
        m, x = in_float64(), np.random.default_rng(2).normal(size=(4, *SIZE, 3))
        with pytest.raises(AssertionError, match="shift"):
            testing.assert_shift_equivariant(jax.jit(lambda x: m(x)), x, shifts=SHIFTS[1::7])


def test_other_models_do_not_follow():
    x = np.random.default_rng(2).normal(size=(2, *SIZE, 3)).astype(np.float32)
    for options in (dict(adaptive=False, padding="circular"), dict(adaptive=("token", "merge"), padding="circular")):
        m = small(**options)
        assert max(np.abs(run(m, np.roll(x, shift, (1, 2)))[0] - run(m, x)[0]).max() for shift in SHIFTS[1::5]) > 1e-3


def test_gradients_and_statistics():
    """Finite on a black image; batch norms record what was chosen, which is as much as the ordinary model's."""
    m, x = small(), np.zeros((1, *SIZE, 3), np.float32)

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
    m = small(adaptive=parts, **options)
    assert [part for part in m.config.KNOWN_PARTS if m.config.mode(part) == "circular"] == list(parts)
    m, x, logits = check_slope(m, np.random.default_rng(4).normal(size=(1, *SIZE, 3)))
    if "pool" in parts:
        normed = BatchNorm.__call__
        monkeypatch.setattr(BatchNorm, "__call__", lambda self, x, train: normed(self, x))
        with jax.enable_x64(True):
            np.testing.assert_allclose(jax.jit(lambda m, x: m(x, train=True))(m, x), logits, rtol=0, atol=1e-12)


def test_arithmetic_above_the_ordinary_model():
    def macs(**options):
        m = zoo.abstract("cvt_13", **options)
        image = jax.ShapeDtypeStruct((1, *m.config.input_shape), jnp.float32)
        counted = costs.count(lambda m, x: m(x), m, image)
        assert not counted.notes
        return counted.macs

    ordinary = macs()
    assert macs(adaptive=True) < 1.12 * ordinary
    assert macs(adaptive=True, select="input") < 1.005 * ordinary


def test_adapted_weights_are_the_ordinary_ones():
    ordinary = small(adaptive=False)
    adapted = models.adapt(ordinary)
    assert adapted.config == small().config
    for one, other in zip(jax.tree.leaves(adapted), jax.tree.leaves(ordinary), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, (224, 240), r"the width 240 of the images is not a multiple of 32, .*; the nearest are 224 and 256"),
        (
            dict(paddings=(2, 2, 1)),
            (224, 224),
            r"paddings\[1\]=2: .* a kernel of 3 and a stride of 2; the nearest is 1",
        ),
        (dict(kernels=(7, 2, 3), adaptive=("pool",)), (224, 224), r"paddings\[1\]=1: .* the nearest is 0"),
        (dict(kernels=(4, 3, 3), strides=(1, 2, 2)), (224, 224), r"paddings\[0\]=2: .*; take kernels\[0\]=5"),
        (
            dict(strides=(4, 2, 3)),
            (224, 224),
            r"kernels\[2\]=3 and strides\[2\]=3: .*'merge' takes .*or select='input'",
        ),
        (dict(kernels=(7, 5, 3), paddings=(2, 2, 1)), (224, 224), r"kernels\[1\]=5 and strides\[1\]=2: .* of 2 or 3"),
        (dict(adaptive=("token", "window")), (224, 224), "adaptive='window' is not one of token, merge, pool"),
    ],
)
def test_what_no_grid_divides_is_refused(options, size, message):
    with pytest.raises(ValueError, match=message):
        m = zoo.abstract("cvt_13", **dict(adaptive=True) | options)
        jax.eval_shape(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, *size, 3), jnp.float32))
