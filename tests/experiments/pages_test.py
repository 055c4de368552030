"""Figures on the pages of experiments/, to their last digit: from the JSON files, or what their commands print."""

import argparse
import functools
import itertools
import json
import pathlib
import re
import statistics

import pytest

from equivit import summarize
from experiments.benchmarks import gpu
from experiments.studies import several_seeds
from experiments.tables.depthwise import speed
from experiments.tables.depthwise.calls import NAMES as KINDS
from experiments.tables.jumbo import paper_numbers, timeseries
from experiments.tables.octic.complexity import FLAVOURS, PAPER, SIZES

ROOT = pathlib.Path(__file__).parents[2]
PAGES = {name: (ROOT / f"experiments/{name}/README.md").read_text() for name in ("tables", "studies", "benchmarks")}


def entry(name: str, key: str = "main") -> dict:
    """An entry of the JSON file of a script."""
    return json.loads((ROOT / f"experiments/{name}.json").read_text())[key]


def rows_by(name: str, key: str, *fields: str) -> dict:
    """The rows of an entry by some of their fields."""
    return {tuple(row[field] for field in fields): row for row in entry(name, key)["rows"]}


# ---- Cells


def short(value: float) -> str:
    """Three digits, and whole numbers above."""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def hundreds(value: float) -> str:
    return f"{round(value, -2):,.0f}"


def times(value: float) -> str:
    return f"{value:.2f}x"


def percent(value: float) -> str:
    return "100" if value > 0.99999 else f"{100 * value:.1f}"


spread = several_seeds.spread
TASKS = {"forward": "forward", "training": "training step"}


def constant(values: list[float]) -> str:
    """Shares that are 1 with every seed, up to a few pixels, are "100"."""
    return "100" if min(values) > 0.99999 else spread(values)


# ---- Tables: by page and heading, the rows

TABLES = {}


def table(page: str, heading: str, *arguments):
    """Register a function that yields the rows of a table."""

    def register(function):
        TABLES[page, heading] = functools.partial(function, *arguments)
        return function

    return register


@table("benchmarks", "width, tokens, batch | dense | torch | octic | torch | dense / octic")
def block_cpu():
    for row in entry("benchmarks/block_cpu")["rows"]:
        if row["type"] == "float32":
            cells = [short(row[key]) for key in ("dense", "torch_dense", "octic", "torch_octic")]
            yield [f"{row['width']}, {row['tokens']}, {row['batch']}", *cells, f"{row['gain']:.1f}x"]


@table(
    "benchmarks",
    "float32 | timm | plain | H8 | I8 | D8 | Jumbo | registers | plain / timm | D8 / timm",
    ("plain", "H8", "I8", "D8", "Jumbo", "registers"),
    "main",
    "b",
    "b_others",
)
@table(
    "benchmarks",
    "bfloat16 | timm | plain | H8 | I8 | D8 | plain / timm | D8 / timm",
    ("plain", "H8", "I8", "D8"),
    "bfloat16",
    "b_bfloat16",
    "b_others_bfloat16",
)
@table("benchmarks", "float32, Xeon | timm | plain | D8 | plain / timm | D8 / timm", ("plain", "D8"), "xeon")
def model_cpu(models: tuple[str, ...], *entries: str):
    found: dict = {}
    for key in entries:
        for place, row in rows_by("benchmarks/model_cpu", key, "size", "task").items():
            found[place] = row | found.get(place, {})  # the first entry has the ratios
    for size, task in sorted(found, key=lambda place: "tsb".index(place[0][0])):
        row = found[size, task]
        ratios = [times(row[f"{name}_over_timm"]) for name in ("plain", "D8")]
        yield [f"ViT-{size.capitalize()}/16, {TASKS[task]}", *(short(row[m]) for m in ("timm", *models)), *ratios]


@table("benchmarks", "ViT-S/16, measured last | timm | plain | D8 | plain / timm | D8 / timm")
def model_cpu_in_both_types():
    found = rows_by("benchmarks/model_cpu", "s_both_types", "type", "task")
    for type_, (task, words) in itertools.product(("float32", "bfloat16"), TASKS.items()):
        row = found[type_, task]
        ratios = [times(row[f"{name}_over_timm"]) for name in ("plain", "D8")]
        yield [f"{type_}, {words}", *(short(row[name]) for name in ("timm", "plain", "D8")), *ratios]


