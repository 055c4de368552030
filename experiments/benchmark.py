"""Shared by the benchmarks: timing in turn, a bound on their minutes, claims, and facts about the machine.

A time is that of one call until its result is there (`jax.block_until_ready`), after warm-up, as a median over rounds.
In a round every variant runs once, and the order turns round from one to the next, so that the device's clock and
temperature meet all variants alike; ratios are taken between variants of the same rounds only.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from equivit import errors

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results"


def parser(description: str, *, output: str) -> argparse.ArgumentParser:
    """Options of a benchmark; `output` is the name of the JSON in experiments/results."""
    options = argparse.ArgumentParser(description=description.split("\n")[0])
    options.add_argument("--output", type=pathlib.Path, default=RESULTS / output, help="where the JSON goes")
    return options


def timing_parser(description: str, *, output: str, runs: int = 100, warmup: int = 10, minutes: float = 7):
    """The same with the options of timing; the defaults are those of octic ViTs, Appendix D.4."""
    options = parser(description, output=output)
    options.add_argument("--runs", type=at_least(1), default=runs, help="timed rounds (%(default)s)")
    options.add_argument("--warmup", type=at_least(0), default=warmup, help="rounds before them (%(default)s)")
    note = "begin nothing further that would not fit (%(default)s)"
    options.add_argument("--minutes", type=at_least(0, float), default=minutes, help=note)
    return options


def in_one_line(main: Callable[[Any], int]) -> Callable[..., int]:
    """The `main` of a script, which says in one line what is wrong with what it was given; the status is 1 then."""

    @functools.wraps(main)
    def run(arguments=None) -> int:
        try:
            return main(arguments)
        except (ValueError, OSError) as error:
            print(f"error: {errors.line(str(error))}", file=sys.stderr)
            return 1

    return run


def one_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that lists some of the known words, separated by commas."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
        return words

    return parse


def at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], float]:
    """The type of an option that is a number of a kind, and not smaller."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not value >= least:
            noun = "whole number" if kind is int else "number"
            raise argparse.ArgumentTypeError(f"{text} must be a {noun}, at least {least}")
        return value

    return parse


def each_at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], list[float]]:
    """The type of an option that lists such numbers, separated by commas."""
    parse = at_least(least, kind)
    return lambda text: [parse(word) for word in text.split(",")]


def interleaved(variants: Mapping[str, Callable[[], Any]], *, warmup: int, runs: int) -> dict[str, list[float]]:
    """Seconds of each timed call of each variant; a variant returns what is to be waited for."""
    seconds = {name: [] for name in variants}
    for turn in range(warmup + runs):
        for name in list(variants)[:: -1 if turn % 2 else 1]:
            start = time.perf_counter()
            jax.block_until_ready(variants[name]())
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each variant."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, or None where one of the two was not measured."""
    return None if numerator is None or denominator is None else numerator / denominator


class Budget:
    """The minutes that a script may take, and what came of the variants that it set out to measure.

    Something further is begun only if it would still fit, were it as long as the longest so far.  What is not begun
    stands in `left_out` with the reason; what failed, with its error, in `failed`.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._begun, self._longest = clock, None, 0.0
        self._end = clock() + 60 * minutes
        self.left_out: list[str] = []
        self.failed: dict[str, str] = {}

    def allows(self, name: str) -> bool:
        """Whether `name` may begin now; what was begun before it has ended."""
        now = self._clock()
        if self._begun is not None:
            self._longest = max(self._longest, now - self._begun)
        allowed = now + self._longest <= self._end
        self._begun = now if allowed else None
        if not allowed:
            self.left_out.append(f"{name}: no time left")
        return allowed

    @contextlib.contextmanager
    def trying(self, name: str):
        """Notes an error of one variant, such as too little memory, so that the others' figures are not lost."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}"[:500]


@dataclasses.dataclass(frozen=True)
class Claim:
    """A figure of ours and the bound it is held to.  `ours` is None where it was not measured.

    A claim about a kind of machine is not judged on another: `judged` is False there.
    """

    text: str
    ours: float | None
    at_least: float | None = None
    at_most: float | None = None
    judged: bool = True

    @property
    def holds(self) -> bool | None:
        """None where it is not judged."""
        if self.ours is None or not self.judged:
            return None
        above = self.at_least is None or self.ours >= self.at_least
        return above and (self.at_most is None or self.ours <= self.at_most)

    def __str__(self):
        bounds = [f"{word} {bound:g}" for word, bound in _bounds(self) if bound is not None]
        ours = "not measured" if self.ours is None else f"{self.ours:.4g}"
        verdict = {None: "not judged", True: "holds", False: "FAILS"}[self.holds]
        return f"{verdict:10} {self.text}: {ours}, claimed {' and '.join(bounds)}"


def _bounds(claim):
    return ("at least", claim.at_least), ("at most", claim.at_most)


def finish(
    path: pathlib.Path, results: Mapping[str, Any], claims: Sequence[Claim], budget: Budget | None = None
) -> int:
    """Write the results as JSON with the machine, versions and commit, and print every claim.

    Returns the exit status: 1 if a claim or a variant fails.
    """
    budget = budget or Budget(0)
    facts = dict(device=device(), versions=versions(), commit=commit())
    judged = [{**dataclasses.asdict(claim), "holds": claim.holds} for claim in claims]
    ended = dict(claims=judged, left_out=budget.left_out, failed=budget.failed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts, **results, **ended}, indent=1) + "\n")
    for name in budget.left_out:
        print(f"left out: {name}")
    for name, error in budget.failed.items():
        print(f"failed: {name}: {error.splitlines()[0]}")
    for claim in claims:
        print(claim)
    print(f"written: {path}")
    return int(bool(budget.failed) or any(claim.holds is False for claim in claims))


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Aligned text; `columns` maps keys to headings.  Missing cells are "-"."""
    body = [[_cell(row.get(key)) for key in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(columns.values(), *body, strict=True)]
    lines = [list(columns.values()), *body]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines)


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"
    return str(value)


class Memory(NamedTuple):
    """Bytes that a compiled program holds from call to call (parameters, inputs), and at most during a call.

    `temporary` are those that are neither held nor results.

    This is the compiler's own account.  The device's counter of its highest use is one for the whole process and never
    goes back, so it cannot tell the variants of one process apart.
    """

    held: int
    peak: int
    temporary: int = 0


def memory(compiled) -> Memory | None:
    """The memory of a compiled program; None where the compiler does not tell."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    held = stats.argument_size_in_bytes
    return Memory(held, held + results + stats.temp_size_in_bytes, stats.temp_size_in_bytes)


def fit(memories: Iterable[Memory | None], limit: float | None) -> bool:
    """Whether programs that run in turn fit into `limit` bytes: what all of them hold, and what one more needs.

    True where nothing is known.  A twentieth is kept free for what the compiler does not count.
    """
    known = [m for m in memories if m is not None]
    needed = sum(m.held for m in known) + max((m.peak - m.held for m in known), default=0)
    return limit is None or needed <= 0.95 * limit


def device_memory() -> int | None:
    """Bytes that programs may use on the first device; None where it does not say."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def on_gpu() -> bool:
    """Whether the first device is a GPU, for which the targets are."""
    return jax.local_devices()[0].platform == "gpu"


def device() -> dict:
    """The device of the figures."""
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
    """Versions of Python and of the packages that the figures depend on."""
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
