"""The commands of `equivit` answer `--help` before anything large is imported, and runs import only what they use."""

import ast
import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

import equivit
from equivit import __main__, command, convert, export, onnx_files, pretrained, profile, train
from equivit.training import sharding
from equivit.training.run import stopping

ROOT = pathlib.Path(__file__).parents[1]
FILES = [path for path in (ROOT / "equivit").glob("[!_]*.py") if '"__main__"' in path.read_text()]
COMMANDS = sorted(
    [path.stem for path in FILES] + [path.parent.name for path in (ROOT / "equivit").glob("*/__main__.py")]
)
LARGE = {"numpy", "jax", "flax", "optax", "orbax", "grain", "matplotlib", "rich", "PIL", "tensorboardX", "sklearn"}
LARGE |= {"onnx", "onnxruntime", "jax2onnx"}
PRINT = "import sys; print([*sys.modules])"


def imported(program: str) -> set[str]:
    """The modules that there are after a program in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", f"{program}\n{PRINT}"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return set(ast.literal_eval(run.stdout.splitlines()[-1]))


def test_the_dispatcher_and_the_docstring_have_all_commands():
    assert all(name in equivit.__doc__.partition("`testing`")[0] for name in COMMANDS)
    assert list(__main__.COMMANDS) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_large(name):
    """As `python -m equivit.<command> --help`, which the parser ends."""
    program = (
        f"import contextlib, {__main__.module(name)} as command\n"
        "with contextlib.suppress(SystemExit): command.main(['--help'])\n"
    )
    assert not imported(program) & LARGE


@pytest.mark.slow
def test_a_plain_run_imports_no_gpu_kernels_and_draws_at_its_end_alone():
    """All that `equivit.train` imports before the pictures; octic models get the kernels when they are traced."""
    modules = imported(
        "from equivit.data import loader\n"
        "from equivit.evaluation import runner, summary\n"
        "from equivit.training import build, loop, sharding, teachers, warm_start\n"
        "from equivit import models\n"
    )
    assert {"equivit.kernels.d8_gelu", "equivit.kernels.octic_branch"} <= modules  # the names below still exist
    assert not modules & {"jax.experimental.pallas", "jax.experimental.mosaic.gpu", "equivit.kernels.d8_gelu.gpu"}
    assert not modules & {"matplotlib", "sklearn", "tensorflow", "tensorflow_datasets", "imagecorruptions"}


def test_the_names_that_help_shows_are_those_there_are():
    """They stand in the commands a second time, because the modules that define them are large."""
    assert list(pretrained.FORMATS) == list(convert.FORMATS)
    assert list(onnx_files.PROVIDERS) == list(profile.PROVIDERS)


@pytest.mark.parametrize(("end", "status", "said"), [
    (stopping.Stopped(signal.SIGTERM), 143, ""),
    (stopping.Stopped(signal.SIGINT), 130, ""),
    (KeyboardInterrupt(), 130, "error: interrupted by Ctrl-C.\n"),
    (OSError("no\nroom"), 1, "error: no room\n"),
])  # fmt: skip
def test_a_scheduler_can_tell_how_a_command_ended(capsys, end, status, said):
    def main():
        raise end

    assert command.run(main, debug=False) == status
    assert capsys.readouterr().err == said


def test_errors_of_threads_are_not_told_twice(capsys, caplog, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    command.run(lambda: None, debug=False)
    for name, message, told in (("absl", "of orbax: failed", False), ("absl", "other", True), ("equivit", "our", True)):
        caplog.clear()
        try:
            raise RuntimeError("no room")
        except RuntimeError:
            logging.getLogger(name).exception(message)
        assert (message in caplog.text) == told
    caplog.clear()
    try:
        exec(compile("raise OSError('no room')", "/site-packages/orbax/checkpoint/path.py", "exec"))
    except OSError:
        logging.getLogger("asyncio").exception("Future exception was never retrieved")
    assert not caplog.text
    for message, told in (("Event loop is closed", False), ("other", True)):
        error = types.SimpleNamespace(
            exc_type=RuntimeError, exc_value=RuntimeError(message), exc_traceback=None, err_msg=None, object=None
        )
        with contextlib.suppress(TypeError):  # of Python's own hook, which takes its own class alone
            sys.unraisablehook(error)
            assert not told


def told(capsys, main, *arguments):
    """The output of a command that refuses an argument."""
    with pytest.raises(SystemExit) as raised:
        main(list(arguments))
    assert raised.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_numbers_and_sizes_of_a_command_are_refused_with_their_rule(capsys):
    for value in ("224", "224,", "0,16", "-16,16", "16,16,16", "1e3,16", "abc", "3000000000,16"):
        for main, given in ((export.main, ["--input=a", "--output=b.onnx"]), (convert.main, ["--source=timm"])):
            said = told(capsys, main, *given, f"--image_size={value}")
            assert f"'{value}' must be HEIGHT,WIDTH, two positive whole numbers such as 224,320" in said
    for main, flag, value, smallest in (
        (profile.main, "warmup", "-5", 0),
        (profile.main, "runs", "1.5", 1),
        (export.main, "batch", "x", 1),
        (export.main, "opset", "0", 1),
        (convert.main, "num_heads", "3,0", 1),
        (convert.main, "num_classes", "9" * 5000, 1),
    ):
        assert f" must be a whole number from {smallest} to 2147483647" in told(capsys, main, f"--{flag}={value}")


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path, capsys):
    (tmp_path / "a.onnx").mkdir()
    for place, message in (
        ("a.onnx", "this is a directory; give a file in it"),
        ("no/b.onnx", "there is no directory"),
    ):
        assert export.main([f"--input={tmp_path}", f"--output={tmp_path / place}", "--image_size=8,8"]) == 1
        assert message in capsys.readouterr().err
    (tmp_path / "c.onnx").touch()
    assert profile.main([str(tmp_path / "c.onnx"), f"--out={tmp_path / 'a.onnx'}"]) == 1
    assert "--out=" in (said := capsys.readouterr().err) and "this is a directory" in said


@pytest.mark.parametrize("several", [False, True])
def test_steps_of_one_process_run_in_the_main_thread(tmp_path, monkeypatch, several):
    """Where glibc keeps their memory; with several processes, the end of another one could not be recognised."""
    chosen = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: several)
    monkeypatch.setattr(train, "train", lambda config, workdir: {})
    assert train.main(["--config=configs/quickstart.py:quicktest", f"--workdir={tmp_path}"]) == 0
    assert chosen == ({} if several else {"jax_cpu_enable_async_dispatch": False})


@pytest.mark.parametrize(("width", "share"), [(16, "25.0"), (15, "100.0")])
def test_a_run_says_how_much_fsdp_splits(width, share):
    mesh = sharding.create_mesh(ConfigDict(dict(data=2, fsdp=4)))
    module = jax.eval_shape(lambda: nnx.Linear(6, width, rngs=nnx.Rngs(0)))
    assert train._split(mesh, module) == (f"mesh.fsdp: each device holds {share} % of the parameters, at best 25.0 %.")


@pytest.mark.parametrize(
    ("platform", "before", "expected"),
    [("gpu", None, "compiled"), ("tpu", None, "compiled"), ("cpu", None, None), ("gpu", "/elsewhere", None)],
)
def test_compiled_programs_are_kept_in_the_directory_of_each_run(tmp_path, monkeypatch, platform, before, expected):
    seen = []

    def begin(config, workdir):
        seen.append(jax.config.jax_compilation_cache_dir)
        raise SystemExit

    def update(name, value):
        monkeypatch.setattr(type(jax.config), name, value)

    monkeypatch.setattr(train, "_train", begin)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax.config, "update", update)
    monkeypatch.setattr(compilation_cache, "reset_cache", lambda: seen.append("reset"))
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", before)
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        with pytest.raises(SystemExit):
            train.train(None, run)
    found = [before, before] if expected is None else [at for run in runs for at in (str(run / expected), "reset")]
    assert seen == found and jax.config.jax_compilation_cache_dir == before
