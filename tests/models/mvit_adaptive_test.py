"""Adaptive MViTv2s: logits and maps under every shift, ties, choices, and what is refused.

The small models halve their map once, so that a step of the last map is 8 pixels; keys and values lie 16 pixels apart.
Their maps are 8x4 and 4x2 tokens.  Wrong layers are tried on single blocks (`pooling_attention_test.py`).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import costs, logical, models, precision, testing
from equivit.models import zoo
from equivit.models.mvit.position import folded
from tests.models.backbones import model
from tests.models.swin_adaptive_test import KINDS, check_slope
from tests.models.swin_adaptive_test import picture as small_picture

SIZE, STRIDE = (32, 16), 8
SHIFTS = list(itertools.product(range(STRIDE), repeat=2))
SMALL = dict(depths=(1, 1), image_size=SIZE, adaptive=True, class_token=False)
CHOICES = dict(patch_embed=16, stage0_block0_kv=16, stage1_block0_q=4, stage1_block0_kv=4)


@jax.jit
def run(m, x):
    """Logits, choices, and the grids after each block before the final norm; one pass, which is compiled once."""
    last, seen = m.trunk(x, capture=tuple(range(m.config.depth)))
    grids = [m._features(seen[i], x.shape[:1], False, {}).patches for i in seen]
    tokens = m.norm(last.tokens)
    return m.head(tokens[:, 0] if m.config.class_token else tokens.mean(1)), last.choices, grids


@functools.cache
def small(**options):
    return model("mvitv2_t", **SMALL | options)


def images(batch=2, dtype=np.float32):
    return np.random.default_rng(2).normal(size=(batch, *SIZE, 3)).astype(dtype)


def picture(kind):
    """An image [32, 16, 3]: some decide every choice, others leave some undecided."""
    x = np.zeros((*SIZE, 3))
    if kind in ("random", "mirror"):
        x = np.random.default_rng(5).normal(size=x.shape)
        return x if kind == "random" else (x + x[:, ::-1]) / 2
    if kind in ("flat", "period 2"):
        return np.tile(small_picture(kind), (2, 2, 1))
    x[:16, :8] = small_picture(kind)
    if kind == "two objects":  # an odd number of half patches apart, so that two phases hold the same patches
        x[8:10, 5:7] = 0
        x[19:21, 12:14] = x[1:3, 2:4]
    return x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shift_gives_the_same_bits(dtype):
    m = small() if dtype == "float32" else precision.cast(small(depths=(1,)), "bfloat16")
    x = np.stack([picture(kind) for kind in KINDS]).astype(np.float32)
    upright, chosen, _ = jax.device_get(run(m, x))
    assert len({row.tobytes() for row in upright}) == len(KINDS)
    for shift in [*SHIFTS[1:], (8, 0), (0, 8), (8, 8), (21, 13)]:
        moved = run(m, np.roll(x, shift, (1, 2)))[:2]
        jax.tree.map(np.testing.assert_array_equal, moved, (upright, chosen))
    assert chosen.keys() == (CHOICES.keys() if dtype == "float32" else {"patch_embed", "stage0_block0_kv"})
    for name, (index, gap) in chosen.items():
        assert (
            index.shape == (len(KINDS),)
            and (index >= 0).all()
            and (index < CHOICES[name]).all()
            and (gap >= 0).all()
            and (gap <= 1).all()
        )
    gaps = dict(zip(KINDS, chosen["patch_embed"].gap, strict=True))
    assert max(gaps[kind] for kind in ("black", "flat", "two objects")) < 1e-6 and gaps["random"] > 1e-4


def test_the_layers_follow_every_shift_without_an_anchor():
    """In float64, where a choice is decided by more than rounding; with a class token and a scan of two blocks."""
    with jax.enable_x64(True):
        m = small(anchor=False, class_token=True, depths=(2, 1))
        m, x = jax.tree.map(lambda a: a.astype(jnp.float64), m), images(dtype=np.float64)
        _, chosen, grids = run(m, x)
        assert chosen.keys() == {*CHOICES, "stage0_block1_kv"} and min(gap.min() for _, gap in chosen.values()) > 1e-9
        testing.assert_shift_equivariant(lambda x: run(m, x)[0], x, shifts=[*SHIFTS[1:], (8, 0), (0, 8), (13, 9)])
        for block in range(len(grids)):
            grid = functools.partial(lambda block, x: run(m, x)[2][block], block)
            testing.assert_shift_equivariant(grid, x, shifts=SHIFTS[1::9], output="grid")


def test_with_some_parts_only_a_model_moves():
    x = images()
    for parts in [("token", "pool"), ("pool", "position"), ("token", "position")]:
        m = small(adaptive=parts, padding="circular", depths=(1,))
        assert {m.config.mode(part) for part in m.config.KNOWN_PARTS} == {"circular"} and not m.config.anchored
        logits = run(m, x)[0]
        deviations = [np.abs(run(m, np.roll(x, shift, (1, 2)))[0] - logits).max() for shift in ((1, 0), (5, 3))]
        assert max(deviations) > 1e-2


def test_the_cheap_choice_follows_too():
    with jax.enable_x64(True):
        m = small(depths=(1,), select="input", anchor=False)
        m, x = jax.tree.map(lambda a: a.astype(jnp.float64), m), images(1, np.float64)
        testing.assert_shift_equivariant(lambda x: run(m, x)[0], x, shifts=SHIFTS[1::5])


def test_gradients_are_finite_on_black():
    m = small(anchor=False, depths=(1,))
    slopes = jax.jit(jax.grad(lambda m, x: m(x).sum(), (0, 1)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes(m, 0 * images(1))))
    by_model, by_image = slopes(m, images(1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(by_model)) and np.abs(by_image).max() > 1e-4
    found = logical.to_logical(by_model)
    assert all(np.abs(slope).max() > 1e-3 for name, slope in found.items() if "pool_k" in name or "embed" in name)


@pytest.mark.parametrize(
    ("parts", "options"),
    [(("pool",), {}), (("token", "pool"), dict(depths=(1,), select="input"))],
    ids=["pool", "token and pool"],
)
def test_some_parts_have_one_function_and_its_gradient(parts, options):
    """For any padding of the other parts' convolutions."""
    check_slope(small(adaptive=parts, **options), images(1))


