"""Runs that are asked to end: SIGTERM and Ctrl-C stop a run after the step it is in, with its state saved.

A scheduler can tell a stopped run from a finished one by its exit status: 143 after SIGTERM, 130 after Ctrl-C.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}


class Stopped(SystemExit):
    """A signal has ended the run; if nobody catches it, the program ends with the status that shells give.

    Attributes:
      status: 128 and the signal's number.
      name: of the signal, as people know it.
    """

    def __init__(self, number: int):
        self.status, self.name = 128 + number, NAMES[signal.Signals(number)]
        super().__init__(self.status)


class Signals:
    """Notes SIGTERM and Ctrl-C as long as it is entered; a second Ctrl-C ends the process at once.

    A Python handler waits for the end of whatever is done in C, such as a compilation of minutes.  So a thread listens,
    too: it says that the signal has come, and it is what the second Ctrl-C reaches.

    Args:
      agreed: says, given the number of finished steps, whether all processes of a run stop here, some having got a
        SIGTERM; None for a run of one process.
    """

    def __init__(self, agreed: Callable[[int], bool] | None = None):
        self._agreed, self._number, self._at_once = agreed, None, False

    def __enter__(self) -> "Signals":
        heard = (signal.SIGINT,) if self._agreed else (signal.SIGINT, signal.SIGTERM)  # the runtime listens to SIGTERM
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self._wakeup = signal.set_wakeup_fd(self._writer)
        self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *exception):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._writer)
        self._thread.join()
        os.close(self._reader)

    def _listen(self):
        interrupts = 0
        while received := os.read(self._reader, 1):
            interrupts += received[0] == signal.SIGINT
            if interrupts == 1 and received[0] == signal.SIGINT:
                _tell("Ctrl-C: the run saves its state and ends; a second Ctrl-C ends it at once.")
            if interrupts == 2:
                _tell("Ctrl-C again: the run ends at once, unsaved.")
                os._exit(128 + signal.SIGINT)

    def _note(self, number, frame):
        self._number = self._number or number
        if self._agreed:
            os.kill(os.getpid(), signal.SIGTERM)  # which the runtime passes to all processes
        elif self._at_once:
            raise Stopped(self._number)

    def asked(self, step: int) -> bool:
        """Whether the run is to end after `step` steps; several processes must ask at the same steps."""
        return self._agreed(step) if self._agreed else self._number is not None

    def stopped(self) -> Stopped:
        """The exception of a run that was asked to end."""
        return Stopped(self._number or signal.SIGTERM)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """In this context a signal raises Stopped wherever the program is, but not in a run of several processes."""
        if self._agreed:
            yield
            return
        self._at_once = True
        try:
            self._check()
            yield
        finally:
            self._at_once = False
        self._check()  # an exception may be lost where it is raised, such as in a hook of the garbage collector

    def _check(self):
        if self._number is not None:
            raise self.stopped()


def _tell(line):
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
    print(f"{show_cursor}{line}", file=sys.stderr, flush=True)
