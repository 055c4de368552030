"""Parameters, throughput, FLOPs and peak memory of plain, H8, I8, D8, H2 and D2: Table 2 and Figure 1 of octic ViTs.

    python -m experiments tables.octic.complexity --models=h  # on a GPU; at most 7 minutes (--minutes)
    python -m experiments tables.octic.complexity --models=l
    python -m experiments tables.octic.complexity --quick --models=l  # tiny models on any machine; tries the script

Forward passes and training steps (configs/octic_h.py: mixing, gradient, LAMB, averaged weights) of 64 images of 224 px,
bfloat16 arithmetic on float32 parameters (--precision=bfloat16: bfloat16 parameters in the forward pass); every model
in turn with the plain one.  Activations of a training step are kept where they fit, else every model recomputes its
blocks (`remat` in the JSON).  With torch, timm and a GPU, timm's DeiT III under `torch.compile` with bfloat16 autocast
is timed, too.

The paper's figures are forward passes on one A100-80GB with `torch.compile` (Appendix D.4).  Its I8 and D8 have other
invariantizations than the zoo's, hence other parameter counts.  Memory is what the compiled program needs; for timm, as
in the paper, the peak of PyTorch's allocator.  Accuracies are the paper's.

Claims, on a GPU (set for an H200): H8(ViT-H/14) at least 1.5 times plain in the forward pass, D8(ViT-H/14) at least 2.5
times in the training step, plain not slower than timm.
"""

import os

# A training step of ViT-H wants more than the three quarters of the device that are usual; timm has the rest.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")

import argparse
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure

from equivit import costs
from equivit.models import zoo
from experiments import compiled_models, findings, flags, machine, timing
from experiments.findings import Claim

SIZES = {"h": ("ViT-H/14", "h14", "deit3_huge_patch14_224"), "l": ("ViT-L/16", "l16", "deit3_large_patch16_224")}
FLAVOURS = {"plain": "vit", "D8": "octic_vit", "H8": "octic_vit", "I8": "octic_vit", "H2": "flip_vit", "D2": "flip_vit"}
COLUMNS = ("parameters", "throughput", "flops", "mib", "accuracy", "rotation")
# Table 2: millions, images per second, G multiply-adds, MiB, top-1 in percent, its change on rotated images.
PAPER = {
    "h": {
        "plain": (632.1, 526, 167.8, 3285, 84.6, -12.6),
        "H2": (474.2, 624, 127.4, 2734, 85.0, None),
        "I8": (362.3, 621, 104.0, 2249, 84.7, 0.0),
        "H8": (355.8, 629, 102.3, 2223, 85.0, -13.4),
        "D2": (316.1, 734, 87.3, 2100, 84.4, None),
        "D8": (80.5, 830, 36.6, 1141, 82.0, 0.0),
    },
    "l": {
        "plain": (304.4, 1317, 61.9, 1557, 84.2, -13.4),
        "H2": (228.3, 1561, 46.9, 1458, 84.5, None),
        "I8": (175.5, 1511, 38.5, 1210, 84.0, 0.0),
        "H8": (171.3, 1538, 37.7, 1194, 84.5, -13.6),
        "D2": (152.2, 1753, 32.2, 1173, 83.4, None),
        "D8": (39.2, 1760, 13.5, 689, 79.5, 0.0),
    },
}
# (size, family, phase) -> ratio to plain.
TARGETS = {("h", "H8", "forward"): 1.5, ("h", "D8", "train"): 2.5}
PEER = "timm"
TINY = dict(width=96, depth=2, num_heads=3, mlp_dim=128, image_size=(56, 56), patch_size=14, num_classes=10)


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows = timing.Budget(options.minutes), {}
    if "train" in options.phases and not importlib.util.find_spec("ml_collections"):
        options.phases.remove("train")
        budget.left_out.append("training steps: ml_collections is not installed")
    for size in options.models:
        rows[size] = {family: counted(size, family) for family in FLAVOURS if family in ("plain", *options.families)}
        for phase in options.phases:
            measure(rows[size], size, phase, options, budget)
        note = "  TINY MODELS: the figures mean nothing" if options.quick else "; beside ours the paper's"
        print(f"\n{SIZES[size][0]}, batch {options.batch}, {options.precision} precision{note}")
        print(findings.table(table_rows(size, rows[size]), HEADINGS), flush=True)
    judged = machine.on_gpu() and not options.quick
    claims = [claim for size in rows for claim in claims_of(size, rows[size], judged=judged)]
    keys = ("batch", "precision", "runs", "train_runs", "quick")
    results = dict(**{key: getattr(options, key) for key in keys}, rows=rows, paper=paper_rows(options.models))
    status = findings.finish(options, results, claims, budget)
    draw(rows, findings.picture(options))
    return status


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__)
    options.add_argument("--models", type=flags.one_of(list(SIZES)), default=list(SIZES), help="in this order")
    families = list(FLAVOURS)[1:]
    options.add_argument("--families", type=flags.one_of(families), default=families, help="beside plain")
    options.add_argument("--phases", type=flags.one_of(["forward", "train"]), default=["forward", "train"])
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--precision", choices=compiled_models.PRECISIONS, default="mixed")
    options.add_argument("--train_runs", type=int, default=20, help="timed training steps (%(default)s)")
    options.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    return options.parse_args(arguments)


