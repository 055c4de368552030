"""Default against adaptive models on CIFAR-10 at equal epochs: accuracy, and consistency under shifts.

    python -m experiments studies.adaptive_small_images --source=npz:/data/cifar10.npz

Small models on images of 32 px in the circular setting of arXiv 2305.16316, all at one untuned learning rate: default,
adaptive, and adaptive with phases chosen by a module's input (Table 1); Swin without one of the adaptive parts (Table
6); Swin trained on circular shifts (Swin-T DA, Table A10); CvT made adaptive after its training, at once and after one
or two more epochs (Table A12).

Consistency is the share of test images whose class is the same after two random shifts: circular ones of the whole
image (C-Cons), and of up to 3 px to either side with zeros (S-Cons).  Claim: no circular shift changes a class of a
model whose parts are all adaptive.
"""

import pathlib
from typing import NamedTuple

from equivit.training import config as configs
from experiments import flags
from experiments.studies import several_seeds
from experiments.tables.adaptive import accuracy, further_evaluations

WINDOWS = ["model.width=32", "model.depths=(2,2)", "model.num_heads=(1,2)", "model.window_size=(4,4)"]
WINDOWS += ["model.patch_size=2"]
CONVOLUTIONS = ["model.widths=(32,64)", "model.depths=(1,3)", "model.num_heads=(1,2)", "model.kernels=(5,3)"]
CONVOLUTIONS += ["model.strides=(2,2)", "model.paddings=(2,1)", "model.drop_path=0.0"]
POOLING = ["model.width=32", "model.depths=(2,2)", "model.num_heads=1"]
MODELS = {"swin": ("swin_t", WINDOWS), "swinv2": ("swinv2_t", WINDOWS), "cvt": ("cvt_13", CONVOLUTIONS)}
MODELS |= {"mvitv2": ("mvitv2_t", POOLING)}
SHARED = ["data.image_size=(32,32)", "model.image_size=(32,32)", "data.crop_ratio=1.0", "precision=float32"]
SHARED += ["schedule.lr=2e-3", "schedule.warmup_lr=2e-5", "schedule.min_lr=2e-5", "objective.mix_groups=1"]
SHARED += ["evaluation.shift.kinds=circular,zeros", "evaluation.shift.ranges=('full',6)"]
SHARED += ["objective.label_smoothing=0.0"]
SHARED += [*several_seeds.SMALL, *several_seeds.CIFAR10, *several_seeds.QUIET]
FIGURES = {"top1": "accuracy/top1", "circular": "shift/circular_full", "zeros": "shift/zeros_6"}
COLUMNS = dict(top1="top-1, %", circular="C-Cons, %", zeros="S-Cons, %")
WARMUP = 0.1  # of the epochs


class Variant(NamedTuple):
    """A row of the table."""

    model: str  # of MODELS
    words: str = ""  # of the mode of configs/adaptive_cifar.py
    keys: tuple[str, ...] = ()  # of the config, such as "model.select=input"
    against: str | None = None  # the row that it is compared with
    tuned: int | None = None  # epochs for which the default model, once trained, is tuned as an adaptive one

    @property
    def exact(self) -> bool:
        """Whether all parts are adaptive."""
        return self.words.startswith("adap") and not any(key.startswith("model.adaptive") for key in self.keys)


VARIANTS = {}
for model in MODELS:
    VARIANTS[model] = Variant(model)
    VARIANTS[f"{model} adaptive"] = Variant(model, "adaptive", against=model)
    VARIANTS[f"{model} by input"] = Variant(model, "adaptive", ("model.select=input",), f"{model} adaptive")
for name, parts in accuracy.PARTS.items():
    VARIANTS[f"swin {name}"] = Variant("swin", "adaptive", (f"model.adaptive={parts}",), "swin adaptive")
VARIANTS["swin da"] = Variant("swin", "da", against="swin")
VARIANTS |= {f"cvt adapted {n}": Variant("cvt", "adapted=1", (), "cvt adaptive", n) for n in (0, 1, 2)}


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--rows", default=list(VARIANTS), type=flags.one_of(list(VARIANTS)), help="(all)")
    parser.set_defaults(epochs=5)
    options = several_seeds.parse(parser, arguments)
    rows = {name: row(name, options) for name in options.rows}
    pairs = ((name, VARIANTS[name].against) for name in rows)
    settings = dict(epochs=options.epochs, shared=[*SHARED, *options.override], models=MODELS)
    several_seeds.conclude(options, rows, COLUMNS, pairs, FIGURES, **settings)
    return int(any(VARIANTS[name].exact and min(found["circular"]) < 1 for name, found in rows.items()))


def row(name: str, options) -> dict[str, list[float]]:
    """The figures of a variant, one for each seed."""
    reports = [figures(name, seed, options) for seed in options.seeds]
    return {figure: [found[figure] for found in reports if figure in found] for figure in FIGURES}


def figures(name: str, seed: int, options) -> dict[str, float]:
    """The figures of a variant for one seed; trains it or resumes its run."""
    variant, epochs, begin = VARIANTS[name], options.epochs, []
    if variant.tuned is not None:
        figures(variant.model, seed, options)  # there it begins
        before = place(variant.model, seed, options)
        if not variant.tuned:
            further_evaluations.evaluate(before, ["adapted"])
            found = further_evaluations.read(before)["adapted"]
            return dict(top1=found["top1"], circular=found["circular_full"])
        epochs, begin = variant.tuned, [f"init={before}"]
    base, shape = MODELS[variant.model]
    texts = [*SHARED, *shape, *variant.keys, *begin, f"epochs={epochs}", f"schedule.warmup_epochs={WARMUP * epochs}"]
    texts += [*several_seeds.source(options), *options.override, f"seed={seed}"]
    mode = ",".join(["10", base, *filter(None, [variant.words])])
    config = configs.load(f"configs/adaptive_cifar.py:{mode}", texts)
    found = several_seeds.trained(config, place(name, seed, options))
    return {figure: found[f"eval/{key}"] for figure, key in FIGURES.items()}


def place(name: str, seed: int, options) -> pathlib.Path:
    return options.workdir / name.replace(" ", "_") / f"seed_{seed}"
