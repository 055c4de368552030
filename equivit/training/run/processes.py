"""Join the processes of a run, and watch them: if one is killed, the others end at once with one line.

By itself, JAX waits `HEARTBEAT_SECONDS` for a dead process, then aborts the others from a C++ thread that no handler
reaches.  So every process holds a connection to the first one, which the system closes whenever a process ends.  A
process that finishes normally announces it first; one that fails sends the reason, which the others print too.
"""

import atexit
import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

HEARTBEAT_SECONDS = 30  # JAX considers a process dead after this silence, and ends the others
LEAVING = b"."  # sent by a process that has finished
TOKEN = 16  # bytes; only processes of this run know it
ADDRESSES = 4  # of the first process, at most
SECONDS = 3.0  # to connect
MOMENT = 1.0  # seconds within which the reason of another process arrives
REASON = 2**16  # bytes of a reason, at most
ENDED = "another process of this run has ended; restart all of them to continue."
_last_word = threading.Lock()  # held by the thread that prints why this process ends
_links: list[socket.socket] = []  # to other processes
_finished = threading.Event()
_log = logging.getLogger("equivit")


def join(asked: bool) -> None:
    """Join the other processes of the run if `asked`, or if the environment describes several processes.

    SLURM, Open MPI and TPU slices are detected.  Otherwise give each process JAX_COORDINATOR_ADDRESS (host:port of the
    first), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    """
    import jax

    if jax.distributed.is_initialized() or not (asked or _several_shown()):
        return
    count, index = os.environ.get("JAX_NUM_PROCESSES"), os.environ.get("JAX_PROCESS_ID")
    numbers: dict[str, Any] = {}
    if count is not None and index is not None:
        numbers = dict(num_processes=int(count), process_id=int(index))
    jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEAT_SECONDS, **numbers)
    if jax.process_count() > 1:
        watch()


def _several_shown():
    launched = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "JAX_NUM_PROCESSES")
    hosts = os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")
    return len(hosts) > 1 or any(int(os.environ.get(name, "1")) > 1 for name in launched)


def watch() -> None:
    """Start watching the other processes of this run; all of them must call it.

    A process that cannot connect to the first one logs a warning and relies on JAX's heartbeat.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    first = jax.process_index() == 0
    server = socket.create_server(("", 0)) if first else None
    sent = secrets.token_bytes(TOKEN) + _place(server) if server else bytes(TOKEN + 2 + 4 * ADDRESSES)
    found = multihost_utils.broadcast_one_to_all(np.frombuffer(sent, np.uint8).astype(np.int32))
    found = np.asarray(found).astype(np.uint8).tobytes()
    token, port, addresses = found[:TOKEN], int.from_bytes(found[TOKEN : TOKEN + 2], "big"), found[TOKEN + 2 :]
    if server:
        _start(_accept, server, token)
    elif (link := _connected(token, port, addresses)) is not None:
        hold(link)
    else:
        _log.warning("port %d of the first process cannot be reached; if a process is killed, others may abort.", port)


def hold(link: socket.socket) -> None:
    """Watch a connection to another process, and notify it when this one has finished."""
    _links.append(link)
    atexit.register(_leave, link)
    _start(_listen, link)


def end(text: str, reason: str | None = None) -> NoReturn:
    """Print the error that ends this process, send its reason to the others, and exit with status 1.

    Args:
      reason: None: the text.
    """
    _last_word.acquire()  # for good: no other thread speaks after this one
    print(f"error: {text}", file=sys.stderr, flush=True)
    for link in _links:
        with contextlib.suppress(OSError):
            link.sendall((text if reason is None else reason).encode())
    os._exit(1)


def end_by_jax(text: str) -> NoReturn:
    """`end` after an error of JAX, whose usual cause is the end of another process.

    The reason of the other process, if it sends one, is printed instead (`_listen`).
    """
    time.sleep(MOMENT)
    end(f"{ENDED}  ({text})", text)


def _place(server: socket.socket) -> bytes:
    """The port and the addresses of this machine, in a fixed number of bytes."""
    addresses = list(dict.fromkeys(socket.inet_aton(address) for address in _addresses()))[:ADDRESSES]
    return server.getsockname()[1].to_bytes(2, "big") + b"".join(addresses).ljust(4 * ADDRESSES, b"\0")


def _addresses() -> Iterator[str]:
    """Addresses of this machine in the network, the likeliest first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # a reserved address; sends nothing, but the system picks a local address
            yield probe.getsockname()[0]
        except OSError:
            pass
    with contextlib.suppress(OSError):
        yield from socket.gethostbyname_ex(socket.gethostname())[2]
    yield "127.0.0.1"


def _accept(server, token):
    while True:
        link, _ = server.accept()
        link.settimeout(SECONDS)
        try:
            known = link.recv(TOKEN, socket.MSG_WAITALL) == token
            link.sendall(token if known else b"")
        except OSError:
            known = False
        if known:
            hold(link)
        else:
            link.close()


def _connected(token, port, addresses):
    """Connect to the first process, identified by the token; None if no address works."""
    coordinator = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")[0]
    hosts = [socket.inet_ntoa(addresses[i : i + 4]) for i in range(0, len(addresses), 4)]
    for host in dict.fromkeys([coordinator, *hosts]):
        if host in ("", "0.0.0.0"):
            continue
        try:
            link = socket.create_connection((host, port), timeout=SECONDS)
            link.sendall(token)
            if link.recv(TOKEN, socket.MSG_WAITALL) == token:
                return link
            link.close()
        except OSError:
            continue
    return None


def _listen(link):
    link.settimeout(None)
    received = b""
    with contextlib.suppress(OSError), link.makefile("rb") as file:
        received = file.read(REASON)  # until the other process ends
    if received == LEAVING or _finished.is_set():
        return
    reason = received.decode(errors="replace")
    end(f"{ENDED}  ({reason})" if reason else ENDED, reason)


def _leave(link):
    _finished.set()
    with contextlib.suppress(OSError):
        link.sendall(LEAVING)


def _start(target, *arguments):
    threading.Thread(target=target, args=arguments, daemon=True).start()
