"""Adaptive Swin transformers: logits and maps under every shift, ties, choices, and what is refused.

The whole stride of the small models is 8 pixels, so 64 shifts are all that differ for them.  Their maps are 8x4 and 4x2
tokens with windows of 2x2: in the last stage one window spans the columns.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import costs, logical, models, precision, testing
from equivit.models import zoo
from tests.models.backbones import call, model

SIZE, STRIDE = (16, 8), 8
SHIFTS = list(itertools.product(range(STRIDE), repeat=2))
SMALL = dict(depths=(2, 1), num_heads=(1, 2), patch_size=2, window_size=(2, 2), image_size=SIZE, adaptive=True)
both = pytest.mark.parametrize("name", ["swin_t", "swinv2_t"])
run = jax.jit(lambda m, x: (m(x), m.selections(x)))


@jax.jit
def everything(m, x):
    """Logits, choices, and the grids after each block."""
    seen = m.features(x, blocks=tuple(range(m.config.depth))).blocks
    return m(x), m.selections(x), [seen[i].patches for i in seen]


@functools.cache
def small(name, **options):
    return model(name, **SMALL | options)


def check_slope(m, x):
    """In float64: the gradient by the image is the slope along a line; returns model, image, logits."""

    @jax.jit
    def sides(m, x):
        logits, back = jax.vjp(m, x)
        return logits, back(jnp.cos(logits))[0]

    with jax.enable_x64(True):
        m = jax.tree.map(lambda a: a.astype(jnp.float64), m)
        x, way = x.astype(np.float64), np.random.default_rng(6).normal(size=x.shape)
        logits, by_image = sides(m, x)
        ends = [np.sin(sides(m, x + step * way)[0]).sum() for step in (1e-5, -1e-5)]
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose((by_image * way).sum(), slope, rtol=1e-6)
        assert abs(slope) > 1e-3
        return m, x, logits


def picture(kind):
    """An image [16, 8, 3]: some decide every choice, others leave some undecided."""
    rng, x = np.random.default_rng(5), np.zeros((*SIZE, 3))
    if kind == "random":
        x = rng.normal(size=x.shape)
    elif kind == "flat":
        x += 0.7
    elif kind == "period 2":
        x[::2, ::2] = x[1::2, 1::2] = (1, -1, 0.5)
    elif kind == "mirror":
        x = rng.normal(size=x.shape)
        x = (x + x[:, ::-1]) / 2
    elif kind == "pixel":
        x[3, 5] = 2
    elif kind == "two objects":  # an odd number of half patches apart, so that two phases hold the same patches
        x[1:3, 2:4] = rng.normal(size=(2, 2, 3))
        x[8:10, 5:7] = x[1:3, 2:4]
    return x


KINDS = ("random", "flat", "black", "period 2", "mirror", "pixel", "two objects")


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shift_gives_the_same_bits(name, dtype):
    m = precision.cast(small(name), "bfloat16") if dtype == "bfloat16" else small(name)
    x = np.stack([picture(kind) for kind in KINDS]).astype(np.float32)
    upright, chosen = jax.device_get(run(m, x))
    assert len({row.tobytes() for row in upright}) == len(KINDS)
    for shift in SHIFTS[1:]:
        moved = run(m, np.roll(x, shift, (1, 2)))
        jax.tree.map(np.testing.assert_array_equal, moved, (upright, chosen))
    check(chosen)


def check(chosen):
    """The names and ranges of choices."""
    numbers = dict(patch_embed=4, stage0_window=4, stage1_merge=4, stage1_window=2)
    assert {name: len(index) for name, (index, _) in chosen.items()} == dict.fromkeys(numbers, len(KINDS))
    for name, (index, gap) in chosen.items():
        assert (index >= 0).all() and (index < numbers[name]).all() and (gap >= 0).all() and (gap <= 1).all()
    gaps = dict(zip(KINDS, chosen["patch_embed"].gap, strict=True))
    # Norms of equal patches, summed in another order: equal up to rounding, but for a black image, which has none.
    assert gaps["black"] == 0 and max(gaps["flat"], gaps["two objects"]) < 1e-6 and gaps["random"] > 1e-4


@both
def test_the_layers_follow_every_shift_without_an_anchor(name):
    """In float64, where a choice is decided by more than rounding."""
    with jax.enable_x64(True):
        m = jax.tree.map(lambda a: a.astype(jnp.float64), small(name, anchor=False))
        x = np.random.default_rng(2).normal(size=(2, *SIZE, 3))
        _, chosen, grids = everything(m, x)
        assert min(gap.min() for _, gap in chosen.values()) > 1e-9
        testing.assert_shift_equivariant(lambda x: everything(m, x)[0], x, shifts=SHIFTS[1:])
        for block in range(len(grids)):
            grid = functools.partial(lambda block, x: everything(m, x)[2][block], block)
            testing.assert_shift_equivariant(grid, x, shifts=SHIFTS[1::9], output="grid")


def test_other_models_do_not_follow():
    """The ordinary model moves, and so does one with only some of its parts."""
    x = np.random.default_rng(2).normal(size=(2, *SIZE, 3)).astype(np.float32)
    for parts in [False, ("token", "merge"), ("window", "merge", "position")]:
        m = small("swin_t", adaptive=parts)
        deviations = [np.abs(call(m, np.roll(x, shift, (1, 2))) - call(m, x)).max() for shift in ((1, 0), (5, 3))]
        assert max(deviations) > 1e-2


def test_the_cheap_choice_follows_too():
    m, x = small("swin_t", select="input"), np.random.default_rng(4).normal(size=(1, *SIZE, 3)).astype(np.float32)
    for shift in ((1, 0), (2, 3), (7, 7)):
        np.testing.assert_array_equal(call(m, np.roll(x, shift, (1, 2))), call(m, x))
    assert np.abs(call(m, x) - call(small("swin_t"), x)).max() > 1e-3  # another choice


@both
def test_gradients_are_those_of_what_was_chosen(name):
    """On a black image they are finite; and the phases that were not chosen get none."""
    m = small(name)
    slopes = jax.jit(jax.grad(lambda m, x: m(x).sum(), (0, 1)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes(m, np.zeros((1, *SIZE, 3), np.float32))))
    by_model, by_image = slopes(m, np.random.default_rng(3).normal(size=(1, *SIZE, 3)).astype(np.float32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(by_model)) and np.abs(by_image).max() > 1e-4
    assert np.abs(logical.to_logical(by_model)["stages.1.merge.reduction.weight"]).max() > 1e-4


def test_adapted_weights_are_the_ordinary_ones():
    ordinary = small("swin_t", adaptive=False)
    adapted = models.adapt(ordinary)
    assert adapted.config == small("swin_t").config
    for one, other in zip(jax.tree.leaves(adapted), jax.tree.leaves(ordinary), strict=True):
        np.testing.assert_array_equal(one, other)
    assert models.adapt(ordinary, adaptive=("token", "merge"), select="input").config.parts == ("token", "merge")
    with pytest.raises(ValueError, match="adapt: a PatchTST has no adaptive version; take another model, such as sw"):
        models.adapt(zoo.abstract("patchtst", length=8, channels=1, num_classes=2))
    with pytest.raises(ValueError, match=r"adapt: 'swin_s' is no model; give one, such as models.create\('swin_s'\)"):
        models.adapt("swin_s")
    with pytest.raises(ValueError, match=r"adapt: None is no model; give one, such as models.create\('swin_t'\)"):
        models.adapt(None)
    with pytest.raises(ValueError, match="adapt: field='selct' is not one of width, .*; the nearest is 'select'"):
        models.adapt(ordinary, selct="input")


@pytest.mark.parametrize(("name", "share"), [("swin_t", 0.08), ("swinv2_t", 0.08)])
def test_arithmetic_above_the_ordinary_model(name, share):
    """Multiply-adds of one image; those of the definition, all phases at stride 1, would be 0.16."""

    def macs(**options):
        m = zoo.abstract(name, **options)
        image = jax.ShapeDtypeStruct((1, *m.config.input_shape), jnp.float32)
        counted = costs.count(lambda m, x: m(x), m, image)
        assert not counted.notes
        return counted.macs

    ordinary = macs()
    assert macs(adaptive=True) < (1 + share) * ordinary
    assert macs(adaptive=True, select="input") < 1.005 * ordinary


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, (224, 240), "the width 240 of the images is not a multiple of 224, .*; the nearest are 224 and 448"),
        (dict(version=2, window_size=8, image_size=(256, 256)), (224, 256), "the height 224 .* multiple of 256"),
        (
            dict(adaptive=("token", "pool")),
            (224, 224),
            "adaptive='pool' is not one of token, window, merge, position",
        ),
        (
            dict(adaptive="all"),
            (224, 224),
            "'all' must be one or more of token, .*, position, or True or False",
        ),
        (dict(select="best"), (224, 224), "select='best' is not one of output, input"),
    ],
)
def test_what_no_grid_divides_is_refused(options, size, message):
    with pytest.raises(ValueError, match=message):
        m = zoo.abstract("swin_t", **dict(adaptive=True) | options)
        jax.eval_shape(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, *size, 3), jnp.float32))
