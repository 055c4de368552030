"""Plain, D8, adaptive and D8-adaptive ViTs on blood cells at equal epochs: is the class the same for every copy?

    python -m experiments studies.adaptive_p4m --source=npz:/data/pbc_wbc96.npz

Blood cells have no canonical orientation and no canonical place.  A D8 ViT is invariant to the eight orientations, an
adaptive ViT to circular shifts, an adaptive D8 ViT to both: to the wallpaper group p4m.  "Never changes" is the share
of the first test images (--images) with one class for all copies: eight orientations of 64 circular shifts.  An image
is undecided, and rounding may decide, where the best two logits of a copy are closer than 1e-4.  Claim: no decided
image changes its class in the model with both symmetries.
"""

import pathlib

import numpy as np

from equivit.data import loader
from equivit.evaluation import predictions
from equivit.evaluation.protocols.orientation import TIE
from equivit.symmetry.groups import OCTIC
from equivit.training import checkpoints
from experiments import findings, flags
from experiments.studies import adaptive_exactness, differences, several_seeds

VARIANTS = {
    "plain": ("plain", []),
    "D8": ("D8", []),
    "adaptive": ("plain", ["model.adaptive=True"]),
    "p4m": ("D8", ["model.adaptive=True"]),
}
SHARED = ["data.image_size=(48,48)", "model.image_size=(48,48)", "model.patch_size=8", "model.num_classes=8"]
SHARED += ["model.width=64", "model.depth=4", "model.num_heads=2", "model.layer_scale=0.1", "schedule.lr=2e-3"]
SHARED += ["evaluation.suite=accuracy,orientation", *several_seeds.SMALL, *several_seeds.QUIET]
SHIFTS = 64
BATCH = 16  # images whose copies are compared at once: an image with a tie slows all of its batch
FIGURES = dict(upright="eval/orientation/upright", eight="eval/orientation/accuracy_mean")
FIGURES |= dict(turned="eval/orientation/consistency")
COLUMNS = dict(upright="upright, %", eight="eight orientations, %", turned="same in eight, %")
COLUMNS |= dict(constant="never changes, %")


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--rows", default=list(VARIANTS), type=flags.one_of(list(VARIANTS)), help="(all)")
    parser.add_argument("--images", type=flags.at_least(1), default=400, help="whose copies are compared (%(default)s)")
    parser.set_defaults(epochs=20)
    options = several_seeds.parse(parser, arguments)
    rows = {name: row(name, options) for name in options.rows}
    pairs = ((name, "plain") for name in rows if name != "plain")
    gains = differences.gains(rows, pairs, ("upright", "eight", "constant"))
    shown = {}
    for name, found in rows.items():  # of each seed, the images with one class over the decided ones
        counts = zip(found["identical"], found["decided"], strict=True)
        shown[name] = found | dict(counts=" ".join(f"{one:.0f}/{all_:.0f}" for one, all_ in counts))
    several_seeds.show(shown, COLUMNS, gains, dict(counts="of the decided"))
    settings = dict(epochs=options.epochs, shared=[*SHARED, *options.override], images=options.images)
    findings.write(options, dict(rows=rows, gains=gains, **settings))
    return int("p4m" in rows and rows["p4m"]["identical"] != rows["p4m"]["decided"])


def row(name: str, options) -> dict[str, list[float]]:
    """The figures of a model, one for each seed."""
    family, keys = VARIANTS[name]
    texts = [*SHARED, *keys, *several_seeds.length_in_epochs(options.epochs, max(1, options.epochs // 10))]
    found = several_seeds.reports(options, f"configs/cifar.py:10,{family}", texts, name)
    same = [copies(options.workdir / name / f"seed_{seed}", options.images) for seed in found]
    figures = {figure: [one[figure] for one in same] for figure in ("constant", "decided", "identical")}
    return several_seeds.by_seed(found.values(), FIGURES) | figures


def copies(run: pathlib.Path, images: int) -> dict[str, float]:
    """The results of `compared` for a run, cached in its directory."""

    def compute():
        config, model, _ = checkpoints.load_run(run)
        predict = predictions.predictor(model, config.data.mean, config.data.std, config.precision)
        data = config.data.copy_and_resolve_references().unlock()
        data.eval_examples = images
        return compared(predict, loader.evaluate(data, batch_size=BATCH, seed=config.seed).batches())

    return findings.cached(run / f"copies_of_{images}.json", compute)


def compared(predict, batches) -> dict[str, float]:
    """Compare the classes of all copies of the images.

    "constant" is the share of images with one class, "decided" the number whose best two logits differ by more than TIE
    in every copy, "identical" the number of these with one class.
    """
    same, decided = [], []
    for batch in batches:
        real = batch["weight"] > 0  # others are black images that fill a batch
        logits = np.stack([np.asarray(predict(copy)) for copy in all_copies(batch["image"][real])])
        classes, best = logits.argmax(-1), np.sort(logits, axis=-1)
        same.append((classes == classes[0]).all(0))
        decided.append(((best[..., -1] - best[..., -2]) > TIE).all(0))
    same, decided = np.concatenate(same), np.concatenate(decided)
    numbers = dict(images=len(same), decided=int(decided.sum()), identical=int((same & decided).sum()))
    return numbers | dict(constant=float(same.mean()))


def all_copies(images: np.ndarray):
    """Square images [B, H, H, C] in eight orientations, each rolled by SHIFTS offsets; the first are as they are."""
    offsets = np.random.default_rng(0).integers(0, images.shape[1], (SHIFTS, 2))
    offsets[0] = 0
    yield from adaptive_exactness.copies(images, offsets, OCTIC.elements)
