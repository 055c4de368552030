"""Sources of the test sets of Jumbo's Tables 6 to 12 beside ImageNet's validation set, and a run's evaluation on them.

| set  | default source                        | split                                                              |
|------|---------------------------------------|--------------------------------------------------------------------|
| real | tfds:imagenet2012_real                | validation                                                         |
| v2   | tfds:imagenet_v2/matched-frequency    | test; the paper does not name the variant, this is the usual one   |
| r    | tfds:imagenet_r                       | test                                                               |
| hr   | none: folder:<dir>                    | all, the images in <dir>/all/<class>/                              |

ImageNet-R has 200 of the 1000 classes.  The paper's values are so low that they must be among all 1000; accuracy among
the 200, the set's own protocol, is evaluated, too.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from equivit.evaluation import runner
from equivit.training import checkpoints
from experiments.tables import finished_runs

FILE, KEY = "jumbo_test_sets.json", "sets"  # in the directory of a run


class Place(NamedTuple):
    """A source of `equivit/data/sources.py`, None if it must be given, and its split."""

    source: str | None
    split: str


PLACES = {
    "real": Place("tfds:imagenet2012_real", "validation"),
    "v2": Place("tfds:imagenet_v2/matched-frequency", "test"),
    "r": Place("tfds:imagenet_r", "test"),
    "hr": Place(None, "all"),
}


def given(text: str) -> tuple[str, Place]:
    """A place from the command line, NAME=SOURCE or NAME=SOURCE,SPLIT.  Raises ValueError for an unknown name."""
    name, _, rest = text.partition("=")
    source, _, split = rest.partition(",")
    if name not in PLACES or not source:
        raise ValueError(f"{text!r} must be NAME=SOURCE or NAME=SOURCE,SPLIT, NAME one of {', '.join(PLACES)}.")
    return name, Place(source, split or PLACES[name].split)


def read(run: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The results of a run: "top1", "top5" and "examples" by set; for "r" also "present", among its classes.

    Raises:
      ValueError: the file is damaged.
    """
    return finished_runs.evaluations(run / FILE, KEY)


def evaluate(run: pathlib.Path, places: Mapping[str, Place]) -> dict[str, str]:
    """Evaluate a finished run on those sets on which it has not been yet; each result is kept at once.

    Returns why, for each set that could not be opened.
    """
    known, why = read(run), {}
    wanted = {name: place for name, place in places.items() if name not in known}
    if not wanted:
        return {}
    config, model, step = checkpoints.load_run(run)
    for name, (source, split) in wanted.items():
        if source is None:
            why[name] = "no source is given"
            continue
        names = ("accuracy", "present_classes") if name == "r" else ("accuracy",)
        with config.unlocked():
            config.data.update(source=source, eval_split=split, eval_examples=None)
        try:
            runner.prepare(model, config, names)
        except (ValueError, OSError, ImportError) as error:
            why[name] = str(error).split("\n")[0]
            continue
        print(f"{run}: {name}", flush=True)
        found = runner.evaluate(model, config, names)
        present = {"present": found["present_classes"]} if name == "r" else {}
        known[name] = found["accuracy"] | present
        finished_runs.write_evaluations(run / FILE, KEY, step, known)
    return why
