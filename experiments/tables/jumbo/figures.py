"""Figures 1 and 4 of Jumbo: accuracy over throughput, the paper's above ours.

Above are the paper's accuracies over its throughputs (RTX 4090), below accuracies over ours: full markers are our
trained runs, hollow ones have the paper's accuracy.  Plain ViTs are red, others blue, as in the paper; of folded and
not folded batch norms the faster is drawn.  Left: ImageNet-1k at 224 px, Figures 1a and 4; middle: at 128 px, Figure 4;
right: ImageNet-21K, Figure 1b.  BiXT is drawn where it has runs, as the paper gives no numbers.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from experiments.tables.jumbo import paper_numbers

REGISTERS = ("nano,registers", "tiny,registers", "small,registers")
MOBILENETS = ("mobilenetv4_conv_small", "mobilenetv4_conv_medium", "mobilenetv4_hybrid_medium")
# Words of configs/jumbo_in1k.py, or labels of Table 5; colour and marker.
FAMILIES = {
    "ViT+Jumbo": (("pico", "nano", "tiny", "small", "ViT-S, Jumbo", "ViT-B, Jumbo"), "tab:red", "o"),
    "ViT+Registers": ((*REGISTERS, "ViT-S, Registers", "ViT-B, Registers"), "tab:red", "^"),
    "MobileNetV4": (MOBILENETS, "tab:blue", "s"),
    "SHViT": (("shvit_s1", "shvit_s2", "shvit_s3"), "tab:blue", "D"),
    "EfficientViT": (("efficientvit_b0", "efficientvit_b1"), "tab:blue", "v"),
    "BiXT": (("bixt_ti_p16",), "tab:blue", "P"),
}
PANELS = {(224, "in1k"): "ImageNet-1k, 224 px", (128, "in1k"): "ImageNet-1k, 128 px", (224, "in21k"): "ImageNet-21K"}
Point = tuple[float, float, bool]  # images per second, top-1, whether the run is ours


def draw(measured: Mapping[str, Any], best: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draw the figures of an entry of the JSON of speed.py, with the rows "best" of the JSON of accuracy.py."""
    runs = {(r["label"], r["pixels"]): r["top1"] for r in best if r.get("top1") is not None}
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    grid = figure.subplots(2, len(PANELS))
    for column, ((pixels, data), title) in enumerate(PANELS.items()):
        above, below = grid[:, column]
        _panel(above, points(papers(), {}, pixels, data))
        _panel(below, points(measured["rows"], runs, pixels, data))
        above.set_title(f"{title}: the paper, RTX 4090", fontsize=9)
        below.set_title(f"{title}: ours, {measured['device']['name'][:24]}", fontsize=9)
        below.set_xlabel("images per second")
    for axes in grid[:, 0]:
        axes.set_ylabel("top-1, %")
    legends = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in figure.axes]
    handles = {label: handle for legend in legends for handle, label in legend}  # each label of all panels once
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def papers() -> list[dict[str, Any]]:
    """The paper's throughputs, as the rows of speed.py."""
    found = paper_numbers.speeds() | {(c["table"], c["label"], 224): c["speed"] for c in paper_numbers.COSTS}
    return [dict(table=t, words=words, pixels=at, speed=1000 * speed) for (t, words, at), speed in found.items()]


def points(rows: list[dict], runs: Mapping[tuple[str, int], float], pixels: int, data: str) -> dict[str, list[Point]]:
    """Throughputs by family, with the accuracy of our runs or else the paper's."""
    found: dict[str, Point] = {}
    for r in rows:
        if (r["table"] == "5") is not (data == "in21k") or r["table"] in ("1", "4", "12") or r["pixels"] != pixels:
            continue
        run = runs.get((r["words"], pixels)) if data == "in1k" else None
        value = _accuracy(r["words"], pixels, data) if run is None else run
        if value is not None and r["speed"] > found.get(r["words"], (0.0,))[0]:
            found[r["words"]] = r["speed"], value, run is not None
    return {name: [found[words] for words in members if words in found] for name, (members, *_) in FAMILIES.items()}


def _accuracy(words: str, pixels: int, data: str) -> float | None:
    if data == "in21k":
        return next(c["top1"] for c in paper_numbers.COSTS if (c["table"], c["label"]) == ("5", words))
    return paper_numbers.best(words, pixels)


def _panel(axes: Any, families: Mapping[str, list[Point]]) -> None:
    for name, points in families.items():
        _, colour, marker = FAMILIES[name]
        if points:
            axes.plot(*list(zip(*points, strict=True))[:2], color=colour, linewidth=0.8, alpha=0.6)
        for full in (True, False):
            these = [point[:2] for point in points if point[2] is full]
            face = colour if full else "white"
            label = f"{name}{', our run' if full else ''}"
            if these:
                axes.plot(*zip(*these, strict=True), marker, color=colour, markerfacecolor=face, label=label)
    if not axes.lines:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not timed", transform=axes.transAxes, ha="center")
        return
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}" if x < 1000 else f"{x / 1000:g}K"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
