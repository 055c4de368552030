r"""Frozen features of DINOv2 runs beside octic ViTs, Table 3: ImageNet-1k, ADE20K and VOC2012, linear and k-NN.

    python -m equivit.train --config=configs/dinov2.py:L,H8 --workdir=runs/dinov2/L_H8
    python -m experiments tables.octic.frozen_features runs/dinov2  # what has been evaluated
    python -m experiments tables.octic.frozen_features runs/dinov2 --evaluate \
        --ade20k=pairs:/data/ADEChallengeData2016 --voc2012=pairs:/data/VOCdevkit/VOC2012

Takes the runs of configs/dinov2.py in the directory, at any depth, and the models there that equivit.convert made of
the authors' files (docs/octic_weights.md), and counts the operations of every model.  Cells without a run or data stay
empty.  --evaluate evaluates the teachers where that has not been done: the protocols `knn`
and `linear_probe` on ImageNet-1k, `patch_knn` and `patch_linear` on the others; results lie in the run's directory, and
are refused where the data came from another source.
Operations beside linear accuracy are the self-supervised half of Figure 1.

As in the paper, the linear probe is the best of 52 heads on the reported images, and segmentation counts ignored labels
as a class where k-NN predicts them (`miou_official`).

Claims: operations are the paper's within 2 % (its I8 has another invariantization); for runs with the paper's recipe,
accuracies are within 0.3 points and mean IoU within 0.5.
"""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import costs
from equivit.evaluation import runner
from equivit.models import saved
from equivit.models.vit.config import ViTConfig
from equivit.training import build, loading
from equivit.training import config as configs
from experiments import findings, flags, machine
from experiments.findings import Claim
from experiments.tables import finished_runs, papers
from experiments.tables.octic.stored_evaluations import load_or_evaluate

# Table 3: operations in G, and figures in percent.
PAPER = {row["model"]: row for row in papers.rows(__file__, "paper_frozen_features.csv", words=("model",))}
MIOU = dict(linear="patch_linear/miou_official", knn="patch_knn/miou_official")
# Keys of the `data` section beside the source, the protocols, and their figures.
SETS = {
    "imagenet": ({}, ("knn", "linear_probe"), dict(linear="linear_probe/best", knn="knn/top1")),
    "ade20k": (dict(split="training", eval_split="validation", void=(255,)), ("patch_knn", "patch_linear"), MIOU),
    "voc2012": (dict(split="train", eval_split="val", void=(255,)), ("patch_knn", "patch_linear"), MIOU),
}
WITHIN = dict(imagenet=0.3, ade20k=0.5, voc2012=0.5)  # points
COLUMNS = dict(model="", macs="GFLOPs", macs_paper="paper")
for name in SETS:
    for kind in ("linear", "knn"):
        COLUMNS |= {f"{name}_{kind}": f"{name} {kind}", f"{name}_{kind}_paper": "paper"}


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("runs", type=pathlib.Path, nargs="?", help="directory of the runs; without it, operations only")
    parser.add_argument("--evaluate", action="store_true", help="read features where that has not been done")
    parser.add_argument("--ade20k", help="such as pairs:/data/ADEChallengeData2016")
    parser.add_argument("--voc2012", help="such as pairs:/data/VOCdevkit/VOC2012")
    options = parser.parse_args(arguments)
    if (options.ade20k or options.voc2012) and not options.evaluate:
        parser.error("--ade20k and --voc2012 go with --evaluate")
    runs = found_in(options.runs) if options.runs else []
    found = finished_runs.present(runs, cell_of, list(PAPER))
    sources = dict(imagenet=None, ade20k=options.ade20k, voc2012=options.voc2012)
    for run in (run for group in found.values() for run in group if options.evaluate):
        for name in SETS:
            if name == "imagenet" or sources[name] is not None:
                compute = functools.partial(evaluated, run, name, sources[name])
                load_or_evaluate(file(run, name), dict(source=sources[name]), compute)
    rows = [row(name, found[name]) for name in PAPER]
    claims = [claim for each in rows for claim in claims_of(each, found[each["model"]])]
    print(findings.table(rows, COLUMNS))
    return findings.finish(options, dict(rows=rows), claims)


