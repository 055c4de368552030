"""Figures of experiments/benchmarks/README.md."""

import itertools
import json

from experiments.benchmarks import gpu
from tests.experiments.pages.figures import CONV, ROOT, Page, entry, rows_by, short, times

PAGE = Page("benchmarks/README")
TASKS = {"forward": "forward", "training": "training step"}


@PAGE.table("width, tokens, batch | dense | torch | octic | torch | dense / octic")
def block_cpu():
    for row in entry("benchmarks/block_cpu")["rows"]:
        if row["type"] == "float32":
            cells = [short(row[key]) for key in ("dense", "torch_dense", "octic", "torch_octic")]
            yield [f"{row['width']}, {row['tokens']}, {row['batch']}", *cells, f"{row['gain']:.1f}x"]


@PAGE.table(
    "float32 | timm | plain | H8 | I8 | D8 | Jumbo | registers | plain / timm | D8 / timm",
    ("plain", "H8", "I8", "D8", "Jumbo", "registers"),
    "main",
    "b",
    "b_others",
)
@PAGE.table(
    "bfloat16 | timm | plain | H8 | I8 | D8 | plain / timm | D8 / timm",
    ("plain", "H8", "I8", "D8"),
    "bfloat16",
    "b_bfloat16",
    "b_others_bfloat16",
)
@PAGE.table("float32, Xeon | timm | plain | D8 | plain / timm | D8 / timm", ("plain", "D8"), "xeon")
def model_cpu(models: tuple[str, ...], *entries: str):
    found: dict = {}
    for key in entries:
        for place, row in rows_by("benchmarks/model_cpu", key, "size", "task").items():
            found[place] = row | found.get(place, {})  # the first entry has the ratios
    for size, task in sorted(found, key=lambda place: "tsb".index(place[0][0])):
        row = found[size, task]
        ratios = [times(row[f"{name}_over_timm"]) for name in ("plain", "D8")]
        yield [f"ViT-{size.capitalize()}/16, {TASKS[task]}", *(short(row[m]) for m in ("timm", *models)), *ratios]


@PAGE.table("ViT-S/16, measured last | timm | plain | D8 | plain / timm | D8 / timm")
def model_cpu_in_both_types():
    found = rows_by("benchmarks/model_cpu", "s_both_types", "type", "task")
    for type_, (task, words) in itertools.product(("float32", "bfloat16"), TASKS.items()):
        row = found[type_, task]
        ratios = [times(row[f"{name}_over_timm"]) for name in ("plain", "D8")]
        yield [f"{type_}, {words}", *(short(row[name]) for name in ("timm", "plain", "D8")), *ratios]


@PAGE.table("operation | XLA | XLA, from eight arrays | kernel | of copy bandwidth | of matmul rate")
def kernels():
    found = rows_by("benchmarks/kernel_speed", "h100", "operation", "variant")
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


@PAGE.table("ms a block | H200, forward | gradient | H100, forward | gradient")
def gpu_blocks():
    cells = [cell.name for cell in gpu.gpu_cells.cells(gpu._options(["--dry"])) if cell.name.startswith("ViT-")]
    names = dict.fromkeys(name.replace(", forward", "").replace(", gradient", "") for name in cells)
    yield from (row for row in by_card(list(names)) if "remat" not in row[0] or any(row[1:]))


@PAGE.table("block | pass | blocks | remat | chosen by | kernels | MB | floor, us | MiB, 4 blocks")
def gpu_programs():
    for row in entry("benchmarks/gpu_program")["rows"]:
        cells = [f"{row[key]:,.0f}" for key in ("kernels", "megabytes", "floor_us", "temporary_mib")]
        by = {"auto": "`auto`", "kernels": "`gpu`"}[row["chosen"]]
        yield [row["model"], row["what"], row["blocks"], row["remat"], by, *cells]


