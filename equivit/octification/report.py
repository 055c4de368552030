"""The report of an octification: report.json and report.md."""

import json
import pathlib
from typing import Any

from equivit import files
from equivit.evaluation import runner
from equivit.octification.plan import Plan
from equivit.octification.stages import COMPARED, Result


def write(plan: Plan, result: Result) -> pathlib.Path:
    """Write report.json and report.md, and return the path of report.md."""
    path = plan.workdir / "report.md"
    files.write_text(plan.workdir / "report.json", json.dumps(result._asdict(), indent=1) + "\n")
    files.write_text(path, page(plan, result))
    return path


def page(plan: Plan, result: Result) -> str:
    """The text of report.md."""
    octic, names, times = plan.octic, list(result.figures), result.milliseconds
    family = "D8" if octic.k == octic.depth else octic.family
    averaged = ", averaged over the eight orientations" if plan.orientations else ""
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {title} | {' | '.join(cells)} |" for title, cells in _rows(result)]
    errors = ", ".join(f"{name} {error:.3f}" for name, error in result.starts.items())
    curves = [
        f"![Learning curves of {stage}]({stage}/learning_curves.png)"
        for stage in ("stage1", "stage2")
        if (plan.workdir / stage / "learning_curves.png").is_file()
    ]
    parts = [
        f"# A plain ViT made {family}: {octic.k} of {octic.depth} blocks octic",
        "\n".join(lines),
        f"Cosines and errors are of features after the final norm{averaged}, beside the teacher's, on test images. "
        "The teacher's mean over images is subtracted from both, and errors are relative to its variance.  The "
        "deviation is between the features of turned and mirrored images and the turned and mirrored features.",
        f"Times are medians of batches of {times['batch']}, alternately: {times['machine']}, {times['precision']}.",
        f"Squared error at the transition before training, with a map by least squares, relative to the variance over "
        f"images: {errors}. Stage 1 began with the smallest.",
        *curves,
        *[f"![Features of {name}](features_{name}.png)" for name in COMPARED],
        "*Features of moved copies of a test image, moved back, as colours: principal components of the upright ones, "
        "of the teacher, then of the model after stage 2.  Rows are equal where the model is symmetric.*",
    ]
    return "\n\n".join(parts) + "\n"


def _rows(result: Result) -> list[tuple[str, list[str]]]:
    """A title and a cell for each model."""
    found, times = list(result.figures.values()), result.milliseconds

    def row(get: Any, form: str) -> list[str]:
        return ["-" if get(one) is None else form.format(get(one)) for one in found]

    rows = [
        ("cosine of patch tokens", row(lambda one: one["agreement"]["patches"], "{:.4f}")),
        ("cosine of class and register tokens", row(lambda one: one["agreement"]["prefix"], "{:.4f}")),
        ("squared error of patch tokens", row(lambda one: one["agreement"]["patches_left"], "{:.4f}")),
        ("squared error of class and register tokens", row(lambda one: one["agreement"]["prefix_left"], "{:.4f}")),
        ("deviation of turned features", row(lambda one: one["deviation"], "{:.1e}")),
    ]
    for name, protocol in runner.PROTOCOLS.items():
        key = f"{name}/{protocol.curve}"
        if any(key in one["suite"] for one in found):
            rows.append((f"{key}, %", row(lambda one, key=key: 100 * one["suite"][key], "{:.2f}")))
    rows.append(("GFLOPs", row(lambda one: one["gigaflops"], "{:.4g}")))
    cells = [f"{times[name]:.3g}" if name in times else "-" for name in result.figures]
    return [*rows, ("milliseconds per image", cells)]
