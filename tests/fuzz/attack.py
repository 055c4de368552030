"""Gives inputs to readers in a child process, and judges what comes of them.

The child is a fork of this process, which has imported the readers and begun nothing.  It takes one input after the
other, until it dies or a reader has changed it; then comes a new one.
"""

import contextlib
import faulthandler
import gc
import os
import pathlib
import pickle
import re
import resource
import select
import shutil
import signal
import sys
import traceback
import unicodedata
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import strategies

from tests.fuzz import watch

SECONDS, BYTES = 5, 500 * 2**20  # of processor time and of memory, for one input
SILENCE = 600  # seconds without an answer, on however slow a machine, mean that a reader waits for something
# Characters of a message, which may list the tensors that do not fit, warnings, and bytes printed, at most.
LINE, WARNINGS, OUTPUT = 10_000, 5, 2000
OUTSIDE = ("/etc/passwd", "/dev/zero")  # files that inputs name
USES = 3000  # inputs of one child: what it keeps must not count as memory of a reader

# JAX warns of forks: no thread of it runs yet.  What is in force here is in force in the child, too.
warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called")

Files = dict[str, bytes]  # by their path in the folder that a reader is given


class Reader(NamedTuple):
    """A reader of files.

    Attributes:
      name: for reports.
      valid: files that it reads well.
      damaged: a strategy of other ones.
      read: takes the folder of the files.
      writes: whether it may write in this folder.
      lenient: whether it takes what it can of any file, and refuses none.
    """

    name: str
    valid: Files
    damaged: strategies.SearchStrategy[Files]
    read: Callable[[pathlib.Path], Any]
    writes: bool = False
    lenient: bool = False


def made_in_child(make: Callable[[], Any]) -> Any:
    """Run a function in a child process and return its result: a process with threads cannot be forked."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            with os.fdopen(write, "wb") as stream:
                pickle.dump(make(), stream)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        made = pickle.load(stream)
    os.waitpid(child, 0)
    return made


class Outcome(NamedTuple):
    """`kind` is "value", "refused" or "fault"; `text` says more, and `place` tells faults of one cause from others."""

    kind: str
    text: str = ""
    place: str = ""


class Attacker:
    """Attacks one reader; a context manager, which ends its child.

    Args:
      room: a folder for the files.
    """

    def __init__(self, reader: Reader, room: pathlib.Path):
        self.reader, self._room, self._child, self._uses = reader, room, None, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()

    def __call__(self, files: Files) -> Outcome:
        """The outcome of reading these files."""
        if self._child is None:
            self._child, self._uses = _Child(self.reader, self._room), 0
            first = self._child.ask(self.reader.valid)  # also imports and keeps what each use needs
            if first.kind != "value":
                self._end()
                return first._replace(kind="fault", place="valid files", text=f"valid files: {first.text}")
        outcome, self._uses = self._child.ask(files), self._uses + 1
        if outcome.kind == "fault" or self._uses == USES:
            self._end()
        return outcome

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """A process that reads what it is asked to."""

    def __init__(self, reader: Reader, room: pathlib.Path):
        (there, write), (read, back) = os.pipe(), os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(write), os.close(read)
            _serve(reader, room, os.fdopen(there, "rb"), os.fdopen(back, "wb"))
        os.close(there), os.close(back)
        self._to, self._from = os.fdopen(write, "wb"), os.fdopen(read, "rb")

    def ask(self, files: Files) -> Outcome:
        """The outcome, also where the child dies of it."""
        pickle.dump(files, self._to)
        self._to.flush()
        if not select.select([self._from], [], [], SILENCE)[0]:
            return Outcome("fault", f"waits: no answer in {SILENCE} s, and less than {SECONDS} s of work", "silence")
        try:
            return pickle.load(self._from)
        except EOFError:
            return _death(os.waitpid(self._pid, 0)[1])

    def end(self) -> None:
        """End the process, if it has not died."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._from.close()


