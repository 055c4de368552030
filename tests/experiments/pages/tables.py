"""Figures of experiments/tables/README.md."""

import json

from experiments.tables.depthwise import speed
from experiments.tables.depthwise.calls import NAMES as KINDS
from experiments.tables.jumbo import paper_numbers, timeseries
from experiments.tables.octic.complexity import PAPER
from tests.experiments.pages.figures import CONV, ROOT, Page, entry, hundreds, percent, rows_by, times

PAGE = Page("tables/README")


@PAGE.table("table | model | M parameters | paper | GFLOPs | paper")
def jumbo_costs():
    for row in entry("tables/jumbo/costs")["rows"]:
        numbers = (
            f"{row['parameters']:.2f}",
            f"{row['paper_parameters']}",
            f"{row['gflops']:.2f}",
            f"{row['paper_gflops']}",
        )
        yield [row["table"], row["model"], *numbers]


@PAGE.table("forward | images per second | over plain | paper (A100) | memory, MiB | paper")
def complexity_forward():
    rows, paper = entry("tables/octic/complexity")["rows"]["h"], PAPER["h"]
    for name in ("plain", "H8", "D8", "timm"):
        row, theirs = rows[name], paper.get(name)
        ratio = "" if name == "plain" else times(row["forward_ratio"])
        theirs_ratio = times(theirs["ratio_paper"]) if theirs and name != "plain" else ""
        numbers = [f"{row['forward_throughput']:,.0f}", ratio, theirs_ratio, f"{row['forward_mib']:,.0f}"]
        yield [f"{name}, plain" if name == "timm" else name, *numbers, f"{theirs['mib_paper']:,}" if theirs else ""]


@PAGE.table("training step | images per second | over plain | memory, MiB")
def complexity_training():
    rows = entry("tables/octic/complexity", "training")["rows"]["h"]
    for name in ("plain", "H8", "D8"):
        ratio = "" if name == "plain" else times(rows[name]["train_ratio"])
        yield [name, f"{rows[name]['train_throughput']:,.0f}", ratio, f"{rows[name]['train_mib']:,.0f}"]


@PAGE.table("model | plain, images/s | D8 | throughput | paper (A100) | FLOPs | paper | memory | paper")
def scaling():
    found = entry("tables/octic/scaling")["rows"] | entry("tables/octic/scaling", "h_g_e")["rows"]
    for key, patch in (("l", 16), ("h", 14), ("g", 16), ("22b", 16)):
        row = found[key]
        unit = ", one block" if row["unit"] == "one block" else ""
        cells = [f"{row['plain_per_second']:,.0f}", f"{row['octic_per_second']:,.0f}"]
        for figure in ("throughput", "flops", "memory"):
            cells += [times(row[figure]), times(row[f"{figure}_paper"])]
        yield [f"{row['model']}/{patch}{unit}", *cells]


@PAGE.table("model | time | by input | paper (RTX 5000) | multiply-adds | memory, forward | gradient | paper")
def adaptive_speed():
    names = {"swin_t": "Swin-T", "swinv2_t": "SwinV2-T", "cvt_13": "CvT-13", "mvitv2_t": "MViTv2-T"}
    for row in entry("tables/adaptive/speed")["rows"]:
        keys = ("output", "input", "paper", "macs", "forward", "gradient", "gradient_paper")
        yield [names[row["model"]], *(times(row[key]) for key in keys)]


JUMBO = {size: f"Jumbo {size}" for size in ("pico", "nano", "tiny", "small")}
JUMBO |= {f"{size},registers": f"16 registers, {size}" for size in ("nano", "tiny", "small")}
CODES = ("efficientvit_b0", "efficientvit_b1", "shvit_s1", "shvit_s2", "shvit_s3", "mobilenetv4_conv_small")
CODES += ("mobilenetv4_conv_medium", "mobilenetv4_hybrid_medium")
JUMBO |= dict(zip(CODES, CONV, strict=False))


@PAGE.table("model | 224 px | 128 px | paper (RTX 4090), 224 px | 128 px")
def jumbo_speed_cpu():
    speeds: dict = {}
    for row in entry("tables/jumbo/speed")["rows"]:
        if row["table"] != "12":
            key = row["words"], row["pixels"]
            speeds[key] = max(row["speed"], speeds.get(key, 0.0))
    paper = {(words, at): speed for (table, words, at), speed in paper_numbers.speeds().items() if table != "12"}
    for words, name in JUMBO.items():
        ours = [f"{speeds[words, pixels]:.0f}" for pixels in (224, 128)]
        yield [name, *ours, *(hundreds(1000 * paper[words, pixels]) for pixels in (224, 128))]


