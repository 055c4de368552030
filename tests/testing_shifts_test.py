"""`assert_shift_equivariant` itself: the faults that it finds in small models, and what it says of other things."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import testing
from equivit.models.features import Grid
from equivit.symmetry import shifts
from equivit.symmetry.views import view_hashes

SIDE = 4  # of a patch, and of a window
RNG = np.random.default_rng(0)
RANDOM = RNG.standard_normal((2, 8, 32, 3))
TWO, PIXEL = np.zeros((2, 1, 8, 32, 3))
TWO[0, 2:4, 1:3] = TWO[0, 2:4, 27:29] = RNG.standard_normal((2, 2, 3))  # 26 px apart
PIXEL[0, 5, 9] = 1
WEIGHTS = RNG.uniform(1, 2, (SIDE, SIDE))
EMBEDDING, BIAS = RNG.standard_normal((48, 6)) / 7, RNG.standard_normal(6)
MIXING, TABLE = RNG.standard_normal((2, 2, 8))
WITHIN = RNG.standard_normal((SIDE**2, SIDE**2))  # a bias for each pair of places in a window
QUERY, KEY, VALUE = RNG.standard_normal((3, 3, 3))


@jax.jit
def by_content(image, energy):
    """The phase (row, column) with the largest sum of energies."""
    choice = shifts.choose(energy[None], SIDE, view_hashes(image[None]))
    return shifts.phases(choice.index, SIDE)[0]


def by_index(image, energy):
    """The same, and among equal ones the first."""
    return np.divmod(energy.reshape(2, SIDE, 8, SIDE).sum((0, 2)).argmax(), SIDE)


def around(image, weights):
    """Weighted energies of the square that begins at each position."""
    pixels = (image**2).sum(-1)
    return sum(weights[i, j] * np.roll(pixels, (-i, -j), (0, 1)) for i, j in np.ndindex(SIDE, SIDE))


def back(x, begin):
    return np.roll(x, -np.asarray(begin), (0, 1))


def blocks(x):
    """[H, W, C] to patches or windows [H / 4, W / 4, 16, C]."""
    return x.reshape(2, SIDE, 8, SIDE, -1).swapaxes(1, 2).reshape(2, 8, SIDE**2, -1)


def whole(x):
    """The inverse of `blocks`."""
    return x.reshape(2, 8, SIDE, SIDE, -1).swapaxes(1, 2).reshape(8, 32, -1)


def attend(q, k, v, bias=0.0):
    scores = np.exp(q @ k.swapaxes(-1, -2) + bias)
    return scores / scores.sum(-1, keepdims=True) @ v


def tokens(image, rule=by_content, positions=False):
    """Adaptive patches, embedded and mixed over the torus: [2, 8, 6], and where they begin."""
    begin = np.asarray(rule(image, around(image, WEIGHTS)))
    x = blocks(back(image, begin)).reshape(2, 8, -1) @ EMBEDDING + BIAS
    if positions:
        x = x + TABLE[..., None]
    return np.maximum(sum(MIXING[d] * np.roll(x, d, (0, 1)) for d in np.ndindex(2, 8)), 0), begin


def windows(image, rule=by_content, mask=False):
    """Attention in adaptive windows, then in shifted ones; with the mask of the usual ones, if asked for."""
    begin = np.asarray(rule(image, around(image, np.ones((SIDE, SIDE))) ** 2))
    x, half = back(image, begin), SIDE // 2
    x = x + whole(attend(*[blocks(x @ w) for w in (QUERY, KEY, VALUE)], WITHIN))
    rows, columns = (np.digitize(np.arange(n), (n - SIDE, n - half)) for n in (8, 32))
    region = blocks((3 * rows[:, None] + columns)[..., None])
    apart = np.where(region != region.swapaxes(-1, -2), -np.inf, 0) if mask else 0
    moved = whole(attend(*[blocks(back(x, half) @ w) for w in (QUERY, KEY, VALUE)], WITHIN + apart))
    return x + back(moved, -half), begin


def pooled_attention(image, together=True):
    """All positions attend to keys and values on a coarse lattice."""
    k, v = image @ KEY, image @ VALUE
    phase = by_content(image, (k**2).sum(-1))
    other = phase if together else by_content(image, (v**2).sum(-1))
    k, v = (back(a, p)[::SIDE, ::SIDE].reshape(-1, 3) for a, p in ((k, phase), (v, other)))
    return attend(image @ QUERY, k, v)


def each(layer, **options):
    """The layer on each image of a batch, pooled."""
    return lambda x: np.stack([np.tanh(layer(image, **options)[0]).mean((0, 1)) for image in x])


def grid(layer, stride, place=lambda begin: begin):
    """The layer's maps, said to begin at `place(begin)`."""

    def fn(x):
        values, begin = zip(*map(layer, x), strict=True)
        return Grid(np.stack(values), (stride, stride), place(np.stack(begin)))

    return fn


