"""Studies on a GPU: runs trained together are the runs trained alone, cells are resumed, and the configs are real."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from equivit.training import build
from equivit.training import config as configs
from experiments.studies import adaptive_gpu, held_out, jumbo_rates_gpu, octic_gpu, together

TINY = ["model.width=16", "model.num_heads=1", "model.depth=1", "model.patch_size=16", "model.num_classes=2"]
TINY += ["batch_size=8", "objective.mixup=0.0", "objective.cutmix=0.0", "model.drop_path=0.0"]
RATES = (1e-3, 0.0, 1e-2)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Images that tell their class by their brightness."""
    rng, arrays = np.random.default_rng(0), {}
    for split, n in (("train", 50), ("test", 21)):
        label = np.arange(n) % 2
        arrays[f"{split}_image"] = (rng.integers(0, 20, (n, 32, 32, 3)) + 200 * label[:, None, None, None]).astype("u1")
        arrays[f"{split}_label"] = label
    path = tmp_path_factory.mktemp("made_up") / "images.npz"
    np.savez(path, **arrays, classes=np.array(["dark", "bright"]))
    return f"npz:{path}"


@pytest.fixture(scope="module")
def arm(source, tmp_path_factory):
    config = configs.load("configs/cifar.py:10,plain", [*TINY, *held_out.WHOLE, f"data.source={source}"])
    path = tmp_path_factory.mktemp("prepared") / "images.npz"
    held_out.prepare(config.data, path)
    return together.Arm("tiny", config, path)


def runs(rates, seeds):
    return together.Run(jnp.float32(rates), jnp.uint32(seeds))


def test_a_run_among_others_is_the_run_alone(arm):
    program, fit = together.Program(arm.config), together.images(arm)["fit"]
    state, losses = program.train(runs(RATES, (0, 1, 1)), fit, chunks=2, chunk=3)
    alone, own = program.train(runs(RATES[2:], (1,)), fit, chunks=2, chunk=3)
    # The same arithmetic, where products have another batch.
    np.testing.assert_allclose(losses[:, 2], own[:, 0], rtol=1e-5)
    still = program.train(runs((0.0,), (1,)), fit, chunks=1, chunk=3)[0]
    for name, array in state.arrays.items():
        np.testing.assert_allclose(array[2], alone.arrays[name][0], atol=1e-5)
        np.testing.assert_array_equal(array[1], still.arrays[name][0])  # a rate of 0 leaves the start
    assert any(np.abs(a[2] - a[1]).max() > 1e-3 for a in state.arrays.values())  # and another does not


def test_images_are_moved_mirrored_and_resized(arm):
    images = np.arange(2 * 16 * 16 * 3, dtype=np.int32).reshape(2, 16, 16, 3)
    batch = together.Batches(jnp.arange(2), jnp.array([2, 0]), jnp.array([2, 3]), jnp.array([0, 1]))
    first, second = np.asarray(together.shifted(jnp.asarray(images), batch))
    np.testing.assert_array_equal(first, images[0])  # as far as the padding: not moved
    np.testing.assert_array_equal(second[2:, ::-1][:, :15], images[1][:14, 1:])
    assert not second[:2].any()
    resized = together.Program(arm.config)._resized(jnp.ones((2, 8, 8, 3)))
    assert resized.shape == (2, 32, 32, 3) and (resized == 1).all()


def test_every_image_is_seen_once_an_epoch():
    batches = list(zip(range(5), together.orders(20, pad=2, batch=4, chunk=2, seed=0), strict=False))
    rows = np.concatenate([batch.rows.ravel() for _, batch in batches])
    assert [sorted(epoch) for epoch in rows.reshape(2, 20)] == [list(range(20))] * 2
    assert {int(x) for _, batch in batches for x in batch.down.ravel()} == set(range(5))


def test_runs_of_a_seed_see_the_same_batches_and_others_do_not(arm):
    fit = (np.zeros((40, 32, 32, 3), np.uint8), np.zeros(40, np.int32))
    batch = next(together.Program(arm.config)._orders(runs(RATES, (0, 1, 1)), fit, chunk=2))
    for array in batch:
        np.testing.assert_array_equal(array[1], array[2])
        assert (array[0] != array[1]).any()


def test_a_study_chooses_rates_and_goes_on(arm, tmp_path, monkeypatch):
    output = tmp_path / "gpu.json"

    def share(predict, images, labels):
        return dict(share=(predict(images[:5]) >= 0).mean(1))

    def study(*more):
        parser = together.parser("A study.", "study.py", seconds=1, rates=(1e-8, 1e-2))
        options = parser.parse_args(["--seeds=0,1", f"--output={output}", "--entry=card", *more])
        return together.study(options, {"table": lambda: [arm]}, share)

    monkeypatch.setattr(together, "CHUNK", 30)
    monkeypatch.setattr(together.machine, "on_gpu", lambda: True)
    monkeypatch.setattr(together.Program, "step_seconds", lambda *arguments: 0.01)
    assert study("--minutes=0") == 0 and not output.exists()
    assert study() == 0
    ((name, found),) = json.loads(output.read_text())["card"].items()
    assert name == "table, tiny" and found["steps"] == 90
    assert found["rate"] == 1e-2 and np.mean(found["held_out"][1]) > np.mean(found["held_out"][0])
    assert found["top1"] == found["test"][1] and found["share"] == [1, 1] and found["curve"][0] > found["curve"][-1]
    assert found["settings"] == dict(seconds=1, rates=[1e-8, 1e-2], seeds=[0, 1], overrides=[], source="images.npz")
    before = output.read_text()
    assert study() == 0 and output.read_text() == before  # nothing is measured again
    measured = []
    monkeypatch.setattr(
        together, "cell", lambda options, arm, figures: measured.append(options) or {**found, "top1": [1]}
    )
    assert study("--rates=1e-3,1e-2", "--minutes=0") == 0 and output.read_text() == before and not measured
    assert study("--rates=1e-3,1e-2") == 0 and len(measured) == 1  # with other settings it is
    assert study("--quick") == 0 and set(json.loads(output.read_text())) == {"card", "card, quick"}
    monkeypatch.setattr(together.machine, "on_gpu", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU"):
        study()


def test_the_arms_of_every_study_are_models(source, monkeypatch):
    monkeypatch.setattr(held_out, "prepared", lambda data, path, *more, **settings: path)
    monkeypatch.setattr(together, "study", lambda options, tables, *figures: made.extend(f() for f in tables.values()))
    made = []
    for script, flags in ((jumbo_rates_gpu, "source"), (octic_gpu, "blood_cells"), (adaptive_gpu, "source")):
        script.main([f"--{flags}={source}"])
    models = [build.model_configuration(arm.config) for arms in made for arm in arms]
    assert [len(arms) for arms in made] == [4] * 6 + [6, 3]
    assert {model.image_size for model in models} == {(32, 32), (96, 96), (224, 224)}


def test_predictions_of_orientations_and_shifts():
    images = np.zeros((2, 8, 8, 3), np.uint8)
    images[0, 0, :, 0] = 1  # a bright first row, which a model takes for class 1

    def predict(images):
        return (images[:, 0, :, 0].mean(1) > 0.9).astype(int)[None]

    found = octic_gpu.orientations(predict, images, np.array([1, 0]))
    assert found["eight"][0] == (2 / 8 + 1) / 2 and found["constant"][0] == 1 / 2
    found = adaptive_gpu.shifts(predict, images, np.array([1, 0]))
    assert found["shifted"][0] == found["constant"][0] == 1 / 2
