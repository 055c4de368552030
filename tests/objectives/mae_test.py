"""Masked autoencoding: the loss, training and resuming, evaluation, and what a later run takes from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.evaluation import runner
from equivit.objectives import mae
from equivit.training import build, checkpoints, config, sharding, warm_start
from tests.training.state_test import mesh_of

MODEL = dict(
    name="jumbo_vit_mae_ti16",
    width=24,
    depth=1,
    num_heads=2,
    jumbo=2,
    patch_size=4,
    image_size=(12, 16),
    in_channels=1,
)


def options(**changes):
    c = config.get_base("mae")
    c.update(steps=4, batch_size=8)
    c.model = dict(**MODEL, num_classes=None)
    c.data.update(image_size=(12, 16), mean=(0.3,), std=(0.4,), eval_examples=13)
    c.objective.update(decoder_width=16, decoder_depth=1, decoder_heads=2, **changes)
    c.evaluation.suite = ("reconstruction",)
    return c


def batch(t):
    images = jax.random.randint(jax.random.key(t), (8, 12, 16, 1), 0, 256).astype(jnp.uint8)
    return {"image": np.asarray(images), "label": np.zeros(8, np.int32)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run directory: (config, its place, the program, the mesh, the state after four steps)."""
    workdir, c, mesh = tmp_path_factory.mktemp("run"), options(), mesh_of(1, 1)
    with jax.set_mesh(mesh), checkpoints.Checkpoints(workdir, c.checkpoint) as manager:
        compiled = build.make_program(c, mesh, total=4, per_epoch=4)
        state = steps(compiled, mesh, compiled.init({}), 2)
        manager.save(state)
        state = steps(compiled, mesh, state, 4)
        manager.save(state)
    (workdir / "config.json").write_text(config.to_json(c))
    return c, workdir, compiled, mesh, state


def steps(compiled, mesh, state, stop):
    for t in range(int(state.step), stop):
        state, _ = compiled.step(state, sharding.to_global(mesh, batch(t)))
    return state


def module(c):
    """The module to train, with shapes in place of arrays."""
    return jax.eval_shape(lambda: mae.Mae(c).module(build.make_model(c, nnx.Rngs(params=0)), jax.random.key(0)))


@pytest.mark.slow
def test_stopped_and_resumed_equals_uninterrupted(run, tmp_path):
    c, workdir, compiled, mesh, whole = run
    (tmp_path / "checkpoints").mkdir()
    (workdir / "checkpoints" / "2").rename(tmp_path / "checkpoints" / "2")
    with jax.set_mesh(mesh), checkpoints.Checkpoints(tmp_path, c.checkpoint) as manager:
        state = manager.restore(compiled.abstract)
        assert state.step == 2
        state = steps(compiled, mesh, state, 4)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(whole))


