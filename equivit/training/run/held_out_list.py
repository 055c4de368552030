"""The list of a run's held-out images, `held_out.csv`: data to evaluate on (`csv:FILE`), and a check that they stay."""

import collections
import csv
import io
import os
import pathlib

import jax
from ml_collections import ConfigDict

from equivit import errors, files
from equivit.data import held_out, sources
from equivit.training.run import resuming

FILE = "held_out.csv"
KEYS = ("held_out", "split_seed", "split", "eval_examples")  # keys of `data` that choose them


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
    """ValueError if other images are held out now than at the start of the run; it names the changed key, if known.

    The run would be evaluated on images that it was trained on.  Only names and classes count, not folders.
    """
    path = workdir / FILE
    if not section.held_out or not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        before = collections.Counter((os.path.basename(row[0]), row[1]) for row in list(csv.reader(file))[1:])
    now = collections.Counter((os.path.basename(place), label) for place, label in _rows(section))
    if before == now:
        return
    gone = (before - now).total()
    numbers = f"{(now - before).total()} of its training images would now be held out, and {gone} no longer"
    previous = resuming.config_before(workdir)
    old = section if previous is None else previous.data
    if changed := [key for key in KEYS if section[key] != old[key]]:
        value, has = (errors.shown(one[changed[0]]) for one in (section, old))
        raise ValueError(
            f"config.data.{changed[0]}={value}: the run in {workdir} has {has}, and {numbers}; give that value, or "
            "another --workdir."
        )
    raise ValueError(
        f"config.data.source={errors.shown(section.source)}: the images have changed since the run began, and "
        f"{numbers}; evaluate it on {path}, with --config.data.source=csv:{path} --config.data.split=train "
        "--config.data.eval_split=train --config.data.held_out=0, or train in another --workdir."
    )


def _rows(section: ConfigDict) -> list[tuple[str, str]]:
    """The place and the class of each held-out image."""
    source = sources.open_source(section, held_out.NAME)
    labels = sources.labels(source)
    names = [""] * len(source) if labels is None else [source.classes[label] for label in labels]
    places = [source.where(index) for index in range(len(source))]
    return [(os.path.abspath(p) if os.path.exists(p) else p, name) for p, name in zip(places, names, strict=True)]