@PAGE.table("224 px | images per second | paper (RTX 4090) | over 16 registers | paper")
def jumbo_speed_gpu():
    found = {(row["words"], row["folded"]): row for row in entry("tables/jumbo/speed", "h100")["rows"]}
    for (words, folded), row in found.items():
        if (words, True) in found and not folded or words not in JUMBO:
            continue
        note = "" if "mobilenet" not in words else ", folded" if folded else ", not folded"
        over = found.get((f"{words},registers", False))
        ratio = (
            [times(row[key] / over[key]) for key in ("speed", "paper_speed")] if over and words != "pico" else ["", ""]
        )
        yield [JUMBO[words] + note, hundreds(row["speed"]), hundreds(row["paper_speed"]), *ratio]


def replaced(key: str, *parts: str) -> dict[tuple, dict]:
    """The rows of parts of speed.json, by all that makes a cell; none of an entry that there is not."""
    found = json.loads((ROOT / "experiments/tables/depthwise/speed.json").read_text()).get(key, dict(rows=[]))
    return {speed.cell_of(row): row for row in found["rows"] if row["part"] in parts and row["ms"] is not None}


@PAGE.table("module | float32 | paper | float16 | paper")
def half_modules():
    found = replaced("h100_printed", "table_a4")
    for name in ("MhSA", "DW", "Ens+DW"):
        cell = speed.Cell("table_a4", "576 tokens, 16 heads", name, int(name != "MhSA"))
        rows = [found[cell._replace(precision=precision)] for precision in ("float32", "float16")]
        yield [name, *(cell for row in rows for cell in (f"{row['ms']:.3f}", f"{row['paper']}"))]


@PAGE.table(
    "module | 576 tokens, 16 heads | ratio | paper | 256 tokens, 16 heads | ratio | paper | 256 tokens, 12 heads "
    "| ratio | paper",
)
def onnx_modules():
    found = {cell[1:4]: row for cell, row in replaced("main", "table_1", "table_a3").items()}
    for kind, name in KINDS.items():
        cells = []
        for subject in ("576 tokens, 16 heads", "256 tokens, 16 heads", "256 tokens, 12 heads"):
            row = found.get((subject, name, int(kind is not None)))
            ratios = [f"{row[key]:.2f}" if kind else "1" for key in ("ratio", "paper_ratio")] if row else ["", ""]
            cells += [f"{row['ms']:.1f}" if row else "", *ratios]
        yield [name, *cells]


@PAGE.table("ONNX Runtime | blocks | ms | saved, % | paper, ms | saved, %")
def onnx_backbones():
    """Rows are those that the script measures."""
    found = replaced("main", "table_2", "table_4")
    cells = speed.variants("onnx", ("table_2", "table_4"))
    for cell, variant in cells.items():
        row, name = found.get(cell), f"{cell.name} {cell.number}" if cell.number else cell.name
        ours = [f"{row['ms']:,.0f}", f"{row['saved']:.1f}" * bool(cell.number)] if row else ["", ""]
        saved = 100 * (1 - variant.paper / cells[attention(cell)].paper)
        yield [cell.subject, name, *ours, f"{variant.paper}", f"{saved:.1f}" if cell.number else ""]


@PAGE.table("JAX on a GPU | blocks | float32 | TF32 | bfloat16 | float32, 32 images | TF32 | bfloat16 | paper, saved")
def gpu_times():
    """Milliseconds, and in brackets the percentage saved."""
    found = replaced("jax", "table_1", "table_2", "table_4")
    variants = speed.variants("jax", ("table_1", "table_2", "table_4"))
    conditions = speed.conditions_of("table_2", "jax")
    for cell in (cell for cell in variants if cell[4:] == conditions[0]):
        rows = [found.get(cell._replace(precision=precision, batch=batch)) for precision, batch in conditions]
        ours = [f"{row['ms']:.3g}" + f" ({row['saved']:.0f} %)" * bool(cell.number) if row else "" for row in rows]
        saved = 100 * (1 - variants[cell].paper / variants[attention(cell)].paper)
        blocks = f" {cell.number}" if cell.number and cell.part != "table_1" else ""
        yield [cell.subject, cell.name + blocks, *ours, f"{saved:.0f} %" if cell.number else ""]


