"""Number of octic blocks: Figure 4b of octic ViTs, from trained runs of H8 and I8.

    for family in H8 I8; do for k in 6 12 18; do
        python -m equivit.train --config=configs/octic_ablations.py:$family,k=$k --workdir=runs/blocks/${family}_$k
    done; done
    python -m experiments tables.octic.number_of_blocks runs/blocks  # some seconds
    python -m experiments tables.octic.number_of_blocks runs/blocks --families=I8 --blocks=0,6,12,18,24

Takes the runs of these families in the directory, at any depth, all of one recipe; means over seeds.  The paper's
numbers are those of Table 2: H8 and I8 with k = 12 of 24 blocks, and plain ViT-L.  By its parameters that I8 has the
polynomial invariantization.  Its other points cannot be read to digits.

Claims, judged for runs of configs/octic_ablations.py on ImageNet: top-1 with k = 12 within 0.3 points of the paper's,
and I8 worse with the fewest octic blocks than with half (Section 4.2).  A missing run is an error.
"""

import itertools
import pathlib

from matplotlib.figure import Figure

from experiments import findings, flags
from experiments.findings import Claim
from experiments.tables import finished_runs
from experiments.tables.finished_runs import Run

RECIPE = "configs/octic_ablations.py"
FAMILIES = ("H8", "I8")
# Top-1 of Table 2, in percent.
PAPER = {("H8", 12): 84.5, ("I8", 12): 84.0}
PAPER_PLAIN = 84.2
FREE = ("model.family", "model.equivariant_blocks")
TOLERANCE = 0.3
COLUMNS = dict(family="family", k="k", depth="of", seeds="seeds", top1="top1", spread="+-", paper="paper, Table 2")


def main(arguments=None) -> int:
    parser = finished_runs.parser(__doc__, __file__)
    parser.add_argument("--families", type=flags.one_of(FAMILIES), default=list(FAMILIES), help="curves (both)")
    parser.add_argument("--blocks", type=flags.each_at_least(0), default=[6, 12, 18], help="values of k (%(default)s)")
    options = parser.parse_args(arguments)
    wanted = list(itertools.product(options.families, sorted(set(options.blocks))))
    found, others = finished_runs.of_one_recipe(
        options.runs, cell_of, wanted, free=FREE, recipe=lambda cell: f"{RECIPE}:{cell[0]},k={cell[1]}"
    )
    rows = [row(*cell, runs) for cell, runs in found.items()]
    print("Top-1 by the number k of octic blocks, %; beside ours the paper's, of ViT-L/16 on ImageNet-1k.")
    print(findings.table(rows, COLUMNS))
    results = dict(rows=rows, paper_plain=PAPER_PLAIN, other_values=others)
    status = findings.finish(options, results, claims_of(rows, judged=not others))
    draw(rows, findings.picture(options))
    return status


def cell_of(run: Run) -> tuple[str, int] | None:
    """Family and number of octic blocks; None for other models."""
    family = getattr(run.model, "family", None)
    return None if family is None else (family, run.model.k)


def row(family: str, k: int, runs: list[Run]) -> dict:
    ours = finished_runs.figure(runs, "eval/accuracy/top1")
    found = dict(family=family, k=k, depth=runs[0].model.depth, seeds=len(runs), top1=ours.mean, spread=ours.spread)
    return found | dict(values=ours.values, paper=PAPER.get((family, k)))


def claims_of(rows: list[dict], *, judged: bool) -> list[Claim]:
    claims = []
    for r in rows:
        if r["paper"] is not None:
            text = f"{r['family']}, k = {r['k']}, distance to the paper's in points"
            claims.append(Claim(text, abs(r["top1"] - r["paper"]), at_most=TOLERANCE, judged=judged))
    few, *more = [r for r in rows if r["family"] == "I8" and r["k"]] or [None]  # without octic blocks I8 is plain
    for half in (r for r in more if 2 * r["k"] == r["depth"]):
        text = f"I8, points that k = {half['k']} gains over k = {few['k']}"
        claims.append(Claim(text, half["top1"] - few["top1"], at_least=0.0, judged=judged))
    return claims


def draw(rows: list[dict], path: pathlib.Path):
    """Top-1 over k, a curve for each family; the paper's numbers are crosses and a line."""
    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.subplots()
    for family, color in zip(FAMILIES, ("tab:blue", "tab:orange"), strict=True):
        if curve := [r for r in rows if r["family"] == family]:
            k, top1, spread = ([r[key] or 0 for r in curve] for key in ("k", "top1", "spread"))
            axes.errorbar(k, top1, spread, marker="o", color=color, label=f"{family}, ours")
        for r in (r for r in curve if r["paper"] is not None):
            axes.plot(r["k"], r["paper"], "x", color=color, markersize=9, label=f"{family}, paper (Table 2)")
    axes.axhline(PAPER_PLAIN, color="black", linewidth=0.8, linestyle=":", label="plain ViT-L/16, paper (Table 2)")
    axes.set(xlabel=f"k, octic blocks of {rows[0]['depth']}", ylabel="top-1, %")
    axes.set_xticks(sorted({r["k"] for r in rows}))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
