"""The suite by name on a config's data, and the command."""

import errno
import json
import re
import signal
import tempfile

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from equivit import evaluate
from equivit.evaluation import predictions, protocol, runner, summary
from equivit.models import saved
from equivit.trained_on import TrainedOn
from equivit.training import checkpoints
from equivit.training.config import get_base
from equivit.training.run import processes
from tests.evaluation.predictors import random_model

CONFIG = """
from equivit.training.config import get_base

def get_config():
    config = get_base()
    config.update(steps=1, batch_size=12)
    config.data.update(image_size=(12, 20), mean=(0.3,), std=(0.3,), eval_examples=20)
    return config
"""


@pytest.fixture(scope="module")
def model():
    return random_model("D8")


@pytest.fixture
def config():
    config = get_base()
    config.batch_size = 12
    config.data.update(image_size=(12, 20), mean=(0.3,), std=(0.3,), eval_examples=20)
    return config


def test_protocols_by_name(model, config):
    seen = []

    def track(batches, total, name):
        seen.append((name, total))
        return batches

    results = runner.evaluate(model, config, ("accuracy", "orientation"), track=track)
    assert seen == [("accuracy", 2), ("orientation", 2)]  # 20 images in batches of 12, rounded up to 16 for 8 devices
    assert results["accuracy"]["examples"] == 20
    assert results["accuracy"]["top1"] == pytest.approx(results["orientation"]["upright"])
    assert results["orientation"]["identical"] == results["orientation"]["decided"]
    assert results["orientation"]["field_error"] < 1e-5
    numbers = runner.scalars(results)
    assert numbers["accuracy/top1"] == results["accuracy"]["top1"] and "orientation/rotated" in numbers
    assert all(isinstance(value, float) for value in numbers.values())


def test_evaluating_another_model_of_the_same_kind_compiles_nothing(model, config):
    runner.evaluate(model, config, ["accuracy"])
    compiled = predictions._forward._cache_size()
    graph, state = nnx.split(model)
    runner.evaluate(nnx.merge(graph, jax.tree.map(lambda a: a + 0.1, state)), config, ["accuracy"])
    assert predictions._forward._cache_size() == compiled


def test_on_a_mesh_equals_one_device(model, config):
    alone = runner.evaluate(model, config, ("accuracy", "orientation"))
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = jax.device_put(model, NamedSharding(mesh, PartitionSpec()))
        spread = runner.evaluate(model, config, ("accuracy", "orientation"))
    assert spread["accuracy"] == alone["accuracy"]
    assert spread["orientation"]["accuracy"] == alone["orientation"]["accuracy"]
    assert spread["orientation"]["equivariance_error"] < 1e-5


@pytest.mark.parametrize(("names", "message"), [(["acuracy"], "the nearest is 'accuracy'"), ([], "is empty")])
def test_unknown_protocols_are_refused(model, config, names, message):
    with pytest.raises(ValueError, match=message):
        runner.evaluate(model, config, names)


def test_another_number_of_classes_is_refused(config):
    with pytest.raises(ValueError, match=r"the model has 7 classes, the data \(digits\) 10"):
        runner.evaluate(random_model("plain", num_classes=7), config, ["accuracy"])


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    saved.save(directory / "model", model)
    (directory / "config.py").write_text(CONFIG)
    return directory


def run(files, *arguments):
    return evaluate.main([f"--model={files}/model", f"--config={files}/config.py", *arguments])


@pytest.mark.slow
def test_the_command_on_a_saved_model(files, capsys):
    assert run(files, "--suite=accuracy,orientation", "--config.data.eval_examples=10", "--figures") == 0
    output = capsys.readouterr().out
    assert f"Drawn: {files}/model/patch_filters.png" in output and (files / "model" / "patch_filters.png").is_file()
    assert "orientation: 1 of 1 batches" in output and f"Done: {files}/model/evaluation.json" in output
    stored = json.loads((files / "model" / "evaluation.json").read_text())
    assert stored["data"] == "digits, test" and stored["image_size"] == "12x20"
    assert stored["accuracy"]["examples"] == 10
    assert np.isfinite(stored["orientation"]["delta"])


def test_classes_of_other_names_are_refused(model, files, tmp_path, capsys):
    names = [f"class {label}" for label in range(10)]
    arrays = {"test_image": np.zeros((12, 12, 20, 1), np.uint8), "test_label": np.zeros(12, int)}
    saved.save(tmp_path / "model", model, TrainedOn(tuple(names), 40))
    (tmp_path / "config.py").write_text(CONFIG.replace("eval_examples=20", "eval_examples=None"))
    for order, status in ((names, 0), (names[::-1], 1), (list("0123456789"), 0)):
        np.savez(tmp_path / "data.npz", classes=np.array(order), **arrays)
        assert run(tmp_path, "--suite=accuracy", f"--config.data.source=npz:{tmp_path}/data.npz") == status
        error = capsys.readouterr().err
        assert error.count("\n") == status
        if status:
            assert "class 0 is 'class 9', in the data of the model it is 'class 0' (they are in another order)" in error


def test_where_results_cannot_be_written_they_are_printed(files, capsys, monkeypatch):
    path = files / "model" / "evaluation.json"
    path.unlink(missing_ok=True)

    def read_only(**options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    assert run(files, "--suite=accuracy", "--config.data.eval_examples=10") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"{path} cannot be written: Read-only file system.  Results are only printed")
    assert lines[-2].startswith("accuracy  ") and lines[-1] == "Done: results are printed above only"
    assert not path.exists()


