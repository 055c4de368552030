"""Where a run stands: shares and schedules, traced and not."""

import jax
import numpy as np
import pytest

from equivit.objectives.clock import Clock


@pytest.mark.parametrize("step", [0, 3, 20])
def test_shares(step):
    assert float(Clock(np.int32(step), 20, 8).done) == pytest.approx(step / 20)


def test_schedules():
    ramp = [Clock(t, 10, 5).ramp(0.04, 0.07, 4) for t in range(11)]
    np.testing.assert_allclose(ramp, [0.04, 0.05, 0.06, *[0.07] * 8], rtol=1e-6)
    cosine = [Clock(t, 10, 5).cosine(0.992, 1.0) for t in range(11)]
    expected = 1.0 + 0.5 * (0.992 - 1.0) * (1 + np.cos(np.pi * np.arange(11) / 10))
    np.testing.assert_allclose(cosine, expected, rtol=1e-7)


def test_the_step_may_be_traced():
    values = jax.jit(lambda t: (Clock(t, 10, 5).cosine(0.0, 1.0), Clock(t, 10, 5).ramp(0.0, 1.0, 11)))(7)
    np.testing.assert_allclose(values, (Clock(7, 10, 5).cosine(0.0, 1.0), 0.7), rtol=1e-6)