def test_prepared_batch():
    prepared = mae.Mae(options(ratio=0.8, groups=2)).prepare(module(options()), batch(0), jax.random.key(1))
    assert prepared["keep"].shape == (8, 2) and prepared["mask"].shape == (8, 12)  # int(0.2 * 12)
    assert (prepared["mask"][:4] == prepared["mask"][0]).all() and (prepared["mask"][0] != prepared["mask"][4]).any()
    np.testing.assert_allclose(prepared["image"], (batch(0)["image"] / 255 - 0.3) / 0.4, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("target", mae.TARGETS)
@pytest.mark.parametrize("variance", mae.VARIANCES)
def test_loss_by_hand(target, variance):
    rng = np.random.default_rng(0)
    images, predictions = rng.normal(2, 3, (2, 4, 6, 3)), rng.normal(size=(2, 6, 12))
    mask = np.asarray([[1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0]])
    ours = mae.targets(jnp.asarray(images), (2, 2), target, variance)
    for b, row, column in np.ndindex(2, 2, 3):
        patch = images[b, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2].reshape(-1)  # rows, columns, channels
        if target == "normalised_pixels":
            patch = (patch - patch.mean()) / np.sqrt(patch.var(ddof=int(variance == "unbiased")) + 1e-6)
        np.testing.assert_allclose(ours[b, 3 * row + column], patch, rtol=1e-5, atol=1e-6)
    errors = ((predictions - np.asarray(ours)) ** 2).mean(-1)
    expected = [errors[0, [0, 2, 3]].mean(), errors[1, [1, 2]].mean()]
    found = mae.removed_errors(jnp.asarray(predictions, jnp.bfloat16), ours, mask)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(mae.removed_errors(jnp.asarray(predictions), ours, mask), expected, rtol=1e-5)


def test_a_black_image_has_a_finite_loss_and_gradient():
    wanted = mae.targets(jnp.zeros((1, 4, 4, 1)), (2, 2), "normalised_pixels", "unbiased")
    value, slope = jax.value_and_grad(lambda p: mae.removed_errors(p, wanted, jnp.ones((1, 4))).sum())(wanted + 1)
    assert value == 1 and jnp.isfinite(slope).all()


def test_which_tensors_decay(run):
    objective, tables = mae.Mae(run[0]), logical.tensors(module(run[0]))
    decays = {tensor.name: objective.rule(tensor).decay for table in tables.values() for tensor in table.flat}
    assert {name for name in decays if not name.startswith(("encoder.", "decoder."))} == set()
    assert decays["decoder.blocks.0.mlp.fc1.weight"] and decays["decoder.embed.weight"]
    assert (
        not decays["encoder.prefix.jumbo_token"]
        and not decays["decoder.mask_token"]
        and not decays["decoder.pixels.bias"]
    )


def test_evaluation_depends_on_the_seed_and_not_on_the_batches(run):
    c, workdir = run[:2]
    model = checkpoints.load_run(workdir).model
    assert logical.take(model).keys() == run[4].trainable.keys()
    found = runner.evaluate(model, c, ("reconstruction",))["reconstruction"]
    assert found["examples"] == 13 and found["loss"] > 0
    c = c.copy_and_resolve_references().unlock()
    c.batch_size = 16
    again = runner.evaluate(model, c, ("reconstruction",))["reconstruction"]
    assert again["loss"] == pytest.approx(found["loss"], rel=1e-5)
    c.seed = 1
    assert runner.evaluate(model, c, ("reconstruction",))["reconstruction"]["loss"] != pytest.approx(found["loss"])


def test_a_protocol_of_the_other_kind_is_refused(run):
    model = checkpoints.load_run(run[1]).model
    with pytest.raises(ValueError, match="'accuracy' is for classifiers, .* 'reconstruction'.*config.init"):
        runner.evaluate(model, run[0], ("accuracy",))
    supervised = config.get_base()
    with pytest.raises(ValueError, match="'reconstruction' is for masked autoencoders"):
        runner.evaluate(model.encoder, supervised, ("reconstruction",))
    with pytest.raises(
        ValueError, match="objective.name='supervised' does not define how .* masked; .* configs/mae.py"
    ):
        runner.evaluate(model, supervised, ("reconstruction",))


def test_a_supervised_run_begins_with_the_encoder(run, capsys):
    workdir, state = run[1], run[4]
    c = config.get_base()
    c.init, c.steps, c.model = str(workdir), 1, dict(**MODEL, num_classes=5)
    arrays = warm_start.initial_parameters(c, build.model_configuration(c))
    said = capsys.readouterr().out
    assert "its decoder is left out; drawn: head.bias, head.weight" in said
    assert arrays.keys() == {k.removeprefix("encoder.") for k in state.trainable if k.startswith("encoder.")}
    np.testing.assert_array_equal(arrays["prefix.jumbo_token"], state.trainable["encoder.prefix.jumbo_token"])
    c.model.width = 48
    with pytest.raises(ValueError, match="holds the weights of another model: config.model.width=48 instead of 24"):
        warm_start.initial_parameters(c, build.model_configuration(c))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(ratio=1.0), r"config.objective.ratio=1.0 must be in \(0, 1\)"),
        (dict(target="pixel"), "config.objective.target='pixel' is not one of .*; the nearest is 'pixels'"),
        (dict(variance="none"), "config.objective.variance='none' is not one of unbiased, biased"),
        (dict(groups=3), "config.objective.groups=3 must divide config.batch_size=8; .* is 2"),
    ],
)
def test_impossible_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config.validate(options(**changes))


def test_a_head_is_refused():
    c = options()
    c.model.num_classes = 10
    with pytest.raises(ValueError, match="config.model.num_classes=10: .* set num_classes=None"):
        config.validate(c)
