"""Parameters, throughput, FLOPs and peak memory of plain, H8, I8, D8, H2 and D2: Table 2 and Figure 1 of octic ViTs.

    python -m experiments tables.octic.complexity --models=h  # on a GPU; at most 7 minutes (--minutes)
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
from matplotlib.colors import TABLEAU_COLORS
from matplotlib.figure import Figure

from equivit.models import zoo
from experiments import compiled_models, findings, flags, machine, timing
from experiments.compiled_models import Compiled
from experiments.findings import Claim
from experiments.tables import measuring, papers

SIZES = {"h": ("ViT-H/14", "h14", "deit3_huge_patch14_224"), "l": ("ViT-L/16", "l16", "deit3_large_patch16_224")}
FLAVOURS = {"plain": "vit", "D8": "octic_vit", "H8": "octic_vit", "I8": "octic_vit", "H2": "flip_vit", "D2": "flip_vit"}
# (size, family, phase) -> ratio to plain.
TARGETS = {("h", "H8", "forward"): 1.5, ("h", "D8", "train"): 2.5}
PEER = "timm"
TINY = dict(width=96, depth=2, num_heads=3, mlp_dim=128, image_size=(56, 56), patch_size=14, num_classes=10)
HEADINGS = dict(model="", parameters="M par.", parameters_paper="paper", flops="GFLOPs", flops_paper="paper")
HEADINGS |= dict(forward_throughput="im/s", throughput_paper="paper", forward_ratio="ratio", ratio_paper="paper")
HEADINGS |= dict(forward_mib="MiB", mib_paper="paper", train_throughput="train im/s", train_ratio="ratio")
HEADINGS |= dict(train_mib="MiB", accuracy_paper="top-1, paper")


def _paper() -> dict[str, dict[str, dict[str, float]]]:
    """Table 2 by size and family; every key ends in "_paper".

    Millions of parameters, images per second, also over the plain model's, G multiply-adds, MiB, top-1 in percent, and
    its change on rotated images.
    """
    found: dict[str, dict] = {size: {} for size in SIZES}
    for row in papers.rows(__file__, "paper_complexity.csv", words=("size", "family")):
        rows, family = found[row.pop("size")], row.pop("family")
        rows[family] = {f"{key}_paper": value for key, value in row.items()}
        rows[family]["ratio_paper"] = row["throughput"] / rows["plain"]["throughput_paper"]
    return found


PAPER = _paper()


def main(arguments=None) -> int:
    parser = measuring.parser(__doc__, __file__, models=list(SIZES), precisions=compiled_models.PRECISIONS)
    families = list(FLAVOURS)[1:]
    parser.add_argument("--families", type=flags.one_of(families), default=families, help="beside plain")
    parser.add_argument("--phases", type=flags.one_of(["forward", "train"]), default=["forward", "train"])
    parser.add_argument("--train_runs", type=int, default=20, help="timed training steps (%(default)s)")
    options = parser.parse_args(arguments)
    budget, rows = timing.Budget(options.minutes), {}
    if "train" in options.phases and not importlib.util.find_spec("ml_collections"):
        options.phases.remove("train")
        budget.left_out.append("training steps: ml_collections is not installed")
    chosen = {key: getattr(options, key) for key in ("train_runs", "models", "families", "phases")}
    entry = findings.Entry(options, dict(**measuring.settings(options), **chosen), budget)
    for size in options.models:
        rows[size] = {family: counted(size, family) for family in FLAVOURS if family in ("plain", *options.families)}
        for phase in options.phases:
            measure(rows[size], size, phase, options, budget)
        note = measuring.note(options, "beside ours the paper's")
        print(f"\n{SIZES[size][0]}, batch {options.batch}, {options.precision} precision{note}")
        order = [family for family in (*PAPER[size], PEER) if family in rows[size]]  # the paper's, and the peer last
        lines = [dict(model=family, **rows[size][family], **PAPER[size].get(family, {})) for family in order]
        print(findings.table(lines, HEADINGS), flush=True)
    judged = machine.on_gpu() and not options.quick
    claims = [claim for size in rows for claim in claims_of(size, rows[size], judged=judged)]
    paper = {size: PAPER[size] for size in options.models}
    status = entry.finish(claims, rows=rows, paper=paper)
    draw(rows, findings.picture(options))
    return status


def counted(size: str, family: str) -> dict:
    """Parameters in millions and G multiply-adds of one image, as the paper counts them."""
    model = zoo.abstract(f"{FLAVOURS[family]}_{SIZES[size][1]}", family=family)
    parameters = sum(a.size for a in jax.tree.leaves(model)) / 1e6
    return dict(parameters=parameters, flops=measuring.counted(model).fvcore / 1e9)


def measure(rows: dict, size: str, phase: str, options: argparse.Namespace, budget: timing.Budget) -> None:
    """Add the figures of one phase to `rows`; each family is timed in turn with the plain model."""
    families = [family for family in FLAVOURS if family in options.families]
    installed = all(importlib.util.find_spec(name) for name in ("torch", "timm"))
    if phase == "forward" and installed and machine.on_gpu() and not options.quick:
        families.insert(2, PEER)  # after those that claims are about
    name = f"{SIZES[size][0]} {phase}"

    def start_plain():
        for remat in ("none", "full"):  # activations are kept if they fit, with room for a second model
            program = build(size, "plain", phase, remat, options)
            if machine.fit([program.memory, program.memory], machine.device_memory()):
                break
        return program, program.start(), remat

    def compare(family):
        program = peer(size, options) if family == PEER else build(size, family, phase, remat, options)
        calls = {"plain": plain_call, "other": program.start()}  # whose arrays are freed afterwards
        runs = options.runs if phase == "forward" else options.train_runs
        seconds = timing.medians(timing.interleaved(calls, warmup=options.warmup, runs=runs))
        add("plain", figures(phase, seconds["plain"], seconds["plain"], plain, options.batch))
        add(family, figures(phase, seconds["plain"], seconds["other"], program, options.batch))
        print(f"{name}, {family}: {seconds['plain'] / seconds['other']:.2f} times plain", flush=True)

    def add(family, values):  # older values stay, as the plain model is timed several times
        rows[family] = {**values, **rows.get(family, {})}

    if (started := measuring.attempt(budget, f"{name}, plain", start_plain)) is None:
        return
    plain, plain_call, remat = started
    add("plain", {"train_remat": remat} if phase == "train" else {})
    for family in families:
        measuring.attempt(budget, f"{name}, {family}", compare, family)


def build(size: str, family: str, phase: str, remat: str, options: argparse.Namespace) -> Compiled:
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


def figures(phase: str, plain: float, seconds: float, program: Compiled, batch: int) -> dict:
    """Images per second, also over the plain model's, and MiB."""
    return {
        f"{phase}_throughput": batch / seconds,
        f"{phase}_ratio": plain / seconds,
        f"{phase}_mib": program.memory and program.memory.peak / 2**20,
    }


