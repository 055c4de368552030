"""Throughput and peak memory of Jumbo against Registers at each width, in one run; Figures 1 and 4 from them.

    python experiments/jumbo_speed.py                                    # a GPU: batches of 512, bfloat16
    python experiments/jumbo_speed.py --batch=8 --runs=10 --warmup=2     # a CPU: float32

The paper (RTX 4090, torch.compile, batches of 512): Jumbo over Registers 1.15x to 1.23x at 224 px, 0.94x to 0.96x at
128 px.  Its ratios are printed beside ours; only a GPU's are held to them, with a tenth to spare.  The figures put the
paper's accuracies over our throughputs.  Exits 1 when a claim or a program fails.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from experiments import benchmark, programs
from experiments.benchmark import Budget, Claim

WIDTHS = {96: "pico16", 128: "nano16", 192: "ti16", 384: "s16", 768: "b16"}
MODELS = {"jumbo": "jumbo_vit", "registers": "register_vit"}
# Thousands of images per second, and ImageNet-1K top-1 (Tables 6 to 8), by size of the image and width.
PAPER_SPEED = {
    224: {"jumbo": {96: 43.7, 128: 31.3, 192: 20.4, 384: 7.6}, "registers": {128: 25.5, 192: 16.7, 384: 6.6}},
    128: {"jumbo": {96: 136.0, 128: 103.1, 192: 57.3, 384: 20.4}, "registers": {}},
}
PAPER_ACCURACY = {
    224: {
        "jumbo": {96: 69.0, 128: 74.0, 192: 78.4, 384: 82.7},
        "registers": {128: 61.0, 192: 74.5, 384: 81.9},
    },
    128: {
        "jumbo": {96: 62.4, 128: 68.4, 192: 73.5, 384: 79.3},
        "registers": {128: 53.6, 192: 68.8, 384: 78.2},
    },
}
# Other architectures at 224 px, the paper's throughput and accuracy (Table 6): for Figures 1 and 4.
PAPER_OTHERS = {
    "MobileNetV4": [(33.7, 65.6), (11.2, 74.9), (8.8, 78.1)],
    "SHViT": [(42.1, 67.9), (34.5, 71.0), (23.7, 74.3)],
    "EfficientViT": [(25.2, 66.3), (9.8, 76.9)],
}
RATIOS = {224: (1.15, 1.23), 128: (0.94, 0.96)}  # the paper's range over widths
COLUMNS = dict(
    pixels="px",
    width="D",
    jumbo="Jumbo, images/s",
    registers="Registers",
    ratio="ratio",
    jumbo_mib="Jumbo, MiB",
    registers_mib="Registers",
)


def main(arguments=None) -> int:
    parser = benchmark.timing_parser(__doc__, output="jumbo_speed.json", runs=50, warmup=10)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--widths", default=list(map(str, WIDTHS)), type=benchmark.one_of(list(map(str, WIDTHS))))
    options = parser.parse_args(arguments)
    budget, rows = Budget(options.minutes), []
    for pixels in RATIOS:
        for width in map(int, options.widths):
            name = f"{width} at {pixels} px"
            if budget.allows(name):
                with budget.trying(name):
                    rows.append(measured(width, pixels, options))
    print(benchmark.table(rows, COLUMNS))
    compute = "bfloat16" if benchmark.on_gpu() else "float32"
    results = dict(batch=options.batch, compute=compute, rows=rows, paper=dict(ratios=RATIOS))
    status = benchmark.finish(options.output, results, claims_of(rows), budget)
    draw(rows, options.output.with_suffix(".png"))
    return status


def measured(width: int, pixels: int, options) -> dict:
    """Images per second and the memory of a call, of both models in turn."""
    sizes = dict(image_size=(pixels, pixels), num_classes=1000)
    precision = "mixed" if benchmark.on_gpu() else "float32"
    found = {
        model: programs.forward(f"{name}_{WIDTHS[width]}", batch=options.batch, precision=precision, **sizes)
        for model, name in MODELS.items()
    }
    calls = {model: program.start() for model, program in found.items()}
    seconds = benchmark.medians(benchmark.interleaved(calls, warmup=options.warmup, runs=options.runs))
    speeds = {model: options.batch / value for model, value in seconds.items()}
    memory = {f"{model}_mib": program.memory and program.memory.peak / 2**20 for model, program in found.items()}
    return dict(pixels=pixels, width=width, **speeds, ratio=speeds["jumbo"] / speeds["registers"], **memory)


def claims_of(rows) -> list[Claim]:
    """Jumbo over Registers, within a tenth of the paper's range."""
    claims = []
    for pixels, (low, high) in RATIOS.items():
        ratios = [row["ratio"] for row in rows if row["pixels"] == pixels and 96 < row["width"] < 768]
        for name, value, bounds in (
            ("smallest", min(ratios, default=None), dict(at_least=low * 0.9)),
            ("largest", max(ratios, default=None), dict(at_most=high * 1.1)),
        ):
            text = f"Jumbo over Registers at {pixels} px, {name} over widths (paper {low} to {high})"
            claims.append(Claim(text, value, **bounds, judged=benchmark.on_gpu()))
    return claims


def draw(rows, path):
    """The paper's accuracies over its throughputs, and over ours."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    theirs, *ours = figure.subplots(1, 3)
    for model, points in PAPER_SPEED[224].items():
        theirs.plot(points.values(), [PAPER_ACCURACY[224][model][w] for w in points], marker="o", label=model)
    for name, points in PAPER_OTHERS.items():
        theirs.plot(*zip(*points, strict=True), marker="s", linestyle="--", linewidth=1, label=name)
    theirs.set(title="224 px, the paper's RTX 4090", xlabel="thousand images per second", ylabel="the paper's top-1, %")
    for axes, pixels in zip(ours, RATIOS, strict=False):
        for model in MODELS:
            points = [
                (row[model], PAPER_ACCURACY[pixels][model][row["width"]])
                for row in rows
                if row["pixels"] == pixels and row["width"] in PAPER_ACCURACY[pixels][model]
            ]
            axes.plot(*zip(*points, strict=True) if points else ((), ()), marker="o", label=f"{model}, ours")
        axes.set(title=f"{pixels} px, {benchmark.device()['name'][:24]}", xlabel="images per second")
    for axes in figure.axes:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
