"""Run any protocol on images with each of 15 corruptions."""

from collections.abc import Callable, Iterable
from typing import Any

from ml_collections import ConfigDict

from equivit.data import directories
from equivit.data.corruptions import NAMES
from equivit.evaluation.protocol import Line, Run

# The columns of Table 2: short forms of NAMES, and their mean.
HEADINGS = (
    "Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit.", "Contr.",
    "Elastic", "Pixel", "JPEG", "Avg.",
)  # fmt: skip


def each(run: Run, measure: Callable[[Run], dict[str, Any]]) -> dict:
    """Apply `measure(run)` to every corruption, at `config.evaluation.severities`."""

    def on(data: ConfigDict, name: str) -> dict[str, Any]:
        return measure(run.on(data, name))

    evaluation = run.config.evaluation
    return corrupted(on, run.data, evaluation.severities, evaluation.corruption_crop_ratio)


def first(config: ConfigDict) -> ConfigDict:
    """The `data` section of the first corruption that `each` measures."""
    evaluation = config.evaluation
    return section(config.data, NAMES[0], evaluation.severities[0], evaluation.corruption_crop_ratio)


def lines(result: dict[str, Any]) -> list[Line]:
    """Table 2 of Jumbo for each severity."""
    plain = "unadapted_top1" if "unadapted_top1" in result else "top1"
    found = []
    for severity in result["top1"]:
        found.append((f"corruptions of severity {severity}, %", headings()))
        found.append(("without adaptation", row(result[plain][severity])))
        if plain != "top1":
            found.append(("with SAR", row(result["top1"][severity])))
    return found


def corrupted(
    measure: Callable[[ConfigDict, str], dict[str, float]],
    data: ConfigDict,
    severities: Iterable[int],
    crop_ratio: float,
) -> dict:
    """Measure every corruption at every severity.

    Args:
      measure: `measure(data, name)` evaluates a `data` section; `name` is for display.
      data: the `data` section without corruption.
      severities: from 1 to 5.
      crop_ratio: the crop ratio of images that are corrupted on reading.

    Returns:
      For each number from `measure`, such as "top1": {severity: {corruption: number}}; fractions also have their mean,
      such as "mean_top1".

    Source: Hendrycks and Dietterich 2019; Jumbo, Table 2.
    """
    table, severities = {}, tuple(severities)
    for severity in severities:
        for name in NAMES:
            for figure, value in measure(section(data, name, severity, crop_ratio), f"{name} {severity}").items():
                table.setdefault(figure, {}).setdefault(str(severity), {})[name] = value
    values = {figure: [v for row in rows.values() for v in row.values()] for figure, rows in table.items()}
    return table | {f"mean_{figure}": sum(v) / len(v) for figure, v in values.items() if isinstance(v[0], float)}


def section(data: ConfigDict, name: str, severity: int, crop_ratio: float) -> ConfigDict:
    """The `data` section of one corruption.

    If the official files exist, as `<split>/<corruption>/<severity>/<class>/`, they are read.  They are already
    cropped, so the whole image is used.  Otherwise the images of the split are resized (bilinear), cropped by
    `crop_ratio` and corrupted, as in the code that made the official files, which crops 224 of 256 pixels.
    """
    data = data.copy_and_resolve_references().unlock()
    kind, _, directory = data.source.partition(":")
    split = f"{data.eval_split}/{name}/{severity}"
    if kind == "folder" and (directories.expanded(directory) / split).is_dir():
        data.eval_split, data.crop_ratio, data.corruption = split, 1.0, None
    else:
        data.crop_ratio, data.interpolation, data.corruption, data.severity = crop_ratio, "bilinear", name, severity
    return data


def headings() -> str:
    """The header of Table 2."""
    return "  ".join(f"{name:>5}" for name in HEADINGS)


def row(figures: dict[str, float]) -> str:
    """A row of Table 2: each corruption, and their mean, in percent."""
    values = [figures[name] for name in NAMES]
    values.append(sum(values) / len(values))
    return "  ".join(f"{100 * value:>{max(5, len(name))}.1f}" for value, name in zip(values, HEADINGS, strict=True))
