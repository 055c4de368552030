"""Signals: the first one is noted, whatever the program is doing, and a second Ctrl-C ends it."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from equivit.training.run import stopping

ROOT = pathlib.Path(__file__).parents[3]
# A call in C that no signal reaches, as a compilation is; it would take hours.
BUSY = """
import hashlib
from equivit.training.run import stopping
with stopping.Signals():
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""


def test_a_second_ctrl_c_ends_a_program_in_the_middle_of_a_call():
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, **pipes)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("Ctrl-C: the run saves its state and ends")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=3600) == 130
        assert process.stderr.read() == "Ctrl-C again: the run ends at once, unsaved.\n"
    finally:
        process.kill()
        process.communicate()


def test_of_several_processes_one_tells_the_others_and_all_agree(monkeypatch):
    """Their runtime listens to SIGTERM, so Ctrl-C becomes one; the step is where all of them stop."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
    try:
        passed = []
        with stopping.Signals(lambda number: passed.append(number) or bool(heard) and len(passed) == 3) as signals:
            assert not signals.asked()
            os.kill(os.getpid(), signal.SIGINT)
            with signals.at_once():
                assert heard == ["SIGTERM"] and not signals.asked() and signals.asked()
            assert signals.stopped().status == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_numbers_at_which_processes_agree_never_go_back():
    """Nor skip one: JAX stops a run at the number after the largest so far, which is 0 at the start of a process."""
    numbers = []
    for _ in range(2):  # two runs of a process
        with stopping.Signals(numbers.append) as signals:
            for _ in range(3):
                signals.asked()
    assert numbers == list(range(numbers[0], numbers[0] + 6)) and numbers[0] > 0
    code = "from equivit.training.run import stopping; print(next(stopping._numbers))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "1\n"


def test_an_exception_that_was_lost_comes_at_the_end():
    with (
        pytest.raises(stopping.Stopped),
        stopping.Signals() as signals,
        signals.at_once(),
        contextlib.suppress(stopping.Stopped),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