def _death(status: int) -> Outcome:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return Outcome("fault", f"more than {SECONDS} s of processor time", "time")
    how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
    return Outcome("fault", f"the process ended by {how}", f"death {how}")


def _serve(reader: Reader, room: pathlib.Path, requests, answers) -> None:
    """Answer requests until there are no more; never returns."""
    try:
        faulthandler.disable()
        log = os.open(room / "output", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)  # C libraries print too
        auditor, state = watch.Auditor(), None
        while True:
            outcome, state = _tried(reader, room / "files", pickle.load(requests), auditor, log, state)
            pickle.dump(outcome, answers)
            answers.flush()
    except EOFError:
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _tried(reader: Reader, folder: pathlib.Path, files: Files, auditor: watch.Auditor, log: int, before: Any):
    """Read the files; the outcome, and the state of the process after it.  Before the first read it is not known."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    os.ftruncate(log, 0), os.lseek(log, 0, os.SEEK_SET)
    limits = contextlib.nullcontext() if before is None else _limited()  # at first libraries start threads, with stacks
    with warnings.catch_warnings(record=True) as warned, limits:
        auditor.begin(folder if reader.writes else None)
        outcome = _read(reader, folder)
        heard = auditor.end()
    gc.collect()  # a file may be open for as long as the traceback of an error is there
    after = watch.state()
    return outcome if before is None else _changed(outcome, before, after, heard, warned, log), after


def _changed(outcome: Outcome, before: dict, after: dict, heard: list[str], warned: list, log: int) -> Outcome:
    """The outcome, or a fault if the reader did more than return a value or an error."""
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    if outcome.kind == "fault":
        return outcome
    if changed:
        return Outcome("fault", f"changed: {', '.join(sorted(changed))}", f"changed {min(changed)}")
    if heard:
        return Outcome("fault", f"did {', '.join(sorted(set(heard)))}", f"event {heard[0]}")
    if len(warned) > WARNINGS:
        return Outcome("fault", f"{len(warned)} warnings, such as {warned[0].message}", "warnings")
    if (size := os.fstat(log).st_size) > OUTPUT:
        return Outcome("fault", f"{size} bytes of output", "output")
    return outcome


def _read(reader: Reader, folder: pathlib.Path) -> Outcome:
    try:
        reader.read(folder)
        return Outcome("value")
    except BaseException as error:
        return judged(error, folder)


@contextlib.contextmanager
def _limited():
    """Limits of time and memory; the first ends the process, the second is a MemoryError or the end."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (_data() + BYTES, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _data() -> int:
    """Bytes of memory that this process may write to."""
    with open("/proc/self/status", "rb") as file:
        return 1024 * int(next(line for line in file if line.startswith(b"VmData")).split()[1])


def judged(error: BaseException, folder: pathlib.Path) -> Outcome:
    """Whether an error refuses the files as it should, or is a fault."""
    message, place = str(error), _place(error)
    if any(isinstance(one, MemoryError) for one in _chain(error)):
        return Outcome("fault", f"asks for more than {BYTES // 2**20} MB: {message}", f"memory at {place}")
    wrong = ""
    if not isinstance(error, ValueError | OSError):
        wrong = "a wrong kind of error"
    elif len(message.splitlines()) != 1 or any(unicodedata.category(letter) in ("Cc", "Cs") for letter in message):
        wrong = "a message that is not one line of text"
    elif not any(path in message for path in (str(folder), *OUTSIDE)):
        wrong = "a message that does not name the file"
    elif len(message) > LINE:
        wrong = f"a message of {len(message)} characters"
    if wrong:
        return Outcome(
            "fault", f"{wrong}, {type(error).__name__}: {message[:400]!r}, at {place}", f"{wrong} at {place}"
        )
    return Outcome("refused", message)


def _chain(error: BaseException | None):
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _place(error: BaseException) -> str:
    """Where in our code the error passed last, and its type."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if re.search(r"/(equivit|kernels)/", frame.filename)] or frames
    last = ours[-1]
    return f"{pathlib.Path(last.filename).name}:{last.name} {type(error).__name__}"
