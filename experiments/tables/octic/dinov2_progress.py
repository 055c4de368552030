"""The quality of frozen features during training: Figure 7 of octic ViTs.

    python -m equivit.train --config=configs/dinov2.py:L,H8 --workdir=runs/dinov2/L_H8
    python -m experiments tables.octic.dinov2_progress runs/dinov2/L_plain runs/dinov2/L_H8 runs/dinov2/L_I8

Each run keeps teachers as saved models in `<run>/teachers/<step>/`.  The protocols `knn` and `linear_probe` are
evaluated on each where that has not been done; results lie beside the model, and a linear probe resumes.  The paper
prints its curves without numbers.
"""

import pathlib

from matplotlib.figure import Figure

from equivit.models import saved
from equivit.training import config as configs
from experiments import findings, flags
from experiments.tables import finished_runs
from experiments.tables.octic.stored_evaluations import load_or_evaluate

PROTOCOLS = {"linear_probe": "linear probe", "knn": "k-NN"}
FILE = "progress.json"  # beside a teacher


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("runs", type=pathlib.Path, nargs="+", help="directories of runs")
    options = parser.parse_args(arguments)
    found = {run.name: progress(run) for run in options.runs}
    for name, points in found.items():
        rows = [dict(step=step, **{key: 100 * value for key, value in point.items()}) for step, point in points.items()]
        print(f"{name}\n{findings.table(rows, dict(step='step', **PROTOCOLS))}")
    status = findings.finish(options, dict(runs=found), [])
    draw(found, findings.picture(options))
    return status


def progress(run: pathlib.Path) -> dict[int, dict[str, float]]:
    """Top-1 by protocol, by step; FileNotFoundError where there is no run, or it has kept no teacher."""
    if not (run / "config.json").is_file():
        raise FileNotFoundError(f"{run}: there is no run of equivit.train in it (no config.json).")
    teachers = sorted(run.glob("teachers/*/model.json"), key=lambda path: int(path.parent.name))
    if not teachers:
        raise FileNotFoundError(f"{run} has kept no teacher; train with --config.checkpoint.teacher_every_steps=12500.")
    return {int(path.parent.name): evaluated(path.parent, run) for path in teachers}


def evaluated(place: pathlib.Path, run: pathlib.Path) -> dict[str, float]:
    """The figures of a teacher, on the data of its run."""

    def evaluate():
        print(f"{place}: {', '.join(PROTOCOLS)}", flush=True)
        config, model = configs.from_json(run / "config.json"), saved.load(place)
        results = finished_runs.protocols(config, model, tuple(PROTOCOLS), directory=place)
        return {name: results[name]["top1"] for name in PROTOCOLS}

    return load_or_evaluate(place / FILE, {}, evaluate)


def draw(found: dict[str, dict[int, dict[str, float]]], output: pathlib.Path) -> None:
    """One panel for each protocol, one line for each run."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, len(PROTOCOLS)), PROTOCOLS.items(), strict=True):
        for name, points in found.items():
            axis.plot(list(points), [100 * point[key] for point in points.values()], marker="o", label=name)
        axis.set(title=title, xlabel="step", ylabel="top-1, %")
        axis.legend(fontsize=8)
    figure.savefig(output, dpi=130)
    print(f"picture: {output}")
