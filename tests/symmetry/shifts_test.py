"""Circular shifts, polyphase components, and choices that no shift changes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.symmetry import shifts
from equivit.symmetry.views import view_hashes

SIZE, STRIDE = (4, 40), 4
SHIFTS = np.stack(np.meshgrid(*map(np.arange, SIZE), indexing="ij"), -1).reshape(-1, 2)
KERNEL = np.random.default_rng(1).standard_normal((4, 4, 3, 6)).astype(np.float32)
ODD = np.random.default_rng(2).standard_normal((3, 6, 9, 2)).astype(np.float32)


def image(kind):
    """One image [4, 40, 3]."""
    rng = np.random.default_rng(0)
    x = np.zeros((*SIZE, 3), np.float32)
    if kind == "random":
        x = rng.standard_normal(x.shape)
    elif kind == "flat":
        x = x + [0.5, -1, 2]
    elif kind == "period 2":
        x = np.tile(rng.standard_normal((2, 2, 3)), (SIZE[0] // 2, SIZE[1] // 2, 1))
    elif kind == "mirror":
        x = rng.standard_normal(x.shape)
        x = x + x[:, ::-1]
    elif kind == "one pixel":
        x[1, 17] = [1, 2, 3]
    elif kind in (
        "two objects",
        "huge",
        "tiny",
    ):  # 26 px apart: phases 2 apart hold the same patches, placed differently
        x[2:4, 3:6] = x[2:4, 29:32] = rng.standard_normal((2, 3, 3))
        x = x * {"two objects": 1, "huge": 1e30, "tiny": 1e-30}[kind]  # their squares leave float32
    return x.astype(np.float32)


KINDS = ("random", "flat", "black", "period 2", "mirror", "one pixel", "two objects", "huge", "tiny")


def each(x, moved):
    """Numpy's roll of maps by a shift each."""
    return np.stack([np.roll(a, tuple(s), (0, 1)) for a, s in zip(x, moved, strict=True)])


def parts(x, stride):
    """Components [B, sh sw, H / sh, W / sw, ...] of maps [B, H, W, ...]."""
    return np.stack([np.asarray(x)[:, i :: stride[0], j :: stride[1]] for i, j in np.ndindex(*stride)], 1)


def embedded(x):
    """A patch embedding at every position: what an adaptive tokenisation chooses from.

    A sum of shifted maps has the same bits at all positions.  A convolution of the library has not: where its vector
    unit holds fewer numbers than there are positions, it adds in another order at the last ones.
    """
    x = x.astype(jnp.float32)
    y = sum(jnp.roll(x, (-i, -j), (1, 2))[..., k, None] * KERNEL[i, j, k] for i, j, k in np.ndindex(4, 4, 3))
    return shifts.energies(y + 0.1)


def boxes(x):
    """Energies of windows: all windows tie when one pixel alone is bright."""
    norms = jnp.sqrt(shifts.energies(x))
    return sum(jnp.roll(norms, (-i, -j), (1, 2)) for i in range(4) for j in range(4)) ** 2


@jax.jit
def chosen(x):
    """By the content of components, by their embeddings, and by windows."""
    views = view_hashes(x)
    return [shifts.choose(of(x), STRIDE, views) for of in (shifts.energies, embedded, boxes)]


canonical = jax.jit(shifts.canonical)
down = jax.jit(shifts.polyphase_down, static_argnums=1, static_argnames=("order", "lowpass"))
up = jax.jit(shifts.polyphase_up, static_argnums=2, static_argnames="lowpass")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_follows_every_shift_to_the_last_bit(kind, dtype):
    x = image(kind).astype(dtype)
    everywhere = each([x] * len(SHIFTS), SHIFTS)
    for index, gap in jax.tree.map(np.asarray, chosen(everywhere)):
        assert (gap == gap[0]).all() and (kind not in ("flat", "black", "period 2") or gap[0] == 0)
        phases = np.asarray(shifts.phases(index, STRIDE))
        # Equal up to a shift of the chosen lattice: what follows sees the same patches in the same arrangement.
        ours = {np.roll(x, (*(STRIDE * np.array(k) - phases[0]),), (0, 1)).tobytes() for k in np.ndindex(1, 10)}
        assert {a.tobytes() for a in each(everywhere, -phases)} <= ours
    rolled, first = map(np.asarray, canonical(everywhere))
    assert (rolled == rolled[0]).all()
    np.testing.assert_array_equal(each(rolled, first), everywhere)


def test_ties_are_met():
    x = np.stack([image(kind) for kind in ("random", "mirror", "one pixel", "two objects")])
    components, embeddings, windows = (gap == 0 for _, gap in map(jax.device_get, chosen(x)))
    np.testing.assert_array_equal(components, [False, True, False, True])
    np.testing.assert_array_equal(embeddings, [False, False, False, True])
    np.testing.assert_array_equal(windows[2:], True)


