"""Hashes of the views of a map: equal for equal views alone, and moved with the map."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

from equivit.symmetry import fields, shifts
from equivit.symmetry.groups import FLIP, OCTIC
from equivit.symmetry.views import greatest, oriented_hashes, view_hashes

hashes_of = jax.jit(view_hashes)


def of_each(x):
    """The hash of each view as one integer, [B, H, W]."""
    words = np.asarray(hashes_of(x)).astype(np.uint64)
    return words[:, 0] << np.uint64(32) | words[:, 1]


@pytest.mark.parametrize("size", [(3, 5), (4, 16), (1, 7), (17, 1)], ids=str)
@pytest.mark.parametrize("channels", [1, 2])
def test_equal_hashes_are_equal_views(size, channels):
    """Maps of two values, of which many views agree: flat, periodic, ordinary, of zeros of both signs."""
    rng = np.random.default_rng(3)
    x = rng.integers(0, 2, (6, *size, channels)).astype(np.float32)
    x[0], x[1], x[2] = 0, np.tile(x[1, :, :1], (1, size[1], 1)), np.where(x[2] > 0, -0.0, 0)
    hashes = of_each(x)
    seen = {}
    for a, row in zip(x + 0.0, hashes, strict=True):
        for place in np.ndindex(size):
            view = np.roll(a, (-place[0], -place[1]), (0, 1)).tobytes()
            assert seen.setdefault(row[place], view) == view
    assert len(seen) == len(set(seen.values())) > 3
    np.testing.assert_array_equal(of_each(np.roll(x, (2, 3), (1, 2))), np.roll(hashes, (2, 3), (1, 2)))


def test_all_views_of_one_bright_pixel_differ():
    x = np.zeros((1, 64, 48, 1), np.float32)
    x[0, 5, 7] = 1
    assert len(np.unique(of_each(x))) == 64 * 48


@pytest.mark.parametrize("dtype", ["uint8", "bool", "bfloat16", "float64"])
def test_any_dtype_is_hashed(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = np.zeros((2, 3, 5, 2))
        x[1, 0, 0, 1] = 1e-300 if dtype == "float64" else 1  # below what float32 holds
        hashes = of_each(jnp.asarray(x, dtype))
    assert len(np.unique(hashes[0])) == 1 and len(np.unique(hashes[1])) == 15


def test_the_greatest_hash_among_some():
    hashes = np.array([[[7, 9, 9, 9], [0, 1, 3, 2]], [[7, 9, 9, 9], [0, 1, 3, 2]], [[0, 0, 0, 0]] * 2], np.uint32)
    among = np.array([[True] * 4, [True, True, False, False], [False, False, True, True]])
    np.testing.assert_array_equal(greatest(hashes, among), [2, 1, 2])


@pytest.mark.parametrize(
    ("size", "group"),
    [((6, 6), OCTIC), ((4, 6), OCTIC), ((6, 4), OCTIC), ((4, 6), FLIP), ((6, 4), FLIP)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_oriented_hashes_turn_with_the_map(size, group):
    x = np.random.default_rng(0).integers(0, 3, (2, *size, 1)).astype(np.float32)
    of = jax.jit(lambda x: oriented_hashes(x, (2, 2), group))
    hashes = np.asarray(of(x))
    assert len(np.unique(hashes[:, 0])) == 8  # two maps of four phases, all different
    for element in group.elements:
        for move in ((0, 0), (1, 0), (2, 3)):
            turned = np.roll(fields.act_on_image(element, x), move, (1, 2))
            expected = fields.act_on_torus(element, hashes, (2, 3))
            np.testing.assert_array_equal(of(turned), np.roll(expected, move, (2, 3)))
    assert not np.array_equal(of(2 - x), hashes)


def test_a_mirror_image_ties_two_phases():
    """Two objects on two phases, each the mirror image of the other about one axis."""
    thing = np.random.default_rng(0).standard_normal((2, 2))
    x = np.zeros((1, 8, 8, 1), np.float32)
    x[0, :2, :2, 0], x[0, :2, 3:5, 0] = thing, thing[:, ::-1]
    for group in (FLIP, OCTIC):
        assert len(np.unique(np.asarray(oriented_hashes(x, (2, 2), group))[0, 0])) == 2
    assert len(np.unique(np.asarray(oriented_hashes(x.swapaxes(1, 2), (2, 2), FLIP))[0, 0])) == 4


def test_real_images_tie():
    """Digits at 64 px: some tie, and all keep their frame under every shift, beside any others."""
    digits = load_digits().images[:48] / 16
    x = np.asarray(jax.image.resize(digits.astype(np.float32), (48, 64, 64), "nearest"))[..., None]
    changes = np.asarray(shifts._changes(x)).reshape(48, -1)
    ties = int(((changes == changes.max(1, keepdims=True)).sum(1) > 1).sum())
    print(f"{ties} of 48 digits tie")
    assert ties >= 3
    canonical = jax.jit(shifts.canonical)
    moved = np.random.default_rng(0).integers(0, 64, (48, 2))
    shifted = np.stack([np.roll(a, s, (0, 1)) for a, s in zip(x, moved, strict=True)])
    frames = np.asarray(canonical(x)[0])
    np.testing.assert_array_equal(np.asarray(canonical(shifted[::-1])[0])[::-1], frames)


def test_no_step_depends_on_the_content():
    """Neither sorting nor branches: an image with ties costs what any image does."""
    x = jax.ShapeDtypeStruct((2, 24, 16, 3), jnp.float32)
    functions = (shifts.canonical, lambda x: oriented_hashes(x, (4, 4), OCTIC), lambda x: shifts.polyphase_down(x, 2))
    for function in functions:
        text = jax.jit(function).lower(x).compile().as_text()  # where the case of the platform is decided
        assert not any(name in text for name in (" sort(", " conditional("))
