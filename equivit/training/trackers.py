"""Trackers of a run's metrics beside metrics.jsonl, by their name in `log.to`."""

import csv
import io
import json
import pathlib
import secrets
import time
from typing import Any, Protocol, cast

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2

from equivit import errors, files, metrics_files

_messages = cast(Any, event_pb2)  # its classes are created at import, unknown to the type checker


class Tracker(Protocol):
    """A record of metrics, made of the run directory and the step at which the run starts."""

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics after `step` steps."""
        ...

    def close(self) -> None:
        """Finish the record."""
        ...


class TensorBoard:
    """TensorBoard's file of a run, without the thread of `SummaryWriter`, which hangs on a full disk."""

    def __init__(self, workdir: pathlib.Path, start: int):
        self._writer = EventsWriter(str(workdir / "events"))
        # Discard events of later steps from an earlier process.
        self._write(step=start + 1, session_log=_messages.SessionLog(status=_messages.SessionLog.START))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics after `step` steps."""
        values = [summary.scalar(name, value).value[0] for name, value in metrics.items()]
        self._write(step=step, summary=summary.Summary(value=values))

    def _write(self, **fields):
        self._writer.write_event(_messages.Event(wall_time=time.time(), **fields))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Csv:
    """metrics.csv, a table with a column for each metric and a row for each step with metrics.

    The file is written as a whole from metrics.jsonl when the run starts, at each new metric and at the end; rows
    between are appended.
    """

    def __init__(self, workdir: pathlib.Path, start: int):
        self._workdir, self._columns = workdir, []
        self._rewrite()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Append a row, or write the table with new columns."""
        if metrics.keys() - set(self._columns):
            self._rewrite()
            return
        with (self._workdir / "metrics.csv").open("a", encoding="utf-8", newline="") as file:
            self._table(file).writerow({"step": step, **metrics})

    def close(self) -> None:
        """Write the whole table: the final figures replace earlier ones."""
        self._rewrite()

    def _rewrite(self):
        rows = metrics_files.rows(self._workdir / "metrics.jsonl")
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        text = io.StringIO()
        table = self._table(text)
        table.writeheader()
        table.writerows(rows)
        files.write_text(self._workdir / "metrics.csv", text.getvalue())

    def _table(self, file):
        return csv.DictWriter(file, self._columns, lineterminator="\n")


class Wandb:
    """Weights & Biases (the extra `wandb`); WANDB_MODE=offline writes to `<workdir>/wandb` alone.

    A resumed run goes on in its record.  WANDB_PROJECT and the other variables of wandb apply.
    """

    def __init__(self, workdir: pathlib.Path, start: int):
        wandb = imported_wandb()
        name = workdir.absolute().name
        path = workdir / "wandb.json"
        known = files.read_json(path, "id") if path.is_file() else {"id": secrets.token_hex(4)}
        files.write_text(path, json.dumps(known) + "\n")
        config = json.loads((workdir / "config.json").read_text(encoding="utf-8"))
        self._run = wandb.init(dir=str(workdir), name=name, id=known["id"], resume="allow", config=config)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record metrics after `step` steps."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Wait until the record is complete."""
        self._run.finish()


def imported_wandb() -> Any:
    """The library; ValueError if it is not installed."""
    try:
        import wandb  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            f"config.log.to: 'wandb' needs the library of that name ({errors.reason(error)}); pip install wandb, or "
            "leave it out."
        ) from None
    return wandb


TRACKERS = {"tensorboard": TensorBoard, "csv": Csv, "wandb": Wandb}
