"""Time series for classification: read a data set by name and prepare it for a model.

    data = series.load("Crop", directory="/data/ucr", normalize="training", seed=0)
    data.train.series, data.train.labels  # float32 [N, T, channels], int32 [N]

Unequal lengths and missing values are both steps without a value.  They are interpolated linearly in time; before the
first and after the last value, that value repeats.  So a short series is padded with its last value, as in PatchTST, to
the longest length in both splits.
"""

import dataclasses

import numpy as np

from equivit import errors
from equivit.data import directories, series_formats
from equivit.data.series_formats import Cases, Missing

NORMALIZE = ("training", "series", "none")


@dataclasses.dataclass(frozen=True)
class Split:
    """Series float32 [N, T, channels] and labels int32 [N]."""

    series: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class SeriesData:
    """A data set prepared for a model.  `validation` and `test` are halves of the archive's test set."""

    name: str
    train: Split
    validation: Split
    test: Split
    classes: tuple[str, ...]


def load(name: str, *, directory: str | None = None, normalize: str = "training", seed: int = 0) -> SeriesData:
    """Read, normalise and fill the data set `name`, and split its test set in half (Jumbo, Appendix A.3.2).

    Args:
      name: "synthetic", or the name of the data set and its files.
      directory: holds `<name>.npz`, or `<name>_TRAIN.ts` or `.tsv` and `_TEST` next to it or in a folder `<name>`.
        aeon reads a missing data set that it bundles, and downloads others to this directory.  None: aeon reads every
        data set.
      normalize: "training": each channel by mean and standard deviation of the training series, which keeps the scale
        of a series; "series": each channel of each series separately; "none".  Missing values are ignored.
      seed: seed of the random halves.

    Raises:
      ValueError: an unknown `normalize`, or inconsistent files.
      Missing: the directory lacks the data set, and aeon is not installed or cannot get it.
    """
    errors.one_of("series: normalize", normalize, NORMALIZE)
    cases = read(name, directory)
    shapes = [x.shape for split in cases.values() for x in split.series]
    if len(channels := {shape[0] for shape in shapes}) > 1:
        where = f"series '{name}'" + (f" in {directory}" if directory else "")
        raise ValueError(f"{where}: all series must have the same number of channels, not {sorted(channels)}.")
    shape = max(shape[1] for shape in shapes), channels.pop()
    classes = sorted({*cases["train"].labels, *cases["test"].labels}, key=_order)
    train, test = (_split(cases[split], classes, shape) for split in ("train", "test"))
    center, scale = _statistics(train.series, axis=(0, 1))
    filled = []
    for split in (train, test):
        if normalize == "series":
            center, scale = _statistics(split.series, axis=1)
        x = split.series if normalize == "none" else (split.series - center) / scale
        filled.append(Split(fill(x).astype(np.float32), split.labels))
    return SeriesData(name, filled[0], *halve(filled[1], seed), tuple(classes))


def read(name: str, directory: str | None) -> dict[str, Cases]:
    """Both splits of a data set, as published."""
    if name == "synthetic":
        return series_formats.synthetic()
    if directory is None:
        return series_formats.read_aeon(name)
    folder = directories.expanded(directory)
    if (folder / f"{name}.npz").is_file():
        return series_formats.read_npz(folder / f"{name}.npz")
    for suffix, reader in ((".ts", series_formats.read_ts), (".tsv", series_formats.read_tsv)):
        for place in (folder, folder / name):
            train, test = (place / f"{name}_{split}{suffix}" for split in ("TRAIN", "TEST"))
            if train.is_file() and test.is_file():
                return {"train": reader(train), "test": reader(test)}
    patterns = ("*.npz", "*_TRAIN.ts*", "*/*_TRAIN.ts*")
    there = {path.stem.removesuffix("_TRAIN") for pattern in patterns for path in folder.glob(pattern)}
    try:
        return series_formats.read_aeon(name, folder)
    except Missing as error:
        raise Missing(
            f"series '{name}': {folder} has neither {name}.npz nor {name}_TRAIN and {name}_TEST as .ts or .tsv"
            f"{errors.nearest(name, there)}.  Without them, {error}"
        ) from error


def fill(series: np.ndarray) -> np.ndarray:
    """Replace each NaN by interpolating its channel in time; a channel without values becomes zeros.

    Shapes: [N, T, channels] -> the same.
    """
    result, time = series.copy(), np.arange(series.shape[1])
    for n, channel in zip(*np.nonzero(np.isnan(series).any(axis=1)), strict=True):
        known = ~np.isnan(series[n, :, channel])
        result[n, :, channel] = np.interp(time, time[known], series[n, known, channel]) if known.any() else 0
    return result


def halve(split: Split, seed: int) -> tuple[Split, Split]:
    """Two random stratified halves: the number of series per class differs by at most one."""
    order = np.random.default_rng(seed).permutation(len(split.labels))
    order = order[np.argsort(split.labels[order], kind="stable")]
    first, second = (Split(split.series[rows], split.labels[rows]) for rows in (order[::2], order[1::2]))
    return first, second


def _split(cases: Cases, classes: list[str], shape: tuple[int, int]) -> Split:
    series = np.full((len(cases.series), *shape), np.nan, np.float64)
    for row, x in zip(series, cases.series, strict=True):
        row[: x.shape[1]] = x.T
    return Split(series, np.array([classes.index(label) for label in cases.labels], np.int32))


def _statistics(series, axis) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation without missing values; a deviation of 0 (constant channel) becomes 1."""
    known = ~np.isnan(series)
    number = np.maximum(known.sum(axis, keepdims=True), 1)
    mean = np.where(known, series, 0).sum(axis, keepdims=True) / number
    deviation = np.sqrt((np.where(known, series - mean, 0) ** 2).sum(axis, keepdims=True) / number)
    return mean, np.where(deviation > 0, deviation, 1)


def _order(label: str):
    """A sort key: numbers by value, then names."""
    try:
        return (0, float(label), label)
    except ValueError:
        return (1, 0.0, label)
