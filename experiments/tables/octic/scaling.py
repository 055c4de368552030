"""Throughput, FLOPs and peak memory of D8 over the plain ViT as they grow: Table 1 of octic ViTs.

    python -m experiments tables.octic.scaling  # on a GPU; at most 7 minutes (--minutes)
    python -m experiments tables.octic.scaling --models=h,l
    python -m experiments tables.octic.scaling --quick --models=l  # tiny models on any machine; tries the script

Forward passes, batch 64, 224 px, bfloat16 arithmetic on float32 parameters (--precision=bfloat16: bfloat16 parameters),
plain and octic in turn.  Where both models do not fit the device, a block of each is timed.  Memory is that of a
compiled program, parameters included, and their bfloat16 copies in mixed precision.  The paper's figures are of one
A100-80GB with `torch.compile` (Appendix D.4), its memory the most that PyTorch's allocator held.

FLOPs are counted on shapes.  The paper's FLOPs of ViT-G, e and 22B are those of patches of 16 pixels, with a class
token in the octic model too (with 14 pixels they would be 4.81, 4.98 and 5.17).  So these three are measured with
patches of 16, without the class token, which D8 does not need.

Claims.  On any machine: FLOPs as in the paper, within 0.015.  On a GPU (set for an H200): throughput at least 3.0 times
plain for ViT-H, 2.4 for ViT-L, 4.5 for ViT-22B; peak memory smaller by at least the paper's factor, or for ViT-L and H
below its figure for D8 in Table 2.
"""

import argparse

import jax
import jax.numpy as jnp

from equivit import costs
from equivit.models import zoo
from experiments import compiled_models, findings, flags, machine, timing
from experiments.findings import Claim

# Name of the zoo, and the patch where it is not the zoo's.
MODELS = {
    "l": ("ViT-L", "l16", {}),
    "h": ("ViT-H", "h14", {}),
    "g": ("ViT-G", "bigg14", dict(patch_size=16)),
    "e": ("ViT-e", "e14", dict(patch_size=16)),
    "22b": ("ViT-22B", "22b14", dict(patch_size=16)),
}
# The paper's Table 1, octic over plain; peak memory of D8 in MiB from its Table 2.
PAPER = {
    "l": dict(throughput=1.33, flops=4.58, memory=2.44, octic_mib=689),
    "h": dict(throughput=1.57, flops=4.58, memory=2.88, octic_mib=1141),
    "g": dict(throughput=1.91, flops=4.88, memory=4.36),
    "e": dict(throughput=2.37, flops=5.01, memory=5.30),
    "22b": dict(throughput=3.54, flops=5.18, memory=5.80),
}
TARGETS = {"l": 2.4, "h": 3.0, "22b": 4.5}
FLOPS_TOLERANCE = 0.015  # the paper's rounding, and a class token more or less in ViT-L and H
TINY = dict(width=64, depth=2, num_heads=2, mlp_dim=128, image_size=(56, 56), patch_size=14, num_classes=10)
KINDS = {"plain": ("vit", {}), "octic": ("octic_vit", dict(family="D8"))}


def main(arguments=None) -> int:
    options = _options(arguments)
    budget = timing.Budget(options.minutes)
    rows = {key: dict(model=MODELS[key][0], **paper_columns(key), flops=flops(key)) for key in options.models}
    for key in options.models:  # the first ones matter most
        if budget.allows(MODELS[key][0]):
            with budget.trying(MODELS[key][0]):
                rows[key] |= measure(key, options)
    rows = {key: rows[key] for key in MODELS if key in rows}
    note = "  TINY MODELS: the figures mean nothing" if options.quick else "; beside ours the paper's"
    print(f"octic over plain, batch {options.batch}, {options.precision} precision{note}")
    print(findings.table(list(rows.values()), COLUMNS))
    claims = claims_of(rows, judged=machine.on_gpu() and not options.quick)
    keys = ("batch", "precision", "runs", "quick")
    results = dict(**{key: getattr(options, key) for key in keys}, rows=rows)
    return findings.finish(options, results, claims, budget)