def attention(cell: speed.Cell) -> speed.Cell:
    """The cell that a cell is compared with."""
    return cell._replace(name=KINDS[None], number=0)


@PAGE.table("set | plain, best | registers | Jumbo | plain, mean | registers | Jumbo")
def series():
    found = {(r["data"], r["kind"]): r for r in entry("tables/jumbo/timeseries")["rows"]}
    paper = timeseries.paper()
    for name in sorted({data for data, _ in found}):
        yield [name, *(f"{found[name, kind][m]:.1f}" for kind in timeseries.KINDS for m in timeseries.MODELS)]
        theirs = [paper["univariate", kind, 8].get(name) for kind in timeseries.KINDS]
        if None not in theirs:
            yield [f"{name}, paper", *(f"{value}" for three in theirs for value in three)]
    ranks = {r["kind"]: r for r in entry("tables/jumbo/timeseries")["ranks"] if r["group"] == "univariate"}
    yield ["mean rank", *(f"{ranks[kind][m]:.2f}" for kind in timeseries.KINDS for m in timeseries.MODELS)]


@PAGE.table("run | 1-NN | 20-NN | linear")
def hematology():
    for run, found in entry("tables/octic/hematology")["results"].items():
        cells = []
        for classifier in ("knn1", "knn20", "linear"):
            figures = found[classifier]
            turned = figures["turned"]
            cells.append(
                f"{percent(figures['accuracy'])}, {percent(turned['accuracy_mean'])}, {100 * turned['consistency']:.0f}"
            )
        yield [run.removeprefix("cells/"), *cells]


def sentences():
    cells = entry("tables/octic/hematology")["results"]
    before, after = (cells[f"cells/I8, {when}"]["linear"]["accuracy"] for when in ("before", "after"))
    yield f"but I8's linear probe, by +{100 * (after - before):.1f} points"
    rows = entry("tables/octic/complexity")["rows"]["h"]
    mib = {name: rows[name]["forward_mib"] for name in ("plain", "D8", "timm")}
    ours, timm = (mib[name] / mib["D8"] for name in ("plain", "timm"))
    yield f"D8 takes {ours:.2f} times less memory than our plain model and {timm:.2f} times less than timm's"
    yield f"over timm's plain ViT-H/14 it is {timm:.2f}x"
    parameters = rows["plain"]["parameters"] * 1e6 / 2**20
    yield f"in float32 and in bfloat16 ({4 * parameters:,.0f} and {2 * parameters:,.0f} MiB)"
    rows = rows_by("tables/adaptive/speed", "main", "model")
    cvt, mvit = (rows[name,]["circular_ms"] / rows[name,]["ordinary_ms"] for name in ("cvt_13", "mvitv2_t"))
    yield f"with circular padding CvT-13 takes {cvt:.2f} and MViTv2-T {mvit:.2f} times as long"
    (swin,) = entry("tables/adaptive/speed", "h100")["rows"]
    yield f"takes {swin['output']:.2f} times as long as the ordinary one, {swin['output_ms']:.1f} ms for "
    yield f"{swin['ordinary_ms']:.1f}, where 1.11 was the target; by input {swin['input']:.2f} times, "
    yield f"{swin['input_ms']:.1f} ms. Temporary memory is {swin['forward']:.2f} times the ordinary model's forward "
    yield f"and {swin['gradient']:.2f} for the gradient"
    shares = [row["changed"] for row in entry("tables/adaptive/masks")["rows"] if "/swin/" in row["model"]]
    yield f"changes the class of {min(shares):.0f} to {max(shares):.0f} % of the pixels"
    speeds = {(row["words"], row["pixels"]): row["speed"] for row in entry("tables/jumbo/speed")["rows"]}
    for pixels in (224, 128):
        sizes = ("nano", "tiny", "small")
        ratios = [speeds[size, pixels] / speeds[f"{size},registers", pixels] for size in sizes]
        words = " of the throughput of 16 registers" if pixels == 224 else ""
        yield f"{min(ratios):.2f} to {max(ratios):.2f}{words} at {pixels} px"
