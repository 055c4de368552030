"""Precision "float16": gradients under a loss scale, steps that overflow, and runs that go on."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.models import zoo
from equivit.objectives.supervised import Supervised
from equivit.training import loop, loss_scale, schedules, sharding
from equivit.training.loss_scale import LossScale
from equivit.training.run import checkpoint_files, resuming
from tests.training import tiny
from tests.training.loop_test import Pipeline, options, rows
from tests.training.state_test import mesh_of

CLIP, BETA = 1e-3, 0.9
VIT = zoo.configuration(
    "vit_ti16", width=32, depth=2, num_heads=2, patch_size=2, image_size=(4, 4), in_channels=1, num_classes=tiny.CLASSES
)


def scale(value, steps=0):
    return LossScale(jnp.float32(value), jnp.int32(steps))


@functools.cache
def vit(precision):
    """A ViT whose layer scales are 1e-4, and its first state."""
    config = tiny.config(objective=dict(ema=0.9), optimizer=dict(name="adamw", clip=CLIP, betas=(BETA, 0.999)))
    config.precision = precision
    with jax.set_mesh(mesh_of(1, 1)):
        program = tiny.program(config, mesh_of(1, 1), build_model=VIT.build)
        return program, jax.device_get(program.init({}))


def step(precision, **changes):
    """The state and the metrics after the first step from a changed state."""
    program, state = vit(precision)
    with jax.set_mesh(mesh_of(1, 1)):
        batch = sharding.to_global(mesh_of(1, 1), tiny.batch(0))
        return jax.device_get(program.step(jax.device_put(state._replace(**changes)), batch))


def gradients(state):
    """The clipped gradients of matrices behind a layer scale, from the moments after one step, as one vector."""
    mu = state.optimizer["adam"].mu
    leaves = [mu[k] for k in sorted(mu) if k.endswith((".qkv.weight", ".fc1.weight"))]
    return np.concatenate([leaf.ravel() for leaf in leaves]) / (1 - BETA)


def distance(a, b):
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_gradients_are_near_those_of_float32_and_clipped_without_the_scale():
    """Each factor has a relative error of 2^-11, or 5e-4; those of some ten products on a path add up as a root.

    Without a scale, gradients behind a layer scale of 1e-4 are a few multiples of 6e-8, or 0.
    """
    (exact, exact_metrics), (state, metrics) = step("float32"), step("float16")
    wrong, _ = step("float16", loss_scale=scale(1.0))
    print("relative errors", distance(gradients(state), gradients(exact)), distance(gradients(wrong), gradients(exact)))
    assert distance(gradients(state), gradients(exact)) < 2e-3
    assert distance(gradients(wrong), gradients(exact)) > 0.1
    everything = np.concatenate([mu.ravel() for mu in state.optimizer["adam"].mu.values()]) / (1 - BETA)
    np.testing.assert_allclose(np.linalg.norm(everything), CLIP, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], exact_metrics["grad_norm"], rtol=2e-3)
    np.testing.assert_allclose(metrics["loss"], exact_metrics["loss"], rtol=1e-3)
    assert metrics["loss_scale"] == 2.0**16 and not metrics["skipped"] and state.loss_scale.steps == 1


def test_a_step_that_overflows_changes_the_scale_alone():
    _, before = vit("float16")
    after, metrics = step("float16", loss_scale=scale(2.0**40, 7))
    assert metrics["skipped"] and metrics["good"] and np.isfinite(metrics["loss"])
    assert after.step == 1 and after.loss_scale == (2.0**39, 0)
    chex.assert_trees_all_equal(after._replace(step=before.step, loss_scale=before.loss_scale), before)


def test_the_scale_follows_gradscaler():
    yes, no = jnp.bool_(True), jnp.bool_(False)
    start = loss_scale.start("float16")
    assert start == (2.0**16, 0) and loss_scale.INTERVAL == 2000
    assert loss_scale.after(scale(8.0, 1998), yes, yes) == (8.0, 1999)
    assert loss_scale.after(scale(8.0, 1999), yes, yes) == (16.0, 0)
    assert loss_scale.after(scale(8.0, 1999), yes, no) == (4.0, 0)
    assert loss_scale.after(scale(8.0, 5), no, no) == (8.0, 5)
    assert loss_scale.after(scale(loss_scale.LARGEST, 1999), yes, yes) == (loss_scale.LARGEST, 0)
    assert loss_scale.may_fall(scale(2.0)) and not loss_scale.may_fall(scale(1.0)) and not loss_scale.may_fall(None)
    assert all(loss_scale.start(precision) is None for precision in ("float32", "mixed", "bfloat16"))


class Overflowing(Supervised):
    """Gradients of images with a black first pixel are not finite, but the loss is: the root of 0 has no slope."""

    def loss(self, module, batch, step):
        found = super().loss(module, batch, step)
        is_black = (batch["image"][:, 0, 0, 0] < -0.995).any()  # normalised
        parameter = module.head.bias[...].sum()
        return found._replace(value=found.value + jnp.sqrt(jnp.where(is_black, 0 * parameter, 1)))


def config_of(precision, **sections):
    config = options(**sections)
    config.precision = precision
    return config


def batch(t, black=()):
    """`tiny.batch` with some black first pixels, and no others."""
    rows = tiny.batch(t)
    rows["image"] = np.array(rows["image"])
    rows["image"][:, 0, 0, 0] = np.maximum(rows["image"][:, 0, 0, 0], 1)
    rows["image"][list(black), 0, 0, 0] = 0
    return rows


@pytest.mark.slow
def test_micro_batches_on_two_devices_share_one_scale():
    """A scale is a power of two, so without products in float16 it changes nothing; one bad micro-batch skips all."""
    mesh, states = mesh_of(2, 1), {}
    with jax.set_mesh(mesh):
        for precision in ("float32", "float16"):
            config = config_of(precision, optimizer=dict(accumulation=4))
            program = tiny.program(config, mesh, objective=Overflowing(config))
            state = program.init({})
            for t in range(3):
                state, _ = program.step(state, sharding.to_global(mesh, batch(t)))
            states[precision] = jax.device_get(state)
        chex.assert_trees_all_close(states["float16"]._replace(loss_scale=None), states["float32"], rtol=1e-6)
        state, metrics = program.step(state, sharding.to_global(mesh, batch(3, black=[5])))
    assert metrics["skipped"] and state.loss_scale == (2.0**15, 0) and state.step == 4
    chex.assert_trees_all_equal(jax.device_get(state.trainable), states["float16"].trainable)


class Killed(Exception):
    pass


class Black(Pipeline):
    """Every third batch overflows; the run is killed before batch `kill`."""

    def __init__(self, kill=None, black=lambda t: t % 3 == 1):
        self.kill, self.black = kill, black

    def batches(self, start=0):
        for t in range(start, 100):
            if t == self.kill:
                raise Killed
            yield batch(t, [0] if self.black(t) else [])


@functools.cache
def program_of(precision, interval, mesh, total, per_epoch):
    """Return one program for all runs of a precision and an interval of the loss scale."""
    config = config_of(precision)
    return tiny.make_program(config, mesh, total=total, per_epoch=per_epoch, objective=Overflowing(config))


def make_program(config, mesh, *, total, per_epoch):
    return program_of(config.precision, loss_scale.INTERVAL, mesh, total, per_epoch)


def train(workdir, config, pipeline):
    loop.train(config, workdir=workdir, pipeline=pipeline, evaluate=lambda *_: {}, make_program=make_program)


def stored(workdir, step):
    with checkpoint_files.ocp.CheckpointManager(workdir / "checkpoints") as manager:
        about = checkpoint_files._about(manager, step)
    return about["leaves"].keys(), about["bits"]


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch, capsys):
    """With three skipped steps of ten, and a scale that doubles after two good ones."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 2)
    config = config_of("float16", checkpoint=dict(every_steps=4))
    train(tmp_path / "whole", config, Black())
    with pytest.raises(Killed):
        train(tmp_path / "killed", config, Black(kill=5))  # at half the scale
    train(tmp_path / "killed", config, Black())
    leaves, bits = stored(tmp_path / "whole", 10)
    assert {"loss_scale.value", "loss_scale.steps"} < leaves
    assert stored(tmp_path / "killed", 10) == (leaves, bits)

    metrics = [row for row in rows(tmp_path / "whole") if "loss" in row]
    assert [row["loss_scale"] / 2**16 for row in metrics] == [1, 0.5, 0.75, 0.75, 0.5]
    assert [row["skipped"] for row in metrics] == [0.5, 0, 0.5, 0.5, 0]
    assert all(np.isfinite(list(row.values())).all() for row in metrics)
    lr = schedules.create(config.schedule, total_steps=10, steps_per_epoch=4)
    assert metrics[-1]["lr"] == pytest.approx(lr(6))  # of the seventh update
    assert "loss scale 65536" in capsys.readouterr().out

    # Another precision can take it over, but has no scale to give back.
    other = config_of("float32", checkpoint=dict(every_steps=4))
    other.steps = 12
    train(tmp_path / "whole", other, Black(black=lambda t: False))
    assert stored(tmp_path / "whole", 12)[0] == leaves - {"loss_scale.value", "loss_scale.steps"}
    with pytest.raises(ValueError, match="config.precision='float16': the run in .* has 'float32', and no loss scale"):
        resuming.check(tmp_path, config, other)


@pytest.mark.slow
def test_gradients_that_overflow_at_any_scale_end_the_run(tmp_path):
    config = config_of("float16")
    config.steps = 30
    with pytest.raises(loop.NotFiniteError, match="at step 18 .* or set precision='mixed', as float16 ends at 65504"):
        train(tmp_path, config, Black(black=lambda t: t > 1))
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["skipped"] == 1
