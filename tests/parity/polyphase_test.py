"""Polyphase sampling against the layers of learnable polyphase sampling (LPS) and of its predecessor (APS).

The predecessor numbers phases by columns, LPS and ours by rows; the maps are the same.
"""

import math

import jax
import numpy as np

from equivit.symmetry import shifts
from tests.parity.arrays import FIXTURES, Comparison, load

# The filters add up to 25 products of float32 in another order; everything else is a copy, a number of a phase, or
# compared as such.
ROUNDING = 2.5e-7

down = jax.jit(shifts.polyphase_down, static_argnums=1, static_argnames=("order", "lowpass"))
up = jax.jit(shifts.polyphase_up, static_argnums=2, static_argnames="lowpass")


def channels_first(x):
    return np.moveaxis(np.asarray(x), -1, -3)


def test_official(record_property):
    data = load(FIXTURES / "adaptive" / "aps_lps.npz")
    comparison = Comparison(data)
    x = np.moveaxis(data["input/x"], 1, -1)
    moved = np.stack([np.roll(x, shift, (1, 2)) for shift in data["input/shifts"]])

    def compare(values, phase, name, stride=2, tolerance=0.0, lead=()):
        """The component and the index of its phase."""
        comparison.array(f"output/down{name}", channels_first(values.reshape(*lead, -1, *values.shape[1:])), tolerance)
        comparison.array(f"output/idx{name}", (np.asarray(phase) @ [stride, 1]).reshape(*lead, -1), 0)

    values, phase = down(moved.reshape(-1, *x.shape[1:]), 2)
    compare(values, phase, "", lead=moved.shape[:1])
    comparison.array("output/up", channels_first(up(values, phase, 2)).reshape(data["output/up"].shape), 0)
    compare(*down(x, 4), "_stride4", 4)
    for size in (2, 3, 5):
        values, phase = down(x, 2, lowpass=size)
        compare(values, phase, f"_lpf{size}", tolerance=ROUNDING)
        comparison.array(f"output/up_lpf{size}", channels_first(up(values, phase, 2, lowpass=size)), ROUNDING)
    for name, order in (("p1", 1), ("p3", 3), ("pinf", math.inf)):
        comparison.array(f"output/idx_{name}", np.asarray(down(x, 2, order=order)[1]) @ [2, 1], 0)
    energies = np.asarray(shifts.energies(x), np.float64).reshape(len(x), 4, 2, 6, 2).sum((1, 3)).reshape(len(x), 4)
    comparison.array("output/norms_unshifted", np.sqrt(energies), ROUNDING)

    values, phase = down(x[:, :, : x.shape[1]], 2)
    comparison.array("output/lps_idx_square", np.asarray(phase) @ [2, 1], 0)
    comparison.array("output/aps_orig_idx_square", np.asarray(phase) @ [1, 2], 0)
    comparison.array("output/aps_orig_down_square", channels_first(values), 0)
    comparison.finish(record_property, "polyphase")
