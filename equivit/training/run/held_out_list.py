"""The list of a run's held-out images, `held_out.csv`: data to evaluate on (`csv:FILE`), and a check that they stay."""

import csv
import io
import os
import pathlib

import jax
from ml_collections import ConfigDict

from equivit import errors, files
from equivit.data import held_out, sources

FILE = "held_out.csv"


def record(workdir: pathlib.Path, section: ConfigDict) -> str:
    """Write the held-out images of a `data` section, with their classes, if there are any; in the first process.

    Returns a line about them, or "".

    Raises ValueError as `check`.
    """
    if not section.held_out:
        return ""
    check(workdir, section)
    rows = _rows(section)
    if jax.process_index() == 0 and not (workdir / FILE).is_file():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([("path", "label"), *rows])
        files.write_text(workdir / FILE, text.getvalue())
    return f"{len(rows)} other images are held out, and listed in {workdir / FILE}."


def check(workdir: pathlib.Path, section: ConfigDict) -> None:
    """ValueError if other images are held out now than at the start of the run.

    The run would be evaluated on images that it was trained on.  Only names and classes count, not folders.
    """
    path = workdir / FILE
    if not section.held_out or not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        before = [(os.path.basename(row[0]), row[1]) for row in list(csv.reader(file))[1:]]
    now = [(os.path.basename(place), label) for place, label in _rows(section)]
    if sorted(before) != sorted(now):
        raise ValueError(
            f"config.data.source={errors.shown(section.source)}: the images have changed since the run began, and "
            f"{len(set(now) - set(before))} of its training images would now be held out; evaluate it on {path}, with "
            f"--config.data.source=csv:{path} --config.data.split=train --config.data.eval_split=train "
            "--config.data.held_out=0, or train in another --workdir."
        )


def _rows(section: ConfigDict) -> list[tuple[str, str]]:
    """The place and the class of each held-out image."""
    source = sources.open_source(section, held_out.NAME)
    labels = sources.labels(source)
    names = [""] * len(source) if labels is None else [source.classes[label] for label in labels]
    places = [source.where(index) for index in range(len(source))]
    return [(os.path.abspath(p) if os.path.exists(p) else p, name) for p, name in zip(places, names, strict=True)]
