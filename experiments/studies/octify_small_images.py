"""Plain ViTs made octic without labels, against octic ViTs trained from scratch with labels.

    python -m experiments studies.octify_small_images --data=cifar10 --source=npz:/data/cifar10.npz
    python -m experiments studies.octify_small_images --data=blood_cells --source=npz:/data/pbc_wbc96.npz

A plain ViT, four blocks of width 64, is trained with labels for --steps steps.  `equivit.octify` makes it H8 and I8
with a third of these steps; the result has the teacher's head.  Beside each is a model of the family trained from
scratch with labels, for a third of the steps and for all.  Accuracies are upright and the mean of the eight
orientations; "start" is the best start, before any training.  "teacher, averaged" is the teacher's head on the average
of its features over the orientations, which I8 learns.

Claims: H8 keeps 97 % of the teacher's accuracy upright; I8 passes the teacher over the eight orientations.
"""

import json
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from equivit import octify
from equivit.data.pixels import normalize
from equivit.evaluation import runner
from equivit.models import saved
from equivit.objectives import feature_matching
from equivit.octification import stages
from equivit.training import checkpoints, sharding
from equivit.training import config as configs
from experiments import findings, flags
from experiments.findings import Claim
from experiments.studies import differences, octic_small_images, several_seeds

FAMILIES = ("H8", "I8")
SHARE = 3  # `octify` and the short runs from scratch take the teacher's steps divided by this
SCRATCH = ("third", "all")  # of the teacher's steps
KEPT = 0.97
BATCH = 64
FIGURES = {"upright": "accuracy/top1", "eight orientations": "orientation/accuracy_mean"}
RECIPE = ["evaluation.suite=('accuracy','orientation')"]
# Keys of `data` that configs/octify.py takes from the teacher's recipe.
IMAGES = ("source", "split", "eval_split", "image_size", "mean", "std", "channels", "crop_ratio")
IMAGES += ("train_examples", "eval_examples", "augment.crop", "augment.flip")
# Overrides of the trainings with labels alone: `octify` has the teacher's model, and the rest by its own recipe.
SUPERVISED = ("steps=", "epochs=", "model.", "objective.", "optimizer.", "schedule.", "evaluation.")


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__, epochs=False)
    parser.add_argument("--steps", type=flags.at_least(SHARE), default=1800, help="of the teacher (%(default)s)")
    parser.add_argument("--scratch", default=list(SCRATCH), type=flags.one_of(SCRATCH), help="steps from scratch")
    parser.add_argument("--families", default=list(FAMILIES), type=flags.one_of(FAMILIES))
    options = several_seeds.parse(parser, arguments, ("cifar10", "blood_cells"))
    found = [figures(options, seed) for seed in options.seeds]
    rows = {name: {key: [each[name][key] for each in found] for key in FIGURES} for name in found[0]}
    pairs = [(f"{family}, octify", other) for family in options.families for other in compared(family)]
    gains = differences.gains(rows, pairs, list(FIGURES))
    several_seeds.show(rows, {key: f"{key}, %" for key in FIGURES}, gains)
    features = {family: nearness(options, family) for family in options.families}
    for family, part in features.items():
        for title, values in part.items():
            print(f"{family}, {title}: {', '.join(f'{k} {statistics.fmean(v):.3f}' for k, v in values.items())}")
    settings = dict(data=options.data, steps=options.steps, seeds=options.seeds, rows=rows, gains=gains)
    settings |= dict(features=features, **several_seeds.settings(options))
    return findings.finish(options, settings, claims(rows, judged=len(options.seeds) > 1))


def compared(family: str) -> tuple[str, ...]:
    """The rows that a model by `octify` is compared with."""
    return ("teacher", f"{family}, scratch, a third", f"{family}, scratch")


def claims(rows: Mapping[str, Mapping[str, list[float]]], judged: bool) -> list[Claim]:
    mean = {name: {key: statistics.fmean(values) for key, values in row.items()} for name, row in rows.items()}
    found = []
    if "H8, octify" in mean:
        share = mean["H8, octify"]["upright"] / mean["teacher"]["upright"]
        found.append(Claim("H8: share of the teacher's accuracy", share, at_least=KEPT, judged=judged))
    if "I8, octify" in mean:
        gap = mean["I8, octify"]["eight orientations"] - mean["teacher"]["eight orientations"]
        found.append(Claim("I8: accuracy over the orientations, minus the teacher's", gap, at_least=0, judged=judged))
    return found


