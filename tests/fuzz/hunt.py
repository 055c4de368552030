"""Looks for inputs of a reader that make it break the property, and reduces the first one that it finds."""

import collections
import gc
import pathlib
import warnings
from typing import NamedTuple

import hypothesis

from tests.fuzz.attack import Attacker, Files, Outcome, Reader

# Hypothesis warns of long inputs in its errors.
warnings.filterwarnings("ignore", category=hypothesis.errors.HypothesisWarning)

SHRINKS = 60  # inputs that reducing a fault may take: each may take 5 s


class Found(NamedTuple):
    """How many inputs came to what, and the first fault that was not known, with its reduced input."""

    counts: collections.Counter
    fault: Outcome | None
    files: Files


class Broken(Exception):
    """The property does not hold."""


class Hunt:
    """One go with a reader.

    Args:
      known: places of faults that have been found before; they are counted only.
    """

    def __init__(self, reader: Reader, room: pathlib.Path, known: frozenset[str] = frozenset()):
        self._reader, self._known, self._room = reader, known, room
        self._counts, self._fault, self._broken, self._shrinks = collections.Counter(), None, set(), 0

    def run(self, examples: int, seed: int) -> Found:
        """Try this number of inputs."""
        gc.collect()
        gc.freeze()  # else each search for garbage, also in a child, looks at all that is imported
        with Attacker(self._reader, self._room) as attacker:

            @hypothesis.seed(seed)
            @hypothesis.settings(
                max_examples=examples,
                database=None,
                deadline=None,
                print_blob=False,
                report_multiple_bugs=False,
                phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
                suppress_health_check=list(hypothesis.HealthCheck),
                verbosity=hypothesis.Verbosity.quiet,
            )
            @hypothesis.given(self._reader.damaged)
            def attempt(files: Files) -> None:
                self._judge(attacker, files)

            try:
                attempt()
            except Broken as broken:
                return Found(self._counts, self._fault, dict(broken.args[0]))
        return Found(self._counts, None, {})

    def _judge(self, attacker: Attacker, files: Files) -> None:
        """Broken if these files make a fault; while one is being reduced, only if they make this one."""
        key = tuple(sorted(files.items()))
        if key in self._broken or self._breaks(attacker, files):
            self._broken.add(key)  # so that the same input has the same result, whatever was tried meanwhile
            raise Broken(key)  # in one place, by which hypothesis tells errors apart

    def _breaks(self, attacker: Attacker, files: Files) -> bool:
        if self._fault is not None:
            self._shrinks += 1
            if self._shrinks > SHRINKS:
                return False
        outcome = attacker(files)
        self._counts[outcome.kind] += self._fault is None
        if outcome.kind != "fault" or outcome.place in self._known:
            return False
        self._fault = self._fault or outcome
        return outcome.place == self._fault.place
