"""The outputs of a run: metrics.jsonl, trackers such as TensorBoard, and a progress bar or plain lines."""

import collections
import contextlib
import dataclasses
import json
import logging
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from ml_collections import ConfigDict
from rich.progress import BarColumn, Progress, TimeRemainingColumn

from equivit import errors, files, metrics_files
from equivit.constraints import OneOf, PositiveInt
from equivit.training.trackers import TRACKERS, imported_wandb

_log = logging.getLogger("equivit")
IN_FLIGHT = 2  # steps the device may be behind: enough to keep it busy, with few batches in memory


@dataclasses.dataclass(frozen=True)
class LogConfig:
    """The `log` section of a configuration."""

    every_steps: PositiveInt = 50
    # Where metrics go beside metrics.jsonl (trackers.py).
    to: tuple[Annotated[str, OneOf(TRACKERS)], ...] | tuple[()] = ("tensorboard",)
    profile: str | None = None  # steps to trace with jax.profiler, such as "100:105"; the trace is in profile/


class Log:
    """Writes the metrics of a run; only the first process writes.

    Args:
      options: the `log` section.
      total: steps of the run.
      start: finished steps; lines of later steps, left by a killed run, are dropped.

    Unreadable lines are dropped with a warning, after the file is copied to damaged/.
    """

    def __init__(self, workdir: pathlib.Path, options: ConfigDict, *, total: int, start: int):
        self._total, self._writes = total, jax.process_index() == 0
        self._bar, self._trackers = None, []
        if not self._writes:
            return
        self._path = workdir / "metrics.jsonl"
        _drop_later_lines(self._path, start)
        self._file = self._path.open("a")
        self._trackers = [TRACKERS[name](workdir, start) for name in options.to]
        if sys.stdout.isatty():
            columns = ("step {task.completed}/{task.total}", BarColumn(), "{task.fields[text]}", TimeRemainingColumn())
            self._bar = Progress(*columns)
            self._task = self._bar.add_task("", total=total, completed=start, text="compiling")
            self._bar.start()

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exception):
        if not self._writes:
            return
        self._file.close()
        for tracker in self._trackers:
            tracker.close()
        if self._bar:
            self._bar.stop()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics after `step` steps, and show them."""
        if not self._writes:
            return
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for tracker in self._trackers:
            tracker.write(step, metrics)
        text = _line(metrics)
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        else:
            print(f"step {step}/{self._total}  {text}", flush=True)

    def conclude(self, figures: dict[str, float]) -> None:
        """Record and show the final figures; they replace the final figures of an earlier start."""
        if self._writes:
            self._file.close()
            _rewrite(self._path, metrics_files.lines(self._path), lambda row: not _is_evaluation(row, self._total))
            self._file = self._path.open("a")
        self.write(self._total, figures)

    def has_evaluation(self, step: int) -> bool:
        """Whether figures of an evaluation after `step` steps are recorded; all processes must call it."""
        found = self._writes and any(_is_evaluation(row, step) for row in metrics_files.rows(self._path))
        if jax.process_count() > 1:  # only the first one reads the file
            found = multihost_utils.broadcast_one_to_all(np.int32(found))
        return bool(found)

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """Show a line of text."""
        if self._writes:
            (self._bar.console.print if self._bar else print)(text)
            sys.stdout.flush()


class Meter:
    """Collects the metrics of steps while the device works, and times the steps.

    Metrics are fetched `IN_FLIGHT` steps late, when they are ready, so that the device never waits for the host.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self._pending: collections.deque = collections.deque()
        self._begin()

    def _begin(self):
        self._values, self._waited, self._since = collections.defaultdict(list), 0.0, time.perf_counter()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in this context as waiting for data."""
        begin = time.perf_counter()
        yield
        self._waited += time.perf_counter() - begin

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in this context."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin

    def add(self, metrics: dict[str, jax.Array]) -> bool:
        """Add the metrics of one step; False if any step fetched so far was not finite."""
        self._pending.append(metrics)
        return self.flush(IN_FLIGHT)

    def flush(self, leave: int = 0) -> bool:
        """Fetch the metrics of all steps so far but the last few; False if one of the steps was not finite."""
        good = True
        while len(self._pending) > leave:
            metrics = jax.device_get(self._pending.popleft())
            good &= bool(metrics.pop("good"))
            if metrics.get("skipped"):
                del metrics["grad_norm"]  # not finite
            for name, value in metrics.items():
                self._values[name].append(float(value))
        return good

    def summary(self) -> dict[str, float]:
        """Means since the last summary, and speed; call after `flush`.  Skipped steps have no gradient norm."""
        seconds, steps = time.perf_counter() - self._since, len(self._values["loss"])
        result = {name: float(np.mean(values)) for name, values in self._values.items()}
        result |= {"images_per_second": steps * self._batch_size / seconds, "step_seconds": seconds / max(steps, 1)}
        result["data_wait_share"] = self._waited / seconds
        memory = jax.local_devices()[0].memory_stats()
        if memory and "peak_bytes_in_use" in memory:
            result["peak_memory_gb"] = memory["peak_bytes_in_use"] / 1e9
        self._begin()
        return result


class Profile:
    """Traces some steps of a run with `jax.profiler`, into `<workdir>/profile/`.

    Args:
      steps: "100:105", the first step and the one after the last; None: no trace.
    """

    def __init__(self, workdir: pathlib.Path, steps: str | None):
        self._place, self._running = workdir / "profile", False
        self._first, self._end = (-1, -1) if steps is None else traced(steps)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *exception):
        if self._running:
            jax.profiler.stop_trace()

    def remarks(self, start: int) -> list[str]:
        """Report that a run which resumes at step `start` traces nothing, if the first traced step is before it."""
        if not 0 <= self._first < start:
            return []
        return [f"Nothing is traced: log.profile begins at step {self._first}, and the run resumes at step {start}."]

    def before(self, step: int) -> None:
        """Start the trace if `step` is its first step."""
        if step == self._first:
            jax.profiler.start_trace(str(self._place))
            self._running = True

    def after(self, step: int, results: Any) -> pathlib.Path | None:
        """End the trace if `step` was its last step, when its results are computed; return its place then."""
        if not (self._running and step + 1 == self._end):
            return None
        jax.block_until_ready(results)
        jax.profiler.stop_trace()
        self._running = False
        return self._place


def traced(steps: str) -> tuple[int, int]:
    """The first step of `log.profile`, and the one after the last; ValueError unless it is such as "100:105"."""
    first, _, end = steps.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ValueError(
            f"config.log.profile={errors.shown(steps)} must be the first step and the one after the last, such as "
            "100:105."
        )
    return int(first), int(end)


def check_traced(section: ConfigDict, total: int) -> None:
    """Raise ValueError if `log.profile` begins after the last step of a run of `total` steps."""
    if section.profile is not None and traced(section.profile)[0] >= total:
        raise ValueError(
            f"config.log.profile={errors.shown(section.profile)} must begin before the end of the run, which has "
            f"{total} steps; give a first step of at most {total - 1}."
        )


def _drop_later_lines(path, step):
    """Drop the lines of later steps, unreadable lines, and a last line that a kill cut short."""
    lines = metrics_files.lines(path)
    if bad := sum(line.row is None for line in lines):
        aside = path.parent / "damaged" / f"{path.stem}-{time.time_ns()}{path.suffix}"
        files.write_bytes(aside, path.read_bytes())
        _log.warning("%s: %d lines cannot be read and are left out; the file as it was is %s.", path, bad, aside)
    _rewrite(path, lines, lambda row: row["step"] <= step)


def _is_evaluation(row, step):
    return row["step"] == step and all(name.startswith("eval/") for name in row.keys() - {"step"})


def _rewrite(path, lines, selects):
    """Write the readable lines whose rows are selected, unless the file already equals them."""
    content = b"".join(line.content + b"\n" for line in lines if line.row is not None and selects(line.row))
    if content != (path.read_bytes() if path.exists() else b""):
        files.write_bytes(path, content)


def _line(metrics):
    formats = {
        "loss": "loss {:.4f}", "accuracy": "accuracy {:.3f}", "lr": "lr {:.2e}", "grad_norm": "grad norm {:.2f}",
        "loss_scale": "loss scale {:.0f}",
        "images_per_second": "{:.0f} images/s", "step_seconds": "{:.3f} s/step", "data_wait_share": "waiting {:.0%}",
    }  # fmt: skip
    known = [form.format(metrics[name]) for name, form in formats.items() if name in metrics]
    others = [f"{name} {value:.4g}" for name, value in metrics.items() if "/" in name]
    return "  ".join(known + others[:3])


def check(section: ConfigDict) -> None:
    """Raise ValueError for an invalid `log` section."""
    if section.profile is not None:
        traced(section.profile)


def check_libraries(section: ConfigDict) -> None:
    """Raise ValueError if the library of a tracker is missing."""
    if "wandb" in section.to:
        imported_wandb()