def test_names_are_printed_as_they_are_on_a_terminal(monkeypatch, capsys):
    """Brackets and colons are markup and emoji to rich."""
    lines = [("IoU of sky [void]", "[bold]1[/bold]"), ("IoU of a[/b]", ":car:"), ("IoU of c\\", "2")]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    evaluate._print(lines, summary.text(lines))
    printed = capsys.readouterr().out.splitlines()
    assert [tuple(re.split(" {2,}", line)) for line in map(str.strip, printed) if line] == lines


def test_an_error_in_storing_printing_or_drawing_loses_no_results(files, monkeypatch, capsys):
    def broken(*_, **__):
        raise ValueError("broken")

    path, found = files / "model" / "evaluation.json", {"accuracy": dict(top1=0.5, top5=1.0, examples=10)}
    monkeypatch.setattr(runner, "evaluate", lambda *_, **__: found)
    for place, name in ((summary, "write"), (evaluate, "_print"), (summary, "draw")):
        path.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, broken)
            assert run(files, "--suite=accuracy", "--figures") == 1
        printed = capsys.readouterr()
        assert "error: broken" in printed.err
        assert ("50.0 %" in printed.out) == (name != "_print") and path.is_file() == (name != "write")
    assert json.loads(path.read_text())["accuracy"] == found["accuracy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite=orientatoin"], "the nearest is 'orientation'"),
        (["--suits=accuracy"], "unknown argument '--suits'; the nearest is '--suite'"),
        (["--config.data.sorce=digits"], "the nearest is 'source'"),
        (["--config.data.source=npz:nowhere.npz"], "nowhere.npz"),
        (["--config.data.image_size=(13,20)"], "the height 13 is not divisible by the patch height 4"),
        (["--weights=averaged"], "--weights is only for --workdir"),
        (["--config.batch_size=0"], "config.batch_size=0 must be a positive whole number"),
    ],
)
def test_mistakes_are_one_line(files, arguments, message, capsys):
    assert run(files, *arguments) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("error: ")


def test_what_divides_the_batches_of_training_does_not_bind_evaluation(files):
    changes = ["objective.mixup=0.8", "objective.mix_groups=4", "optimizer.accumulation=4", "batch_size=5"]
    config, *_ = evaluate._load(
        evaluate._parser().parse_args([f"--model={files}/model", f"--config={files}/config.py"]), changes
    )
    assert config.batch_size == 5 and config.objective.mix_groups == 4


def test_a_run_of_another_version_is_evaluated(monkeypatch, tmp_path):
    """Which had other keys, and no rule for the end of the learning rate."""
    stored = get_base()
    stored.steps, stored.optimizer.later, stored.schedule.lr = 1, 0.5, 5e-6
    monkeypatch.setattr(checkpoints, "load_run", lambda *_, **__: checkpoints.Loaded(stored.lock(), None, 1))
    options = evaluate._parser().parse_args([f"--workdir={tmp_path}"])
    assert evaluate._load(options, ["seed=3"])[0].seed == 3
    with pytest.raises(ValueError, match="config.seed=-1 must be"):
        evaluate._load(options, ["seed=-1"])


def test_sigterm_ends_an_evaluation_by_several_processes(monkeypatch, tmp_path):
    """JAX takes the signal when the processes join, to agree on a step; here there are none."""

    def load(*_):
        raise StopIteration

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(processes, "join", lambda asked: signal.signal(signal.SIGTERM, signal.SIG_IGN))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(evaluate, "_load", load)
    try:
        with pytest.raises(StopIteration):
            evaluate._run(evaluate._parser().parse_args([f"--workdir={tmp_path}", "--distributed"]), [])
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_directory_without_a_run_is_refused(tmp_path, capsys):
    assert evaluate.main([f"--workdir={tmp_path}"]) == 1
    assert "holds no config.json" in capsys.readouterr().err


def test_it_reads_with_the_workers_of_the_config(model, config, monkeypatch):
    """As the command does; `loader.evaluate` alone reads in threads."""
    config.data.workers = 3
    seen = []

    def read(section, *, workers=0, **_):
        seen.append(workers)
        raise FileNotFoundError("before anything is read")

    monkeypatch.setattr(protocol.loader, "evaluate", read)
    with pytest.raises(FileNotFoundError, match="before anything"):
        runner.evaluate(model, config, "accuracy")
    assert seen == [3]


def test_results_of_other_protocols_and_of_other_weights_are_kept(tmp_path):
    def stored(name="evaluation"):
        return json.loads((tmp_path / f"{name}.json").read_text())

    about = dict(weights="trained", data="digits, test", image_size="12x20")
    summary.write(tmp_path, {"accuracy": 1}, **about)
    summary.write(tmp_path, {"orientation": 2}, **about)
    summary.write(tmp_path, {"accuracy": 3}, **about)
    assert stored() == {**about, "accuracy": 3, "orientation": 2}
    summary.write(tmp_path, {"accuracy": 4}, **about, step="8")
    assert stored() == {**about, "step": "8", "accuracy": 4} and stored("evaluation.1")["accuracy"] == 3
    (tmp_path / "evaluation.json").write_text("{")
    summary.write(tmp_path, {"accuracy": 5}, **about)
    assert stored() == {**about, "accuracy": 5} and (tmp_path / "evaluation.2.json").read_text() == "{"
