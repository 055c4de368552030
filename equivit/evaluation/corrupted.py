"""Accuracy on corrupted images: a table of 15 corruptions, and where each one's images come from."""

import pathlib
from collections.abc import Callable, Iterable

from ml_collections import ConfigDict

from equivit.data.corruptions import NAMES

# Of Table 2: the NAMES in short, and their mean.
HEADINGS = (
    "Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit.", "Contr.",
    "Elastic", "Pixel", "JPEG", "Avg.",
)  # fmt: skip


def corrupted(
    measure: Callable[[ConfigDict, str], dict[str, float]], data: ConfigDict, severities: Iterable[int]
) -> dict:
    """Every corruption at every severity.

    Args:
      measure: `measure(data, name)` evaluates the stream of a `data` section; `name` is for people.
      data: the `data` section without corruption.
      severities: from 1 to 5.

    Returns:
      For each figure that `measure` gives, such as "top1": {severity: {corruption: figure}}; and the mean over all of
      each share, such as "mean_top1".

    Source: Hendrycks and Dietterich 2019; Jumbo, Table 2.
    """
    table, severities = {}, tuple(severities)
    for severity in severities:
        for name in NAMES:
            for figure, value in measure(section(data, name, severity), f"{name} {severity}").items():
                table.setdefault(figure, {}).setdefault(str(severity), {})[name] = value
    values = {figure: [v for row in rows.values() for v in row.values()] for figure, rows in table.items()}
    return table | {f"mean_{figure}": sum(v) / len(v) for figure, v in values.items() if isinstance(v[0], float)}


def section(data: ConfigDict, name: str, severity: int) -> ConfigDict:
    """The `data` section of one corruption.

    The official files are taken where the split is a folder of them, `<split>/<corruption>/<severity>/<class>/`.  They
    are cropped already, so all of an image is used.  Elsewhere images of the split are corrupted as they are read.
    """
    data = data.copy_and_resolve_references().unlock()
    kind, _, directory = data.source.partition(":")
    split = f"{data.eval_split}/{name}/{severity}"
    if kind == "folder" and (pathlib.Path(directory).expanduser() / split).is_dir():
        data.eval_split, data.crop_ratio, data.corruption = split, 1.0, None
    else:
        data.corruption, data.severity = name, severity
    return data


def headings() -> str:
    """The first line of Table 2."""
    return "  ".join(f"{name:>5}" for name in HEADINGS)


def row(figures: dict[str, float]) -> str:
    """A line of Table 2: each corruption, and their mean, in percent."""
    values = [figures[name] for name in NAMES]
    values.append(sum(values) / len(values))
    return "  ".join(f"{100 * value:>{max(5, len(name))}.1f}" for value, name in zip(values, HEADINGS, strict=True))
