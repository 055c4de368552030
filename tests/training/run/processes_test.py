"""Connections by which a process notices that another one of its run was killed."""

import pathlib
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize(
    ("what", "wait", "outcome"),
    [
        ("others.close()", "", ENDED),
        ("others.sendall(b'.'); others.close()", "0.2", (0, "")),
        ("", "0", (0, "")),
    ],
    ids=["killed", "finished", "alive"],
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
