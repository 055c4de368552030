"""Time series for classification: read a data set by name and prepare it for a model.

    data = series.load("Crop", directory="/data/ucr", normalize="training", seed=0)
    data.train.series, data.train.labels  # float32 [N, T, channels], int32 [N]

Unequal lengths and missing values are both steps without a value.  They are interpolated linearly in time; before the
first and after the last value, that value repeats.  So a short series is padded with its last value, as in PatchTST, to
the longest length in both splits.

Reads `.npz`, `.ts` and `.tsv` files of the UCR and UEA archives, or data sets by name through aeon.  Their readers
return the series as published: missing values are NaN, and lengths may be unequal.
"""

import dataclasses
import math
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from equivit import archives, errors
from equivit.data import directories

NORMALIZE = ("training", "series", "none")
SPLITS = ("train", "test")


class Missing(FileNotFoundError):
    """A data set that is missing and cannot be downloaded."""


class Cases(NamedTuple):
    """One split."""

    series: list[np.ndarray]  # each float32 [channels, T]
    labels: list[str]


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
        aeon downloads a missing data set to this directory.  None: aeon reads every data set.
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
        return synthetic()
    if directory is None:
        return read_aeon(name)
    folder = directories.expanded(directory)
    if (folder / f"{name}.npz").is_file():
        return read_npz(folder / f"{name}.npz")
    for suffix, reader in ((".ts", read_ts), (".tsv", read_tsv)):
        for place in (folder, folder / name):
            train, test = (place / f"{name}_{split}{suffix}" for split in ("TRAIN", "TEST"))
            if train.is_file() and test.is_file():
                return {"train": reader(train), "test": reader(test)}
    there = {p.stem.removesuffix("_TRAIN") for p in folder.glob("*") if p.suffix in (".npz", ".ts", ".tsv", "")}
    try:
        return read_aeon(name, folder)
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


def read_npz(path: pathlib.Path) -> dict[str, Cases]:
    """Read a file with `train_x` [N, channels, T], `train_y` int [N], the same for test, and the names `classes`.

    `train_len` int [N], if present, gives the length of each series; the rest is padding.

    Raises:
      ValueError: the file is damaged, an array is missing or empty, or types, shapes, labels or lengths are wrong.
    """
    with archives.Npz(path) as file:
        arrays = {key: file[key] for key in file.keys}
    for key in ("classes", *(f"{split}_{kind}" for split in SPLITS for kind in "xy")):
        if key not in arrays:
            found = errors.listed(map(errors.word, sorted(arrays))) or "none"
            raise ValueError(f"{path}: the array `{key}` is missing; the file has {found}.")
    return {split: _npz_split(path, arrays, split) for split in SPLITS}


def _npz_split(path: pathlib.Path, arrays: dict[str, np.ndarray], split: str) -> Cases:
    series, labels, classes = arrays[f"{split}_x"], arrays[f"{split}_y"], arrays["classes"]
    _check_array(f"{path}: `{split}_x`", series, "numbers [N, channels, T]", 3, "iuf")
    _check_array(f"{path}: `{split}_y`", labels, "int [N]", 1, "iu")
    _check_array(f"{path}: `classes`", classes, "names [K]", 1, "USiuf")
    lengths = arrays.get(f"{split}_len", np.full(len(series), series.shape[-1]))
    _check_array(f"{path}: `{split}_len`", lengths, "int [N]", 1, "iu")
    if not len(series) == len(labels) == len(lengths):
        raise ValueError(
            f"{path}: `{split}_x` {list(series.shape)} must be [N, channels, T], for {len(labels)} labels and "
            f"{len(lengths)} lengths."
        )
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise ValueError(f"{path}: `{split}_y` must be integers in 0..{len(classes) - 1}, the indices of `classes`.")
    if not 1 <= lengths.min() <= lengths.max() <= series.shape[-1]:
        raise ValueError(
            f"{path}: `{split}_len` is in {lengths.min()}..{lengths.max()}; series of length {series.shape[-1]} allow "
            f"1..{series.shape[-1]}."
        )
    cases = [_in_float32(x[:, :length]) for x, length in zip(series, lengths, strict=True)]
    if any(np.isinf(case).any() for case in cases):
        raise ValueError(f"{path}: `{split}_x` has values that are infinite in float32; NaN means a missing value.")
    return Cases(cases, [str(classes[label]) for label in labels])


def _check_array(where: str, array: np.ndarray, form: str, axes: int, kinds: str) -> None:
    """ValueError unless an array has this number of axes, is not empty, and has one of these kinds (`dtype.kind`)."""
    if array.ndim != axes or array.dtype.kind not in kinds or not array.size:
        raise ValueError(f"{where} must be {form} and not empty, but it is {array.dtype} {list(array.shape)}.")