@PAGE.table("floor, ms | ordinary | adaptive | by input | adaptive / ordinary | by input / ordinary")
def adaptive_programs():
    found = rows_by("benchmarks/adaptive_program", "main", "model", "what", "form")
    for model, what in dict.fromkeys(key[:2] for key in found):
        ordinary, *others = (found[model, what, form] for form in ("ordinary", "adaptive", "by input"))
        floors = [f"{row['floor_ms']:.2f}" for row in (ordinary, *others)]
        yield [f"{model}, {what}", *floors, *(times(row["ratio"]) for row in others)]


@PAGE.table("ms, 128 images | H200, forward | gradient | H100, forward | gradient")
def gpu_adaptive():
    yield from by_card([f"{name}, {choice}" for name in gpu.gpu_cells.ADAPTIVE for choice in gpu.gpu_cells.CHOICES])


@PAGE.table("block | direction | tokens | dense | octic, XLA alone | octic, kernels | dense / octic, kernels")
def tpu_blocks():
    found = {(r["model"], r["direction"], r["tokens"], r["kind"]): r for r in entry("benchmarks/tpu_compile")["blocks"]}
    for model, direction, tokens in dict.fromkeys(key[:3] for key in found):
        kinds = [found[model, direction, tokens, kind]["kcycles"] for kind in ("dense", "octic, XLA", "octic, kernels")]
        yield [model, direction, str(tokens), *(f"{value:,.0f}" for value in kinds), f"{kinds[0] / kinds[2]:.1f}x"]


@PAGE.table("thousands of cycles | ordinary | adaptive | by input | adaptive / ordinary | by input / ordinary")
def adaptive_on_tpu():
    found = rows_by("benchmarks/adaptive_tpu", "main", "model", "form")
    for model in dict.fromkeys(key[0] for key in found):
        ordinary, *others = (found[model, form]["kcycles"] for form in ("ordinary", "adaptive", "by input"))
        cells = [f"{value:,.0f}" for value in (ordinary, *others)]
        yield [model, *cells, *(times(other / ordinary) for other in others)]


@PAGE.table("kernel | ViT-L, 196 tokens | 197 | ViT-H, 256 | 257")
def tpu_kernels():
    names = {"octic_attention": "`octic_attention`", "octic_mlp": "`octic_mlp`"}
    for kind in ("dense", "octic"):
        names[f"{kind} attention"] = f"`attention`, {kind}"
        names[f"{kind} attention_backward"] = f"`attention`, {kind}, backward"
    found = {(r["kernel"], r["tokens"]): r for r in entry("benchmarks/tpu_compile")["kernels"]}
    for kernel, name in names.items():
        rows = [found[kernel, tokens] for tokens in (196, 197, 256, 257)]
        yield [name, *(f"{row['kcycles']:.0f} ({row['matrix_kcycles']:.0f})" for row in rows)]


@PAGE.table("model | ours | folded | torch | torch, channels last | ours / torch")
def conv_models():
    for name, row in zip(CONV, entry("benchmarks/conv_models_cpu")["rows"], strict=True):
        cells = [short(row[key]) for key in ("ours", "folded", "contiguous", "channels_last")]
        yield [name, *cells, times(row["over_peer"])]


@PAGE.table("family | step | student | teacher | heads and losses | step / parts | step / plain")
def dinov2_step():
    for row in entry("benchmarks/dinov2_step")["step"]:
        cells = [short(row[key]) for key in ("step", "student", "teacher", "losses")]
        yield [row["family"], *cells, f"{row['over_parts']:.2f}", f"{row['over_plain']:.2f}"]


@PAGE.table("width, tokens | k = 3 | 5 | 7 | 13")
def depthwise_module():
    found = rows_by("benchmarks/depthwise_module", "main", "width", "tokens", "kernel")
    for width, tokens in dict.fromkeys(key[:2] for key in found):
        ratios = [found.get((width, tokens, k), {}).get("forward_over_torch") for k in (3, 5, 7, 13)]
        yield [f"{width}, {tokens}", *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def sentences():
    rows = entry("benchmarks/kernel_speed", "h100")["rows"]
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
