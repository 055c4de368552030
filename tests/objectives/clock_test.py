"""Where a run stands: shares, epochs and schedules, traced and not."""

import jax
import numpy as np
import pytest

from equivit.objectives.clock import Clock


@pytest.mark.parametrize("step", [0, 3, 20])
def test_shares_and_epochs(step):
    clock = Clock(np.int32(step), 20, 8)
    assert float(clock.done) == pytest.approx(step / 20) and float(clock.epoch) == pytest.approx(step / 8)


def test_schedules():
    linear = [Clock(t, 10, 5).linear(0.04, 0.07, until=0.3) for t in range(11)]
    np.testing.assert_allclose(linear, [0.04, 0.05, 0.06, *[0.07] * 8], rtol=1e-6)
    np.testing.assert_allclose(Clock(5, 10, 5).linear(1.0, 3.0), 2.0)
    cosine = [Clock(t, 10, 5).cosine(0.992, 1.0) for t in range(11)]
    expected = 1.0 + 0.5 * (0.992 - 1.0) * (1 + np.cos(np.pi * np.arange(11) / 10))
    np.testing.assert_allclose(cosine, expected, rtol=1e-7)


def test_the_step_may_be_traced():
    values = jax.jit(lambda t: (Clock(t, 10, 5).cosine(0.0, 1.0), Clock(t, 10, 5).linear(0.0, 1.0)))(7)
    np.testing.assert_allclose(values, (Clock(7, 10, 5).cosine(0.0, 1.0), 0.7), rtol=1e-6)