COLUMNS = dict(model="", unit="timed", throughput="throughput", throughput_paper="paper", flops="FLOPs")
COLUMNS |= dict(flops_paper="paper", memory="memory", memory_paper="paper", plain_per_second="plain 1/s")
COLUMNS |= dict(octic_per_second="octic 1/s", plain_mib="plain MiB", octic_mib="octic MiB", octic_mib_paper="paper")


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__)
    options.add_argument(
        "--models", type=flags.one_of(list(MODELS)), default=["h", "l", "22b", "g", "e"], help="in this order"
    )
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--precision", choices=compiled_models.PRECISIONS, default="mixed")
    options.add_argument("--memory_gib", type=float, help="memory to plan with; default: what the device reports")
    options.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    return options.parse_args(arguments)


def paper_columns(key: str) -> dict:
    return {f"{name}_paper": value for name, value in PAPER[key].items()}


def flops(key: str) -> float:
    """Plain over octic operations, as the paper counts, of the models of the paper's figures."""
    image, counted = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32), {}
    for kind, (flavour, more) in KINDS.items():
        _, variant, options = MODELS[key]
        token = dict(class_token=True) if options and kind == "octic" else {}
        model = zoo.abstract(f"{flavour}_{variant}", **options, **more, **token)
        counted[kind] = costs.count(lambda model, images: model(images), model, image).fvcore
    return counted["plain"] / counted["octic"]


def measure(key: str, options: argparse.Namespace) -> dict:
    """Batches' images per second, MiB, and their ratios.

    Memory is the compiler's figure for the whole model, also where the model cannot run.
    """
    models = {kind: _model(key, kind, options) for kind in KINDS}
    limit = machine.device_memory() if options.memory_gib is None else options.memory_gib * 2**30
    common = dict(batch=options.batch, precision=options.precision)
    whole = {kind: compiled_models.forward(name, **common, **more) for kind, (name, more) in models.items()}
    peaks = {kind: program.memory and program.memory.peak for kind, program in whole.items()}
    unit = "model" if machine.fit([program.memory for program in whole.values()], limit) else "one block"
    if unit == "one block":
        whole = {kind: compiled_models.block(name, **common, **more) for kind, (name, more) in models.items()}
    calls = {kind: program.start() for kind, program in whole.items()}
    seconds = timing.medians(timing.interleaved(calls, warmup=options.warmup, runs=options.runs))
    return dict(
        unit=unit,
        throughput=seconds["plain"] / seconds["octic"],
        memory=timing.ratio(peaks["plain"], peaks["octic"]),
        **{f"{kind}_per_second": options.batch / t for kind, t in seconds.items()},
        **{f"{kind}_milliseconds": 1e3 * t for kind, t in seconds.items()},
        **{f"{kind}_mib": timing.ratio(peak, 2**20) for kind, peak in peaks.items()},
    )


def _model(key, kind, options):
    """Name in the zoo, and its options."""
    (_, variant, own), (flavour, more) = MODELS[key], KINDS[kind]
    return f"{flavour}_{variant}", {**own, **more, **(TINY if options.quick else {})}


def claims_of(rows: dict, *, judged: bool) -> list[Claim]:
    claims = []
    for key, row in rows.items():
        off, name = abs(row["flops"] - PAPER[key]["flops"]), row["model"]
        claims.append(Claim(f"{name}: distance of the FLOPs ratio to the paper's", off, at_most=FLOPS_TOLERANCE))
        if key in TARGETS:
            text = f"{name}: throughput ratio{' of a block' if row.get('unit') == 'one block' else ''}"
            claims.append(Claim(text, row.get("throughput"), at_least=TARGETS[key], judged=judged))
        claims.append(memory_claim(PAPER[key], row, judged=judged))
    return claims


def memory_claim(paper: dict, row: dict, *, judged: bool) -> Claim:
    """Claim the ratio of the paper; where it is missed, the MiB of the paper, if there are any."""
    memory, mib = row.get("memory"), row.get("octic_mib")
    if memory is not None and memory < paper["memory"] and "octic_mib" in paper:
        text = f"{row['model']}: peak memory ratio {memory:.2f}, the paper's {paper['memory']}; octic MiB"
        return Claim(text, mib, at_most=paper["octic_mib"], judged=judged)
    return Claim(f"{row['model']}: peak memory ratio", memory, at_least=paper["memory"], judged=judged)
