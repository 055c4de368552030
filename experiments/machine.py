"""The machine, package versions and commit of a result; memory of compiled programs."""

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Iterable
from typing import NamedTuple

import jax

ROOT = pathlib.Path(__file__).resolve().parents[1]


class Memory(NamedTuple):
    """Bytes of a compiled program, by the compiler's own account.

    The device's counter of its highest use is one for the whole process and cannot distinguish variants.
    """

    held: int  # from call to call: parameters, inputs
    peak: int  # during a call, at most
    temporary: int = 0  # neither held nor results


def memory(compiled) -> Memory | None:
    """The memory of a compiled program; None where the compiler does not report it."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    held, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    return Memory(held, held + stats.output_size_in_bytes - stats.alias_size_in_bytes + temporary, temporary)


def fit(memories: Iterable[Memory | None], limit: float | None) -> bool:
    """Whether programs that run in turn fit into `limit` bytes: what all of them hold, and what one more needs.

    True where nothing is known.  A twentieth is kept free for what the compiler does not count.
    """
    known = [m for m in memories if m is not None]
    needed = sum(m.held for m in known) + max((m.peak - m.held for m in known), default=0)
    return limit is None or needed <= 0.95 * limit


def device_memory() -> int | None:
    """Bytes that programs may use on the first device; None where it does not report them."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def on_gpu() -> bool:
    """Whether the first device is a GPU."""
    return jax.local_devices()[0].platform == "gpu"


def device() -> dict:
    """Facts about the device."""
    first = jax.local_devices()[0]
    return dict(
        name=first.device_kind if first.platform != "cpu" else _processor(),
        kind=first.platform,
        memory_bytes=device_memory(),
        threads=os.cpu_count(),
        runtime=first.client.platform_version,
        driver=_driver(),
    )


def _processor():
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver():
    """The version of NVIDIA's driver, where there is one."""
    if not on_gpu() or not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True).stdout.split("\n")[0].strip() or None


def versions() -> dict[str, str | None]:
    """Versions of Python and of packages."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "torch", "timm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str | None:
    """The commit that is checked out, "-dirty" if files differ; where there is no .git, the one in EQUIVIT_COMMIT."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        found = ""
    return found or os.environ.get("EQUIVIT_COMMIT")
