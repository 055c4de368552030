"""The greatest view of a map among equals: both forms follow every shift, compare in order and agree."""

import functools

import jax
import numpy as np
import pytest

from equivit.kernels.views import greatest_view
from equivit.kernels.views.reference import FACTORS, JOINED

RNG = np.random.default_rng(0)
FORMS = {name: jax.jit(functools.partial(greatest_view, implementation=name)) for name in ("reference", "gpu")}


def both(size):
    """Energies and hashes of pixels of few values: many positions tie."""
    pixels = np.random.default_rng(0).integers(0, 2, (6, 2, *size)).astype(np.uint32)
    pixels[0], pixels[1, :, :, 1:] = 7, pixels[1, :, :, :1]  # flat, and periodic along one axis
    return (pixels[:, 0] % 2).astype(np.float32), pixels


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(5, 6), (1, 17), (16, 3), (31, 18)], ids=str)
def test_it_follows_every_shift(size, form):
    energies, pixels = both(size)
    found = np.asarray(FORMS[form](energies, pixels))
    assert (energies.reshape(6, -1)[np.arange(6), found] == energies.max((1, 2))).all()

    def views(pixels, found):
        moves = np.stack(np.divmod(found, size[1]), 1)
        return np.stack([np.roll(p, -move, (1, 2)) for p, move in zip(pixels, moves, strict=True)])

    for shift in ((1, 0), (0, 1), (2, 5)):
        moved = np.roll(pixels, shift, (2, 3))
        again = np.asarray(FORMS[form](np.roll(energies, shift, (1, 2)), moved))
        np.testing.assert_array_equal(views(moved, again), views(pixels, found))


@pytest.mark.parametrize("form", FORMS)
def test_the_largest_energy_decides_before_the_view(form):
    energies = RNG.permutation(3 * 35).reshape(3, 5, 7).astype(np.float32)
    pixels = RNG.integers(0, 2**32, (3, 2, 5, 7), dtype=np.uint32)
    np.testing.assert_array_equal(FORMS[form](energies, pixels), energies.reshape(3, -1).argmax(1))


@pytest.mark.parametrize("form", FORMS)
def test_strips_of_two_kinds_of_pixels_differ(form):
    """One bright pixel: every view differs, so the position of its greatest moves with it."""
    pixels = np.full((225, 2, 15, 15), 3, np.uint32)
    for k, place in enumerate(np.ndindex(15, 15)):
        pixels[(k, slice(None), *place)] = 4
    found = np.asarray(FORMS[form](np.zeros((225, 15, 15), np.float32), pixels))
    assert len(np.unique(found)) == 225


@pytest.mark.parametrize("size", [(5, 6), (1, 17), (31, 65)], ids=str)
def test_both_forms_agree(size):
    energies, pixels = both(size)
    np.testing.assert_array_equal(FORMS["gpu"](energies, pixels), FORMS["reference"](energies, pixels))


def test_factors_keep_most_bits():
    """Strips of two kinds of pixels differ by a sum of factors, times a difference; a factor of two loses a bit."""
    sums = np.zeros((1, 2), np.uint32)
    for pair in FACTORS.T:
        sums = np.concatenate([sums, sums + pair, sums - pair])
    lost = np.log2((sums[1:] & -sums[1:].astype(np.int64)).astype(np.float64)).sum(1)
    print(f"{lost.max():.0f} of 64 bits")
    assert lost.max() <= 20


@pytest.mark.parametrize("size", [224, 256])
def test_gpus_hash_each_axis_in_four_steps(size):
    """Each step reads and writes all hashes, and mixes them by three exclusive ors."""
    energies, pixels = np.zeros((1, size, size), np.float32), np.zeros((1, 2, size, size), np.uint32)
    assert JOINED == 4
    assert FORMS["gpu"].lower(energies, pixels).as_text().count("stablehlo.xor") == 2 * 4 * 3