def test_a_first_index_does_not_follow():
    moved = each([image("two objects")] * 3, [(0, 0), (0, 1), (0, 2)])
    scores = parts(shifts.energies(moved), (4, 4)).astype(np.float64).sum((2, 3))
    ours = np.asarray(chosen(moved)[0].index)
    for index, follows in ((scores.argmax(1), False), (ours, True)):
        assert (len(set((index - np.arange(3)) % STRIDE)) == 1) == follows
    assert (scores[np.arange(3), ours] == scores.max(1)).all()


@pytest.mark.parametrize("stride", [(2, 3), (6, 9), 1])
def test_a_choice_is_the_largest_sum(stride):
    energy = ODD[..., 0] ** 2
    views = np.zeros((3, 2, 6, 9), np.uint32)
    index, gap = jax.jit(lambda e: shifts.choose(e, stride, views))(energy)
    scores = parts(energy, np.broadcast_to(stride, 2)).astype(np.float64).sum((2, 3))
    np.testing.assert_array_equal(index, scores.argmax(1))
    best, second = np.sort(np.pad(scores, ((0, 0), (1, 0))), 1)[:, :-3:-1].T
    np.testing.assert_allclose(gap, (best - second) / best, rtol=1e-5)


def test_a_choice_in_float64_sees_what_float32_does_not():
    energy = np.ones((1, 4, 4))
    energy[0, 3, 2] += 1e-12
    views = np.arange(32, dtype=np.uint32).reshape(1, 2, 4, 4)[:, :, ::-1, ::-1]
    choice = jax.jit(lambda e: shifts.choose(e, 2, views))
    assert choice(energy)[0] == 0  # in float32 it is a tie, and the first view has the greatest hash
    with jax.enable_x64(True):
        index, gap = choice(energy)
    assert index == 2 and index.dtype == jnp.int32 and gap.dtype == jnp.float32
    np.testing.assert_allclose(gap, 0.25e-12, rtol=1e-3)
    energy[0, 0, 1] = np.inf  # counts as a very large number
    assert choice(energy)[0] == 1


def test_the_strongest_score():
    index, gap = jax.jit(shifts.strongest)(np.array([[9, 8, 0, 0], [1, 4, 4, 0], [0, 0, 0, 0]], np.float32))
    np.testing.assert_array_equal(index, [0, 1, 0])  # the first of equals
    np.testing.assert_allclose(gap, [1 / 9, 0, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "lowpass"), [("float32", None), ("float32", 3), ("bfloat16", None), ("float64", None)]
)
def test_down_and_up_commute_with_every_shift(dtype, lowpass):
    moved = np.stack(np.meshgrid(np.arange(6), np.arange(9), indexing="ij"), -1).reshape(-1, 2)
    with jax.enable_x64(dtype == "float64"):
        x = ODD[:1].astype(jnp.dtype(dtype))
        values, phase = down(each(x.repeat(54, 0), moved), (2, 3), lowpass=lowpass)
        assert values.shape == (54, 3, 3, 2) and values.dtype == dtype and phase.dtype == jnp.int32
        y = np.asarray(up(values, phase, (2, 3), lowpass=lowpass))
    np.testing.assert_array_equal(phase, (np.asarray(phase)[0] + moved) % (2, 3))
    np.testing.assert_array_equal(y, each(y[:1].repeat(54, 0), moved))
    assert np.abs(y[0]).max() > 0.5


@pytest.mark.parametrize("order", [1, 2.5, math.inf])
def test_the_order_of_the_norm(order):
    values, phase = down(ODD, (3, 3), order=order)
    norms = (np.abs(parts(ODD, (3, 3))).astype(np.float64).reshape(3, 9, -1)) ** min(order, 100)
    np.testing.assert_array_equal(np.asarray(phase) @ [3, 1], norms.sum(2).argmax(1))
    for a, v, (i, j) in zip(ODD, values, np.asarray(phase), strict=True):
        np.testing.assert_array_equal(v, a[i::3, j::3])


def test_gradients_flow_through_the_chosen_component_alone():
    @jax.jit
    @jax.grad
    def gradient(x):
        weights = x.shape[1] * jnp.arange(1.0, 7).reshape(2, 3, 1)
        choice = shifts.choose(shifts.energies(x), (1, 9), view_hashes(x))
        return (
            (shifts.polyphase_down(x, (3, 3))[0] * weights).sum() + 0 * choice.gap.sum() + shifts.canonical(x)[0].sum()
        )

    x = np.stack([np.zeros((6, 9, 1)), ODD[0, ..., :1]]).astype(np.float32)
    phase = np.asarray(down(x, (3, 3))[1])
    expected = np.ones_like(x)
    for a, (i, j) in zip(expected, phase, strict=True):
        a[i::3, j::3] += 6 * np.arange(1.0, 7).reshape(2, 3, 1)
    np.testing.assert_array_equal(gradient(x), expected)


