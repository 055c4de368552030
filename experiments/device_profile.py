"""Profile a call on a GPU: the time of each kernel, from JAX's profiler."""

import collections
import pathlib
import re
import tempfile
from collections.abc import Callable
from typing import Any

import jax

CALLS = 3  # in a trace
LISTED = 25  # kernels


def kernels(call: Callable[[], Any]) -> dict[str, Any]:
    """The kernels of a call, from a trace of CALLS.

    Returns:
      "kernel_us", microseconds of all kernels of a call; "launches", their number; "kernels", [name, launches,
      microseconds] of each kind, the longest first.
    """
    with tempfile.TemporaryDirectory() as place:
        with jax.profiler.trace(place):
            for _ in range(CALLS):
                jax.block_until_ready(call())
        (path,) = pathlib.Path(place).rglob("*.xplane.pb")
        events = gpu_events(jax.profiler.ProfileData.from_file(str(path)))
    rows = collections.defaultdict(list)
    for name, nanoseconds in events:
        rows[kind(name)].append(nanoseconds)
    totals = {name: [name, len(times) / CALLS, sum(times) / CALLS / 1e3] for name, times in rows.items()}
    return dict(
        kernel_us=sum(us for _, _, us in totals.values()),
        launches=sum(launches for _, launches, _ in totals.values()),
        kernels=sorted(totals.values(), key=lambda row: -row[2])[:LISTED],
    )


def gpu_events(profile) -> list[tuple[str, float]]:
    """Name and nanoseconds of every kernel and copy on a GPU."""
    planes = [plane for plane in profile.planes if plane.name.startswith("/device:GPU")]
    lines = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
    return [(event.name, event.duration_ns) for line in lines for event in line.events]


def kind(name: str) -> str:
    """Strip XLA's numbers from a kernel's name, so that kernels of all blocks count together."""
    return re.sub(r"(_\d+)+$", "", name)[:80]
