"""The time of replaced attention: modules (Tables 1, A.3, A.4), backbones (Tables 2, 4), numbers (Figures 2, A.5).

    python -m experiments tables.depthwise.speed  # ONNX Runtime on one core; half an hour on two idle CPU cores
    python -m experiments tables.depthwise.speed --runtime=jax --minutes=9  # on a GPU; again with --resume for the rest
    python -m experiments tables.depthwise.speed --only=table_1,table_a3

Random weights, the released form, images of 336 px.  Each row is timed in turn with attention, and its ratio is to
attention in the same rounds.  ONNX Runtime computes in float32 on one image, on one thread.  JAX computes in float32
with exact products, in TF32 and in bfloat16 (modules also in float16, for Table A.4), on 1 and 32 images; a program
repeats the module --repeats times in a loop.  Cells of JAX stay empty without a GPU: they are never measured on a CPU,
and no table has both.

The paper's milliseconds are of an Orin Nano with TensorRT.  "Desktop CPU" of Table A.3 is the column that the paper
heads Cortex-A53, and its A53 is headed i7: the headings must be exchanged, as 2.4 GFLOPs take 594 ms in one and 19 ms
in the other.  In the figures a stack of 6 blocks of ViT-L with 1, 2, ... of them replaced represents 24 blocks, since
blocks cost the same wherever they are; "scattered" replaces as many heads evenly in all blocks.

Claims, for ONNX Runtime: DW takes at most 0.35 and Ens+DW 0.05 of the time of attention in Table 1; 12 blocks DW save
at least 16 % of ViT-L/14's time and 10 blocks Ens+DW 18 %; and each further replaced block saves more.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from equivit import onnx_files, profile
from equivit.configs import depthwise
from experiments import findings, flags, machine, timing
from experiments.findings import Claim
from experiments.tables import measuring, papers
from experiments.tables.depthwise import calls
from experiments.tables.depthwise.calls import NAMES

# Table, (tokens, heads of 64 channels): milliseconds of the paper, by kind.
MODULES = {
    ("table_1", (576, 16)): {None: 3.2, "conv": 3.71, "dw": 1.26, "spvit": 0.641, "ens_dw": 0.215},
    ("table_a3", (256, 16)): {None: 0.93, "dw": 0.32, "ens_dw": 0.06},
    ("table_a3", (256, 12)): {None: 0.75, "dw": 0.28, "ens_dw": 0.09},
}
HALF = {None: 1.14, "dw": 0.86, "ens_dw": 0.271}  # Table A.4, 576 tokens and 16 heads, float16
DESKTOP = {12: {None: 11.02, "dw": 0.89, "ens_dw": 0.30}, 16: {None: 19.45, "dw": 4.22, "ens_dw": 0.27}}  # Table A.3
PARTS = ("table_1", "table_a3", "table_a4", "table_2", "table_4", "figures")
PIXELS, DEPTH, STACK = 336, 24, 6  # of images; blocks of ViT-L, and of the stack that represents them
SAVED = {"DW, blockwise": {12: 17.2, 16: 21.9}, "Ens+DW, blockwise": {10: 18.8, 12: 22.9}}  # Table 2, %
LIMITS = {"dw": 0.35, "ens_dw": 0.05}  # of the time of attention, in Table 1
LEAST = {("dw", 12): 0.16, ("ens_dw", 10): 0.18}  # of the time of ViT-L/14, saved
COLUMNS = dict(subject="", name="", precision="precision", batch="batch", ms="ms", ratio="ratio", saved="saved %")
COLUMNS |= dict(paper="paper ms", paper_ratio="ratio", desktop="desktop CPU ms")


class Cell(NamedTuple):
    """A row of a table at one precision and batch: what is timed, and how much of it is replaced."""

    part: str
    subject: str  # rows of a subject are compared with its attention
    name: str  # of the kind, in the figures with its way
    number: int  # of replaced blocks; of a module 1; 0: attention
    precision: str = "float32"
    batch: int = 1


class Variant(NamedTuple):
    """How a cell is made, and the paper's milliseconds: on the Orin, in float16 there, and on the desktop CPU."""

    make: Callable[..., calls.Subject]  # takes `onnx`
    paper: float | None
    half: float | None = None
    desktop: float | None = None

    def at(self, precision: str) -> "Variant":
        """The variant with the paper's milliseconds at a precision."""
        return self._replace(paper=self.half) if precision == "float16" else self


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=9, warmup=2, minutes=45)
    parser.set_defaults(entry=None)
    parser.add_argument("--runtime", choices=("onnx", "jax"), default="onnx", help="(%(default)s)")
    parser.add_argument("--only", default=list(PARTS), type=flags.one_of(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repeats", type=flags.at_least(1), default=20, help="in a program of JAX (%(default)s)")
    parser.add_argument("--resume", action="store_true", help="measure only rows that the entry does not have yet")
    options = parser.parse_args(arguments)
    options.entry = options.entry or ("main" if options.runtime == "onnx" else "jax")
    wanted = variants(options.runtime, options.only)
    if options.runtime == "jax" and not machine.on_gpu():
        print(findings.table([empty(cell, variant) for cell, variant in wanted.items()], COLUMNS))
        print("Nothing was measured: these cells are for a GPU.")
        return 0
    with profile.alone() if options.runtime == "onnx" else contextlib.nullcontext("one GPU") as conditions:
        print(conditions)
        settings = dict(conditions=conditions, form="released", pixels=PIXELS, repeats=options.repeats)
        if options.runtime == "onnx":
            settings |= dict(onnxruntime=onnx_files.library("onnxruntime").__version__)
        entry = findings.Entry(options, settings, timing.Budget(options.minutes))
        measure_all(wanted, entry, options)
    rows, every = {cell_of(row): row for row in entry.rows()}, variants(options.runtime, PARTS)
    found = [rows.get(cell) or empty(cell, one) for cell, one in every.items() if cell in rows or cell in wanted]
    print(findings.table(found, COLUMNS))
    status = entry.finish(claims_of(found) if options.runtime == "onnx" else [])
    if drawn := [row for row in found if row["part"] == "figures" and row["batch"] == 1 and row["ms"] is not None]:
        draw([row for row in drawn if row["precision"] == "float32"], findings.picture(options))
    return status


# ---- Cells


def variants(runtime: str, parts: Sequence[str]) -> dict[Cell, Variant]:
    """The cells of some parts; of each subject attention comes first."""
    found: dict[Cell, Variant] = {}
    for part in parts:
        for precision, batch in conditions_of(part, runtime):
            for cell, variant in BY_PART[part](part):
                found[cell._replace(precision=precision, batch=batch)] = variant.at(precision)
    return found


def conditions_of(part: str, runtime: str) -> list[tuple[str, int]]:
    """The precisions and batches of a part; Table A.4 is of a GPU alone."""
    if part == "table_a4":
        return [] if runtime == "onnx" else [("float32", 1), ("float16", 1)]
    if runtime == "onnx":
        return [("float32", 1)]
    return [(precision, batch) for batch in (1, 32) for precision in ("float32", "tf32", "bfloat16")]


def modules(part: str) -> Iterator[tuple[Cell, Variant]]:
    """The rows of Tables 1, A.3 and A.4; A.4 has the modules of Table 1."""
    for (table, (tokens, heads)), paper in MODULES.items():
        if table != ("table_1" if part == "table_a4" else part):
            continue
        for kind, ms in paper.items():
            if part == "table_a4" and kind not in HALF:
                continue
            cell = Cell(part, f"{tokens} tokens, {heads} heads", NAMES[kind], int(kind is not None))
            side = round(tokens**0.5)

            def make(side=side, heads=heads, kind=kind, **options):
                return calls.of_module((side, side), 64 * heads, heads, kind, **options)

            yield cell, Variant(make, ms, HALF.get(kind), DESKTOP[heads][kind] if part == "table_a3" else None)


def backbones(part: str) -> Iterator[tuple[Cell, Variant]]:
    """The rows of Table 2 and of Table 4: which blocks are replaced does not change the time."""
    kinds = {"-": None} | {kind: kind for kind in NAMES if kind}
    lines = papers.rows(__file__, "paper.csv", words=("table", "task", "backbone", "kind", "way"))
    for line in lines:
        if line["task"] == "coco" and line["ms"] is not None and f"table_{line['table']}" == part:
            kind, number = kinds[line["kind"]], line["number"]
            replaced = tuple((block, kind) for block in range(number))

            def make(backbone=line["backbone"], replaced=replaced, **options):
                fields = dict(depthwise.BACKBONES[backbone])
                return calls.of_backbone(fields.pop("name"), (PIXELS, PIXELS), replaced, **fields | options)

            yield Cell(part, line["backbone"], NAMES[kind], number), Variant(make, line["ms"])


def numbers(part: str) -> Iterator[tuple[Cell, Variant]]:
    """The points of the figures: up to two thirds of the blocks, as in the paper."""
    for (way, number), replaced in ways(STACK).items():

        def make(replaced=replaced, **options):
            size = (PIXELS, PIXELS)
            return calls.of_backbone("dinov2_vit_l14", size, replaced, depth=STACK, **options)

        yield Cell(part, f"{STACK} blocks of ViT-L", way, number * DEPTH // STACK), Variant(make, None)


def ways(depth: int) -> dict[tuple[str, int], tuple]:
    """The replaced blocks by way and number."""
    found: dict[tuple[str, int], tuple] = {(NAMES[None], 0): ()}
    for number in range(1, 2 * depth // 3 + 1):
        for kind in ("dw", "ens_dw"):
            found[f"{NAMES[kind]}, blockwise", number] = tuple((block, kind) for block in range(number))
        heads = tuple(range(round(16 * number / depth)))
        found["DW, scattered", number] = tuple((block, "dw", 3, heads) for block in range(depth))
    return found


BY_PART = dict.fromkeys(("table_1", "table_a3", "table_a4"), modules) | dict.fromkeys(("table_2", "table_4"), backbones)
BY_PART |= {"figures": numbers}


# ---- Times


def measure_all(wanted: Mapping[Cell, Variant], entry: findings.Entry, options) -> None:
    """Time the wanted cells, with --resume those that the entry does not have; each is written at once."""
    entry.keep(Cell._fields, wanted)
    known = {cell_of(row) for row in entry.rows() if row["ms"] is not None} if options.resume else set()
    for cell in wanted:
        if cell.number and cell not in known:
            name = f"{cell.part}: {cell.subject}, {cell.name} {cell.number}, {cell.precision}, batch {cell.batch}"
            if (found := measuring.attempt(entry.budget, name, measure, cell, wanted, options)) is not None:
                rows = {one: row for one, row in found.items() if one not in known}  # attention as timed first
                known |= rows.keys()
                entry.add(rows.values())
                print(findings.table([found[cell]], COLUMNS), flush=True)


def measure(cell: Cell, wanted: Mapping[Cell, Variant], options) -> dict[Cell, dict]:
    """The rows of a cell and of the attention of its subject, timed in turn."""
    base = next(other for other in wanted if other.number == 0 and other[:2] == cell[:2] and other[4:] == cell[4:])
    timed = {one: opened(one, wanted[one], options) for one in (base, cell)}
    seconds = timing.medians(timing.interleaved(timed, warmup=options.warmup, runs=options.runs))
    repeats = 1 if options.runtime == "onnx" else options.repeats
    ms = {one: 1e3 * second / repeats for one, second in seconds.items()}
    ratio, theirs = ms[cell] / ms[base], timing.ratio(wanted[cell].paper, wanted[base].paper)
    own = dict(ms=ms[cell], ratio=ratio, saved=100 * (1 - ratio), paper_ratio=theirs)
    row = empty(base, wanted[base]) | dict(ms=ms[base], ratio=1.0, saved=0.0)
    return {base: row, cell: empty(cell, wanted[cell]) | own}


def opened(cell: Cell, variant: Variant, options) -> Callable[[], Any]:
    """The call of a cell."""
    subject = variant.make(onnx=options.runtime == "onnx")
    if options.runtime == "onnx":
        return calls.in_onnx(subject)
    return calls.in_jax(subject, cell.precision, cell.batch, options.repeats)


def empty(cell: Cell, variant: Variant) -> dict[str, Any]:
    """The row of a cell before it is measured."""
    figures = dict.fromkeys(("ms", "ratio", "saved", "paper_ratio"))
    return cell._asdict() | figures | dict(paper=variant.paper, desktop=variant.desktop)


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell of a row."""
    return Cell(*(row[field] for field in Cell._fields))


def claims_of(rows: Sequence[dict]) -> list[Claim]:
    """The claims of the docstring, about the parts that the rows belong to."""
    found, claims = {(row["part"], row["subject"], row["name"], row["number"]): row for row in rows}, []
    for kind, most in LIMITS.items():
        if row := found.get(("table_1", "576 tokens, 16 heads", NAMES[kind], 1)):
            text = f"{NAMES[kind]} over attention, 576 tokens, width 1024"
            claims.append(Claim(text, row["ratio"], at_most=most))
    for (kind, number), least in LEAST.items():
        if row := found.get(("table_2", "dinov2_l14", NAMES[kind], number)):
            text = f"share of ViT-L/14's time at 336 px that {number} of 24 blocks {NAMES[kind]} save"
            claims.append(Claim(text, None if row["ms"] is None else row["saved"] / 100, at_least=least))
    for way in SAVED:
        saved = [row["saved"] for row in rows if row["part"] == "figures" and row["name"] == way]
        if saved:
            steps = [] if None in saved else [b - a for a, b in zip([0.0, *saved], saved, strict=False)]
            text = f"{way}: percent that each further point saves, at least"
            claims.append(Claim(text, min(steps, default=None), at_least=0))
    return claims


def draw(rows: Sequence[dict], path) -> None:
    """Figure 2: blockwise and scattered, by heads; Figure A.5: with and without ensembling, by blocks."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    panels = ("Figure 2", "heads", "DW, scattered"), ("Figure A.5", "blocks", "Ens+DW, blockwise")
    for axes, (title, unit, other) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        factor = 16 if unit == "heads" else 1
        for way in ("DW, blockwise", other):
            points = [(0, 0), *((factor * row["number"], row["saved"]) for row in rows if row["name"] == way)]
            (line,) = axes.plot(*zip(*points, strict=True), marker="o", label=f"{way}, ours")
            paper = SAVED.get(way, {})
            places = [factor * number for number in paper]
            axes.plot(places, list(paper.values()), "x", color=line.get_color(), label=f"{way}, paper (Orin)")
        axes.set(xlabel=f"replaced {unit}", title=title)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=7)
    figure.axes[0].set_ylabel("time saved, %")
    figure.savefig(path, dpi=150)
