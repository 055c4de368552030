"""Self-supervised training of small plain, H8 and I8 ViTs by DINOv2: what frozen features know before and after.

    python experiments/octic_dinov2_small_images.py --blood_cells=npz:/data/pbc_wbc96.npz
    python experiments/octic_dinov2_small_images.py --cifar10=npz:/data/cifar10.npz --seeds=0,1,2

The recipe is configs/dinov2.py:small; each set by itself if only one is given.  CIFAR-10 is trained at 32 px in patches
of 4, with mirrored views only.  The same command resumes a run.

Accuracy of 20 nearest neighbours and of a linear probe on the teacher's frozen features, of test images upright and in
the eight orientations; of the same network at its start; and of 20 neighbours by pixels.  The targets' entropies show
that nothing collapsed.  A difference is called resolved when it is larger than twice its standard error over seeds.
Not in the paper.

Claims, for blood cells: after training the probe is at least 5 points above the same network at its start, and k-NN
above it, both by more than the spread; no target is uniform.  Exits 1 when one fails.
"""

import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from equivit.data import loader
from equivit.evaluation import knn, runner
from equivit.objectives import dinov2
from equivit.training import build, sharding, warm_start
from equivit.training import config as configs
from experiments import benchmark, small_images
from experiments.benchmark import Claim

FAMILIES = ("plain", "H8", "I8")
SETS = {
    "blood_cells": ["data.train_examples=None"],
    "cifar10": [
        *(f"{key}=(32,32)" for key in ("data.image_size", "model.image_size")),
        "data.views.local_size=(16,16)",
        "data.augment.octic=False",
        "model.patch_size=4",
        *small_images.CIFAR10,
    ],
}
BEGUN = "begun.json"  # in the directory of a run: its network at the start
FIGURES = ("knn/top1", "linear_probe/top1", "knn/accuracy_mean", "linear_probe/accuracy_mean", "knn/consistency")


def main(arguments=None) -> int:
    parser = small_images.parser(__doc__, "octic_dinov2")
    for flag in ("--blood_cells", "--cifar10"):
        parser.add_argument(flag, help="where it is, such as npz:<file>")
    parser.add_argument("--rows", default=list(FAMILIES), type=benchmark.one_of(FAMILIES), help="(all)")
    options = parser.parse_args(arguments)
    sets = {name: source for name in SETS if (source := getattr(options, name))}
    if not sets:
        parser.error(f"give the data: {' or '.join(f'--{name}=npz:<file>' for name in SETS)}")
    found = {name: {row: runs(name, source, row, options) for row in options.rows} for name, source in sets.items()}
    pixels = {name: by_pixels(config_of(name, source, options.rows[0], options)) for name, source in sets.items()}
    claims = [claim for name, rows in found.items() for claim in report(name, rows, pixels[name])]
    settings = dict(sets=found, pixels=pixels, seeds=options.seeds, overrides=options.override)
    small_images.write(options.out, dict(**settings, claims=[str(claim) for claim in claims]))
    print(*claims, sep="\n")
    return int(any(claim.holds is False for claim in claims))


def config_of(name, source, family, options, seed=0):
    """The config of a run."""
    texts = [f"data.source={source}", *SETS[name], "log.tensorboard=False", f"seed={seed}", *options.override]
    texts += [f"epochs={options.epochs}"] if options.epochs else []
    return configs.load(f"configs/dinov2.py:small,{family}", texts)


def runs(name, source, family, options) -> dict[str, list]:
    """The figures of a model, one for each seed: at the start, at the end, and the last entropies of its targets."""
    found = []
    for seed in options.seeds:
        place = options.workdir / name / family / f"seed_{seed}"
        config = config_of(name, source, family, options, seed)
        before = at_start(config, place)
        after = small_images.trained(config, place)
        last = [
            json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines() if "classes/rows" in line
        ]
        row = {f"start {figure}": before[figure] for figure in FIGURES}
        row |= {figure: after[f"eval/{figure}"] for figure in FIGURES}
        row |= {key: last[-1][key] for key in ("classes/rows", "classes/mean", "patches/rows", "patches/mean")}
        found.append(row)
    return {key: [row[key] for row in found] for key in found[0]}


