"""One run in one directory at a time."""

import errno
import fcntl
import os
import socket

import jax
import pytest

from equivit import sweep, train
from equivit.training.run import lock


def test_a_second_one_is_told_who_holds_the_lock(tmp_path):
    path = tmp_path / "run" / ".lock"
    with lock.held(path):
        with pytest.raises(lock.BusyError) as caught, lock.held(path):
            pass
        message = str(caught.value)
        assert message.startswith(f"{tmp_path}/run: process {os.getpid()} on {socket.gethostname()}, since 20")
        assert path.exists()
    assert not path.exists()
    with lock.held(path):
        pass


def test_what_a_killed_process_left_holds_nobody(tmp_path):
    path = tmp_path / ".lock"
    path.write_text("process 1 on nowhere, since long ago, with a name that is long enough to be left over in part")
    with lock.held(path):
        assert path.read_text().startswith(f"process {os.getpid()} on") and "left over" not in path.read_text()


def test_a_lock_that_its_owner_removes_meanwhile_is_taken_anew(tmp_path, monkeypatch):
    path, flock = tmp_path / ".lock", fcntl.flock

    def removed(file, how):
        monkeypatch.undo()
        path.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", removed)
    with lock.held(path), pytest.raises(lock.BusyError), lock.held(path):
        pass


def test_the_first_process_of_a_run_holds_it_for_all(tmp_path, monkeypatch):
    with lock.held(tmp_path / ".lock"):
        monkeypatch.setattr(jax, "process_index", lambda: 1)
        with lock.held(tmp_path / ".lock"):
            pass
        assert (tmp_path / ".lock").exists()


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog):
    def flock(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    with lock.held(tmp_path / ".lock"):
        assert f"{tmp_path}: the file system has no locks" in caplog.text


@pytest.mark.parametrize("seeds", [False, True])
def test_a_second_run_is_refused_before_anything_is_read(tmp_path, capsys, seeds):
    arguments = ["--config=configs/quickstart.py:quicktest", f"--workdir={tmp_path}", "--config.data.source=npz:none"]
    with lock.held(tmp_path / ".lock"):
        assert train.main([*arguments, *(["--seeds=0,1"] if seeds else [])]) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}: process {os.getpid()} on ")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_result_of_a_sweep_is_computed_once(tmp_path, capsys):
    arguments = ["--config=configs/timeseries.py:quicktest", f"--workdir={tmp_path}", "--config.models=patchtst"]
    with lock.held(tmp_path / "synthetic-patchtst-8.lock"):
        assert sweep.main(arguments) == 1
    assert f"process {os.getpid()} on " in capsys.readouterr().err