@table("benchmarks", "operation | XLA | XLA, from eight arrays | kernel | of copy bandwidth | of matmul rate")
def kernels():
    found = rows_by("benchmarks/kernel_speed", "main", "operation", "variant")
    for name in ("d8_gelu", "octic_linear_gelu"):
        cells = [short(found[name, variant]["microseconds"]) for variant in ("xla", "eight", "gpu")]
        kernel = found[name, "gpu"]
        rate = f"{100 * kernel['arithmetic']:.0f} %" if "linear" in name else ""
        yield [f"`{name}`", *cells, f"{100 * kernel['bandwidth']:.0f} %", rate]


CARDS = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")


def by_card(names: list[str]):
    """Milliseconds of forward passes and gradients on each card; a cell that no card has measured is empty."""
    found = json.loads((ROOT / "experiments/benchmarks/gpu.json").read_text())
    for name, policy in (name.partition(", remat ")[::2] for name in names):
        keys = [f"{name}, {task}{policy and f', remat {policy}'}" for task in ("forward", "gradient")]
        cells = [found.get(card, {}).get(key, {}).get("milliseconds") for card in CARDS for key in keys]
        yield [name + (policy and f", remat {policy}"), *("" if ms is None else f"{ms:.3g}" for ms in cells)]


@table("benchmarks", "ms a block | H200, forward | gradient | H100, forward | gradient")
def gpu_blocks():
    cells = [cell.name for cell in gpu.gpu_cells.cells(gpu._options(["--dry"])) if cell.name.startswith("ViT-")]
    names = dict.fromkeys(name.replace(", forward", "").replace(", gradient", "") for name in cells)
    yield from (row for row in by_card(list(names)) if "remat" not in row[0] or any(row[1:]))


@table("benchmarks", "block | pass | blocks | remat | chosen by | kernels | MB | floor, us | MiB, 4 blocks")
def gpu_programs():
    for row in entry("benchmarks/gpu_program")["rows"]:
        cells = [f"{row[key]:,.0f}" for key in ("kernels", "megabytes", "floor_us", "temporary_mib")]
        by = {"auto": "`auto`", "kernels": "`gpu`"}[row["chosen"]]
        yield [row["model"], row["what"], row["blocks"], row["remat"], by, *cells]


@table("benchmarks", "ms, 128 images | H200, forward | gradient | H100, forward | gradient")
def gpu_adaptive():
    yield from by_card([f"{name}, {choice}" for name in gpu.gpu_cells.ADAPTIVE for choice in gpu.gpu_cells.CHOICES])


@table("benchmarks", "block | direction | tokens | dense | octic, XLA alone | octic, kernels | dense / octic, kernels")
def tpu_blocks():
    found = {(r["model"], r["direction"], r["tokens"], r["kind"]): r for r in entry("benchmarks/tpu_compile")["blocks"]}
    for model, direction, tokens in dict.fromkeys(key[:3] for key in found):
        kinds = [found[model, direction, tokens, kind]["kcycles"] for kind in ("dense", "octic, XLA", "octic, kernels")]
        yield [model, direction, str(tokens), *(f"{value:,.0f}" for value in kinds), f"{kinds[0] / kinds[2]:.1f}x"]


@table("benchmarks", "kernel | ViT-L, 196 tokens | 197 | ViT-H, 256 | 257")
def tpu_kernels():
    names = {"octic_attention": "`octic_attention`", "octic_mlp": "`octic_mlp`"}
    for kind in ("dense", "octic"):
        names[f"{kind} attention"] = f"`attention`, {kind}"
        names[f"{kind} attention_backward"] = f"`attention`, {kind}, backward"
    found = {(r["kernel"], r["tokens"]): r for r in entry("benchmarks/tpu_compile")["kernels"]}
    for kernel, name in names.items():
        rows = [found[kernel, tokens] for tokens in (196, 197, 256, 257)]
        yield [name, *(f"{row['kcycles']:.0f} ({row['matrix_kcycles']:.0f})" for row in rows)]


CONV = ("EfficientViT B0", "EfficientViT B1", "SHViT S1", "SHViT S2", "SHViT S3", "MobileNetV4 conv-small")
CONV += ("MobileNetV4 conv-medium", "MobileNetV4 hybrid-medium", "BiXT-Ti/16")


