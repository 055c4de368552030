"""Connections by which a process notices that another one of its run was killed."""

import os
import pathlib
import socket
import subprocess
import sys
import threading

import pytest

from equivit.training.run import processes

ROOT = pathlib.Path(__file__).parents[3]
CODE = """
import contextlib, socket, sys, threading
from equivit.training.run import processes
assert "jax" not in sys.modules
ours, others = socket.socketpair()
processes.hold(ours)
{what}
threading.Event().wait({wait})
"""
ENDED = (1, "error: another process of this run has ended; restart all of them to continue.\n")
REASON = (1, "error: another process of this run has ended; restart all of them to continue.  (No space left)\n")


@pytest.mark.parametrize(
    ("what", "wait", "outcome"),
    [
        ("others.close()", "", ENDED),
        ("others.sendall(b'No space '); others.sendall(b'left'); others.close()", "", REASON),
        ("others.sendall(b'.'); others.close()", "0.2", (0, "")),
        ("", "0", (0, "")),
    ],
    ids=["killed", "failed", "finished", "alive"],
)
def test_a_process_ends_when_another_is_killed(what, wait, outcome):
    code = CODE.format(what=what, wait=wait)
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == outcome


def test_strangers_end_nothing_and_members_do():
    what = """
server = socket.create_server(("localhost", 0))
token, (_, port) = b"t" * processes.TOKEN, server.getsockname()
threading.Thread(target=processes._accept, args=(server, token), daemon=True).start()
for text in (b"", b"GET / HTTP/1.1 ....", b"s" * processes.TOKEN):
    with socket.create_connection(("localhost", port)) as stranger, contextlib.suppress(OSError):
        stranger.sendall(text)
        stranger.shutdown(socket.SHUT_WR)
        if stranger.recv(1):
            sys.exit("a stranger was let in")
assert processes._connected(b"s" * processes.TOKEN, port, socket.inet_aton("127.0.0.1")) is None
member = processes._connected(token, port, socket.inet_aton("127.0.0.1"))
print("member", flush=True)
member.close()
"""
    run = subprocess.run(
        [sys.executable, "-c", CODE.format(what=what, wait="")], cwd=ROOT, capture_output=True, text=True
    )
    assert (run.returncode, run.stderr, run.stdout) == (*ENDED, "member\n")


@pytest.mark.parametrize(("end", "arguments", "said", "sent"), [
    (processes.end, ("No space left",), "No space left", "No space left"),
    (processes.end_by_jax, ("OUT OF MEMORY",), f"{processes.ENDED}  (OUT OF MEMORY)", "OUT OF MEMORY"),
    (processes.end, (processes.ENDED, ""), processes.ENDED, ""),  # another one was killed
])  # fmt: skip
def test_a_process_that_ends_sends_the_others_its_reason(monkeypatch, capsys, end, arguments, said, sent):
    ours, others = socket.socketpair()
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(processes, "MOMENT", 0)
    monkeypatch.setattr(processes, "_last_word", threading.Lock())
    monkeypatch.setattr(processes, "_links", [ours])
    with ours, others:
        with pytest.raises(SystemExit, match="1"):
            end(*arguments)
        ours.close()
        assert others.makefile().read() == sent
    assert capsys.readouterr().err == f"error: {said}\n"
