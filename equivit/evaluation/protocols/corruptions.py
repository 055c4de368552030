"""Accuracy on ImageNet-C's 15 corruptions, at --config.evaluation.severities."""

import pathlib
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from equivit import errors
from equivit.data import directories
from equivit.data.corruptions import NAMES, SEVERITIES
from equivit.evaluation.protocol import Line, Protocol, Run
from equivit.evaluation.protocols import accuracy

# The columns of Table 2: short forms of NAMES, and their mean.
HEADINGS = (
    "Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit.", "Contr.",
    "Elastic", "Pixel", "JPEG", "Avg.",
)  # fmt: skip


def check(config: ConfigDict) -> None:
    """ValueError if the official files exist, but lack a corruption at a severity of `config.evaluation`."""
    folder, severities = _official(config.data), config.evaluation.severities
    if folder is None:
        return
    lacking = {severity: _lacking(folder, severity) for severity in SEVERITIES}
    if all(len(names) == len(NAMES) for names in lacking.values()):  # no official files
        return
    if missing := [name for severity in severities for name in lacking[severity]]:
        complete = tuple(severity for severity, names in lacking.items() if not names)
        fix = f", or set config.evaluation.severities={complete}" if complete else ""
        raise ValueError(
            f"config.data.eval_split={config.data.eval_split!r}: {folder} has official files of corruptions, but lacks "
            f"{errors.listed(missing)}; add these folders{fix}."
        )


def first(config: ConfigDict) -> ConfigDict:
    """The `data` section of the first corruption that `each` measures."""
    return section(config, NAMES[0], config.evaluation.severities[0])


def each(run: Run, measure: Callable[[Run], dict[str, Any]]) -> dict[str, Any]:
    """Apply `measure` to the run on every corruption, at `config.evaluation.severities`.

    Returns, for each number from `measure`, such as "top1": {severity: {corruption: number}}; fractions also have their
    mean, such as "mean_top1".

    Source: Hendrycks and Dietterich 2019; Jumbo, Table 2.
    """
    table = {}
    for severity in run.config.evaluation.severities:
        for name in NAMES:
            found = measure(run.on(section(run.config, name, severity), f"{name} {severity}"))
            for figure, value in found.items():
                table.setdefault(figure, {}).setdefault(str(severity), {})[name] = value
    values = {figure: [v for row in rows.values() for v in row.values()] for figure, rows in table.items()}
    return table | {f"mean_{figure}": sum(v) / len(v) for figure, v in values.items() if isinstance(v[0], float)}


def section(config: ConfigDict, name: str, severity: int) -> ConfigDict:
    """The `data` section of one corruption.

    If the official files exist, as `<split>/<corruption>/<severity>/<class>/`, they are read.  They are already
    cropped, so the whole image is used.  Otherwise the images of the split are resized (bilinear), cropped by
    `evaluation.corruption_crop_ratio` and corrupted, as in the code that made the official files, which crops 224 of
    256 pixels.
    """
    data = config.data.copy_and_resolve_references().unlock()
    if (folder := _official(data)) is not None and _has(folder, name, severity):
        data.update(eval_split=f"{data.eval_split}/{name}/{severity}", crop_ratio=1.0, corruption=None)
    else:
        data.update(crop_ratio=config.evaluation.corruption_crop_ratio, interpolation="bilinear")
        data.update(corruption=name, severity=severity)
    return data


def _official(data: ConfigDict) -> pathlib.Path | None:
    """The folder of the split, where official files would be; None for a source without folders."""
    kind, _, directory = data.source.partition(":")
    return directories.expanded(directory) / data.eval_split if kind == "folder" else None


def _has(folder: pathlib.Path, name: str, severity: int) -> bool:
    return (folder / name / str(severity)).is_dir()


def _lacking(folder: pathlib.Path, severity: int) -> list[str]:
    return [f"{name}/{severity}" for name in NAMES if not _has(folder, name, severity)]


def lines(result: dict[str, Any]) -> list[Line]:
    """Table 2 of Jumbo for each severity."""
    plain = "unadapted_top1" if "unadapted_top1" in result else "top1"
    found = []
    for severity in result["top1"]:
        found.append((f"corruptions of severity {severity}, %", "  ".join(f"{name:>5}" for name in HEADINGS)))
        found.append(("without adaptation", _row(result[plain][severity])))
        if plain != "top1":
            found.append(("with SAR", _row(result["top1"][severity])))
    return found


def _row(figures: dict[str, float]) -> str:
    """A row of Table 2: each corruption, and their mean, in percent."""
    values = [figures[name] for name in NAMES]
    values.append(sum(values) / len(values))
    return "  ".join(f"{100 * value:>{max(5, len(name))}.1f}" for value, name in zip(values, HEADINGS, strict=True))


PROTOCOL = Protocol(
    needs=accuracy.PROTOCOL.needs,
    run=lambda run: each(run, accuracy.run),
    lines=lines,
    check=check,
    data=first,
    curve="mean_top1",
)
