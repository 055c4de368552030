"""The time of replaced attention in ONNX Runtime on one thread: modules (Tables 1, A.3) and ViT-L/14 (Table 2).

    python -m experiments tables.depthwise.speed  # all, on two idle CPU cores in less than 8 minutes
    python -m experiments tables.depthwise.speed --only=modules --runs=50

Batch 1, float32, random weights, in turn, on one core.  The paper's milliseconds in Tables 1 and 2 are of an Orin Nano
with TensorRT.  "Desktop CPU" of Table A.3 is the column that the paper heads Cortex-A53, and its A53 is headed i7: the
headings must be exchanged, as 2.4 GFLOPs take 594 ms in one and 19 ms in the other.
"""

from equivit import onnx_files, profile
from experiments import findings, flags, timing
from experiments.findings import Claim
from experiments.tables import measuring
from experiments.tables.depthwise import onnx_calls

TABLE_1 = {None: 3.2, "conv": 3.71, "dw": 1.26, "spvit": 0.641, "ens_dw": 0.215}  # 576 tokens, width 1024, 16 heads
# 256 tokens, by heads of 64 channels: milliseconds on an Orin, and on the desktop CPU.
TABLE_A3 = {
    12: {None: (0.75, 11.02), "dw": (0.28, 0.89), "ens_dw": (0.09, 0.30)},
    16: {None: (0.93, 19.45), "dw": (0.32, 4.22), "ens_dw": (0.06, 0.27)},
}
# ViT-L/14 at 336 px: (kind, blocks), milliseconds (Table 2), and the least share of the time that ours must save.
TABLE_2 = {(None, 0): (161.4, None), ("dw", 6): (None, 0.08), ("dw", 12): (133.6, 0.16), ("ens_dw", 10): (131.1, 0.18)}
TARGETS = {"dw": 0.35, "ens_dw": 0.05}  # of the time of attention, in Table 1
PARTS = ("modules", "small_modules", "backbones")
MODULES = dict(module="module", tokens="tokens", heads="heads", ms="ms", ratio="ratio")
MODULES |= dict(paper="paper ms", theirs="ratio")
DESKTOP = dict(desktop="desktop CPU ms", desktop_ratio="ratio")
BACKBONES = dict(kind="kind", blocks="blocks", ms="ms", saved="saved %", paper="paper ms", theirs="saved %")


def main(arguments=None) -> int:
    parser = onnx_calls.parser(__doc__, __file__, runs=25, warmup=3)
    parser.add_argument("--only", default=list(PARTS), type=flags.one_of(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--backbone_runs", type=int, default=7, help="timed rounds of backbones (%(default)s)")
    options = parser.parse_args(arguments)
    budget, found = timing.Budget(options.minutes), {}
    measures = dict(zip(PARTS, (modules, small_modules, backbones), strict=True))
    with profile.alone() as conditions:
        print(conditions)
        for part in options.only:
            if (rows := measuring.attempt(budget, part, measures[part], options)) is not None:
                found[part] = rows
    for part, rows in found.items():
        columns = BACKBONES if part == "backbones" else MODULES | (DESKTOP if part == "small_modules" else {})
        print(f"{part}\n{findings.table(rows, columns)}")
    runtime = onnx_files.library("onnxruntime").__version__
    results = dict(conditions=conditions, onnxruntime=runtime, model=options.model, pixels=options.pixels, **found)
    return findings.finish(options, results, claims_of(found, options), budget)


def modules(options) -> list[dict]:
    """Table 1."""
    return _modules(options, (24, 24), 16, {kind: (ms,) for kind, ms in TABLE_1.items()})


def small_modules(options) -> list[dict]:
    """Table A.3."""
    return [row for heads, paper in TABLE_A3.items() for row in _modules(options, (16, 16), heads, paper)]


def _modules(options, grid, heads, paper) -> list[dict]:
    calls = {kind: onnx_calls.module_call(grid, 64 * heads, heads, kind) for kind in paper}
    times, rows = onnx_calls.milliseconds(calls, options), []
    for kind, ms in times.items():
        row = dict(kind=kind, module=onnx_calls.NAMES[kind], tokens=grid[0] * grid[1], heads=heads, ms=ms)
        row |= dict(ratio=ms / times[None], paper=paper[kind][0], theirs=paper[kind][0] / paper[None][0])
        if len(paper[kind]) > 1:
            row |= dict(desktop=paper[kind][1], desktop_ratio=paper[kind][1] / paper[None][1])
        rows.append(row)
    return rows


def backbones(options) -> list[dict]:
    """Whole backbones: which blocks are replaced does not change the time."""
    calls = {}
    for kind, blocks in TABLE_2:
        replaced = tuple((block, kind) for block in range(blocks))
        calls[kind, blocks] = onnx_calls.backbone_call(options.model, (options.pixels, options.pixels), replaced)
    options.runs, options.warmup = options.backbone_runs, 1
    times, rows = onnx_calls.milliseconds(calls, options), []
    for (kind, blocks), ms in times.items():
        (paper, _), (before, _) = TABLE_2[kind, blocks], TABLE_2[None, 0]
        row = dict(kind=onnx_calls.NAMES[kind], blocks=blocks, ms=ms, saved=100 * (1 - ms / times[None, 0]))
        rows.append(row | dict(paper=paper, theirs=None if paper is None else 100 * (1 - paper / before)))
    return rows


def claims_of(found, options) -> list[Claim]:
    """The targets; for backbones they are judged for ViT-L/14 at 336 px."""
    ratios = {row["kind"]: row["ratio"] for row in found.get("modules", ())}
    claims = []
    for kind, most in TARGETS.items() if "modules" in options.only else ():
        text = f"{onnx_calls.NAMES[kind]} over attention, 576 tokens, width 1024"
        claims.append(Claim(text, ratios.get(kind), at_most=most))
    shares = {(row["kind"], row["blocks"]): row["saved"] / 100 for row in found.get("backbones", ())}
    meant = (options.model, options.pixels) == onnx_calls.VIT_L
    for (kind, blocks), (_, least) in TABLE_2.items():
        if least is not None and "backbones" in options.only:
            name = onnx_calls.NAMES[kind]
            text = f"share of ViT-L/14's time at 336 px that {blocks} of 24 blocks {name} save"
            claims.append(Claim(text, shares.get((name, blocks)), at_least=least, judged=meant))
    return claims
