"""Invariantizations of D8: Table 4 of octic ViTs, from trained runs.

    for kind in linear polynomial triple_correlation canonisation max_filtering power_spectrum; do
        python -m equivit.train --config=configs/octic_ablations.py:D8,invariant=$kind --workdir=runs/invariants/$kind
    done
    python -m experiments tables.octic.invariants runs/invariants  # some seconds

Takes the runs of D8 in the directory, at any depth, all of one recipe; means over seeds.  Claims, judged for runs of
configs/octic_ablations.py on ImageNet: top-1 and top-5 within 0.3 points of the paper's (single runs of one recipe are
about 0.1 apart, and the paper rounds to 0.1).  A missing run is an error.
"""

from experiments import findings, flags
from experiments.findings import Claim
from experiments.tables import finished_runs, papers
from experiments.tables.finished_runs import Run

RECIPE = "configs/octic_ablations.py"
PAPER = {row["kind"]: row for row in papers.rows(__file__, "paper_invariants.csv", words=("kind",))}  # in percent
FIGURES = ("top1", "top5")
TOLERANCE = 0.3
COLUMNS = {"kind": "invariantization", "seeds": "seeds"}
for what in FIGURES:
    COLUMNS |= {what: what, f"{what}_spread": "+-", f"{what}_paper": "paper", f"{what}_difference": "difference"}


def main(arguments=None) -> int:
    parser = finished_runs.parser(__doc__, __file__)
    parser.add_argument("--kinds", type=flags.one_of(list(PAPER)), default=list(PAPER), help="rows (all)")
    options = parser.parse_args(arguments)
    found, others = finished_runs.of_one_recipe(
        options.runs, kind_of, options.kinds, free=("model.invariant",), recipe=lambda k: f"{RECIPE}:D8,invariant={k}"
    )
    rows, claims = [], []
    for kind in options.kinds:
        rows.append(dict(kind=kind, seeds=len(found[kind])))
        for what in FIGURES:
            paper, ours = PAPER[kind][what], finished_runs.figure(found[kind], f"eval/accuracy/{what}")
            rows[-1] |= {what: ours.mean, f"{what}_spread": ours.spread, f"{what}_values": ours.values}
            rows[-1] |= {f"{what}_paper": paper, f"{what}_difference": ours.mean - paper}
            text = f"{kind}, {what}, distance to the paper's in points"
            claims.append(Claim(text, abs(ours.mean - paper), at_most=TOLERANCE, judged=not others))
    print("Accuracy of D8 by invariantization, %; beside ours the paper's Table 4, D8(ViT-L/16) on ImageNet-1k.")
    print(findings.table(rows, COLUMNS))
    return findings.finish(options, dict(rows=rows, other_values=others), claims)


def kind_of(run: Run) -> str | None:
    """The invariantization of a D8, None for other models."""
    return run.model.invariant if getattr(run.model, "family", None) == "D8" else None
