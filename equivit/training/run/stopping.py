"""Graceful shutdown: SIGTERM and Ctrl-C stop a run after the current step, with its state saved.

The exit status shows a scheduler that the run was stopped: 143 after SIGTERM, 130 after Ctrl-C.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

NAMES = {signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}
# JAX stops all processes at the number after the largest that any of them has passed.  A step would not do: a resumed
# run never reaches step 1, and the next run of the same process begins below the last step of this one.
_numbers = itertools.count(1)


class Stopped(SystemExit):
    """A signal has ended the run; uncaught, it ends the program with `status`, 128 plus the signal's number."""

    def __init__(self, number: int):
        self.status, self.name = 128 + number, NAMES[signal.Signals(number)]
        super().__init__(self.status)


class Signals:
    """A context that records SIGTERM and Ctrl-C; a second Ctrl-C ends the process at once.

    Python runs handlers only after C code returns, such as a compilation of minutes.  So a thread listens too: it
    acknowledges the first Ctrl-C, and ends the process at the second.

    Args:
      agreed: called with 1, 2, ..., counted over all runs of this process; whether all processes of the run stop at
        this number because one received SIGTERM.  None for a run of one process.
    """

    def __init__(self, agreed: Callable[[int], bool] | None = None):
        self._agreed, self._number, self._at_once = agreed, None, False

    def __enter__(self) -> "Signals":
        heard = (signal.SIGINT,) if self._agreed else (signal.SIGINT, signal.SIGTERM)  # the runtime handles SIGTERM
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
                _print("Ctrl-C: the run saves its state and ends; a second Ctrl-C ends it at once.")
            if interrupts == 2:
                _print("Ctrl-C again: the run ends at once, unsaved.")
                os._exit(128 + signal.SIGINT)

    def _note(self, number, frame):
        self._number = self._number or number
        if self._agreed:
            os.kill(os.getpid(), signal.SIGTERM)  # the runtime passes it to all processes
        elif self._at_once:
            raise Stopped(self._number)

    def asked(self) -> bool:
        """Whether the run must end after this step; all processes must ask after each step."""
        return self._agreed(next(_numbers)) if self._agreed else self._number is not None

    def stopped(self) -> Stopped:
        """The exception that ends the run."""
        return Stopped(self._number or signal.SIGTERM)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise Stopped at once in this context when a signal comes, except in a run of several processes."""
        if self._agreed:
            yield
            return
        self._at_once = True
        try:
            self._check()
            yield
        finally:
            self._at_once = False
        self._check()  # the first exception may be lost, for example in a hook of the garbage collector

    def _check(self):
        if self._number is not None:
            raise self.stopped()


def _print(line):
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
    print(f"{show_cursor}{line}", file=sys.stderr, flush=True)
