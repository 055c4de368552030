"""Adaptive backbones: logits and maps under every shift, ties, choices, costs, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import costs, logical, models, precision, testing
from equivit.models import zoo
from tests.models.adaptive import ADAPTIVE, KINDS, SHIFTS, in_float64, noise, pictures, run, small
from tests.models.backbones import call

every = pytest.mark.parametrize("name", ADAPTIVE)


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_shift_gives_the_same_bits(name, dtype):
    facts = ADAPTIVE[name]
    m = small(name) if dtype == "float32" else precision.cast(small(name, **facts.bfloat16), "bfloat16")
    x = pictures(facts.size)
    upright, choices, _ = jax.device_get(run(m, x))
    assert len({row.tobytes() for row in upright}) == len(KINDS)
    for shift in [*SHIFTS[1:], *facts.shifts]:
        moved = run(m, np.roll(x, shift, (1, 2)))[:2]
        jax.tree.map(np.testing.assert_array_equal, moved, (upright, choices))
    assert choices.keys() == {choice for choice in facts.places if len(m.stages) > 1 or "stage1" not in choice}
    for choice, (index, gap) in choices.items():
        assert index.shape == (len(KINDS),) and ((index >= 0) & (index < facts.places[choice])).all()
        assert ((gap >= 0) & (gap <= 1)).all()
    if name != "cvt_13":
        # Norms of equal patches, summed in another order, are equal up to rounding.
        gaps = dict(zip(KINDS, choices["patch_embed"].gap, strict=True))
        assert max(gaps[kind] for kind in ("black", "flat", "two objects")) < 1e-6 and gaps["random"] > 1e-4
        assert gaps["black"] == 0


@every
def test_the_layers_follow_every_shift_without_an_anchor(name):
    """In float64, where a choice is decided by more than rounding."""
    with jax.enable_x64(True):
        facts = ADAPTIVE[name]
        m, x = in_float64(small(name, anchor=False, **facts.unanchored)), noise(facts.size)
        _, choices, grids = run(m, x)
        assert choices.keys() >= facts.places.keys() and min(gap.min() for _, gap in choices.values()) > 1e-9
        testing.assert_shift_equivariant(lambda x: run(m, x)[0], x, shifts=[*SHIFTS[1:], *facts.shifts])
        for block in range(len(grids)):
            grid = functools.partial(lambda block, x: run(m, x)[2][block], block)
            testing.assert_shift_equivariant(grid, x, shifts=SHIFTS[1::9], output="grid")


@pytest.mark.parametrize(("name", "options"), [(name, o) for name in ADAPTIVE for o in ADAPTIVE[name].others], ids=str)
def test_other_models_do_not_follow(name, options):
    """The ordinary model moves, and so does one with only some of its parts."""
    m, x = small(name, **options), noise(ADAPTIVE[name].size).astype(np.float32)
    assert not m.config.anchored
    assert "padding" not in options or {m.config.mode(part) for part in m.config.KNOWN_PARTS} == {"circular"}
    assert max(np.abs(call(m, np.roll(x, shift, (1, 2))) - call(m, x)).max() for shift in ((1, 0), (5, 3))) > 1e-3


@pytest.mark.parametrize(("name", "options"), [("swin_t", {}), ("mvitv2_t", dict(depths=(1,)))])
def test_the_cheap_choice_follows_too(name, options):
    with jax.enable_x64(True):
        x = noise(ADAPTIVE[name].size)
        m, other = (in_float64(small(name, anchor=False, select=s, **options)) for s in ("input", "output"))
        testing.assert_shift_equivariant(lambda x: run(m, x)[0], x, shifts=SHIFTS[1::5])
        assert np.abs(run(m, x)[0] - run(other, x)[0]).max() > 1e-3  # another choice
    m, x = small(name, select="input", **options), x.astype(np.float32)
    for shift in ((1, 0), (2, 3), (7, 7)):
        np.testing.assert_array_equal(call(m, np.roll(x, shift, (1, 2))), call(m, x))


@pytest.mark.parametrize(
    ("name", "options", "moved"),
    [
        ("swin_t", {}, ("merge.reduction",)),
        ("swinv2_t", {}, ("merge.reduction",)),
        ("mvitv2_t", dict(anchor=False, depths=(1,)), ("pool_k", "embed")),
    ],
)
def test_gradients_are_those_of_what_was_chosen(name, options, moved):
    """On a black image they are finite."""
    m, x = small(name, **options), noise(ADAPTIVE[name].size, 1).astype(np.float32)
    slopes = jax.jit(jax.grad(lambda m, x: m(x).sum(), (0, 1)))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes(m, 0 * x)))
    by_model, by_image = slopes(m, x)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(by_model)) and np.abs(by_image).max() > 1e-4
    found = {n: slope for n, slope in logical.to_logical(by_model).items() if any(part in n for part in moved)}
    assert found and all(np.abs(slope).max() > 1e-4 for slope in found.values())


@pytest.mark.parametrize("name", ["swin_t", "swinv2_t", "cvt_13"])
def test_adapted_weights_are_the_ordinary_ones(name):
    ordinary = small(name, adaptive=False)
    adapted = models.adapt(ordinary)
    assert adapted.config == small(name).config
    for one, other in zip(jax.tree.leaves(adapted), jax.tree.leaves(ordinary), strict=True):
        np.testing.assert_array_equal(one, other)
    assert models.adapt(ordinary, adaptive=("token", "merge"), select="input").config.parts == ("token", "merge")


def test_models_without_an_adaptive_version_are_refused():
    with pytest.raises(ValueError, match="adapt: a PatchTST has no adaptive version; take another model, such as sw"):
        models.adapt(zoo.abstract("patchtst", length=8, channels=1, num_classes=2))
    with pytest.raises(ValueError, match=r"'swin_s' is not a model; give one, such as models.create\('swin_s'\)"):
        models.adapt("swin_s")
    with pytest.raises(ValueError, match=r"adapt: None is not a model; give one, such as models.create\('swin_t'\)"):
        models.adapt(None)
    with pytest.raises(ValueError, match="adapt: field='selct' is not one of image_size, .*; the nearest is 'select'"):
        models.adapt(small("swin_t"), selct="input")


@every
def test_arithmetic_above_the_ordinary_model(name):
    """Multiply-adds of one image; by the definition of a Swin, all phases at stride 1, they would be 1.16 times."""

    def counted(**options):
        m = zoo.abstract(name, **options)
        found = costs.count(lambda m, x: m(x), m, jax.ShapeDtypeStruct((1, *m.config.input_shape), jnp.float32))
        assert not found.notes
        return found

    ordinary, adaptive = counted(), counted(adaptive=True)
    assert adaptive.macs < ADAPTIVE[name].share * ordinary.macs
    if name == "mvitv2_t":  # which pools at all phases by sums of products
        assert adaptive["linear"].operations < 2 * ordinary["linear"].operations
    else:
        assert counted(adaptive=True, select="input").macs < 1.005 * ordinary.macs


REFUSED = {
    "swin_t": [
        ({}, (224, 240), "the width 240 of the images is not a multiple of 224, .*; the nearest are 224 and 448"),
        (dict(version=2, window_size=8, image_size=(256, 256)), (224, 256), "the height 224 .* multiple of 256"),
        (dict(adaptive=("token", "pool")), (), "adaptive='pool' is not one of token, window, merge, position"),
        (dict(adaptive="all"), (), "'all' must be one or more of token, .*, position, or True or False"),
        (dict(select="best"), (), "select='best' is not one of output, input"),
    ],
    "cvt_13": [
        ({}, (224, 240), "the width 240 of the images is not a multiple of 32, .*; the nearest are 224 and 256"),
        (dict(paddings=(2, 2, 1)), (), r"paddings\[1\]=2: .* a kernel of 3 and a stride of 2; the nearest is 1"),
        (dict(kernels=(7, 2, 3), adaptive=("pool",)), (), r"paddings\[1\]=1: .* the nearest is 0"),
        (dict(kernels=(4, 3, 3), strides=(1, 2, 2)), (), r"paddings\[0\]=2: .*; take kernels\[0\]=5"),
        (dict(strides=(4, 2, 3)), (), r"kernels\[2\]=3 and strides\[2\]=3: .*'merge' takes .*or select='input'"),
        (dict(kernels=(7, 5, 3), paddings=(2, 2, 1)), (), r"kernels\[1\]=5 and strides\[1\]=2: .* of 2 or 3"),
        (dict(adaptive=("token", "window")), (), "adaptive='window' is not one of token, merge, pool"),
    ],
    "mvitv2_t": [
        ({}, (224, 240), "the width 240 of the images is not a multiple of 32, .*; the nearest are 224 and 256"),
        (dict(depths=(1, 1)), (40, 32), "the height 40 .* multiple of 16, .*halved 1 times, .* at every 4th of them"),
        (dict(adaptive=("token", "merge")), (), "adaptive='merge' is not one of token, pool, position"),
        (dict(select="best"), (), "select='best' is not one of output, input"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "size", "message"), [(name, *row) for name, rows in REFUSED.items() for row in rows], ids=str
)
def test_bad_choices_and_sizes_are_refused(name, options, size, message):
    """A configuration where no size is given, otherwise images that no grid divides."""
    with pytest.raises(ValueError, match=message):
        m = zoo.abstract(name, **dict(adaptive=True) | options)
        assert size, "the configuration is taken"
        jax.eval_shape(m, jax.ShapeDtypeStruct((1, *size, 3), jnp.float32))
