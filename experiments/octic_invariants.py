"""Which invariantization a D8 has: Table 4 of octic ViTs, from trained runs.

    for kind in linear polynomial triple_correlation canonisation max_filtering power_spectrum; do
        python -m equivit.train --config=configs/octic_ablations.py:D8,invariant=$kind --workdir=runs/invariants/$kind
    done
    python experiments/octic_invariants.py runs/invariants          # some seconds
    python experiments/octic_invariants.py runs/invariants --kinds=linear,power_spectrum

Takes the runs of D8 in the directory, at any depth; of several seeds the mean.  Prints top-1 and top-5 beside the
paper's, and writes JSON.  All runs must be of one recipe.

Claims, judged where the runs follow configs/octic_ablations.py on ImageNet: top-1 and top-5 as in the paper within 0.3
points (single runs of one recipe are about 0.1 apart, and the paper rounds to 0.1).  Exits 1 when one fails, or a run
is missing.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from experiments import benchmark, trained_runs
from experiments.benchmark import Claim
from experiments.trained_runs import Run

RECIPE = "configs/octic_ablations.py"
# Top-1 and top-5 of Table 4, in percent.
PAPER = {
    "linear": (79.2, 94.7),
    "polynomial": (79.4, 94.8),
    "triple_correlation": (76.8, 93.7),
    "canonisation": (79.5, 94.9),
    "max_filtering": (77.9, 93.9),
    "power_spectrum": (79.5, 94.9),
}
FREE = ("model.invariant",)
TOLERANCE = 0.3
COLUMNS = {"kind": "invariantization", "seeds": "seeds"}
for what in ("top1", "top5"):
    COLUMNS |= {what: what, f"{what}_spread": "+-", f"{what}_paper": "paper", f"{what}_difference": "difference"}


def main(arguments=None) -> int:
    parser = benchmark.parser(__doc__, output="octic_invariants.json")
    parser.add_argument("runs", type=pathlib.Path, help="directory of the runs")
    parser.add_argument("--kinds", type=benchmark.one_of(list(PAPER)), default=list(PAPER), help="rows (all)")
    options = parser.parse_args(arguments)
    try:
        found = trained_runs.cells(
            trained_runs.read(options.runs), kind_of, options.kinds, free=FREE, command=lambda k: command(k, options)
        )
        rows = [row(kind, found[kind]) for kind in options.kinds]
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    others = trained_runs.departures(found[options.kinds[0]][0], f"{RECIPE}:D8", free=FREE)
    print("Accuracy of D8 by invariantization, %; beside ours the paper's Table 4, D8(ViT-L/16) on ImageNet-1k.")
    print(benchmark.table(rows, COLUMNS))
    if others:
        print(f"Not the recipe of the paper's numbers: {RECIPE} has other values of {', '.join(others)}.")
    return benchmark.finish(options.output, dict(rows=rows, other_values=others), claims_of(rows, judged=not others))


def kind_of(run: Run) -> str | None:
    """The invariantization of a D8, None for other models."""
    return run.model.invariant if getattr(run.model, "family", None) == "D8" else None


def command(kind: str, options) -> str:
    return f"python -m equivit.train --config={RECIPE}:D8,invariant={kind} --workdir={options.runs / kind}"


def row(kind: str, runs: list[Run]) -> dict:
    found = dict(kind=kind, seeds=len(runs))
    for what, paper in zip(("top1", "top5"), PAPER[kind], strict=True):
        ours = trained_runs.figure(runs, f"eval/accuracy/{what}")
        found |= {what: ours.mean, f"{what}_spread": ours.spread, f"{what}_values": ours.values}
        found |= {f"{what}_paper": paper, f"{what}_difference": ours.mean - paper}
    return found


def claims_of(rows: list[dict], *, judged: bool) -> list[Claim]:
    return [
        Claim(
            f"{r['kind']}, {what}, distance to the paper's in points",
            abs(r[f"{what}_difference"]),
            at_most=TOLERANCE,
            judged=judged,
        )
        for r in rows
        for what in ("top1", "top5")
    ]


if __name__ == "__main__":
    sys.exit(main())
