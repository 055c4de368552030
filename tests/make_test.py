"""Both parts of `make test` and of the gate run, and one that fails decides the exit status, whichever it is."""

import os
import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[1]
STUB = '#!/bin/sh\necho "$*" >> {log}\ncase "$*" in {fails}) exit 3 ;; esac\n'


def stub(path, log, fails="none"):
    """A program that writes its arguments down, and fails where they match."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STUB.format(log=log, fails=fails))
    path.chmod(0o755)


def run(log, *command, **environment):
    """The exit status, and the arguments that the stubs were given."""
    path = os.pathsep.join(filter(None, (environment.pop("PATH", ""), os.environ["PATH"])))
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment, "PATH": path}, capture_output=True)
    return done.returncode, log.read_text().splitlines()


def made(tmp_path, target, fails):
    """The exit status of a target, and how it called pytest."""
    log = tmp_path / "log"
    for name in ("ruff", "pyright", "python"):
        stub(tmp_path / "bin" / name, log, fails)
    for name in (".installed-dev", ".installed-export"):
        (tmp_path / name).touch()
    status, calls = run(log, "make", target, f"VENV={tmp_path}", "PYTHON=none", MAKEFLAGS="")
    return status, [call for call in calls if "-m pytest" in call]


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@needs_make
@pytest.mark.parametrize(("fails", "passes"), [("none", True), ("*quick\\ tests", False)])
def test_make_test_runs_the_quick_tests(tmp_path, fails, passes):
    status, (call,) = made(tmp_path, "test", fails)
    assert call.endswith("--part quick tests") and (status == 0) == passes


@needs_make
@pytest.mark.parametrize(("fails", "passes"), [("none", True), ("*rest\\ tests/recipes", False), ("*\\ tests", False)])
def test_make_test_rest_runs_both_parts(tmp_path, fails, passes):
    status, (first, second) = made(tmp_path, "test-rest", fails)
    assert first.endswith("--part rest tests/recipes") and second.endswith("--part rest --ignore=tests/recipes tests")
    assert (status == 0) == passes


GATE = [("none", 0), ("test", 3), ("test-others", 3), ("test-recipes*", 3), ("*tests/symmetry*", 3)]


@pytest.mark.parametrize(("fails", "status"), GATE)
def test_the_gate_runs_all_parts(tmp_path, fails, status):
    log, gate = tmp_path / "log", tmp_path / "root" / ".ci" / "run"
    gate.parent.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", gate)
    for name in ("bin/make", "bin/python3.12", "root/.venv/bin/python", "root/.venv-newest/bin/python"):
        stub(tmp_path / name, log, fails)
    found, calls = run(log, "bash", str(gate), PATH=str(tmp_path / "bin"))
    assert found == status and any("tests/symmetry" in call for call in calls)
    assert {"test", "test-others", "test-recipes PROCESSES=0"} <= set(calls)
