"""Sweeps: a run among others is the run alone, seeds, the schedule, results that are there, wrong keys."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import sweep as command
from equivit.data import series
from equivit.data.series import SeriesData
from equivit.models import zoo
from equivit.training import config as configs
from equivit.training import schedules, sweep_config, sweep_program

pytestmark = pytest.mark.slow

CONFIG = "configs/timeseries.py:quicktest"
EPOCHS = 3
SMALL = dict(width=16, depth=1, num_heads=2, mlp_dim=16)


@pytest.fixture(scope="module")
def config():
    config = configs.load(CONFIG, ["batch_size=40"], schema=sweep_config.SCHEMA)  # 96 series: 40, 40 and 16
    with config.unlocked():
        config.model.update(**SMALL, jumbo=2)
    return config.lock()


@pytest.fixture(scope="module")
def data() -> SeriesData:
    return series.load("synthetic")


@pytest.fixture(scope="module")
def program(config):
    model = zoo.configuration("patchtst", length=40, channels=2, num_classes=3, **config.model)
    return sweep_program.Sweep(config, model.build, examples=96, epochs=EPOCHS, together=4)


RUNS = sweep_program.grid((1e-2, 1e-3), (0.0, 0.3), seed=5)


@pytest.fixture(scope="module")
def together(program, data):
    """The final state and figures of all runs, and the losses of their epochs."""
    losses = []
    state, figures = sweep_program.train(
        program, RUNS, data, epochs=EPOCHS, seed=1, report=lambda i, row: losses.append(row)
    )
    return jax.device_get(state), jax.device_get(figures), np.array(losses)


@pytest.mark.slow
def test_runs_differ_and_learn(together):
    state, figures, losses = together
    assert losses.shape == (EPOCHS, 4) and (losses[-1] < losses[0]).all()
    assert len({tuple(row) for row in losses.T}) == 4
    assert state.good.all() and (state.step == 3 * EPOCHS).all()
    assert figures["test"].accuracy.max() > 0.5  # of three classes


@pytest.fixture(scope="module")
def alone(program):
    """One run without vmap."""
    return jax.jit(program.init), jax.jit(program.epoch), jax.jit(program.evaluate)


def batch(split):
    return {"series": jnp.asarray(split.series), "label": jnp.asarray(split.labels)}


def test_a_run_of_a_sweep_is_the_run_alone(alone, data, together):
    """Batched products sum in another order, and Adam carries the difference on.

    Losses, not weights, are compared: a bias of the keys changes nothing, so its gradient is rounding alone, which Adam
    makes as large as any other.
    """
    (init, epoch, evaluate), (_, figures, losses), k = alone, together, 1
    run = jax.tree.map(lambda a: a[k], RUNS)
    state = init(run)
    for i in range(EPOCHS):
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(1), i), 96)
        state, loss = epoch(run, state, batch(data.train), order)
        np.testing.assert_allclose(loss, losses[i, k], rtol=1e-5)
    loss = evaluate(state, batch(data.test)).loss
    np.testing.assert_allclose(loss, figures["test"].loss[k], rtol=1e-4)
    others = np.delete(figures["test"].loss, k)
    assert abs(others / loss - 1).min() > 1e-3  # the tolerance tells runs apart


def test_the_same_seed_gives_the_same_bits(program, data, together):
    state, figures = sweep_program.train(program, RUNS, data, epochs=EPOCHS, seed=1)
    jax.tree.map(np.testing.assert_array_equal, (state, figures), together[:2])


def test_every_series_is_seen_once_in_an_epoch(alone, data):
    """With a rate of zero the mean loss of an epoch is that of the set, whatever the order and the batches."""
    still, train = sweep_program.Run(jnp.float32(0.0), jnp.float32(0.0), jnp.uint32(3)), batch(data.train)
    init, epoch, evaluate = alone
    state = init(still)
    whole = evaluate(state, train).loss
    for i in range(2):
        np.testing.assert_allclose(
            epoch(still, state, train, np.random.default_rng(i).permutation(96))[1], whole, rtol=1e-5
        )
    first_often = np.where(np.arange(96) < 50, np.arange(96), 0)
    assert abs(epoch(still, state, train, first_often)[1] / whole - 1) > 1e-3


def test_seeds_of_runs_are_their_own():
    assert RUNS.lr.tolist() == np.float32([1e-2, 1e-2, 1e-3, 1e-3]).tolist()
    assert RUNS.dropout.tolist() == np.float32([0, 0.3, 0, 0.3]).tolist()
    assert len(set(RUNS.seed.tolist())) == 4
    assert not set(RUNS.seed.tolist()) & set(sweep_program.grid((1e-2, 1e-3), (0.0, 0.3), seed=6).seed.tolist())


def test_the_schedule(config):
    section = sweep_program.schedule_section(config.schedule, 2e-3, steps=200)
    lr = schedules.create(section, total_steps=200, steps_per_epoch=2)
    np.testing.assert_allclose([lr(0), lr(10), lr(20)], [0, 1e-3, 2e-3], rtol=1e-6)
    np.testing.assert_allclose(lr(110), 1e-3 + 0.5e-8, rtol=1e-6)  # halfway down
    np.testing.assert_allclose(lr(200), 1e-8, rtol=1e-3)


def test_the_best_run_is_chosen_by_accuracy_and_then_by_loss():
    figures = sweep_program.Figures(np.array([0.5, 0.9, 0.8, 0.9]), np.array([0.1, 0.4, 0.2, 0.3]))
    assert sweep_program.best(figures) == 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The command's quicktest of one model, and what it said."""
    workdir = tmp_path_factory.mktemp("sweep")
    status = command.main([*arguments(workdir), "--config.models=patchtst_jumbo"])
    return workdir, status


