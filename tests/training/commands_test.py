"""Runs as a user starts them, most in processes of their own: killed and resumed, and two processes as one run."""

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, train
from equivit.evaluation import figures
from equivit.training import checkpoints, sharding
from equivit.training.run import checkpoint_files
from tests import soak

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = "tests/training/run_config.py"
IMAGES = (
    "images.npz"  # beside the runs; scikit-learn's digits would take each process, and each worker, a second longer
)
ALONE = "--config.data.workers=0"
SECONDS = 3600  # after which a run hangs, on any machine


def words(workdir, mode):
    """Return the arguments of `equivit.train`."""
    source = f"--config.data.source=npz:{workdir.parent / IMAGES}"
    return [f"--config={CONFIG}{mode}", f"--workdir={workdir}", source]


def start(workdir, *arguments, send=0, at=-1, mode="", environment=()):
    """Start a run that sends itself a signal at its `at`-th batch."""
    hashes = f"{workdir}.hashes{dict(environment).get('JAX_PROCESS_ID', '')}"
    command = [sys.executable, "-m", "tests.training.run_driver", hashes, str(int(send)), str(at)]
    command += [*words(workdir, mode), *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **dict(environment)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=variables, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(process):
    """The exit status and everything that was said."""
    try:
        return process.communicate(timeout=SECONDS)[0], process.returncode
    finally:
        process.kill()


def final_state(workdir):
    model = checkpoints.load_run(workdir).model
    averaged = checkpoints.load_run(workdir, weights="averaged").model
    return jax.device_get((jax.tree.leaves(model), jax.tree.leaves(averaged)))


def saved_and_actual_bits(path):
    """Sums of bits of a checkpoint's arrays: as saved with it, and as computed from the arrays read back."""
    about, arrays = soak.checkpoint(path)
    return about["bits"], checkpoint_files._bits(jax.tree.map(jnp.asarray, arrays))


def saved_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def hashes(workdir):
    return pathlib.Path(f"{workdir}.hashes").read_text().split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Where all runs lie side by side, and their images."""
    place, random, arrays = tmp_path_factory.mktemp("runs"), np.random.default_rng(0), {}
    for split, number in (("train", 189), ("test", 45)):
        arrays[f"{split}_label"] = random.integers(0, 10, number)
        arrays[f"{split}_image"] = random.integers(0, 256, (number, 16, 16, 1), np.uint8)
    np.savez(place / IMAGES, classes=np.array([f"class {i}" for i in range(10)]), **arrays)
    return place


@pytest.fixture(scope="module")
def uninterrupted(place):
    workdir = place / "whole"
    output, status = finish(start(workdir, ALONE))
    assert status == 0, output
    return workdir, output


@pytest.mark.slow
def test_a_run_says_what_it_does_and_leaves_its_results(uninterrupted):
    workdir, output = uninterrupted
    lines = output.strip().splitlines()
    about = f"Training vit_ti16 on npz:{workdir.parent / IMAGES} (189 images, 10 classes): 16 steps of 16 images"
    assert lines[0].startswith(about)
    assert str(workdir) in lines[-1] and "Warning" not in output
    report = json.loads((workdir / "report.json").read_text())
    assert report["step"] == 16 and 0 <= report["eval/accuracy/top1"] <= 1
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(2, 17, 2), 16]
    expected = {"loss", "accuracy", "lr", "grad_norm", "images_per_second", "step_seconds", "data_wait_share"}
    assert expected <= rows[0].keys()


@pytest.mark.slow
def test_stopped_killed_and_resumed_equals_uninterrupted(uninterrupted):
    """In the first epoch (11 steps), with 2 workers, random augmentation, mixup, accumulation and EMA.

    The uninterrupted run and the last part have no workers, whose number changes nothing.
    """
    whole, workdir = uninterrupted[0], uninterrupted[0].with_name("stopped")
    output, status = finish(start(workdir, send=signal.SIGINT, at=6))
    assert status == 130 and "Ctrl-C: saved" in output and "Traceback" not in output, output
    assert saved_steps(workdir)[-1] == 6
    output, status = finish(start(workdir, send=signal.SIGKILL, at=4))
    assert status == -signal.SIGKILL, output
    step = saved_steps(workdir)[-1]
    assert 6 <= step <= 10
    output, status = finish(start(workdir, ALONE, send=signal.SIGKILL, at=2))
    assert status == -signal.SIGKILL, output
    last = saved_steps(workdir)[-1]
    assert step <= last <= step + 2
    output, status = finish(start(workdir, ALONE))
    assert status == 0, output
    seen, expected = hashes(workdir), hashes(whole)
    assert seen[:10] == expected[:10] and seen[10:12] == expected[step : step + 2] and seen[12:] == expected[last:]
    assert len(seen[12:]) >= 4
    chex.assert_trees_all_equal(final_state(workdir), final_state(whole))
    assert soak.run_losses(workdir, whole) == ["files: ['config.1.json']"]  # with another number of workers


@pytest.mark.slow
def test_the_soak_notices_what_is_lost(uninterrupted, tmp_path, monkeypatch):
    whole, run = uninterrupted[0], tmp_path / "run"
    shutil.copytree(whole, run)
    assert soak.run_losses(run, whole) == []
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join(lines[1:]) + "\n")
    assert soak.run_losses(run, whole) == [f"metrics.jsonl: {len(lines)} of {len(lines)} lines differ"]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (run / ".left").touch()
    assert soak.run_losses(run, whole) == ["files: ['.left']"]
    (run / ".left").unlink()
    read, changed = soak.checkpoint, []

    def other(path):
        about, arrays = read(path)
        if path.is_relative_to(run):
            changed.append(min(name for name, array in arrays.items() if np.size(array)))
            arrays[changed[0]] = np.asarray(arrays[changed[0]]) + 1
        return about, arrays

    monkeypatch.setattr(soak, "checkpoint", other)
    (found,) = soak.run_losses(run, whole)
    assert re.fullmatch(r"arrays: 1 of \d+ differ, such as (.*)", found)[1] == changed[0]
    shutil.rmtree(run / "checkpoints" / "14")
    assert soak.run_losses(run, whole) == ["checkpoints: ['16'] in place of ['14', '16']"]


@pytest.fixture
def one_device(monkeypatch):
    """Train on one device in this process, as the other processes do, and draw no pictures."""
    create = functools.partial(sharding.create_mesh, devices=jax.devices()[:1])
    monkeypatch.setattr(sharding, "create_mesh", create)
    for draw in ("learning_curves", "patch_filters"):
        monkeypatch.setattr(figures, draw, lambda *given: None)


@pytest.mark.slow
def test_batch_statistics_stopped_and_resumed_equal_uninterrupted(place, one_device, monkeypatch, capsys):
    """All three runs are in this process, and each builds its own model."""
    whole, workdir = place / "whole_statistics", place / "stopped_statistics"
    assert train.main(words(whole, ":statistics")) == 0
    to_global, batches = sharding.to_global, iter(range(5))

    def stopping(mesh, batch):
        if next(batches) == 2:
            signal.raise_signal(signal.SIGTERM)
        return to_global(mesh, batch)

    with monkeypatch.context() as patch:
        patch.setattr(sharding, "to_global", stopping)
        assert train.main(words(workdir, ":statistics")) == 143
    assert "SIGTERM: saved" in capsys.readouterr().out and saved_steps(workdir) == [3]
    assert train.main(words(workdir, ":statistics")) == 0
    assert "Resuming at step 3 of 5" in capsys.readouterr().out
    chex.assert_trees_all_equal(final_state(workdir), final_state(whole))
    statistics = logical.take(checkpoints.load_run(workdir).model, nnx.BatchStat)
    means = [array for name, array in statistics.items() if name.endswith(".mean")]
    assert len(means) == 5 and all(np.abs(mean).min() > 0 for mean in means)  # they have moved


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def two_processes(workdir, which=1, *arguments, unreadable="", **signals):
    """Two processes of one run, of which one sends itself a signal."""
    environment = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
    environment |= {"UNREADABLE": unreadable}
    processes = []
    for i in range(2):
        extra = signals if i == which else {**signals, "at": -1}
        variables = {**environment, "JAX_PROCESS_ID": str(i)}
        processes.append(
            start(
                workdir, "--config.mesh.fsdp=2", *arguments, mode=":processes", environment=variables.items(), **extra
            )
        )
    return processes


@pytest.mark.slow
def test_two_processes_train_together_and_save_one_checkpoint(place, one_device):
    outcomes = [finish(process) for process in two_processes(place / "two")]
    assert [status for _, status in outcomes] == [0, 0], outcomes
    assert train.main(words(place / "one", ":processes")) == 0
    saved = sorted(path.name for path in (place / "two" / "checkpoints").iterdir())
    assert saved == ["3", "6"]
    bits, actual = saved_and_actual_bits(place / "two" / "checkpoints" / "6")
    assert bits == actual
    # The mean over the batch is summed in another order.
    chex.assert_trees_all_close(final_state(place / "two"), final_state(place / "one"), rtol=1e-4, atol=1e-5)
    _check_resuming_and_stopping(place / "two")


def _check_resuming_and_stopping(workdir):
    """Both take a checkpoint that both can read; a signal before the first step after it stops both."""
    options = dict(unreadable="1:6", send=signal.SIGTERM, at=1)
    outcomes = [finish(process) for process in two_processes(workdir, 1, "--config.steps=60", **options)]
    assert [status for _, status in outcomes] == [143, 143], outcomes
    assert "Resuming at step 3 of 60" in outcomes[0][0] and "SIGTERM: saved" in outcomes[0][0], outcomes
    (aside,) = (workdir / "damaged").iterdir()
    assert aside.name.startswith("6-") and 3 < saved_steps(workdir)[-1] < 60


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_is_killed_the_other_ends_with_a_message(place, victim):
    """Where the first one is killed, the service has gone by which JAX would notice it."""
    processes = two_processes(place / f"killed{victim}", victim, send=signal.SIGKILL, at=5)
    assert finish(processes[victim])[1] == -9
    output, status = finish(processes[1 - victim])
    assert status == 1, output
    assert output.count("error: another process of this run has ended; restart all of them") == 1, output