def test_adapted_weights_are_the_ordinary_ones_but_for_positions():
    ordinary = small(adaptive=False)
    adapted, changes = models.reconfigure(ordinary, adaptive=True)
    assert adapted.config == small().config and adapted.config.mode("pool") == "circular"
    old, new = logical.to_logical(ordinary), logical.to_logical(adapted)
    assert not changes.drawn and not changes.dropped
    assert set(changes.resized) == {name for name in old if "position" in name} and len(changes.resized) == 4
    for name in old.keys() - set(changes.resized):
        np.testing.assert_array_equal(old[name], new[name])
    name = "stages.1.blocks.0.attention.position.rows"  # distances of 4 places on a line, then around a circle of 8
    around = np.stack([new[name][2 * i] for i in range(4)])
    np.testing.assert_allclose(around, folded(old[name], 1), atol=1e-6)
    np.testing.assert_allclose(new[name][1], (around[0] + around[1]) / 2, atol=1e-6)
    again, changes = models.reconfigure(adapted, image_size=(64, 16))
    again = logical.to_logical(again)
    np.testing.assert_array_equal(again[name][::2], new[name])
    np.testing.assert_allclose(again[name][-1], (new[name][-1] + new[name][0]) / 2, atol=1e-6)
    assert models.adapt(ordinary, adaptive=("token", "pool"), select="input").config.parts == ("token", "pool")


def test_arithmetic_above_the_ordinary_model():
    """Multiply-adds of one image: the moments of its patches; pooling at all phases is a sum of products."""

    def macs(**options):
        m = zoo.abstract("mvitv2_t", **options)
        return costs.count(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, *m.config.input_shape), jnp.float32))

    ordinary, adaptive = macs(), macs(adaptive=True)
    assert adaptive.macs < 1.07 * ordinary.macs and not adaptive.notes
    assert adaptive["linear"].operations < 2 * ordinary["linear"].operations


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, (224, 240), "the width 240 of the images is not a multiple of 32, .*; the nearest are 224 and 256"),
        (dict(depths=(1, 1)), (40, 32), "the height 40 .* multiple of 16, .*halved 1 times, .* at every 4th of them"),
        (
            dict(adaptive=("token", "merge")),
            (224, 224),
            "adaptive='merge' is not one of token, pool, position",
        ),
        (dict(select="best"), (224, 224), "select='best' is not one of output, input"),
    ],
)
def test_what_no_grid_divides_is_refused(options, size, message):
    with pytest.raises(ValueError, match=message):
        m = zoo.abstract("mvitv2_t", **dict(adaptive=True) | options)
        jax.eval_shape(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, *size, 3), jnp.float32))
