"""Sources of the test sets of Jumbo's Tables 6 to 12 beside ImageNet's validation set, and a run's evaluation on them.

The paper does not name the variant of ImageNet-v2; the default is the usual one.  ImageNet-HR is a folder:<dir> with
its images in <dir>/all/<class>/.  ImageNet-R has 200 of the 1000 classes.  The paper's values are so low that they must
be among all 1000; accuracy among the 200, the set's own protocol, is evaluated, too.
"""

import argparse
import pathlib
from collections.abc import Mapping
from typing import Any

from equivit.evaluation import runner
from experiments.tables import finished_runs

FILE, KEY = "jumbo_test_sets.json", "sets"  # in the directory of a run
Place = tuple[str | None, str]  # a source of `equivit/data/sources.py`, None if it must be given, and its split
PLACES: dict[str, Place] = {
    "real": ("tfds:imagenet2012_real", "validation"),
    "v2": ("tfds:imagenet_v2/matched-frequency", "test"),
    "r": ("tfds:imagenet_r", "test"),
    "hr": (None, "all"),
}


def parse_place(text: str) -> tuple[str, Place]:
    """A place from the command line, NAME=SOURCE or NAME=SOURCE,SPLIT."""
    name, _, rest = text.partition("=")
    source, _, split = rest.partition(",")
    if name not in PLACES or not source:
        form = f"NAME=SOURCE or NAME=SOURCE,SPLIT, NAME one of {', '.join(PLACES)}"
        raise argparse.ArgumentTypeError(f"{text!r} must be {form}.")
    return name, (source, split or PLACES[name][1])


def read(run: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The results of a run: "top1", "top5" and "examples" by set; for "r" also "present", among its classes."""
    return finished_runs.evaluations(run / FILE, KEY)


def evaluate(run: pathlib.Path, places: Mapping[str, Place]) -> dict[str, str]:
    """Evaluate a finished run on sets where that has not been done; returns why, for sets that cannot be opened."""
    why = {}

    def accuracy(name, config, model):
        source, split = places[name]
        if source is None:
            why[name] = "no source is given"
            return None
        suite = ("accuracy", "present_classes") if name == "r" else ("accuracy",)
        with config.unlocked():
            config.data.update(source=source, eval_split=split, eval_examples=None)
        try:
            runner.prepare(model, config, suite)
        except (ValueError, OSError, ImportError) as error:
            why[name] = str(error).split("\n")[0]
            return None
        print(f"{run}: {name}", flush=True)
        found = runner.evaluate(model, config, suite)
        return found["accuracy"] | ({"present": found["present_classes"]} if name == "r" else {})

    finished_runs.evaluate(run / FILE, KEY, list(places), accuracy)
    return why
