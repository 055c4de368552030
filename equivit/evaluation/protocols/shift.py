"""Consistency under shifts: circular, zero-padded, or of crops (--config.evaluation.shift.KEY=VALUE)."""

from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict

from equivit.data import crops
from equivit.evaluation import consistency
from equivit.evaluation.consistency import Shifts, Size
from equivit.evaluation.predictions import Batch
from equivit.evaluation.protocol import Line, Protocol, Run, percent

ERROR = "_standard_error"
WORDS = {"circular": "circular shifts", "zeros": "shifts with zeros", "crop": "other crops"}


def check(config: ConfigDict) -> None:
    """ValueError for crops without data.eval_crop='centre', or offsets that do not fit in the images of `config.data`.

    `opens` checks the offsets of whole images.
    """
    settings, kind = Shifts(**config.evaluation.shift.to_dict()), config.data.eval_crop
    if "crop" in settings.kinds and kind != "centre":
        raise ValueError(
            f"config.evaluation.shift.kinds: 'crop' cuts images out of larger ones, and data.eval_crop={kind!r} cuts "
            "nothing; set it to 'centre', or use 'zeros'."
        )
    if kind != "whole":
        consistency.check(settings, tuple(config.data.image_size), source(config.data, settings))


def opens(run: Run) -> None:
    """Open the split; ValueError if offsets do not fit in its first image, with data.eval_crop='whole'."""
    pipeline = run.open()
    if run.whole:
        consistency.check(Shifts(**run.config.evaluation.shift.to_dict()), pipeline.shapes()["image"].shape[1:3])


def run(run: Run) -> dict[str, Any]:
    """The results of `consistency.consistency`, with the settings of `config.evaluation.shift`.

    Crops are cut from the images before the centre crop of `data.crop_ratio`.
    """
    settings = Shifts(**run.config.evaluation.shift.to_dict())
    return consistency.consistency(
        run.predict,
        batches(run, settings),
        settings,
        size=size(run),
        source=source(run.data, settings),
        mean=tuple(run.data.mean),
    )


def lines(result: dict[str, Any]) -> list[Line]:
    """The accuracy without shifts, then the accuracy and the consistency for each kind and range."""
    first = ("accuracy, not shifted", f"{percent(result['top1'])} ({result['examples']} images)")
    shifted = [(f"accuracy after {words(name)}", percent(result[f"{name}_top1"])) for name in names(result)]
    return [first, *shifted, *((f"same class after {name}", value) for name, value in each(result))]


def each(result: dict[str, Any]) -> list[Line]:
    """The results of `consistency.statistics` for each kind and range."""
    found = []
    for name in names(result):
        share, error, changed = (result[name + ending] for ending in ("", ERROR, "_changed"))
        value = f"{100 * share:.2f} % +- {100 * error:.2f} ({changed} of {result['examples']} images change)"
        found.append((words(name), value))
    return found


def names(result: dict[str, Any]) -> list[str]:
    """The names of the kinds and ranges, such as "circular_full"."""
    return [key.removesuffix(ERROR) for key in result if key.endswith(ERROR)]


def words(name: str) -> str:
    """A kind and a range in words: "circular shifts, full"."""
    kind, _, range_ = name.partition("_")
    return f"{WORDS[kind]}, {range_.replace('_', ' ')}"


def batches(run: Run, settings: Shifts) -> Iterable[Batch]:
    """The batches of the split, with images as large as the shifts need."""
    data, larger = run.data.copy_and_resolve_references().unlock(), source(run.data, settings)
    if larger is not None:
        data.image_size, data.crop_ratio = larger, 1.0
    return run.batches(run.open(data=data))


def size(run: Run) -> Size | None:
    """The size of the images for the model; None for whole images, which differ in size."""
    return None if run.whole else tuple(run.data.image_size)


def source(data: ConfigDict, settings: Shifts) -> Size | None:
    """The size of the images to read if crops are cut out of them, else None."""
    height, width = data.image_size
    return crops.enlarged(height, width, data.crop_ratio) if "crop" in settings.kinds else None


PROTOCOL = Protocol(needs=frozenset({"logits"}), run=run, lines=lines, check=check, opens=opens)