def peer(size: str, options: argparse.Namespace) -> Compiled:
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
    return Compiled(lambda: call, machine.Memory(held=0, peak=peak))  # held outside of our allocator


def claims_of(size: str, rows: dict, *, judged: bool) -> list[Claim]:
    title, claims = SIZES[size][0], []
    for (of, family, phase), target in TARGETS.items():
        if of == size:
            text, ratio = f"{family}({title.replace('/', '-')}): {phase} throughput over plain", f"{phase}_ratio"
            claims.append(Claim(text, rows.get(family, {}).get(ratio), at_least=target, judged=judged))
    over_plain = rows.get(PEER, {}).get("forward_ratio")
    text = f"{title}: plain over timm with torch.compile, forward throughput"
    return [*claims, Claim(text, timing.ratio(1, over_plain), at_least=1.0, judged=judged)]


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
                if (x := cost(rows[size].get(family, {}))) is not None:
                    accuracy = PAPER[size][family]["accuracy_paper"]
                    axes.plot(x, accuracy, marker, color=color, label=f"{family}({SIZES[size][0].replace('/', '-')})")
        axes.set(xlabel=label)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, fontsize=7, ncols=2)
    figure.axes[0].set_ylabel("ImageNet-1k top-1, %, of the paper")
    figure.savefig(path, dpi=150)