def arguments(workdir):
    small = [f"--config.model.{key}={value}" for key, value in SMALL.items()]
    return [f"--config={CONFIG}", f"--workdir={workdir}", "--config.batch_size=96", *small]


def test_the_command_writes_a_result(finished):
    workdir, status = finished
    assert status == 0
    (path,) = workdir.iterdir()
    assert path.name == "synthetic-patchtst_jumbo-8.json"
    result = json.loads(path.read_text())
    assert [(run["lr"], run["dropout"]) for run in result["runs"]] == [(3e-3, 0), (3e-3, 0.1), (1e-3, 0), (1e-3, 0.1)]
    assert result["best"]["validation"] == max(run["validation"] for run in result["runs"])
    assert result["test_mean"] == pytest.approx(np.mean([run["test"] for run in result["runs"]]))
    assert result["examples"] == dict(train=96, validation=32, test=32) and result["patch_length"] == 10
    model = zoo.configuration("patchtst_jumbo", length=40, channels=2, num_classes=3, **SMALL)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model.build(nnx.Rngs(0))))
    assert result["parameters"] == sum(leaf.size for leaf in leaves)


def test_a_result_that_is_there_is_kept(finished, monkeypatch, capsys):
    workdir, _ = finished
    monkeypatch.setattr(sweep_program, "train", lambda *args, **kwargs: pytest.fail("it was computed again"))
    assert command.main([*arguments(workdir), "--config.models=patchtst_jumbo"]) == 0
    assert command.main([*arguments(workdir), "--config.models=patchtst_jumbo", "--config.epochs=3"]) == 1
    assert "has another recipe, config.epochs=2 instead of 3" in capsys.readouterr().err


@pytest.mark.parametrize("text", ['{"recipe": [1]}', '{"recipe": {}}', "[]", '{"recipe": {"a\\nb": 1}}', "[" * 100_000])
def test_a_damaged_result_is_one_line(tmp_path, capsys, text):
    path = tmp_path / "synthetic-patchtst_jumbo-8.json"
    path.write_text(text)
    assert command.main([*arguments(tmp_path), "--config.models=patchtst_jumbo"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line


def test_a_set_that_is_not_there_stops_nothing(finished, tmp_path, monkeypatch, capsys):
    workdir, _ = finished
    monkeypatch.setitem(sys.modules, "aeon.datasets", None)
    options = ["--config.models=patchtst_jumbo", f"--config.data.directory={tmp_path}"]
    assert command.main([*arguments(workdir), *options, "--config.data.names=InsectSound,synthetic"]) == 0
    said = capsys.readouterr().out
    assert f"left out: series 'InsectSound': {tmp_path} has neither InsectSound.npz nor" in said
    assert "left out, since their data are not there: InsectSound\n1 results" in said
    assert command.main([*arguments(tmp_path / "empty"), *options, "--config.data.names=InsectSound"]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("error: series 'InsectSound': ")


@pytest.mark.parametrize(
    "override,message",
    [
        ("epoch=3", "no key 'epoch'; the nearest is 'epochs'"),
        ("models=patchtst_jumbos", "'patchtst_jumbos' is not one of .*; the nearest is 'patchtst_jumbo'"),
        ("models=()", r"config.models=\(\) must be one or more of patchtst, "),
        ("data.normalize=serie", "the nearest is 'series'"),
        ("runs.dropout=(0.0,1.0)", r"config.runs.dropout=1.0 must be in \[0, 1\)"),
        ("runs.lr=(0.0,)", "config.runs.lr=0.0 must be positive"),
        ("patches=(8,1.5)", "config.patches=1.5 must be a positive whole number"),
        ("model.widht=3", "'widht' is not one of its options; did you mean width"),
        ("model.patches=3", "config.model.patches: the data, `patches` and `runs` determine it"),
        ("optimizer.name=lamb", "a sweep requires name='adamw'"),
    ],
)
def test_wrong_keys_are_refused(override, message):
    with pytest.raises(ValueError, match=message):
        configs.load(CONFIG, [override], schema=sweep_config.SCHEMA)


def test_overrides():
    config = configs.load(CONFIG, ["data.directory=/nowhere", "data.normalize=none"], schema=sweep_config.SCHEMA)
    assert config.data.directory == "/nowhere" and config.data.normalize == "none"


def test_steps_instead_of_epochs():
    config = configs.load(CONFIG, ["steps=1500", "batch_size=64"], schema=sweep_config.SCHEMA)
    for examples, epochs in ((36, 1500), (64, 1500), (65, 750), (390, 215), (7200, 14)):
        assert sweep_config.epochs(config, "any", examples) == epochs
    config.large.names = ("any",)
    assert sweep_config.epochs(config, "any", 390) == 215
    with pytest.raises(ValueError, match="config.steps=0 must be a positive whole number, or None; the nearest is 1"):
        configs.load(CONFIG, ["steps=0"], schema=sweep_config.SCHEMA)


def test_modes_and_large_sets():
    config = configs.load("configs/timeseries.py:multivariate", schema=sweep_config.SCHEMA)
    assert len(config.data.names) == 10 and sweep_config.epochs(config, "LSST", 2459) == 100
    assert sweep_config.epochs(config, "Tiselac", 81714) == 20
    for mode, models in (("small", 3), ("small,public", 6)):
        config = configs.load(f"configs/timeseries.py:{mode}", schema=sweep_config.SCHEMA)
        assert len(config.data.names) == 14 and len(config.models) == models and config.patches == (8,)
    assert config.model.init == "xavier_uniform"
    with pytest.raises(ValueError, match="mode='univarate' is not one of .*; the nearest is 'univariate'"):
        configs.load("configs/timeseries.py:univarate", schema=sweep_config.SCHEMA)
