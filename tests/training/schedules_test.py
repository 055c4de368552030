import jax.numpy as jnp
import numpy as np
import pytest

from equivit.training import loop, schedules
from equivit.training.config import get_base
from tests.training import tiny
from tests.training.state_test import mesh_of


def _schedule(total_steps, steps_per_epoch, **options):
    config = get_base().schedule
    config.update(options)
    return schedules.create(config, total_steps=total_steps, steps_per_epoch=steps_per_epoch)


def _deit3(steps_per_epoch=1251):
    options = dict(lr=3e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=5, per_epoch=True)
    return _schedule(400 * steps_per_epoch, steps_per_epoch, **options)


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [
        (0, 1e-6),
        (1, 1e-6),  # the scheduler is stepped after epoch 0 with the index 0
        (5, 1e-6 + 4 / 5 * (3e-3 - 1e-6)),
        (6, 1e-5 + 0.5 * (3e-3 - 1e-5) * (1 + np.cos(np.pi * 5 / 400))),
        (399, 1e-5 + 0.5 * (3e-3 - 1e-5) * (1 + np.cos(np.pi * 398 / 400))),
    ],
)
def test_deit3_learning_rate_of_an_epoch(epoch, expected):
    schedule = _deit3()
    rates = [float(schedule(jnp.int32(step))) for step in (epoch * 1251, epoch * 1251 + 1250)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)  # float32


def test_per_step_rises_to_the_peak_and_falls_to_the_minimum():
    schedule = _schedule(100, 10, lr=1.0, warmup_lr=0.2, min_lr=0.1, warmup_steps=20)
    np.testing.assert_allclose([schedule(0), schedule(10), schedule(20)], [0.2, 0.6, 1.0], rtol=1e-6)
    np.testing.assert_allclose([schedule(60), schedule(100)], [0.55, 0.1], rtol=1e-6)


def test_warmup_epochs_are_steps():
    options = dict(lr=1.0, warmup_lr=0.0)
    by_epoch, by_step = _schedule(100, 10, warmup_epochs=2, **options), _schedule(100, 10, warmup_steps=20, **options)
    assert [by_epoch(t) for t in (0, 7, 20, 63)] == [by_step(t) for t in (0, 7, 20, 63)]


def test_constant_stays():
    schedule = _schedule(100, 10, name="constant", lr=0.5, warmup_lr=0.1, warmup_steps=4)
    np.testing.assert_allclose([schedule(0), schedule(4), schedule(99)], [0.1, 0.5, 0.5], rtol=1e-6)


def test_a_polynomial_falls_from_the_first_step_and_the_warmup_multiplies_it():
    """As MMSegmentation trains UperNet: of 100 steps, 10 of warm-up."""
    lr = _schedule(100, 10, name="poly", lr=2.0, min_lr=0.5, warmup_lr=0.2, warmup_steps=10, power=0.9)
    expected = {t: 0.5 + 1.5 * (1 - t / 100) ** 0.9 for t in (0, 5, 10, 50, 100)}
    expected[0] *= 0.1
    expected[5] *= 0.55
    for t, value in expected.items():
        np.testing.assert_allclose(lr(t), value, rtol=1e-6)


def test_a_warmup_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match="warm-up of 10 steps does not fit in a run of 10"):
        _schedule(10, 5, warmup_epochs=2)


def test_warmup_cosine():
    """Three steps of warm-up, the last at the base; six of cosine, the first of them there too; then the end."""
    steps = jnp.arange(12)
    found = schedules.warmup_cosine(2.0, 0.5, total=9, warmup=3, start=1.0)(steps)
    cosine = 0.5 + 1.5 * (1 + np.cos(np.pi * np.arange(6) / 6)) / 2
    np.testing.assert_allclose(found, [1.0, 1.5, 2.0, *cosine, 0.5, 0.5, 0.5], rtol=1e-6)
    risen = schedules.warmup_cosine(2.0, 2.0, total=4, warmup=4)(steps)
    np.testing.assert_allclose(risen[:6], [0, 2 / 3, 4 / 3, 2, 2, 2], rtol=1e-6)
    with pytest.raises(ValueError, match="warmup=5 steps do not fit in total=4"):
        schedules.warmup_cosine(1.0, 0.0, total=4, warmup=5)


@pytest.mark.parametrize("warmup", [1, 2, 5])
def test_an_inclusive_warmup_is_numpys_linspace(warmup):
    """As in the code of DINO and DINOv2, also for a single step, which has the start."""
    found = schedules.warmup_cosine(2.0, 0.5, total=9, warmup=warmup, start=1.0)(jnp.arange(warmup))
    np.testing.assert_allclose(found, np.linspace(1.0, 2.0, warmup), rtol=1e-6)


def test_an_inclusive_warmup_ends_at_the_peak_and_never_above():
    """Also where it is no whole number of steps: of 2.5 the third would have 4/3 of the rate."""
    options = dict(lr=2.0, min_lr=0.5, warmup_lr=1.0, inclusive=True)
    found = _schedule(9, 4, warmup_steps=3, **options)
    expected = schedules.warmup_cosine(2.0, 0.5, total=9, warmup=3, start=1.0)
    assert [float(found(t)) for t in range(10)] == [float(expected(t)) for t in range(10)]
    np.testing.assert_allclose([_schedule(9, 5, warmup_epochs=0.5, **options)(t) for t in (0, 1, 2)], [1, 5 / 3, 2])
    np.testing.assert_allclose(_schedule(9, 4, warmup_steps=3, name="constant", **options)(8), 2.0)


def test_a_run_may_do_the_first_part_of_a_longer_schedule():
    """As DinoBloom does, whose 4,000 of 100,000 steps all belong to the warm-up; decay and averages follow it too."""
    config = tiny.config(schedule=dict(lr=1.0, warmup_lr=0.0, warmup_steps=40, length=100))
    config.steps = 10
    run = tiny.make_program(config, mesh_of(1, 1), total=loop.total_steps(config, 4), per_epoch=4)
    np.testing.assert_allclose([run.lr(0), run.lr(10)], [0, 0.25], rtol=1e-6)
    config.steps = 101
    with pytest.raises(ValueError, match="config.schedule.length=100 must not be below the steps of the run, 101"):
        loop.total_steps(config, 4)