def test_a_component_may_begin_anywhere():
    begin = np.array([(0, 0), (5, 11), (-4, 7)])
    values = jax.jit(shifts.component, static_argnums=2)(ODD, begin, (2, 3))
    for a, v, (i, j) in zip(ODD, values, begin, strict=True):
        np.testing.assert_array_equal(v, np.roll(a, (-i, -j), (0, 1))[::2, ::3])
    y = np.asarray(up(values, begin, (2, 3)))
    np.testing.assert_array_equal(np.where(y != 0, ODD, 0), y)
    assert ((y != 0).sum((1, 2, 3)) == 18).all()
    np.testing.assert_array_equal(shifts.roll(ODD, -begin), each(ODD, -begin))


def test_an_empty_batch():
    values, phase = down(ODD[:0], (2, 3))
    assert values.shape == (0, 3, 3, 2) and phase.shape == (0, 2)
    assert up(values, phase, (2, 3)).shape == (0, 6, 9, 2)


def test_an_order_may_be_any_number():
    x = np.random.default_rng(0).normal(size=(1, 4, 4, 2)).astype(np.float32)
    for order in (np.float32(2), np.int64(2)):
        jax.tree.map(
            np.testing.assert_array_equal, shifts.polyphase_down(x, 2, order=order), shifts.polyphase_down(x, 2)
        )


MAP, PHASE = np.zeros((2, 9, 6, 1), np.float32), np.zeros((2, 2), np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shifts.polyphase_down(MAP, 2), "the height 9 of x must be a multiple of the stride 2; .* 8 and 10"),
        (lambda: shifts.polyphase_down(MAP, (3, 4)), "the width 6 of x must be .* stride 4; the nearest are 4 and 8"),
        (lambda: shifts.polyphase_down(MAP[:, :0], 2), "the height 0 of x must be .* the nearest is 2"),
        (
            lambda: shifts.polyphase_down(MAP[0], 3),
            r"x must be an array of maps \[B, H, W, C\]; it is float32 \[9, 6, 1",
        ),
        (lambda: shifts.polyphase_down([[0.0]], 3), r"x must be an array of maps .*; it is \[\[0.0\]\]"),
        (lambda: shifts.polyphase_down(MAP, 0), r"stride=0 must be a positive integer, or two: \(rows, columns\)"),
        (lambda: shifts.polyphase_down(MAP, 1.5), "stride=1.5 must be a positive integer"),
        (lambda: shifts.polyphase_down(MAP, (3, 3, 3)), r"stride=\(3, 3, 3\) must be a positive integer, or two"),
        (lambda: shifts.polyphase_down(MAP, 3, order=0), "order=0 must be a positive number, or math.inf"),
        (lambda: shifts.polyphase_down(MAP, 3, order=math.nan), "order=nan must be a positive number"),
        (
            lambda: shifts.polyphase_down(MAP, 3, lowpass=0),
            "polyphase_down: lowpass=0 must be a positive integer, a size",
        ),
        (lambda: shifts.polyphase_up(MAP, PHASE, 3, lowpass=2.0), "polyphase_up: lowpass=2.0 must be a positive int"),
        (lambda: shifts.polyphase_down(MAP[..., :0], 3), r"x must have a channel, .*; it is float32 \[2, 9, 6, 0\]"),
        (
            lambda: shifts.polyphase_up(MAP, PHASE[0], 3),
            r"must be an array of integers \[2, 2\], .*; it is int32 \[2\]",
        ),
        (lambda: shifts.polyphase_up(MAP, PHASE + 0.5, 3), r"an array of integers .*; it is float64 \[2, 2\]"),
        (
            lambda: shifts.polyphase_up(MAP, [[0, 0], [1, 1]], 3),
            r"an array of integers .*; it is \[\[0, 0\], \[1, 1\]\]",
        ),
        (lambda: shifts.polyphase_up(None, PHASE, 3), "values must be an array of maps .*; it is None"),
    ],
)
def test_what_is_no_map_stride_or_option_is_told(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_a_map_is_moved_by_one_gather():
    x, by = jax.ShapeDtypeStruct((2, 6, 8, 3), jnp.float32), jax.ShapeDtypeStruct((2, 2), jnp.int32)
    for moved in (shifts.roll, lambda x, by: shifts.component(x, by, 2)):
        assert jax.jit(moved).lower(x, by).as_text().count('"stablehlo.gather"(') == 1


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_unsigned_shifts_have_the_gradient_of_signed_ones(dtype):
    by, x = np.array([[1, 2]]), np.arange(12, dtype=np.float32).reshape(1, 3, 4, 1)

    def gradient(by):
        return jax.grad(lambda x: (shifts.polyphase_up(x, by, 2) * np.arange(48).reshape(1, 6, 8, 1)).sum())(x)

    np.testing.assert_array_equal(gradient(by.astype(dtype)), gradient(by))
