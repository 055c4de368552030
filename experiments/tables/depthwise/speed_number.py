"""Speed against the number of replaced blocks and heads of ViT-L at 336 px: Figures 2 and A.5.

    python -m experiments tables.depthwise.speed_number  # two idle CPU cores, less than 8 minutes

ONNX Runtime, one thread, 576 tokens, random weights.  Blocks cost the same wherever they are, so a stack of 6 blocks
with 1, 2, ... of them replaced represents 24 blocks with four times as many.  "Blockwise" replaces whole blocks,
"scattered" as many heads evenly in all blocks.  Crosses are the paper's tables; its figures have no numbers.  Claim:
each further replaced block saves more time.
"""

from matplotlib.figure import Figure

from equivit import onnx_files, profile
from experiments import findings, timing
from experiments.findings import Claim
from experiments.tables import measuring
from experiments.tables.depthwise import onnx_calls

DEPTH = 24  # of the model that the stack represents
TABLE_2 = {"DW, blockwise": {12: 17.2, 16: 21.9}, "Ens+DW, blockwise": {10: 18.8, 12: 22.9}}  # saved, %
COLUMNS = dict(way="way", blocks="of 24 blocks", heads="of 384 heads", ms="ms of the stack", saved="saved %")


def main(arguments=None) -> int:
    parser = onnx_calls.parser(__doc__, __file__, runs=9, warmup=1)
    parser.add_argument("--depth", type=int, default=6, help="blocks of the stack (%(default)s)")
    options = parser.parse_args(arguments)
    budget, calls, rows = timing.Budget(options.minutes), {}, []

    def call(replaced):
        size = (options.pixels, options.pixels)
        return onnx_calls.backbone_call(options.model, size, replaced, depth=options.depth)

    with profile.alone() as conditions:
        print(conditions)
        for (way, number), replaced in variants(options.depth).items():
            name = f"{way}, {number} of {options.depth} blocks"
            if (found := measuring.attempt(budget, name, call, replaced)) is not None:
                calls[way, number] = found
        times = onnx_calls.milliseconds(calls, options)
    for (way, number), ms in times.items():
        blocks = number * DEPTH / options.depth
        rows.append(dict(way=way, blocks=blocks, heads=16 * blocks, ms=ms, saved=100 * (1 - ms / times["none", 0])))
    print(findings.table(rows, COLUMNS))
    results = dict(conditions=conditions, onnxruntime=onnx_files.library("onnxruntime").__version__, rows=rows)
    status = findings.finish(options, results, claims_of(rows, options), budget)
    draw(rows, findings.picture(options))
    return status


def variants(depth: int) -> dict[tuple[str, int], tuple]:
    """The replaced blocks by way and number: up to two thirds of the blocks, as in the paper."""
    found: dict[tuple[str, int], tuple] = {("none", 0): ()}
    for number in range(1, 2 * depth // 3 + 1):
        for name, kind in (("DW", "dw"), ("Ens+DW", "ens_dw")):
            found[f"{name}, blockwise", number] = tuple((block, kind) for block in range(number))
        heads = tuple(range(round(16 * number / depth)))
        found["DW, scattered", number] = tuple((block, "dw", 3, heads) for block in range(depth))
    return found


def claims_of(rows, options) -> list[Claim]:
    """Each further block of a kind saves more; judged for ViT-L at 336 px."""
    meant = (options.model, options.pixels) == onnx_calls.VIT_L
    claims = []
    for way in ("DW, blockwise", "Ens+DW, blockwise"):
        saved = [0.0, *(row["saved"] for row in rows if row["way"] == way)]
        least = min((b - a for a, b in zip(saved, saved[1:], strict=False)), default=None)
        claims.append(Claim(f"{way}: percent that each further point saves, at least", least, at_least=0, judged=meant))
    return claims


def draw(rows, path):
    """Figure 2: blockwise and scattered, by heads; Figure A.5: with and without ensembling, by blocks."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = ("Figure 2", "heads", "DW, scattered"), ("Figure A.5", "blocks", "Ens+DW, blockwise")
    for axes, (title, key, other) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        for way in ("DW, blockwise", other):
            points = [(0, 0), *((row[key], row["saved"]) for row in rows if row["way"] == way)]
            (line,) = axes.plot(*zip(*points, strict=True), marker="o", label=f"{way}, ours")
            paper = TABLE_2.get(way, {})
            places = [number * (16 if key == "heads" else 1) for number in paper]
            axes.plot(places, list(paper.values()), "x", color=line.get_color(), label=f"{way}, paper (Orin)")
        axes.set(xlabel=f"replaced {key}", title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    figure.axes[0].set_ylabel("time saved, %")
    figure.savefig(path, dpi=150)