def figures(options, seed: int) -> dict[str, dict[str, float]]:
    """The figures of all models of a seed."""
    place = place_of(options, seed)
    teacher = config_of(options, "plain", options.steps, seed)
    found = {"teacher": scratch(teacher, place / "teacher"), "teacher, averaged": averaged(teacher, place / "teacher")}
    short = options.steps // SHARE
    for family in options.families:
        made = octified(options, family, teacher, place, short, seed)
        for name in ("start", "model"):
            row = f"{family}, {'octify' if name == 'model' else name}"
            found[row] = evaluated(teacher, made / name, place / "teacher")
        for share in options.scratch:
            words, steps = (", a third", short) if share == "third" else ("", options.steps)
            config = config_of(options, family, steps, seed)
            found[f"{family}, scratch{words}"] = scratch(config, place / f"{family}_{steps}")
    return found


def nearness(options, family: str) -> dict[str, dict[str, list[float]]]:
    """Errors at the transition by start, and errors and cosines of class tokens by model, of all seeds."""
    reports = [
        json.loads((place_of(options, seed) / f"octify_{family}" / "report.json").read_text()) for seed in options.seeds
    ]
    found = {"error by start": {name: [each["starts"][name] for each in reports] for name in reports[0]["starts"]}}
    for title, key in (("cosine of class tokens", "prefix"), ("error of class tokens", "prefix_left")):
        models = reports[0]["figures"]
        found[title] = {name: [each["figures"][name]["agreement"][key] for each in reports] for name in models}
    return found


def place_of(options, seed: int) -> pathlib.Path:
    return options.workdir / f"seed_{seed}"


def config_of(options, family: str, steps: int, seed: int):
    """The recipe of a model with labels."""
    file, *overrides = octic_small_images.DATA[options.data]
    texts = [*overrides, *RECIPE, *several_seeds.QUIET, *several_seeds.length_in_steps(steps, warmup=10)]
    texts += [*several_seeds.source(options), f"seed={seed}", *options.override]
    return configs.load(file.format(family=family), texts)


def scratch(config, workdir: pathlib.Path) -> dict[str, float]:
    report = several_seeds.trained(config, workdir)
    return {name: report[f"eval/{key}"] for name, key in FIGURES.items()}


def averaged(config, teacher: pathlib.Path) -> dict[str, float]:
    """The teacher's head on the mean of its class tokens over the eight orientations: the targets of I8."""

    def evaluate():
        model, right = checkpoints.load_run(teacher).model, []
        images, labels = several_seeds.decoded(config.data, config.data.eval_split).values()

        @jax.jit
        def predict(images):
            inputs = normalize(images, tuple(config.data.mean), tuple(config.data.std))
            return model.head(feature_matching.targets(model, inputs, "last", 0, orientations=True)[:, 0]).argmax(-1)

        for start in range(0, len(labels), BATCH):
            right.append(np.asarray(predict(images[start : start + BATCH])) == labels[start : start + BATCH])
        return dict.fromkeys(FIGURES, float(np.concatenate(right).mean()))

    path, settings = teacher.with_name("teacher_averaged.json"), configs.flat(configs.plain(config.data))
    return findings.cached(path, evaluate, settings)


def octified(options, family: str, teacher, place: pathlib.Path, steps: int, seed: int) -> pathlib.Path:
    """The directory of `equivit.octify` for the teacher at a place; raises SystemExit where it fails."""
    values = configs.flat(configs.plain(teacher.data))
    data = [f"--config.data.{key}={_text(values[key])}" for key in IMAGES]
    length = [f"--config.steps={steps}", "--config.epochs=None", f"--config.seed={seed}", "--config.log.to=()"]
    length += ["--config.schedule.warmup_epochs=None", f"--config.schedule.warmup_steps={steps // 10}"]
    length += ["--config.evaluation.suite=None"]
    more = [f"--config.{text}" for text in options.override if not text.startswith(SUPERVISED)]
    workdir = place / f"octify_{family}"
    arguments = [f"--input={place / 'teacher'}", f"--family={family}", "--config=configs/octify.py:small"]
    if status := octify.main([*arguments, f"--workdir={workdir}", *data, *length, *more]):
        raise SystemExit(status)
    jax.clear_caches()
    return workdir


def _text(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


def evaluated(config, model: pathlib.Path, teacher: pathlib.Path) -> dict[str, float]:
    """The figures of a model with the teacher's head, by the teacher's recipe; a file beside the model keeps them."""
    path = model.with_name(f"{model.name}_figures.json")
    if not path.is_file():
        octic = saved.load(model)
        if octic.config.num_classes is None:
            octic = stages.with_head(octic, checkpoints.load_run(teacher).model)
        with jax.set_mesh(sharding.create_mesh(config.mesh)):
            results = runner.scalars(runner.evaluate(octic, config, config.evaluation.suite))
        path.write_text(json.dumps({name: results[key] for name, key in FIGURES.items()}) + "\n")
    return json.loads(path.read_text())
