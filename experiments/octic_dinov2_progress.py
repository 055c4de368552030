"""The quality of frozen features during training: Figure 7 of octic ViTs.

    python -m equivit.train --config=configs/dinov2.py:L,H8 --workdir=runs/dinov2/L_H8
    python experiments/octic_dinov2_progress.py runs/dinov2/L_plain runs/dinov2/L_H8 runs/dinov2/L_I8

Each run keeps teachers as saved models, `<run>/teachers/<step>/`; of each the protocols `knn` and `linear_probe` are
evaluated on the data of the run, where that has not been done, and kept beside the model; a linear probe that was cut
off goes on.  Draws both over the steps.  The paper prints its curves without figures; nothing is claimed.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
from matplotlib.figure import Figure

from equivit.evaluation import runner
from equivit.models import saved
from equivit.training import config as configs
from equivit.training import sharding
from experiments import benchmark

PROTOCOLS = {"linear_probe": "linear probe", "knn": "k-NN"}
FILE = "progress.json"  # beside a teacher


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=pathlib.Path, nargs="+", help="directories of runs")
    parser.add_argument("--output", type=pathlib.Path, default=benchmark.RESULTS / "octic_dinov2_progress.json")
    options = parser.parse_args(arguments)
    try:
        found = {run.name: progress(run) for run in options.runs}
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, points in found.items():
        rows = [dict(step=step, **{key: 100 * value for key, value in point.items()}) for step, point in points.items()]
        print(f"{name}\n{benchmark.table(rows, dict(step='step', **PROTOCOLS))}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(found, options.output.with_suffix(".png"))
    return benchmark.finish(options.output, dict(runs=found), [])


def progress(run: pathlib.Path) -> dict[int, dict[str, float]]:
    """Top-1 by protocol, by step.

    Raises:
      FileNotFoundError: there is no run, or it has kept no teacher.
    """
    if not (run / "config.json").is_file():
        raise FileNotFoundError(f"{run}: there is no run of equivit.train in it (no config.json).")
    teachers = sorted(run.glob("teachers/*/model.json"), key=lambda path: int(path.parent.name))
    if not teachers:
        raise FileNotFoundError(f"{run} has kept no teacher; train with --config.checkpoint.teacher_every_steps=12500.")
    return {int(path.parent.name): evaluated(path.parent, run) for path in teachers}


def evaluated(place: pathlib.Path, run: pathlib.Path) -> dict[str, float]:
    """The figures of a teacher, on the data of its run."""
    if not (place / FILE).is_file():
        print(f"{place}: {', '.join(PROTOCOLS)}", flush=True)
        config, model = configs.from_json(run / "config.json"), saved.load(place)
        runner.check(tuple(PROTOCOLS), config, model)
        with jax.set_mesh(sharding.create_mesh(config.mesh)):
            results = runner.evaluate(model, config, tuple(PROTOCOLS), directory=place)
        figures = {name: results[name]["top1"] for name in PROTOCOLS}
        (place / FILE).write_text(json.dumps(figures, indent=1) + "\n")
    return json.loads((place / FILE).read_text())


def draw(found: dict[str, dict[int, dict[str, float]]], output: pathlib.Path) -> None:
    """One panel for each protocol, one line for each run."""
    figure = Figure(figsize=(8, 3), layout="constrained")
    for axis, (key, title) in zip(figure.subplots(1, len(PROTOCOLS)), PROTOCOLS.items(), strict=True):
        for name, points in found.items():
            axis.plot(list(points), [100 * point[key] for point in points.values()], marker="o", label=name)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.set_ylabel("top-1, %")
        axis.legend(fontsize=8)
    figure.savefig(output, dpi=130)
    print(f"picture: {output}")


if __name__ == "__main__":
    sys.exit(main())
