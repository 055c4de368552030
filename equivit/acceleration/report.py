"""The report of an acceleration: report.json, and report.md with figures."""

import json
import pathlib

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from equivit import archives, files
from equivit.acceleration.stages import Result

SIDE = 13  # tokens of a map to show, around the query


def write(workdir: pathlib.Path, result: Result) -> pathlib.Path:
    """Write report.json and report.md, draw Sigma, and return the path of report.md."""
    names = ("name", "before", "after")
    metric = None if result.metric is None else dict(zip(names, result.metric, strict=True))
    pairs = dict(milliseconds=result.milliseconds, bytes=result.bytes)
    report = dict(metric=metric) | {name: dict(before=old, after=new) for name, (old, new) in pairs.items()}
    report |= dict(blocks=list(result.blocks), sigma=result.sigma, fits=result.errors, conditions=result.conditions)
    files.write_text(workdir / "report.json", json.dumps(report, indent=1) + "\n")
    draw(workdir / "sigma.png", _maps(workdir / "sigma.npz"), result)
    path = workdir / "report.md"
    files.write_text(path, _page(workdir, result))
    return path


def _maps(path: pathlib.Path) -> np.ndarray:
    try:
        with archives.Npz(path) as file:
            return file["maps"]
    except (ValueError, LookupError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to create it again.") from error


def _page(workdir: pathlib.Path, result: Result) -> str:
    """The text of report.md."""
    rows = []
    if result.metric is not None:
        name, before, after = result.metric
        rows.append(f"| {name}, % | {100 * before:.2f} | {100 * after:.2f} | {100 * (after - before):+.2f} |")
    (slow, fast), (large, small) = result.milliseconds, result.bytes
    rows.append(f"| milliseconds per image | {slow:.2f} | {fast:.2f} | {100 * (fast / slow - 1):+.1f} % |")
    rows.append(f"| megabytes | {large / 1e6:.2f} | {small / 1e6:.2f} | {100 * (small / large - 1):+.1f} % |")
    fits = ", ".join(f"{block}: {error:.2f}" for block, error in result.errors.items())
    curves = [
        f"![Learning curves of {stage}]({stage}/learning_curves.png)"
        for stage in ("stage1", "stage2")
        if (workdir / stage / "learning_curves.png").is_file()
    ]
    parts = [
        f"# {len(result.blocks)} of {len(result.sigma)} blocks replaced by depthwise convolution",
        "\n".join(["| | before | after | change |", "|---|---|---|---|", *rows]),
        f"ONNX files, timed alternately: {result.conditions}.",
        f"Replaced blocks, with the lowest Sigma: {', '.join(map(str, result.blocks))}.  Relative squared error "
        f"of their least-squares fits, before stage 2: {fits}.",
        "![Sigma of the blocks](sigma.png)",
        "*Above: Sigma of each block; replaced blocks are orange.  Below: the deviation of its attention over images, "
        "by the offset of the key from the query in the centre; the square marks the 3 x 3 taps.*",
        *curves,
    ]
    return "\n\n".join(parts) + "\n"


def draw(path: pathlib.Path, maps: np.ndarray, result: Result) -> None:
    """Draw Sigma of the blocks as bars, and their maps [depth, 2 h - 1, 2 w - 1] around the query."""
    depth, (rows, columns) = len(maps), (size // 2 for size in maps.shape[1:])
    half = min(SIDE // 2, rows, columns)
    wide = min(depth, 8)
    tall = -(-depth // wide)
    figure = Figure(figsize=(1.2 * wide + 1, 2.4 + 1.4 * tall), layout="constrained")
    layout = figure.add_gridspec(2, 1, height_ratios=(2.2, 1.4 * tall))
    axes = figure.add_subplot(layout[0])
    colors = ["tab:orange" if block in result.blocks else "tab:blue" for block in range(depth)]
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