@pytest.mark.parametrize("x", [RANDOM, TWO, PIXEL], ids=["random", "two objects", "one pixel"])
@pytest.mark.parametrize(("layer", "stride"), [(tokens, SIDE), (windows, 1)])
def test_adaptive_layers_pass(layer, stride, x):
    assert testing.assert_shift_equivariant(each(layer), x) < 1e-12
    assert testing.assert_shift_equivariant(grid(layer, stride), x, output="grid") < 1e-12


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        (each(tokens, rule=by_index), TWO),
        (each(windows, rule=by_index), PIXEL),
        (each(tokens, positions=True), RANDOM),
        (each(windows, mask=True), RANDOM),
        (lambda x: np.stack([pooled_attention(image, together=False).mean((0, 1)) for image in x]), RANDOM),
    ],
    ids=["index decides", "index decides windows", "linear positions", "mask kept", "phases of keys and values"],
)
def test_faults_are_caught(fn, x):
    with pytest.raises(AssertionError, match=r"^shift \(-?\d+, -?\d+\): the output deviates by .*relative; tol=1e-10"):
        testing.assert_shift_equivariant(fn, x)


def test_images_move_with_images():
    fn = lambda x: np.stack([pooled_attention(image) for image in x])  # noqa: E731
    assert testing.assert_shift_equivariant(fn, RANDOM, output="image") < 1e-12
    with pytest.raises(
        AssertionError, match=r"shift \(0, 1\): the output deviates by 1.00e-03 \(relative; tol=1e-05\)"
    ):
        testing.assert_shift_equivariant(
            lambda x: jnp.ones(x.shape).at[:, 0, 0].add(-1e-3), jnp.asarray(RANDOM), output="image"
        )
    testing.assert_shift_equivariant(lambda x: x, jnp.asarray(RANDOM, jnp.bfloat16), output="image", tol=0)


