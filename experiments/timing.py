"""Timing of variants in turn, and a bound on a script's minutes.

A time is of one call until its result is ready, after warm-up; scripts report the median over rounds.  In a round every
variant runs once, in reversed order in every other round, so that clock and temperature of the device affect all
variants alike.  Ratios are between variants of the same rounds only.
"""

import contextlib
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

PAUSE = 0.03  # seconds between turns of libraries with threads of their own: by then the threads of the last one sleep


def interleaved(variants: Mapping[str, Callable[[], Any]], *, warmup: int, runs: int) -> dict[str, list[float]]:
    """Seconds of each timed call of each variant; a variant returns the arrays to wait for."""
    return in_turn({name: timed(call) for name, call in variants.items()}, warmup=warmup, runs=runs, pause=0)


def in_turn(
    variants: Mapping[str, Callable[[], float]], *, warmup: int, runs: int, pause: float = PAUSE
) -> dict[str, list[float]]:
    """`interleaved` for variants that return their own seconds."""
    seconds = {name: [] for name in variants}
    for turn in range(warmup + runs):
        for name in list(variants)[:: -1 if turn % 2 else 1]:
            time.sleep(pause)
            took = variants[name]()
            if turn >= warmup:
                seconds[name].append(took)
    return seconds


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    """A call that returns the seconds of another."""

    def run() -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    return run


def second_of_two(call: Callable[[], Any]) -> Callable[[], float]:
    """A call that runs another twice and returns the seconds of the second; the first wakes threads, fills caches."""

    def run() -> float:
        jax.block_until_ready(call())
        return timed(call)()

    return run


def milliseconds(variants: Mapping[str, Callable[[], Any]], options) -> dict[str, float]:
    """Median milliseconds of each of the `interleaved` variants, by the flags of `flags.timing_parser`."""
    times = medians(interleaved(variants, warmup=options.warmup, runs=options.runs))
    return {name: 1e3 * seconds for name, seconds in times.items()}


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each variant."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient, or None where one of the two was not measured."""
    return None if numerator is None or denominator is None else numerator / denominator


class Budget:
    """The minutes that a script may take.

    A variant begins only if it would fit even if it took as long as the longest so far.

    `left_out` has the names of variants that did not begin, `failed` the errors of variants by name.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic):
        self._clock, self._begun, self._longest = clock, None, 0.0
        self._end = clock() + 60 * minutes
        self.left_out: list[str] = []
        self.failed: dict[str, str] = {}

    def allows(self, name: str) -> bool:
        """Whether `name` may begin now, after everything before it has ended."""
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
        """Record an error of one variant, such as too little memory, so that the others' figures are not lost."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed[name] = f"{type(error).__name__}: {error}"[:500]