def at_start(config, place) -> dict[str, float]:
    """The scores of frozen features before training, cached beside the run."""
    path = place.with_name(f"{place.name}_{BEGUN}")
    if path.is_file():
        return json.loads(path.read_text())
    config = config.copy_and_resolve_references().unlock()
    pipeline = loader.evaluate(config.data, batch_size=config.batch_size, seed=config.seed)
    config.model.in_channels = pipeline.channels
    mesh = sharding.create_mesh(config.mesh)
    with jax.set_mesh(mesh):
        run = build.make_program(config, mesh, total=100, per_epoch=10)
        model = run.exported(run.init(warm_start.initial_parameters(config, build.model_configuration(config))))
        results = runner.scalars(runner.evaluate(model, config, config.evaluation.suite))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    jax.clear_caches()
    return results


def by_pixels(config) -> float:
    """Accuracy of 20 nearest neighbours by the pixels of the images, centred, by cosine."""
    parts = []
    for split in (config.data.split, config.data.eval_split):
        data = config.data.copy_and_resolve_references().unlock()
        data.update(eval_split=split, eval_examples=data.train_examples if split == data.split else data.eval_examples)
        batches = loader.evaluate(data, batch_size=config.batch_size, seed=config.seed).batches()
        kept = [
            (batch["image"][real], batch["label"][real]) for batch in batches if (real := batch["weight"] > 0).any()
        ]
        images, labels = (np.concatenate(arrays) for arrays in zip(*kept, strict=True))
        parts.append((images.reshape(len(images), -1).astype(np.float32), labels))
    (keys, classes), (queries, wanted) = parts
    number, mean = 1 + int(classes.max()), keys.mean(0)
    votes = knn.votes(keys - mean, classes, queries - mean, ks=(20,), num_classes=number)[0]
    return float((votes.argmax(-1) == wanted).mean())


def report(name, rows, pixels) -> list[Claim]:
    """Print the table of a set; the claims about it."""
    print(f"\n{name}: accuracy in percent; by pixels {100 * pixels:.1f}")
    cells = [dict(row=row, **{key: small_images.spread(found[key]) for key in COLUMNS}) for row, found in rows.items()]
    print(benchmark.table(cells, dict(row="", **COLUMNS)))
    claims = []
    for row, found in rows.items():
        for figure, least in (("linear_probe/top1", 0.05), ("knn/top1", 0.0)):
            gap, error = small_images.difference(found[figure], found[f"start {figure}"])
            print(f"{row}, {figure}, end - start: {small_images.verdict(gap, error)}")
            spread = max(map(_deviation, (found[figure], found[f"start {figure}"])))
            text = f"{name}, {row}: gain of {figure} over the start"
            judged = name == "blood_cells" and len(found[figure]) > 1
            claims.append(Claim(text, gap, at_least=max(least, spread), judged=judged))
        fullest = max(*found["classes/rows"], *found["patches/rows"])
        claims.append(Claim(f"{name}, {row}: entropy of targets over log K", fullest, at_most=dinov2.UNIFORM))
    for other in ("H8", "I8"):
        if other in rows and "plain" in rows:
            for figure in ("start linear_probe/top1", "linear_probe/top1", "start knn/top1", "knn/top1"):
                gap, error = small_images.difference(rows[other][figure], rows["plain"][figure])
                print(f"{other} - plain, {figure}: {small_images.verdict(gap, error)}")
    return claims


def _deviation(values):
    return statistics.stdev(values) if len(values) > 1 else 0.0


COLUMNS = {
    "start linear_probe/top1": "probe at start",
    "linear_probe/top1": "probe",
    "start knn/top1": "k-NN at start",
    "knn/top1": "k-NN",
    "knn/accuracy_mean": "k-NN, eight",
    "knn/consistency": "same in eight",
    "classes/rows": "entropy, rows",
    "classes/mean": "entropy, mean",
}


if __name__ == "__main__":
    sys.exit(main())