def test_a_grid_tells_where_it_begins():
    with pytest.raises(AssertionError, match=r"shift \(0, 1\): the grid of image 0 begins at .* and not at .*\(4, 4\)"):
        testing.assert_shift_equivariant(grid(tokens, SIDE, np.zeros_like), RANDOM, output="grid")
    # Right modulo the stride is not enough.
    with pytest.raises(AssertionError, match=r"shift \(-4, 7\): the output deviates by"):
        testing.assert_shift_equivariant(
            grid(tokens, SIDE, lambda begin: begin + SIDE * (begin // 2)), RANDOM, shifts=[(-4, 7)], output="grid"
        )


def test_which_shifts_are_tried():
    seen = []
    x = RANDOM[:1]
    testing.assert_shift_equivariant(lambda y: seen.append(y) or np.ones(1), x)
    tried = {y.tobytes() for y in seen}
    assert len(tried) == len(seen) == 12
    assert {np.roll(x, s, (1, 2)).tobytes() for s in [(0, 0), (0, 1), (-1, 0), (5, 0), (-4, 7), (4, 16)]} <= tried
    seen.clear()
    testing.assert_shift_equivariant(lambda y: seen.append(y.tobytes()) or np.ones(1), x[:, :4, :5])
    assert len(set(seen)) == len(seen) == 20
    with pytest.raises(AssertionError, match=r"shift \(2, -3\): the output deviates by 1.00e\+00 .*tol=0e\+00"):
        testing.assert_shift_equivariant(lambda y: np.array([y[0, 2, 0, 0] == x[0, 2, 0, 0]]), x, shifts=[(2, -3)])


OFFSET = np.zeros((2, 2), int)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(output="gird"), "output='gird' is not one of invariant, image, grid; the nearest is 'grid'"),
        (dict(x=[1.0]), r"x must be an array of images \[\*B, H, W, C\]; it is list \[1.0\]"),
        (dict(x=RANDOM[:0]), r"x must be not empty, .* it is float64 \[0, 8, 32, 3\]"),
        (dict(shifts=3), r"shifts=3 must be pairs of integers, \(down, right\)"),
        (dict(shifts=[(1, 2), (1, 0.5)]), r"shifts=\[\(1, 2\), \(1, 0.5\)\] must be pairs of integers"),
        (dict(shifts=[]), r"shifts=\[\] leave images of 8x32 unmoved"),
        (dict(shifts=[(8, -64)]), r"shifts=\[\(8, -64\)\] leave images of 8x32 unmoved"),
        (dict(x=RANDOM[:, :1, :1]), r"shifts=\[\] leave images of 1x1"),
        (dict(fn=lambda x: None), r"output='invariant', so fn\(x\) must be an array, .*; there is None"),
        (
            dict(output="image", fn=lambda x: x[:, ::2]),
            r"must be of the size of x, \[2, 8, 32, 3\]; it is float64 \[2, 4",
        ),
        (dict(output="grid"), r"must be a Grid of values \[\*B, h, w, D\], .*; it is float64 \[2, 8, 32, 3\]"),
        (
            dict(output="grid", fn=lambda x: Grid(x, (2, 1), OFFSET)),
            r"covers x, .*; it is a Grid of values \[2, 8, 32, 3\], stride \(2, 1\), offset int64 \[2, 2\]",
        ),
        (dict(output="grid", fn=lambda x: Grid(x, (1, 1), OFFSET + 0.5)), r"with integer offsets .* offset float64"),
        *((dict(tol=tol), r"tol=.* must be a finite number, zero or more") for tol in ("x", -1, np.nan, True, np.inf)),
        (dict(output="grid", fn=lambda x: Grid(x[0], (1,), OFFSET)), r"must be a Grid .* stride \(1,\)"),
    ],
)
def test_what_cannot_be_checked_is_told(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        testing.assert_shift_equivariant(**(dict(fn=lambda x: x, x=RANDOM) | arguments))
    assert "\n" not in str(error.value) and len(str(error.value)) < 300


def test_outputs_of_another_kind_are_told():
    with pytest.raises(AssertionError, match=r"shift \(0, 1\): the output has the structure"):
        testing.assert_shift_equivariant(lambda x: (x,) * (1 + (x == RANDOM).all()), RANDOM)
    with pytest.raises(AssertionError, match=r"shift \(0, 1\): the grid has values of a different shape"):
        testing.assert_shift_equivariant(
            lambda x: Grid(x if (x == RANDOM).all() else x[:1], (1, 1), OFFSET), RANDOM, output="grid"
        )
    with pytest.raises(AssertionError, match="assert_shift_equivariant: the output is not finite, .*jax_debug_nans"):
        testing.assert_shift_equivariant(lambda x: x * np.nan, RANDOM)
    with pytest.raises(AssertionError, match="the output is zero, which proves nothing"):
        testing.assert_shift_equivariant(np.zeros_like, RANDOM)