def counted(size: str, family: str) -> dict:
    """Parameters in millions and G multiply-adds of one image, as the paper counts them."""
    model = zoo.abstract(f"{FLAVOURS[family]}_{SIZES[size][1]}", family=family)
    image = jax.ShapeDtypeStruct((1, *model.config.image_size, 3), jnp.float32)
    flops = costs.count(lambda model, images: model(images), model, image).fvcore
    return dict(parameters=sum(a.size for a in jax.tree.leaves(model)) / 1e6, flops=flops / 1e9)


def measure(rows: dict, size: str, phase: str, options: argparse.Namespace, budget: timing.Budget) -> None:
    """Add the figures of one phase to `rows`; each family is timed in turn with the plain model."""
    families = [family for family in FLAVOURS if family in options.families]
    if phase == "forward" and peer_is_here() and not options.quick:
        families.insert(2, PEER)  # after those that claims are about
    name, plain = f"{SIZES[size][0]} {phase}", None
    if budget.allows(f"{name}, plain"):
        with budget.trying(f"{name}, plain"):
            plain, remat = plain_program(size, phase, options)
            plain_call = plain.start()
            add(rows, "plain", {"train_remat": remat} if phase == "train" else {})
    for family in families:
        if plain is None or not budget.allows(f"{name}, {family}"):
            continue
        with budget.trying(f"{name}, {family}"):
            program = peer(size, options) if family == PEER else build(size, family, phase, remat, options)
            reference, seconds = in_turn(plain_call, program, phase, options)
            add(rows, "plain", figures(phase, reference, reference, plain, options.batch))
            add(rows, family, figures(phase, reference, seconds, program, options.batch))
            print(f"{name}, {family}: {reference / seconds:.2f} times plain", flush=True)


def in_turn(
    plain_call, program: compiled_models.Compiled, phase: str, options: argparse.Namespace
) -> tuple[float, float]:
    """Median seconds of the plain model and of another, whose arrays are freed afterwards."""
    runs = options.runs if phase == "forward" else options.train_runs
    calls = {"plain": plain_call, "other": program.start()}
    seconds = timing.medians(timing.interleaved(calls, warmup=options.warmup, runs=runs))
    return seconds["plain"], seconds["other"]


def add(rows: dict, family: str, values: dict) -> None:
    """Add values to the family's row; older values stay, as the plain model is timed several times."""
    rows[family] = {**values, **rows.get(family, {})}


def plain_program(size, phase, options) -> tuple[compiled_models.Compiled, str]:
    """The plain model's program, and `remat` of all models of this size: activations are kept if they fit."""
    for remat in ("none", "full"):
        program = build(size, "plain", phase, remat, options)
        if machine.fit([program.memory, program.memory], machine.device_memory()):  # with room for a second model
            break
    return program, remat


def build(size: str, family: str, phase: str, remat: str, options: argparse.Namespace) -> compiled_models.Compiled:
    name, more = f"{FLAVOURS[family]}_{SIZES[size][1]}", TINY if options.quick else {}
    if phase == "forward":
        return compiled_models.forward(name, batch=options.batch, precision=options.precision, family=family, **more)
    from equivit.training import config as configs

    config = configs.load(f"{machine.ROOT}/configs/deit3.py:{size.upper()},{family}")
    with config.unlocked():
        config.batch_size, config.objective.mix_groups = options.batch, 1  # the batch of one GPU
        config.model.update({"num_classes": 1000, "remat": remat, **more})
        config.data.image_size = config.model.image_size
    return compiled_models.training_step(config)


