"""Attack the readers: in each round all of them, with other inputs.

    python -m tests.fuzz --minutes=60               for an hour, from a random seed; or make fuzz MINUTES=60
    python -m tests.fuzz --reader=.pth --seed=3     those with this in their name, one round from a seed
    python -m tests.fuzz --replay=.cache/fuzz/1     what comes of the files of a fault

A fault is reduced to the smallest input that hypothesis finds, and kept in .cache/fuzz with a note, fault.txt.  The
last lines give the inputs of each reader and what came of them.  The exit status is 1 after a fault, and also where a
reader has returned no value or refused nothing, since such inputs show nothing.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import random
import resource
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
os.environ |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot be forked
os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(ROOT / ".cache" / "hypothesis")

from tests.fuzz import coco, foreign, pictures, records, runs, series, tables, weights  # noqa: E402
from tests.fuzz.attack import Attacker, Files, Outcome, Reader  # noqa: E402
from tests.fuzz.hunt import Hunt  # noqa: E402

READERS: tuple[Reader, ...] = (
    *weights.READERS,
    *foreign.READERS,
    *pictures.READERS,
    *tables.READERS,
    *coco.READERS,
    *records.READERS,
    *series.READERS,
    *runs.READERS,
)
KEPT = ROOT / ".cache" / "fuzz"
NOTE = "fault.txt"


@dataclasses.dataclass
class Tally:
    """Outcomes of a reader's inputs, the places of its faults, and the processor time it took, in seconds."""

    reader: Reader
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    places: set[str] = dataclasses.field(default_factory=set)
    seconds: float = 0.0

    @property
    def shows(self) -> bool:
        """Whether there were good inputs and bad ones."""
        return bool(self.counts["value"]) and (bool(self.counts["refused"]) or self.reader.lenient)

    def line(self) -> str:
        numbers = [self.counts.total(), *(self.counts[kind] for kind in ("value", "refused", "fault"))]
        return (
            f"{self.reader.name:26}"
            + "".join(f"{n:10,}" for n in (*numbers, len(self.places)))
            + f"{self.seconds:9.0f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=0.0, help="rounds begin until then; 0: one round")
    parser.add_argument("--examples", type=int, default=300, help="inputs of a reader in a round")
    parser.add_argument("--seed", type=int, help="of the first round; random without it")
    parser.add_argument("--reader", default="", help="only the readers with this in their name")
    parser.add_argument("--replay", type=pathlib.Path, help="a directory of .cache/fuzz")
    options = parser.parse_args()
    tallies = [Tally(reader) for reader in READERS if options.reader in reader.name]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as room:
        if options.replay:
            return _replay(options.replay, pathlib.Path(room))
        seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
        end = time.monotonic() + 60 * options.minutes
        _round(tallies, pathlib.Path(room), options.examples, seed)
        while time.monotonic() < end:
            seed += 1
            _round(tallies, pathlib.Path(room), options.examples, seed)
    return _report(tallies)


def _round(tallies: list[Tally], room: pathlib.Path, examples: int, seed: int) -> None:
    """Attack each reader once; faults at places that are known are counted only."""
    print(f"seed {seed}", flush=True)
    for tally in tallies:
        before = _cpu_seconds()
        found = Hunt(tally.reader, room, frozenset(tally.places)).run(examples, seed)
        tally.counts += found.counts
        tally.seconds += _cpu_seconds() - before
        if found.fault is not None:
            tally.places.add(found.fault.place)
            print(f"{tally.reader.name}: {found.fault.text}", flush=True)
            print(f"  kept in {_kept(tally.reader, found.fault, found.files)}", flush=True)


def _report(tallies: list[Tally]) -> int:
    """Print the table; the exit status."""
    print(f"{'reader':26}{'inputs':>10}{'values':>10}{'refused':>10}{'faults':>10}{'causes':>10}{'CPU s':>9}")
    print("\n".join(tally.line() for tally in tallies))
    inputs, causes = sum(tally.counts.total() for tally in tallies), sum(len(tally.places) for tally in tallies)
    print(f"{len(tallies)} readers, {inputs:,} inputs, {causes} causes of faults")
    if idle := [tally.reader.name for tally in tallies if not tally.shows]:
        print(f"nothing is shown by {', '.join(idle)}: the inputs are all good, or all bad.")
    return int(bool(idle) or bool(causes))


def _kept(reader: Reader, fault: Outcome, files: Files) -> pathlib.Path:
    """The directory with the files of a fault and a note."""
    KEPT.mkdir(parents=True, exist_ok=True)
    place = KEPT / str(1 + max((int(path.name) for path in KEPT.iterdir() if path.name.isdecimal()), default=0))
    for name, content in files.items():
        (place / "files" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "files" / name).write_bytes(content)
    (place / NOTE).write_text(f"{reader.name}\n{fault.text}\n", errors="backslashreplace")
    return place


def _replay(place: pathlib.Path, room: pathlib.Path) -> int:
    """Print what comes of the files of a fault; the exit status."""
    name = (place / NOTE).read_text().partition("\n")[0]
    (reader,) = [reader for reader in READERS if reader.name == name]
    folder = place / "files"
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with Attacker(reader, room) as attacker:
        outcome = attacker(files)
    print(f"{reader.name}: {outcome.kind} {outcome.text}")
    return int(outcome.kind == "fault")


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    sys.exit(main())
