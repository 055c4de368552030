"""Readers of the UCR and UEA archives: `.npz`, `.ts` and `.tsv` files, and data sets by name through aeon.

They return one split or `{"train": Cases, "test": Cases}` with the series as published: missing values are NaN, and
lengths may be unequal.
"""

import math
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from equivit import archives, errors
from equivit.data import directories

SPLITS = ("train", "test")


class Missing(FileNotFoundError):
    """A data set that is missing and cannot be downloaded."""


class Cases(NamedTuple):
    """One split."""

    series: list[np.ndarray]  # each float32 [channels, T]
    labels: list[str]


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
    names = directories.names(f"{path}: `classes`", classes)
    return Cases(cases, [names[label] for label in labels])


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
        from aeon import datasets  # optional, slow  # pyright: ignore[reportMissingImports]
        from aeon.datasets import tsc_datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise Missing(
            f"series '{name}': reading a data set by name needs aeon ({errors.reason(error)}); pip install aeon, or "
            f"give a directory with {name}.npz, {name}_TRAIN.ts or {name}_TRAIN.tsv."
        ) from error
    # Given a directory, aeon looks there alone, and downloads even what it bundles.
    bundled = (pathlib.Path(datasets.__file__).parent / "data" / name).is_dir()
    result, where = {}, None if directory is None or bundled else str(directory)
    as_published = dict(load_equal_length=False, load_no_missing=False)  # earlier versions changed both by default
    for split in SPLITS:
        try:
            series, labels = datasets.load_classification(name, split=split, extract_path=where, **as_published)
        except (OSError, ValueError) as error:
            if name not in (known := tsc_datasets.tsc_zenodo):
                near = errors.nearest(name, known)
                raise Missing(f"series '{name}': aeon has no data set of this name{near}.") from error
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