def read_ts(path: pathlib.Path) -> Cases:
    """Read one split in aeon's format: tags such as `@classLabel true a b`, and after `@data` one series per line.

    Colons separate channels and the final label, commas separate values; "?" and "NaN" are missing values.

    Raises:
      ValueError: time stamps, no class labels, or a line that cannot be read.
    """
    cases, reading = Cases([], []), False
    for number, line in enumerate(directories.lines(directories.text(path)), 1):
        line = line.strip()
        if not line or line[0] in "#%":
            continue
        if reading:
            *channels, label = line.split(":")
            cases.series.append(_stack([_numbers(text.split(","), path, number) for text in channels], path, number))
            cases.labels.append(label.strip())
            continue
        tag, *words = line.lower().split()
        if tag == "@timestamps" and words[:1] == ["true"]:
            raise ValueError(f"{path}: series with time stamps are not supported; give values at equal steps.")
        if tag == "@classlabel" and words[:1] != ["true"] or tag == "@targetlabel" and words[:1] == ["true"]:
            raise ValueError(
                f"{path}: {errors.shown(line)}: there are no class labels; only classification data sets can be read."
            )
        reading = tag == "@data"
    return _not_empty(cases, path)


def read_tsv(path: pathlib.Path) -> Cases:
    """Read one split of the UCR archive: on each line a label and the values of one channel, separated by tabs.

    NaNs at the end of a line mean a shorter series, as in the archive; other NaNs are missing values.
    """
    cases = Cases([], [])
    for number, line in enumerate(directories.lines(directories.text(path)), 1):
        if line.strip():
            label, *values = line.strip().split("\t")
            cases.series.append(_stack([_numbers(values, path, number)], path, number))
            cases.labels.append(label)
    return _not_empty(cases, path)


def read_aeon(name: str, directory: pathlib.Path | None = None) -> dict[str, Cases]:
    """Read an archive data set by name: bundled with aeon, in `directory`, or downloaded to it from Zenodo.

    Raises:
      Missing: aeon is not installed, or does not know or cannot get the data set.
    """
    try:
        from aeon.datasets import load_classification  # optional, slow  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Missing(
            f"series '{name}': reading a data set by name needs aeon; pip install aeon, or give a directory with "
            f"{name}.npz, {name}_TRAIN.ts or {name}_TRAIN.tsv."
        ) from error
    result, where = {}, None if directory is None else str(directory)
    for split in SPLITS:
        try:
            series, labels = load_classification(name, split=split, extract_path=where)
        except (OSError, ValueError) as error:
            raise Missing(f"series '{name}': aeon could not read or download it: {error}") from error
        result[split] = Cases([x.astype(np.float32) for x in series], [str(label) for label in labels])
    return result


def synthetic(length: int = 40, seed: int = 0) -> dict[str, Cases]:
    """Two channels of noisy waves; the frequency is the class, one of three.  96 training series, 64 test series."""
    rng, result = np.random.default_rng(seed), {}
    for split, size in zip(SPLITS, (96, 64), strict=True):
        labels = rng.integers(3, size=size)
        phase, time = rng.uniform(0, 2 * math.pi, (size, 2, 1)), np.arange(length) / length
        waves = np.sin(2 * math.pi * (1 + 2 * labels[:, None, None]) * time + phase)
        noisy = waves + 0.3 * rng.standard_normal(waves.shape)
        result[split] = Cases(list(noisy.astype(np.float32)), [str(label) for label in labels])
    return result


def _numbers(words: Iterable[str], path, number) -> np.ndarray:
    try:
        values = _in_float32([math.nan if word.strip() in ("?", "") else float(word) for word in words])
    except ValueError as error:
        why = errors.brief(str(error))
        raise ValueError(f"{path}, line {number}: {why}; values must be numbers, NaN or '?'.") from None
    if np.isinf(values).any():
        raise ValueError(f"{path}, line {number}: a value is infinite in float32; values must be finite, NaN or '?'.")
    return values


def _in_float32(values: Any) -> np.ndarray:
    with np.errstate(over="ignore"):  # overflow becomes infinite, which is rejected
        return np.asarray(values).astype(np.float32)


def _stack(channels: list[np.ndarray], path, number) -> np.ndarray:
    """Stack channels [T_c] of one series as [channels, T], padding shorter ones with NaN."""
    if not channels or not max(map(len, channels)):
        raise ValueError(f"{path}, line {number}: there are no values; a line needs values and a label.")
    return np.stack([np.pad(x, (0, max(map(len, channels)) - len(x)), constant_values=np.nan) for x in channels])


def _not_empty(cases, path):
    if not cases.series:
        raise ValueError(f"{path}: the file has no series.")
    return cases