@table("benchmarks", "model | ours | folded | torch | torch, channels last | ours / torch")
def conv_models():
    for name, row in zip(CONV, entry("benchmarks/conv_models_cpu")["rows"], strict=True):
        cells = [short(row[key]) for key in ("ours", "folded", "contiguous", "channels_last")]
        yield [name, *cells, times(row["over_peer"])]


@table("benchmarks", "family | step | student | teacher | heads and losses | step / parts | step / plain")
def dinov2_step():
    for row in entry("benchmarks/dinov2_step")["step"]:
        cells = [short(row[key]) for key in ("step", "student", "teacher", "losses")]
        yield [row["family"], *cells, f"{row['over_parts']:.2f}", f"{row['over_plain']:.2f}"]


@table("benchmarks", "width, tokens | k = 3 | 5 | 7 | 13")
def depthwise_module():
    found = rows_by("benchmarks/depthwise_module", "main", "width", "tokens", "kernel")
    for width, tokens in dict.fromkeys(key[:2] for key in found):
        ratios = [found.get((width, tokens, k), {}).get("forward_over_torch") for k in (3, 5, 7, 13)]
        yield [f"{width}, {tokens}", *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


@table("tables", "table | model | M parameters | paper | GFLOPs | paper")
def jumbo_costs():
    for row in entry("tables/jumbo/costs")["rows"]:
        numbers = (
            f"{row['parameters']:.2f}",
            f"{row['paper_parameters']}",
            f"{row['gflops']:.2f}",
            f"{row['paper_gflops']}",
        )
        yield [row["table"], row["model"], *numbers]


@table("tables", "forward | images per second | over plain | paper (A100) | memory, MiB | paper")
def complexity_forward():
    rows, paper = entry("tables/octic/complexity")["rows"]["h"], PAPER["h"]
    for name in ("plain", "H8", "D8", "timm"):
        row, theirs = rows[name], paper.get(name)
        ratio = "" if name == "plain" else times(row["forward_ratio"])
        theirs_ratio = times(theirs["ratio_paper"]) if theirs and name != "plain" else ""
        numbers = [f"{row['forward_throughput']:,.0f}", ratio, theirs_ratio, f"{row['forward_mib']:,.0f}"]
        yield [f"{name}, plain" if name == "timm" else name, *numbers, f"{theirs['mib_paper']:,}" if theirs else ""]


@table("tables", "training step | images per second | over plain | memory, MiB")
def complexity_training():
    rows = entry("tables/octic/complexity", "training")["rows"]["h"]
    for name in ("plain", "H8", "D8"):
        ratio = "" if name == "plain" else times(rows[name]["train_ratio"])
        yield [name, f"{rows[name]['train_throughput']:,.0f}", ratio, f"{rows[name]['train_mib']:,.0f}"]


@table("tables", "model | plain, images/s | D8 | throughput | paper (A100) | FLOPs | paper | memory | paper")
def scaling():
    found = entry("tables/octic/scaling")["rows"] | entry("tables/octic/scaling", "h_g_e")["rows"]
    for key, patch in (("l", 16), ("h", 14), ("g", 16), ("22b", 16)):
        row = found[key]
        unit = ", one block" if row["unit"] == "one block" else ""
        cells = [f"{row['plain_per_second']:,.0f}", f"{row['octic_per_second']:,.0f}"]
        for figure in ("throughput", "flops", "memory"):
            cells += [times(row[figure]), times(row[f"{figure}_paper"])]
        yield [f"{row['model']}/{patch}{unit}", *cells]


@table("tables", "model | time | by input | paper (RTX 5000) | multiply-adds | memory, forward | gradient | paper")
def adaptive_speed():
    names = {"swin_t": "Swin-T", "swinv2_t": "SwinV2-T", "cvt_13": "CvT-13", "mvitv2_t": "MViTv2-T"}
    for name, row in entry("tables/adaptive/speed")["rows"].items():
        keys = ("output", "input", "paper", "macs", "forward", "gradient", "gradient_paper")
        yield [names[name], *(times(row[key]) for key in keys)]


JUMBO = {size: f"Jumbo {size}" for size in ("pico", "nano", "tiny", "small")}
JUMBO |= {f"{size},registers": f"16 registers, {size}" for size in ("nano", "tiny", "small")}
CODES = ("efficientvit_b0", "efficientvit_b1", "shvit_s1", "shvit_s2", "shvit_s3", "mobilenetv4_conv_small")
CODES += ("mobilenetv4_conv_medium", "mobilenetv4_hybrid_medium")
JUMBO |= dict(zip(CODES, CONV, strict=False))


@table("tables", "model | 224 px | 128 px | paper (RTX 4090), 224 px | 128 px")
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


@table("tables", "224 px | images per second | paper (RTX 4090) | over 16 registers | paper")
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


@table("tables", "module | float32 | paper | float16 | paper")
def half_modules():
    found = replaced("h100_printed", "table_a4")
    for name in ("MhSA", "DW", "Ens+DW"):
        cell = speed.Cell("table_a4", "576 tokens, 16 heads", name, int(name != "MhSA"))
        rows = [found[cell._replace(precision=precision)] for precision in ("float32", "float16")]
        yield [name, *(cell for row in rows for cell in (f"{row['ms']:.3f}", f"{row['paper']}"))]


@table(
    "tables",
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


@table("tables", "ONNX Runtime | blocks | ms | saved, % | paper, ms | saved, %")
def onnx_backbones():
    """Rows are those that the script measures; cells stay empty until it has."""
    found = replaced("main", "table_2", "table_4")
    cells = speed.variants(argparse.Namespace(only=["table_2", "table_4"], runtime="onnx"))
    for cell, variant in cells.items():
        row, name = found.get(cell), f"{cell.name} {cell.number}" if cell.number else cell.name
        ours = [f"{row['ms']:,.0f}", f"{row['saved']:.1f}" * bool(cell.number)] if row else ["", ""]
        saved = 100 * (1 - variant.paper / cells[attention(cell)].paper)
        yield [cell.subject, name, *ours, f"{variant.paper}", f"{saved:.1f}" if cell.number else ""]


@table(
    "tables", "JAX on a GPU | blocks | float32 | TF32 | bfloat16 | float32, 32 images | TF32 | bfloat16 | paper, saved"
)
def gpu_times():
    """Milliseconds, and in brackets the percentage saved."""
    found = replaced("jax", "table_1", "table_2", "table_4")
    variants = speed.variants(argparse.Namespace(only=["table_1", "table_2", "table_4"], runtime="jax"))
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


@table("tables", "set | plain, best | registers | Jumbo | plain, mean | registers | Jumbo")
def series():
    found = {(r["data"], r["kind"]): r for r in entry("tables/jumbo/timeseries")["rows"]}
    paper = timeseries.paper()
    for name in sorted({data for data, _ in found}):
        yield [name, *(f"{found[name, kind][m]:.1f}" for kind in timeseries.KINDS for m in timeseries.MODELS)]
        theirs = [paper["univariate", kind, 8].get(name) for kind in timeseries.KINDS]
        if None not in theirs:
            yield [f"{name}, paper", *(f"{value}" for three in theirs for value in three)]
    ranks = {r["kind"]: r for r in entry("tables/jumbo/timeseries")["ranks"] if r["group"] == "all"}
    yield ["mean rank", *(f"{ranks[kind][m]:.2f}" for kind in timeseries.KINDS for m in timeseries.MODELS)]


@table("tables", "run | 1-NN | 20-NN | linear")
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


@table("studies", "digits | upright | mean of eight orientations | never changes", "digits")
@table("studies", "CIFAR-10 | upright | mean of eight orientations | never changes", "cifar10")
@table("studies", "blood cells | upright | mean of eight orientations | never changes", "blood_cells")
def octic_small_images(data: str):
    rows = entry("studies/octic_small_images", data)["rows"]
    for family in ("plain", "H8", "I8", "D8"):
        row = {key: value.get("values") for key, value in rows[family].items() if isinstance(value, dict)}
        never = statistics.fmean(row["eval/orientation/consistency"])
        figures = [row["eval/accuracy/top1"], row["eval/orientation/accuracy_mean"]]
        yield [family, *map(spread, figures), f"{100 * never:.0f} %"]


@table("studies", "equal | model | width | M multiply-adds | step over plain's | upright | eight orientations")
def equal_compute():
    sets = [("blood cells", "blood_cells", "main"), ("CIFAR-10, 2,500 steps", "cifar10", "cifar10")]
    for title, data, key in sets:
        for rule in (None, "multiply-adds", "step time"):
            for row in entry("studies/octic_equal_compute", key)["rows"]:
                if (row["data"], row["rule"]) == (data, rule):
                    label = {None: title, "multiply-adds": "equal multiply-adds"}.get(rule, "equal step time")
                    ratio = "1" if rule is None else f"{row['time_ratio']:.2f}"
                    numbers = [str(row["width"]), f"{row['macs'] / 1e6:.2f}", ratio]
                    yield [label, row["family"], *numbers, spread(row["upright"]), spread(row["eight"])]


@table("studies", "width | 96 | 128 | 192")
def jumbo_small_images():
    found = entry("studies/jumbo_small_images")
    for model, name in (("plain", "plain"), ("registers", "registers"), ("jumbo", "Jumbo")):
        cells = [spread(found["rows"][f"{model} {w}"]["eval/accuracy/top1"]["values"]) for w in (96, 128, 192)]
        yield [name, *cells]
    gains = [found["gains"][f"jumbo - registers, {width}"] for width in (96, 128, 192)]
    cells = [f"{100 * gain['gap']:.1f} ({100 * gain['standard_error']:.1f})" for gain in gains]
    yield ["Jumbo over registers (standard error)", *cells]


@table("studies", "model | images/s | step, ms | equal epochs | equal time (epochs)")
def jumbo_baselines():
    names = dict(jumbo="Jumbo", registers="registers", mobilenetv4="MobileNetV4 conv-small", shvit="SHViT S1")
    names |= dict(efficientvit="EfficientViT-B0", bixt="BiXT")
    for model, row in entry("studies/jumbo_baselines")["rows"].items():
        equal = f"{spread(row['equal time'])} ({row['equal time, epochs']:.2f})"
        numbers = [f"{row['speed']:,.0f}", f"{1e3 * row['step_seconds']:.0f}", spread(row["equal epochs"])]
        yield [names[model], *numbers, "the same (2.00)" if model == "jumbo" else equal]


ADAPTIVE = {"adaptive": "adaptive", "by input": "adaptive, by input", "no token": "without adaptive patches"}
ADAPTIVE |= {"no window": "without adaptive windows", "no merge": "without adaptive merging"}
ADAPTIVE |= {"da": "trained on circular shifts (DA)", "adapted 0": "trained, then adapted"}
ADAPTIVE |= {"adapted 1": "and tuned for 1 epoch", "adapted 2": "and tuned for 2 epochs"}


@table("studies", "model | top-1 | C-Cons | S-Cons")
def adaptive_small_images():
    families = dict(swin="Swin", swinv2="SwinV2", cvt="CvT", mvitv2="MViTv2")
    rows = entry("studies/adaptive_small_images")["rows"]
    for name in sorted(rows, key=lambda name: list(families).index(name.split(" ")[0])):
        (family, _, variant), row = name.partition(" "), rows[name]
        label = f"... {ADAPTIVE[variant]}" if variant else families[family]
        yield [label, spread(row["top1"]), constant(row["circular"]), spread(row["zeros"])]


@table("studies", "model | upright | eight orientations | same in eight | never changes | of the decided")
def adaptive_p4m():
    for name, row in entry("studies/adaptive_p4m")["rows"].items():
        counts = [f"{one:.0f}/{all_:.0f}" for one, all_ in zip(row["identical"], row["decided"], strict=True)]
        cells = [spread(row["upright"]), spread(row["eight"]), constant(row["turned"]), constant(row["constant"])]
        yield [name, *cells, ", ".join(counts)]


@table("studies", "backbone, decoder | mean IoU | mASCC | mean IoU of eight | same in eight")
def camvid():
    names = dict(plain="plain ViT, linear", D8="D8 ViT, linear", swin="Swin, UperNet")
    names |= {"adaptive": "adaptive Swin, equivariant UperNet", "adaptive unpool": "... with unpooling"}
    for name, row in entry("studies/segmentation_camvid")["rows"].items():
        cells = [spread(row["miou"]), constant(row["mascc"]), spread(row["eight"]), constant(row["same"])]
        yield [names[name], *cells]


@table(
    "studies",
    "blood cells | probe at start | probe | k-NN at start | k-NN | k-NN, eight | same in eight | entropies",
    "blood_cells",
)
@table(
    "studies",
    "CIFAR-10 | probe at start | probe | k-NN at start | k-NN | k-NN, eight | same in eight | entropies",
    "cifar10",
)
def dinov2(data: str):
    rows = entry("studies/dinov2_small_images", data)["rows"]
    for family in ("plain", "H8", "I8"):
        row = rows[family]
        keys = ("start linear_probe/top1", "linear_probe/top1", "start knn/top1", "knn/top1", "knn/accuracy_mean")
        cells = [spread(row[key]) for key in keys] + [constant(row["knn/consistency"])]
        entropies = (100 * statistics.fmean(row[f"classes/{key}"]) for key in ("rows", "mean"))
        yield [family, *cells, ", ".join(f"{value:.0f}" if value < 99.45 else f"{value:.1f}" for value in entropies)]


@table(
    "studies",
    "variant | rank: plain | registers | Jumbo | accuracy: plain | registers | Jumbo | Jumbo - plain "
    "| Jumbo - registers",
)
def public_series():
    names = {"best": "best run", "mean": "mean of the runs"}
    for row in entry("studies/timeseries_public")["rows"]:
        ranks = [statistics.fmean(values) for values in zip(*row["ranks"].values(), strict=True)]
        cells = [f"{rank:.2f}" for rank in ranks] + [spread(values) for values in row["accuracy"].values()]
        for gain in row["gains"].values():
            cells.append(f"{100 * gain['gap']:+.2f} ± {100 * gain['standard_error']:.2f}")
        yield [f"{row['variant']}, {names[row['kind']]}", *cells]


@table("studies", "option | plain: loss | gradient | step | I8: loss | gradient | step")
def quirks():
    found = {
        family: {r["option"]: r for r in rows} for family, rows in entry("studies/dinov2_quirks")["families"].items()
    }
    for option in dict.fromkeys(option for rows in found.values() for option in rows):
        cells = []
        for rows in found.values():
            row = rows.get(option)
            change = f"{row['change']:.2g}" if row and row["change"] else "0"
            cells += [f"{row['loss']:.3f}", f"{row['gradient']:.1f}", change] if row else ["", "", ""]
        yield [option, *cells]


@table(
    "studies",
    "model | equal bits, float32 | bfloat16 | float64, no anchor | smallest gap | ordinary model | class changed",
)
def exactness():
    for name, row in entry("studies/adaptive_exactness")["rows"].items():
        equal = [f"{row[f'{dtype}_equal']:.0f} %" for dtype in ("float32", "bfloat16")]
        off = [f"{row[dtype]:.1e} off" for dtype in ("float32", "bfloat16")]
        cells = [*(off if name == "D8 ViT" else equal), f"{row['float64']:.1e}", f"{row['gap']:.1e}"]
        yield [name, *cells, f"{row['ordinary']:.2f}", f"{row['changed']:.1f} %"]


@table("studies", "family | float64 | float32 | bfloat16")
def equivariance():
    for row in entry("studies/equivariance_errors")["rows"]:
        name = f"{row['family']} (field)" if row["measured"] == "field" else row["family"]
        yield [name, *(f"{row[dtype]:.1e}" if row[dtype] else "0" for dtype in ("float64", "float32", "bfloat16"))]


@table("studies", "row | CIFAR-10, 2 epochs | blood cells, 9 epochs | CamVid, 10 epochs")
def depthwise_small():
    sets = [entry("studies/depthwise_small_images", data)["rows"] for data in ("cifar10", "blood_cells", "camvid")]
    names = {"attention": "stage 2 with attention", "lowest": "lowest Sigma", "highest": "highest Sigma"}
    names |= {"random": "random blocks", "damage": "least damage", "least squares": "lowest, taps by least squares"}
    names |= {"one-stage": "lowest, one-stage", "frozen": "lowest, frozen", "ens_dw": "lowest, Ens+DW"}
    for row in sets[0]:
        yield [names.get(row, row), *(spread(rows[row]) if row in rows else "" for rows in sets)]


COSTS = "model | M parameters | paper | GFLOPs, fused | unfused | paper"
PARITY = "reference files | number | largest deviation"
COMMANDS = ("table, figure | subject | command",)


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """The tables of a page by their headings: rows of cells."""
    found = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", PAGES[page], re.MULTILINE):
        lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        heading = " | ".join(lines[0])
        assert heading not in found or heading in COMMANDS, heading
        found[heading] = lines[2:]
    return found


@pytest.mark.parametrize(("page", "heading"), TABLES)
def test_a_table_has_the_figures_of_its_json(page, heading):
    assert tables_of(page)[heading] == list(TABLES[page, heading]())


def test_every_table_is_checked():
    for page in PAGES:
        known = {heading for place, heading in TABLES if place == page} | {COSTS, PARITY, *COMMANDS}
        assert set(tables_of(page)) <= known, page


# ---- Figures in sentences


def tables_sentences():
    rows = entry("tables/octic/complexity")["rows"]["h"]
    mib = {name: rows[name]["forward_mib"] for name in ("plain", "D8", "timm")}
    ours, timm = (mib[name] / mib["D8"] for name in ("plain", "timm"))
    yield f"D8 takes {ours:.2f} times less memory than our plain model and {timm:.2f} times less than timm's"
    yield f"over timm's plain ViT-H/14 it is {timm:.2f}x"
    parameters = rows["plain"]["parameters"] * 1e6 / 2**20
    yield f"in float32 and in bfloat16 ({4 * parameters:,.0f} and {2 * parameters:,.0f} MiB)"
    rows = entry("tables/adaptive/speed")["rows"]
    cvt, mvit = (rows[name]["circular_ms"] / rows[name]["ordinary_ms"] for name in ("cvt_13", "mvitv2_t"))
    yield f"with circular padding CvT-13 takes {cvt:.2f} and MViTv2-T {mvit:.2f} times as long"
    swin = entry("tables/adaptive/speed", "h100")["rows"]["swin_t"]
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
    saved = replaced("main", "table_2")[speed.Cell("table_2", "dinov2_l14", "DW", 6)]["saved"]
    yield f"6 of 24 blocks DW, without a row in the paper, save {saved:.1f} % of the time"


def benchmarks_sentences():
    rows = entry("benchmarks/kernel_speed")["rows"]
    worst = max(row["error"] for row in rows if row["variant"] == "gpu")
    yield f"results are within {100 * worst:.2f} % of the reference in float32"
    found = {(row["kernel"], row["tokens"]): row["kcycles"] for row in entry("benchmarks/tpu_compile")["kernels"]}
    ratios = [found["octic attention", n] / found["dense attention", n] for n in (196, 197, 256, 257)]
    yield "{:.2f} and {:.2f} times as long as dense attention for ViT-L, {:.2f} and {:.2f} times for".format(*ratios)
    step = entry("benchmarks/dinov2_step")
    yield "take {:.2f} (dense) and {:.2f} (octic) of the time".format(*(row["ratio"] for row in step["subsets"]))
    yield f"Heads and losses keep {step['head_arrays']:.2f} arrays"
    cpu = [row["speed_up"] for row in entry("benchmarks/masked_autoencoding")["rows"]]
    yield f"takes {cpu[0]:.2f} times less than one that encodes all patches"
    yield f"A decoder of one block gives {cpu[1]:.2f}; a Jumbo token {cpu[2]:.2f} and {cpu[3]:.2f}"
    for row, words in zip(entry("benchmarks/masked_autoencoding", "h100")["rows"], (" less", ""), strict=True):
        ms = f"{row['masked_ms']:.1f}{' ms' * bool(words)} for {row['all_ms']:.0f}"
        yield f"{row['speed_up']:.2f} times{words} ({ms})"
    found = rows_by("benchmarks/compile_time", "main", "family", "remat", "depth")
    ratios = [found[f, r, 48]["cpu_seconds"] / found[f, r, 2]["cpu_seconds"] for f, r, d in found if d == 2]
    yield f"{min(ratios):.2f} to {max(ratios):.2f} times the processor time of one of 2"
    crops = [row["ratio"] for row in entry("benchmarks/crops_rate")["rows"]]
    yield f"run at {crops[0]:.2f} times the rate of Pillow alone, without colours at {crops[1]:.2f} times"
    seconds = entry("benchmarks/segmentation_costs")["seconds"]
    yield f"takes {seconds['evaluation'] / seconds['forward passes']:.2f} times the bare forward passes"
    yield f"the confusion matrix takes {100 * seconds['counting'] / seconds['training step']:.2f} % of a training step"
    yield f"takes {entry('benchmarks/sigma_cost')['ratio']:.2f} times plain forward passes"
    rows = entry("benchmarks/depthwise_module", "xeon")["rows"]
    for key, words in (("forward_over_torch", ""), ("maps_over_torch", " times as long as torch's")):
        ratios = [row[key] for row in rows]
        yield f"{min(ratios):.2f} to {max(ratios):.2f}{words}"


def studies_sentences():
    def gap(name, gain, key="main", digits=1):
        return f"{100 * abs(entry(f'studies/{name}', key)['gains'][gain]['gap']):.{digits}f}"

    def error(name, gain, key="main"):
        return f"{100 * entry(f'studies/{name}', key)['gains'][gain]['standard_error']:.1f}"

    small = "adaptive_small_images"
    gains = {model: f"{model} adaptive - {model}, top1" for model in ("swin", "swinv2", "mvitv2", "cvt")}
    yield f"by {gap(small, gains['swin'])} points (standard error {error(small, gains['swin'])}) for Swin"
    yield f"{gap(small, gains['swinv2'])} ({error(small, gains['swinv2'])}) for SwinV2"
    yield f"{gap(small, gains['mvitv2'])} ({error(small, gains['mvitv2'])}) for MViTv2"
    yield f"{gap(small, gains['cvt'])} ({error(small, gains['cvt'])}, not resolved) for CvT"
    p4m = "p4m - plain, upright"
    yield f"{gap('adaptive_p4m', p4m)} points below plain (standard error {error('adaptive_p4m', p4m)})"
    name, pairs = "segmentation_camvid", ("D8 - plain, miou", "D8 - plain, eight", "adaptive - swin, miou")
    yield f"D8 is {gap(name, pairs[0])} points below plain (standard error {error(name, pairs[0])}, not resolved)"
    yield f"and {gap(name, pairs[1])} above it over the eight orientations"
    yield f"The adaptive Swin is {gap(name, pairs[2])} points ({error(name, pairs[2])}) below the ordinary one"
    pair = "equal epochs: jumbo - registers"
    yield f"Jumbo is {gap('jumbo_baselines', pair)} points ahead of registers (standard error "
    yield f"{error('jumbo_baselines', pair)}), not resolved"
    yield f"{gap('jumbo_baselines', 'equal time: jumbo - mobilenetv4')} points behind Jumbo, resolved"
    octic = entry("studies/jumbo_small_images", "octic")["rows"]
    values = [
        spread(octic[f"{model} 96"]["eval/accuracy/top1"]["values"]) for model in ("octic", "invariant", "steerable")
    ]
    yield "has {}, with an invariant Jumbo token {}, with a steerable one {}".format(*values)
    for data in ("blood_cells", "cifar10"):
        yield f"{100 * entry('studies/dinov2_small_images', data)['pixels']:.1f}"
    for data, words in (
        ("cifar10", "{} points on CIFAR-10 (standard error {})"),
        ("blood_cells", "{} on blood cells ({})"),
    ):
        pair = "lowest - highest"
        yield words.format(gap("depthwise_small_images", pair, data), error("depthwise_small_images", pair, data))
    name = "octic_equal_compute"
    for data, key, model in (("blood_cells", "main", "I8"), ("cifar10", "cifar10", "H8")):
        yield f"{gap(name, f'{data}, upright: {model}, equal step time, minus plain', key)} "


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_the_figures_of_the_json(page):
    for sentence in globals()[f"{page}_sentences"]():
        assert sentence in PAGES[page], sentence


# ---- Figures of commands, and what the pages say in common


@pytest.mark.parametrize("size", ["l", "h"])
@pytest.mark.parametrize("family", ["plain", "H8", "I8", "D8", "H2", "D2"])
def test_costs_are_those_that_the_command_prints(size, family, capsys):
    title, variant, _ = SIZES[size]
    model = f"--model={FLAVOURS[family]}_{variant}"
    assert summarize.main([model, f"--model.family={family}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    parameters, paper = (PAPER[size][family][f"{key}_paper"] for key in ("parameters", "flops"))
    millions, fused, unfused = found["parameters"] / 1e6, found["fvcore"] / 1e9, found["fvcore_unfused"] / 1e9
    expected = [f"{millions:.2f}", f"{parameters:.1f}", f"{fused:.2f}", f"{unfused:.2f}", f"{paper:.1f}"]
    assert [title if family == "plain" else f"{family}({title})", *expected] in tables_of("tables")[COSTS]


def test_pages_agree_on_what_has_run_where():
    """And on what agrees with the official codes."""
    pages = [(ROOT / page / "README.md").read_text() for page in ("", "configs")]
    run = "Tested on one H100: the quickstart, forward passes and single training steps; no recipe has been run in full"
    assert all(run in page and "Not yet run on a TPU." in page for page in pages)
    assert "no released checkpoint has been loaded" in pages[0]
    assert "No released checkpoint has been loaded" in PAGES["studies"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_read_in_ten_minutes(page):
    assert len(re.sub(r"^\|.*\|$", "", PAGES[page], flags=re.MULTILINE).split()) <= 2200
