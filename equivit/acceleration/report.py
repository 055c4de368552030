"""The report of an acceleration: report.json, and report.md with figures."""

import json
import pathlib
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from equivit import archives, files
from equivit.acceleration.nearness import Nearness
from equivit.acceleration.plan import Plan
from equivit.acceleration.stages import Result, shown

SIDE = 13  # tokens of a map to show, around the query


def write(plan: Plan, result: Result) -> pathlib.Path:
    """Write report.json and report.md, draw Sigma, and return the path of report.md."""
    workdir = plan.workdir
    files.write_text(workdir / "report.json", json.dumps(_report(plan, result), indent=1) + "\n")
    draw(workdir / "sigma.png", _maps(workdir / "sigma.npz"), result)
    path = workdir / "report.md"
    files.write_text(path, _page(plan, result))
    return path


def _report(plan: Plan, result: Result) -> dict[str, Any]:
    """The content of report.json."""
    names = ("name", "before", "after")
    found: dict[str, Any] = dict(metric=None if result.metric is None else dict(zip(names, result.metric, strict=True)))
    if result.features is not None:
        blocks = [dict(cosine=c, error=e) for c, e in zip(*map(np.ndarray.tolist, result.features), strict=True)]
        found |= dict(features=blocks[-1] | dict(blocks=blocks))
    for precision, times in result.times.items():
        pairs = {name: dict(before=old, after=new) for name, (old, new) in times._asdict().items()}
        found |= pairs if precision == "float32" else dict(half=pairs)
    heads = {one.block: one.heads for one in result.replaced}
    found |= dict(blocks=list(heads), heads=heads if plan.heads else None, kind=plan.kind, form=plan.form)
    found |= dict(order=plan.order, start=plan.start, sigma=result.sigma, fits=result.errors)
    return found | dict(conditions=result.conditions)


def _maps(path: pathlib.Path) -> np.ndarray:
    try:
        with archives.Npz(path) as file:
            return file["maps"]
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to create it again.") from error


def _page(plan: Plan, result: Result) -> str:
    """The text of report.md."""
    curves = [
        f"![Learning curves of {stage}]({stage}/learning_curves.png)"
        for stage in ("stage1", "stage2")
        if (plan.workdir / stage / "learning_curves.png").is_file()
    ]
    places = {one.block: one.heads for one in result.replaced}
    number = f"{len(places)} of {len(result.sigma)} blocks" if plan.heads is None else f"{plan.heads} heads"
    fits = ", ".join(f"{block}: {error:.2f}" for block, error in result.errors.items())
    order = "at random" if plan.order == "random" else f"with the {plan.order} Sigma"
    start = "the start of the form" if plan.start is None else f"the start {plan.start}"
    parts = [
        f"# Attention replaced by {plan.kind} ({plan.form}): {number}",
        "\n".join(["| | before | after | change |", "|---|---|---|---|", *_rows(result)]),
        f"ONNX files, timed alternately: {result.conditions}.",
        f"Replaced, {order}: {shown(places)}.  Relative squared error of their modules with {start}, before stage 2: "
        f"{fits}.",
        *([] if result.features is None else [_features(result.features)]),
        "![Sigma of the blocks](sigma.png)",
        "*Above: Sigma of each block; replaced blocks are orange.  Below: the deviation of its attention over images, "
        "by the offset of the key from the query in the centre; the square marks the 3 x 3 taps.*",
        *curves,
    ]
    return "\n\n".join(parts) + "\n"


def _rows(result: Result) -> list[str]:
    """The rows of the table: the metric or the nearness of the features, times and sizes."""
    rows = []
    if result.metric is not None:
        name, before, after = result.metric
        rows.append(f"| {name}, % | {100 * before:.2f} | {100 * after:.2f} | {100 * (after - before):+.2f} |")
    if result.features is not None:
        cosine, error = (part[-1] for part in result.features)
        rows.append(f"| cosine of the features | 1 | {cosine:.4f} | {cosine - 1:+.4f} |")
        rows.append(f"| relative squared error of the features | 0 | {error:.4f} | {error:+.4f} |")
    for precision, ((slow, fast), (large, small)) in result.times.items():
        words = "" if precision == "float32" else f", {precision}"
        rows.append(f"| milliseconds per image{words} | {slow:.2f} | {fast:.2f} | {100 * (fast / slow - 1):+.1f} % |")
        change = 100 * (small / large - 1)
        rows.append(f"| megabytes{words} | {large / 1e6:.2f} | {small / 1e6:.2f} | {change:+.1f} % |")
    return rows


def _features(features: Nearness) -> str:
    """The nearness of the features by block, as a table."""
    lines = ["| after block | cosine | relative squared error |", "|---|---|---|"]
    pairs = enumerate(zip(*features, strict=True))
    lines += [f"| {block} | {cosine:.4f} | {error:.4f} |" for block, (cosine, error) in pairs]
    return "Patch tokens after each block and the final norm, beside the model before:\n\n" + "\n".join(lines)


def draw(path: pathlib.Path, maps: np.ndarray, result: Result) -> None:
    """Draw Sigma of the blocks as bars, and their maps [depth, 2 h - 1, 2 w - 1] around the query."""
    depth, (rows, columns) = len(maps), (size // 2 for size in maps.shape[1:])
    half = min(SIDE // 2, rows, columns)
    wide = min(depth, 8)
    tall = -(-depth // wide)
    figure = Figure(figsize=(1.2 * wide + 1, 2.4 + 1.4 * tall), layout="constrained")
    layout = figure.add_gridspec(2, 1, height_ratios=(2.2, 1.4 * tall))
    axes = figure.add_subplot(layout[0])
    replaced = {one.block for one in result.replaced}
    colors = ["tab:orange" if block in replaced else "tab:blue" for block in range(depth)]
    axes.bar(range(depth), result.sigma, color=colors)
    axes.set(xlabel="block", ylabel="Sigma", xticks=range(depth))
    places = layout[1].subgridspec(tall, wide)
    for block in range(depth):
        axes = figure.add_subplot(places[block // wide, block % wide])
        axes.axis("off")
        part = maps[block, rows - half : rows + half + 1, columns - half : columns + half + 1]
        axes.imshow(part, cmap="magma", vmin=0)
        axes.add_patch(Rectangle((half - 1.5, half - 1.5), 3, 3, fill=False, color="white", linewidth=0.8))
        axes.set_title(str(block), fontsize=8, color=colors[block])
    with files.replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=150)