def found_in(directory: pathlib.Path) -> list[finished_runs.Run]:
    """The runs and the saved models in a directory, a model as a finished run of its row's recipe.

    Raises ValueError if there are none.
    """
    runs = finished_runs.read(directory, may_be_empty=True)
    trained = [run.place for run in runs]  # which also keep the teachers of earlier steps
    for path in sorted(directory.rglob("model.json")):
        model = saved.configuration(path.parent)
        if (cell := _row(model)) is not None and not any(path.is_relative_to(place) for place in trained):
            config = configs.load(recipe(cell))
            with config.unlocked():
                config.model.in_channels = 3  # as a run records it
            runs.append(finished_runs.Run(path.parent, config, model, {}))
    if not runs:
        raise ValueError(f"{directory}: there is neither a run nor a converted model of this table in it.")
    return runs


def recipe(cell: str) -> str:
    """The config of a row."""
    return f"{machine.ROOT}/configs/dinov2.py:{cell}"


def cell_of(run) -> str | None:
    """The row of the table that a run belongs to; None for other models."""
    return _row(run.model) if run.config.objective.name == "dinov2" else None


def _row(model) -> str | None:
    """The row of a model's size and family; None for other models."""
    if not isinstance(model, ViTConfig) or model.patch_size != (16, 16):
        return None
    size = {(1024, 24): "L", (1280, 32): "H"}.get((model.width, model.depth))
    # The D8 of octic DINOv2 is an I8 whose blocks are all octic.
    family = "D8" if model.family == "I8" and model.k == model.depth else model.family
    cell = f"{size},{family}"
    return cell if cell in PAPER else None


def file(run, name: str) -> pathlib.Path:
    """The file of the results on a set."""
    return run.place / f"table3_{name}.json"


def evaluated(run, name: str, source: str | None) -> dict:
    """The results of a run's teacher or of a converted model on a set, and the step of the weights."""
    print(f"{run.place}: {name}", flush=True)
    keys, protocols, _ = SETS[name]
    model, _, step = loading.load(run.place)
    config = run.config.copy_and_resolve_references().unlock()
    config.data.update(keys if source is None else dict(keys, source=source))
    results = finished_runs.protocols(config, model, protocols, directory=run.place)
    return dict(step=step, results=runner.scalars(results))


def row(name: str, runs) -> dict:
    """Operations and figures of a model beside the paper's; figures are means over seeds."""
    cells = dict(model=name, macs=operations(name), macs_paper=PAPER[name]["macs"], seeds=len(runs))
    for of, (_, _, figures) in SETS.items():
        results = [json.loads(file(run, of).read_text())["results"] for run in runs if file(run, of).is_file()]
        for kind, figure in figures.items():
            cells[f"{of}_{kind}"] = finished_runs.over_seeds([100 * result[figure] for result in results]).mean
            cells[f"{of}_{kind}_paper"] = PAPER[name][f"{of}_{kind}"]
    return cells


def operations(name: str) -> float:
    """GFLOPs of a forward pass on an image of 224 px, as the paper counts them."""
    config = configs.load(recipe(name)).unlock()
    config.model.in_channels = 3
    model = jax.eval_shape(lambda: build.model_configuration(config).build(nnx.Rngs(0)))
    images = jax.ShapeDtypeStruct((1, *config.data.image_size, 3), jnp.float32)
    return costs.count(lambda model, images: model.features(images), model, images).fvcore / 1e9


def claims_of(cells: dict, runs) -> list[Claim]:
    name = cells["model"]
    ratio = cells["macs"] / cells["macs_paper"]
    claims = [Claim(f"{name}: operations over the paper's", ratio, at_least=0.98, at_most=1.02)]
    others = [key for run in runs for key in finished_runs.departures(run, f"configs/dinov2.py:{name}", free=("init",))]
    for of, within in WITHIN.items():
        for kind in ("linear", "knn"):
            if (ours := cells[f"{of}_{kind}"]) is not None:
                gap = ours - cells[f"{of}_{kind}_paper"]
                text = f"{name}, {of}, {kind}: points above the paper"
                claims.append(Claim(text, gap, at_least=-within, judged=not others))
    return claims