def figures(phase: str, plain: float, seconds: float, program: compiled_models.Compiled, batch: int) -> dict:
    """Images per second, also over the plain model's, and MiB."""
    return {
        f"{phase}_throughput": batch / seconds,
        f"{phase}_ratio": plain / seconds,
        f"{phase}_mib": program.memory and program.memory.peak / 2**20,
    }


def peer_is_here() -> bool:
    """Whether timm can be timed beside ours."""
    installed = all(importlib.util.find_spec(name) for name in ("torch", "timm"))
    return installed and machine.on_gpu()


def peer(size: str, options: argparse.Namespace) -> compiled_models.Compiled:
    """timm's DeiT III under `torch.compile`, compiled and warm."""
    import timm
    import torch

    torch.set_float32_matmul_precision("high")
    model = timm.create_model(SIZES[size][2]).eval().cuda()
    model = model.to(torch.bfloat16) if options.precision == "bfloat16" else model
    images = torch.randn(options.batch, 3, 224, 224, device="cuda").to(next(model.parameters()).dtype)
    compiled = torch.compile(model)

    def call():
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=options.precision == "mixed"):
            compiled(images)
        torch.cuda.synchronize()

    call()
    torch.cuda.reset_peak_memory_stats()
    call()
    peak = torch.cuda.max_memory_allocated()
    return compiled_models.Compiled(lambda: call, machine.Memory(held=0, peak=peak))  # held outside of our allocator


def claims_of(size: str, rows: dict, *, judged: bool) -> list[Claim]:
    claims = [
        Claim(
            f"{family}({SIZES[size][0].replace('/', '-')}): {phase} throughput over plain",
            rows.get(family, {}).get(f"{phase}_ratio"),
            at_least=target,
            judged=judged,
        )
        for (of, family, phase), target in TARGETS.items()
        if of == size
    ]
    over_plain = rows.get(PEER, {}).get("forward_ratio")
    text = f"{SIZES[size][0]}: plain over timm with torch.compile, forward throughput"
    return [*claims, Claim(text, timing.ratio(1, over_plain), at_least=1.0, judged=judged)]


HEADINGS = dict(model="", parameters="M par.", parameters_paper="paper", flops="GFLOPs", flops_paper="paper")
HEADINGS |= dict(forward_throughput="im/s", throughput_paper="paper", forward_ratio="ratio", ratio_paper="paper")
HEADINGS |= dict(forward_mib="MiB", mib_paper="paper", train_throughput="train im/s", train_ratio="ratio")
HEADINGS |= dict(train_mib="MiB", accuracy_paper="top-1, paper")


def table_rows(size: str, rows: dict) -> list[dict]:
    """Ours and the paper's figures side by side, in the paper's order and the peer last."""
    paper = paper_rows([size])[size]
    order = [family for family in (*PAPER[size], PEER) if family in rows]
    return [dict(model=family, **rows[family], **paper.get(family, {})) for family in order]


def paper_rows(sizes) -> dict:
    """Table 2, every key ending in "_paper", with the throughput over the plain model's."""
    return {
        size: {
            family: {
                **{f"{key}_paper": value for key, value in zip(COLUMNS, values, strict=True)},
                "ratio_paper": values[1] / PAPER[size]["plain"][1],
            }
            for family, values in PAPER[size].items()
        }
        for size in sizes
    }


def draw(rows: dict, path: pathlib.Path):
    """Figure 1: the paper's accuracy against our cost, in FLOPs and, where it was measured, in time."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    costs_of = {
        "GFLOPs of one image": lambda row: row.get("flops"),
        "forward pass, ms per image": lambda row: timing.ratio(1e3, row.get("forward_throughput")),
    }
    for axes, (label, cost) in zip(figure.subplots(1, 2, sharey=True), costs_of.items(), strict=True):
        for family, color in zip(FLAVOURS, ("black", *TABLEAU_COLORS), strict=False):
            for size, marker in zip(rows, "os", strict=False):
                x, accuracy = cost(rows[size].get(family, {})), PAPER[size][family][COLUMNS.index("accuracy")]
                if x is not None:
                    axes.plot(x, accuracy, marker, color=color, label=f"{family}({SIZES[size][0].replace('/', '-')})")
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize=7, ncols=2)
    figure.axes[0].set_ylabel("ImageNet-1k top-1, %, of the paper")
    figure.savefig(path, dpi=150)
