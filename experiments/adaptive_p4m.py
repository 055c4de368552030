"""Plain, D8, adaptive and D8-adaptive ViTs on blood cells at equal epochs: is the class the same for every copy?

Blood cells have no canonical orientation, and no canonical place.  A D8 ViT is invariant to the eight orientations, an
adaptive ViT to circular shifts, and a D8 ViT that is adaptive to both: to the wallpaper group p4m.  None of this is in
the papers.  Images of 48 px in patches of 8, mirrored and shifted in training for all models alike.

    python experiments/adaptive_p4m.py --source=npz:/data/pbc_wbc96.npz

The same command resumes a run.  Accuracy is over all test images, upright and in the eight
orientations.  "Never changes" is the share of the first test images (--images) whose class is the same for all
copies: eight orientations times 64 random circular shifts, the same for all images and models.  An image whose best
two logits are closer than 1e-4 in one of its copies is undecided: there rounding may decide.  Prints the table,
writes JSON with every run's figures, versions and machine; exits 1 when a decided image changes its class in the
model with both symmetries.
"""

import json
import pathlib
import sys
from collections.abc import Mapping

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from equivit.data import loader
from equivit.evaluation import predictions
from equivit.evaluation.protocols.orientation import TIE
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import benchmark, small_images

VARIANTS = {
    "plain": ("plain", []),
    "D8": ("D8", []),
    "adaptive": ("plain", ["model.adaptive=True"]),
    "p4m": ("D8", ["model.adaptive=True"]),
}
SHARED = ["data.image_size=(48,48)", "model.image_size=(48,48)", "model.patch_size=8", "model.num_classes=8"]
SHARED += ["model.width=64", "model.depth=4", "model.num_heads=2", "model.layer_scale=0.1", "schedule.lr=2e-3"]
SHARED += ["evaluation.suite=accuracy,orientation", *small_images.SMALL, *small_images.QUIET]
SHIFTS = 64
COPIES = "copies.json"  # in the directory of a run
BATCH = 16  # images whose copies are compared at once: an image with a tie slows all of its batch
FIGURES = dict(
    upright="eval/orientation/upright",
    eight="eval/orientation/accuracy_mean",
    turned="eval/orientation/consistency",
)


def main(arguments=None) -> int:
    parser = small_images.parser(__doc__, "adaptive_p4m")
    parser.add_argument("--rows", default=list(VARIANTS), type=benchmark.one_of(list(VARIANTS)), help="(all)")
    parser.add_argument("--images", type=int, default=400, help="whose copies are compared (%(default)s)")
    parser.set_defaults(epochs=20)
    options = parser.parse_args(arguments)
    rows = {name: row(name, options) for name in options.rows}
    gains = gains_of(rows)
    report(rows, gains)
    settings = dict(epochs=options.epochs, shared=[*SHARED, *options.override], images=options.images)
    small_images.write(options.out, dict(rows=rows, gains=gains, **settings))
    return int("p4m" in rows and rows["p4m"]["identical"] != rows["p4m"]["decided"])


def row(name: str, options) -> dict[str, list[float]]:
    """The figures of a model, one for each seed."""
    family, keys = VARIANTS[name]
    texts = [*SHARED, *keys, f"epochs={options.epochs}", f"schedule.warmup_epochs={max(1, options.epochs // 10)}"]
    texts += [f"data.source={options.source}"] if options.source else []
    found = []
    for seed in options.seeds:
        config = configs.load(f"configs/cifar.py:10,{family}", [*texts, *options.override, f"seed={seed}"])
        place = options.workdir / name / f"seed_{seed}"
        trained = small_images.trained(config, place)
        found.append({figure: trained[key] for figure, key in FIGURES.items()} | copies(place, options.images))
    return {figure: [one[figure] for one in found] for figure in found[0]}


# ---- Copies of an image


def copies(run: pathlib.Path, images: int) -> dict[str, float]:
    """The results of `compared` for a run, cached in its directory."""
    path = run / COPIES
    known = json.loads(path.read_text()) if path.is_file() else {}
    if known.get("images") != images:
        config, model, _ = checkpoints.load_run(run)
        predict = predictions.predictor(model, config.data.mean, config.data.std, config.precision)
        data = config.data.copy_and_resolve_references().unlock()
        data.eval_examples = images
        known = compared(predict, loader.evaluate(data, batch_size=BATCH, seed=config.seed).batches())
        path.write_text(json.dumps(known, indent=1) + "\n")
    return {figure: known[figure] for figure in ("constant", "decided", "identical")}


def compared(predict, batches) -> dict[str, float]:
    """How many images have one class in all copies.

    Returns:
      "images"; "constant": the share with one class in all copies; "decided": the number of those whose best two logits
      differ by more than TIE in every copy; "identical": how many of these have one class.
    """
    same, decided = [], []
    for batch in batches:
        real = batch["weight"] > 0
        # Without the black images that fill a batch.
        logits = np.stack([np.asarray(predict(copy)) for copy in all_copies(batch["image"][real])])
        classes, best = logits.argmax(-1), np.sort(logits, axis=-1)
        same.append((classes == classes[0]).all(0))
        decided.append(((best[..., -1] - best[..., -2]) > TIE).all(0))
    same, decided = np.concatenate(same), np.concatenate(decided)
    return dict(
        images=len(same), constant=float(same.mean()), decided=int(decided.sum()), identical=int((same & decided).sum())
    )


def all_copies(images: np.ndarray):
    """Square images [B, H, H, C] in eight orientations, each rolled by SHIFTS offsets; the first are as they are."""
    offsets = np.random.default_rng(0).integers(0, images.shape[1], (SHIFTS, 2))
    offsets[0] = 0
    for element in OCTIC.elements:
        turned = np.asarray(_turned(element, images))
        for offset in offsets:
            yield np.roll(turned, tuple(offset), (1, 2))


_turned = jax.jit(fields.act_on_image, static_argnums=0)


# ---- What came of it


def gains_of(rows: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict]:
    """How much each model is above the plain one, and the standard error."""
    gains = {}
    for name, found in rows.items():
        if name != "plain" and "plain" in rows:
            for figure in ("upright", "eight", "constant"):
                gap, error = small_images.difference(found[figure], rows["plain"][figure])
                gains[f"{name} - plain, {figure}"] = dict(gap=gap, standard_error=error)
    return gains


def report(rows: Mapping[str, Mapping[str, list[float]]], gains: Mapping[str, dict]) -> None:
    """Print the rows, and the differences."""
    columns = dict(upright="upright, %", eight="eight orientations, %", turned="same in eight, %")
    columns |= dict(constant="never changes, %")
    cells = []
    for name, found in rows.items():
        counts = [f"{one:.0f}/{all_:.0f}" for one, all_ in zip(found["identical"], found["decided"], strict=True)]
        cells.append(
            dict(name=name, **{key: small_images.spread(found[key]) for key in columns}, counts=" ".join(counts))
        )
    print(benchmark.table(cells, dict(name="", **columns, counts="of the decided")))
    for name, gain in gains.items():
        print(f"{name}: {small_images.verdict(gain['gap'], gain['standard_error'])}")


if __name__ == "__main__":
    sys.exit(main())
