"""Throughput, FLOPs and peak memory of D8 over the plain ViT as they grow: Table 1 of octic ViTs.

    python -m experiments tables.octic.scaling  # on a GPU; at most 7 minutes (--minutes)
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

from equivit.models import zoo
from experiments import compiled_models, findings, machine, timing
from experiments.findings import Claim
from experiments.tables import measuring, papers

# Name of the zoo, and the patch where it is not the zoo's.
MODELS = {
    "l": ("ViT-L", "l16", {}),
    "h": ("ViT-H", "h14", {}),
    "g": ("ViT-G", "bigg14", dict(patch_size=16)),
    "e": ("ViT-e", "e14", dict(patch_size=16)),
    "22b": ("ViT-22B", "22b14", dict(patch_size=16)),
}
# The paper's Table 1, octic over plain; "octic_mib", peak memory of D8, is from its Table 2.
PAPER = {row.pop("model"): row for row in papers.rows(__file__, "paper_scaling.csv", words=("model",))}
TARGETS = {"l": 2.4, "h": 3.0, "22b": 4.5}
FLOPS_TOLERANCE = 0.015  # the paper's rounding, and a class token more or less in ViT-L and H
TINY = dict(width=64, depth=2, num_heads=2, mlp_dim=128, image_size=(56, 56), patch_size=14, num_classes=10)
KINDS = {"plain": ("vit", {}), "octic": ("octic_vit", dict(family="D8"))}


COLUMNS = dict(model="", unit="timed", throughput="throughput", throughput_paper="paper", flops="FLOPs")
COLUMNS |= dict(flops_paper="paper", memory="memory", memory_paper="paper", plain_per_second="plain 1/s")
COLUMNS |= dict(octic_per_second="octic 1/s", plain_mib="plain MiB", octic_mib="octic MiB", octic_mib_paper="paper")


def main(arguments=None) -> int:
    parser = measuring.parser(__doc__, __file__, models=list(MODELS), precisions=compiled_models.PRECISIONS)
    parser.set_defaults(models=["h", "l", "22b", "g", "e"])  # the first ones matter most
    parser.add_argument("--memory_gib", type=float, help="memory to plan with; default: what the device reports")
    options = parser.parse_args(arguments)
    budget, rows = timing.Budget(options.minutes), {}
    entry = findings.Entry(options, dict(**measuring.settings(options), models=options.models), budget)
    for key in options.models:
        paper = {f"{name}_paper": value for name, value in PAPER[key].items() if value is not None}
        rows[key] = dict(model=MODELS[key][0], **paper, flops=flops(key))
        rows[key] |= measuring.attempt(budget, MODELS[key][0], measure, key, options) or {}
    rows = {key: rows[key] for key in MODELS if key in rows}
    note = measuring.note(options, "beside ours the paper's")
    print(f"octic over plain, batch {options.batch}, {options.precision} precision{note}")
    print(findings.table(list(rows.values()), COLUMNS))
    claims = claims_of(rows, judged=machine.on_gpu() and not options.quick)
    return entry.finish(claims, rows=rows)


def flops(key: str) -> float:
    """Plain over octic operations, as the paper counts, of the models of the paper's figures."""
    counted = {}
    for kind, (flavour, more) in KINDS.items():
        _, variant, options = MODELS[key]
        token = dict(class_token=True) if options and kind == "octic" else {}
        counted[kind] = measuring.counted(zoo.abstract(f"{flavour}_{variant}", **options, **more, **token)).fvcore
    return counted["plain"] / counted["octic"]


def measure(key: str, options: argparse.Namespace) -> dict:
    """Images per second, MiB of the whole model, also where it cannot run, and their ratios."""
    (_, variant, own), tiny = MODELS[key], TINY if options.quick else {}
    models = {kind: (f"{flavour}_{variant}", {**own, **more, **tiny}) for kind, (flavour, more) in KINDS.items()}
    limit = machine.device_memory() if options.memory_gib is None else options.memory_gib * 2**30
    common = dict(batch=options.batch, precision=options.precision)
    programs = {kind: compiled_models.forward(name, **common, **more) for kind, (name, more) in models.items()}
    peaks = {kind: program.memory and program.memory.peak for kind, program in programs.items()}
    unit = "model" if machine.fit([program.memory for program in programs.values()], limit) else "one block"
    if unit == "one block":
        programs = {kind: compiled_models.block(name, **common, **more) for kind, (name, more) in models.items()}
    seconds = measuring.seconds(programs, options)
    return dict(
        unit=unit,
        throughput=seconds["plain"] / seconds["octic"],
        memory=timing.ratio(peaks["plain"], peaks["octic"]),
        **{f"{kind}_per_second": options.batch / t for kind, t in seconds.items()},
        **{f"{kind}_milliseconds": 1e3 * t for kind, t in seconds.items()},
        **{f"{kind}_mib": timing.ratio(peak, 2**20) for kind, peak in peaks.items()},
    )


def claims_of(rows: dict, *, judged: bool) -> list[Claim]:
    claims = []
    for key, row in rows.items():
        paper, name = PAPER[key], row["model"]
        off = abs(row["flops"] - paper["flops"])
        claims.append(Claim(f"{name}: distance of the FLOPs ratio to the paper's", off, at_most=FLOPS_TOLERANCE))
        if key in TARGETS:
            text = f"{name}: throughput ratio{' of a block' if row.get('unit') == 'one block' else ''}"
            claims.append(Claim(text, row.get("throughput"), at_least=TARGETS[key], judged=judged))
        text, memory = f"{name}: peak memory ratio", row.get("memory")
        if memory is not None and memory < paper["memory"] and paper["octic_mib"] is not None:
            text += f" {memory:.2f}, the paper's {paper['memory']}; octic MiB"  # where the ratio is missed
            claims.append(Claim(text, row.get("octic_mib"), at_most=paper["octic_mib"], judged=judged))
        else:
            claims.append(Claim(text, memory, at_least=paper["memory"], judged=judged))
    return claims
