"""Learning rates chosen on held-out training images: the data, the runs, and the choice."""

import argparse
import json
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from equivit import files
from equivit.data import loader
from equivit.training import config as configs
from equivit.training import loop
from experiments.studies import several_seeds

HELD_OUT = 0.2  # of the training images
SPLITS = ("data.split=fit", "data.eval_split=held_out")
CHOOSING = (*SPLITS, "evaluation.suite=('accuracy',)")
FINAL = ("data.split=train",)
WHOLE = ("data.train_examples=None", "data.eval_examples=None")  # `prepare` has taken as many as are asked for
UNREAD = ("workers", "augment.", "views.")  # keys of `data` without effect on decoded images


def prepared(
    data: ConfigDict,
    path: pathlib.Path,
    relabel: Callable[[dict], None] | None = None,
    redraw: Callable[[np.ndarray], np.ndarray] | None = None,
    **settings,
) -> pathlib.Path:
    """`path`, which `prepare` writes where it is missing; its data and `settings`, such as labels, lie beside it.

    Raises ValueError if it was written from other data or with other settings.
    """
    about, values = path.with_suffix(".json"), configs.flat(configs.plain(data))
    settings |= {f"data.{key}": value for key, value in values.items() if not key.startswith(UNREAD)}
    if not path.is_file():
        about.unlink(missing_ok=True)
    several_seeds.planned(about, settings, lambda: prepare(data, path, relabel, redraw))
    return path


def prepare(
    data,
    path: pathlib.Path,
    relabel: Callable[[dict], None] | None = None,
    redraw: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """Write the images, decoded and resized once, with a fixed fifth of the training images held out.

    Splits: "train" is "fit" and "held_out" together; "test".

    Args:
      data: the `data` section of a config.
      path: the npz file.
      relabel: changes the labels of {"train": {"image", "label"}, "test": ...} in place; None keeps them.
      redraw: changes the uint8 images [N, H, W, C] of a split before they are written; None keeps them.
    """
    splits = {"train": several_seeds.decoded(data, data.split), "test": several_seeds.decoded(data, data.eval_split)}
    classes = loader.evaluate(data, batch_size=1).source.classes
    if relabel:
        relabel(splits)
        classes = [str(label) for label in range(1 + max(split["label"].max() for split in splits.values()))]
    if redraw:
        for arrays in splits.values():
            arrays["image"] = redraw(arrays["image"])
    order = np.random.default_rng(0).permutation(len(splits["train"]["label"]))
    held_out = round(HELD_OUT * len(order))
    for into, rows in (("held_out", order[:held_out]), ("fit", order[held_out:])):
        splits[into] = {kind: array[np.sort(rows)] for kind, array in splits["train"].items()}
    arrays = {f"{split}_{kind}": array for split, kinds in splits.items() for kind, array in kinds.items()}
    with files.replacing(path) as unfinished:
        np.savez(unfinished, classes=np.array(classes), **arrays)


def row(
    config_of: Callable[..., ConfigDict],
    images: pathlib.Path,
    directory: pathlib.Path,
    options: argparse.Namespace,
    figures: Mapping[str, str],
    *,
    chosen: str,
    choosing: Sequence[str] = CHOOSING,
    final: Sequence[str] = FINAL,
    begin: Callable[[int, str], Sequence[str]] = lambda seed, split: (),
) -> dict:
    """Choose the rate of an arm on held-out images, train it with every seed, and return its figures.

    Args:
      config_of: the config of the arm with more overrides.
      images: the file of `prepare`.
      directory: where the runs lie, each named by `run_name`.
      options: with `rates` and `seeds`.
      figures: the key of a report for each figure.
      chosen: the key of a report by which the rate is chosen.
      choosing, final: overrides of the runs that choose, and of the others; the first names the split.
      begin: further overrides of a run with a seed on a split.

    Returns:
      "rate"; "held_out", the figure of each rate; "diverged", the number of seeds; and lists over the other seeds: the
      values of `figures`, the "loss" at the end of training and its "late_fall".
    """

    def run(rate, seed, chooses):
        splits = choosing if chooses else final
        texts = [f"data.source=npz:{images}", *WHOLE, *splits, f"schedule.lr={rate}", f"seed={seed}"]
        config = config_of(*texts, *begin(seed, splits[0]))
        return trained(config, directory / run_name(splits[0], rate, seed))

    rate, tried, done = at_best_rate(run, options.rates, options.seeds, chosen)
    found = dict(rate=rate, held_out=tried, diverged=len(options.seeds) - len(done))
    found |= dict(loss=[statistics.fmean(report["losses"][-5:]) for report in done])
    found |= dict(late_fall=[late_fall(report["losses"]) for report in done])
    return found | several_seeds.by_seed(done, figures)


def run_name(split: str, rate: float, seed: int) -> str:
    """The directory of a run; `split` is the override that names its split."""
    return f"{split},lr={rate},seed={seed}"


def trained(config, workdir: pathlib.Path) -> dict | None:
    """The final figures of a run and its training losses; None if it diverged."""
    try:
        report = several_seeds.trained(config, workdir)
    except loop.NotFiniteError as error:
        print(error)
        return None
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return report | {"losses": [line["loss"] for line in lines if "loss" in line]}


def at_best_rate(
    run: Callable[[float, int, bool], dict | None], rates: Sequence[float], seeds: Sequence[int], figure: str
) -> tuple[float, dict[float, float | None], list[dict]]:
    """Choose a learning rate on held-out images with the first seed, then train with every seed.

    Args:
      run: the report of a run with a rate, a seed and whether it chooses, as by `trained`.
      figure: a key of the reports; the rate with the highest value is chosen.

    Returns:
      the rate, the figure of each rate (None: diverged; none is tried where there is one rate), and the reports of the
      runs that did not diverge.
    """
    tried = {}
    if len(rates) > 1:
        tried = {rate: run(rate, seeds[0], True) for rate in rates}
        tried = {rate: report and report[figure] for rate, report in tried.items()}
    rate = best(tried) if tried else rates[0]
    return rate, tried, [report for seed in seeds if (report := run(rate, seed, False)) is not None]


def best(held_out: Mapping[float, float | None]) -> float:
    """The rate with the highest accuracy, the first of equals; diverged runs have None."""
    finished = {rate: value for rate, value in held_out.items() if value is not None}
    if not finished:
        raise ValueError(f"--rates={','.join(map(str, held_out))}: every run diverged; give smaller ones.")
    return max(finished, key=finished.__getitem__)


def late_fall(losses: Sequence[float]) -> float | None:
    """The share of the fall of the loss in the last tenth of a run, by means over equal parts."""
    part = max(1, len(losses) // 10)
    if len(losses) < 3 * part or losses[0] <= (last := statistics.fmean(losses[-part:])):
        return None
    return (statistics.fmean(losses[-2 * part : -part]) - last) / (losses[0] - last)
