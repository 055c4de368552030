"""Default against adaptive models on CIFAR-10 at equal epochs: accuracy, and consistency under shifts.

Small Swin, SwinV2, CvT and MViTv2 on images of 32 px, in circular setting; the tables are those of "Making Vision
Transformers Truly Shift-Equivariant" (arXiv 2305.16316), whose models are trained for 100 epochs on images of 224 px:

- default, adaptive, and adaptive with phases chosen by what goes into a module (`select="input"`): Table 1;
- Swin without one of the adaptive parts: Table 6;
- Swin trained on circular shifts, the strongest way to make an ordinary model consistent (Swin-T DA): Table A10;
- CvT made adaptive after its training, at once and after one or two more epochs: Table A12.

    python experiments/adaptive_small_images.py --source=npz:/data/cifar10.npz

The same command resumes a run.  All runs have one learning rate, not tuned.  Consistency is the
share of test images whose class is the same after two random shifts: circular ones of the whole image (C-Cons), and
of up to 3 px to either side with zeros (S-Cons; `equivit/evaluation/consistency.py`).  A difference is called
resolved when it is larger than twice its standard error over seeds.  Prints the table, writes JSON with every run's
figures, versions and machine; exits 1 when a circular shift changes a class of a model whose parts are all adaptive.
"""

import pathlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from equivit.training import config as configs
from experiments import adaptive_conditions, adaptive_results, benchmark, small_images

WINDOWS = ["model.width=32", "model.depths=(2,2)", "model.num_heads=(1,2)", "model.window_size=(4,4)"]
WINDOWS += ["model.patch_size=2"]
MODELS = {
    "swin": ("swin_t", WINDOWS),
    "swinv2": ("swinv2_t", WINDOWS),
    "cvt": (
        "cvt_13",
        [
            "model.widths=(32,64)",
            "model.depths=(1,3)",
            "model.num_heads=(1,2)",
            "model.kernels=(5,3)",
            "model.strides=(2,2)",
            "model.paddings=(2,1)",
            "model.drop_path=0.0",
        ],
    ),
    "mvitv2": ("mvitv2_t", ["model.width=32", "model.depths=(2,2)", "model.num_heads=1"]),
}
SHARED = ["data.image_size=(32,32)", "model.image_size=(32,32)", "data.crop_ratio=1.0", "precision=float32"]
SHARED += ["schedule.lr=2e-3", "schedule.warmup_lr=2e-5", "schedule.min_lr=2e-5", "objective.mix_groups=1"]
SHARED += [
    "evaluation.shift.kinds=circular,zeros",
    "evaluation.shift.ranges=('full',6)",
    "objective.label_smoothing=0.0",
]
SHARED += [*small_images.SMALL, *small_images.CIFAR10, *small_images.QUIET]
FIGURES = {"top1": "accuracy/top1", "circular": "shift/circular_full", "zeros": "shift/zeros_6"}
WARMUP = 0.1  # of the epochs


class Variant(NamedTuple):
    """A row of the table.

    Attributes:
      model: its shape, of MODELS.
      words: of the mode of configs/adaptive_cifar.py.
      keys: of the config, such as "model.select=input".
      against: the row that it is compared with.
      tuned: None, or the number of epochs for which the default model, once trained, is tuned as an adaptive one.
    """

    model: str
    words: str = ""
    keys: tuple[str, ...] = ()
    against: str | None = None
    tuned: int | None = None

    @property
    def exact(self) -> bool:
        """Whether all parts are adaptive."""
        return self.words.startswith("adap") and not any(key.startswith("model.adaptive") for key in self.keys)


def variants() -> dict[str, Variant]:
    """All rows by their names."""
    found = {}
    for model in MODELS:
        found[model] = Variant(model)
        found[f"{model} adaptive"] = Variant(model, "adaptive", against=model)
        found[f"{model} by input"] = Variant(model, "adaptive", ("model.select=input",), f"{model} adaptive")
    for name, parts in adaptive_results.PARTS.items():
        found[f"swin {name}"] = Variant("swin", "adaptive", (f"model.adaptive={parts}",), "swin adaptive")
    found["swin da"] = Variant("swin", "da", against="swin")
    for epochs in (0, 1, 2):
        found[f"cvt adapted {epochs}"] = Variant("cvt", "adapted=1", (), "cvt adaptive", epochs)
    return found


VARIANTS = variants()


@benchmark.in_one_line
def main(arguments=None) -> int:
    parser = small_images.parser(__doc__, "adaptive_small_images")
    parser.add_argument("--rows", default=list(VARIANTS), type=benchmark.one_of(list(VARIANTS)), help="(all)")
    parser.set_defaults(epochs=5)
    options = parser.parse_args(arguments)
    rows = {name: row(name, options) for name in options.rows}
    gains = gains_of(rows)
    report(rows, gains)
    settings = dict(epochs=options.epochs, shared=[*SHARED, *options.override], models=MODELS)
    small_images.write(options.out, dict(rows=rows, gains=gains, **settings))
    return int(any(VARIANTS[name].exact and min(found["circular"]) < 1 for name, found in rows.items()))


# ---- Runs


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
            adaptive_conditions.evaluate(before, ["adapted"])
            found = adaptive_conditions.read(before)["adapted"]
            return dict(top1=found["top1"], circular=found["circular_full"])
        epochs, begin = variant.tuned, [f"init={before}"]
    base, shape = MODELS[variant.model]
    texts = [*SHARED, *shape, *variant.keys, *begin, f"epochs={epochs}", f"schedule.warmup_epochs={WARMUP * epochs}"]
    texts += [f"data.source={options.source}"] if options.source else []
    mode = ",".join(["10", base, *filter(None, [variant.words])])
    config = configs.load(f"configs/adaptive_cifar.py:{mode}", [*texts, *options.override, f"seed={seed}"])
    found = small_images.trained(config, place(name, seed, options))
    return {figure: found[f"eval/{key}"] for figure, key in FIGURES.items()}


def place(name: str, seed: int, options) -> pathlib.Path:
    """The directory of a run."""
    return options.workdir / name.replace(" ", "_") / f"seed_{seed}"


# ---- What came of it


def gains_of(rows: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict]:
    """The difference of each row to that which it is compared with, in each figure, and its standard error."""
    gains = {}
    for name, found in rows.items():
        if (reference := rows.get(VARIANTS[name].against)) is not None:
            for figure in (figure for figure in FIGURES if found[figure]):
                gap, error = small_images.difference(found[figure], reference[figure])
                gains[f"{name} - {VARIANTS[name].against}, {figure}"] = dict(gap=gap, standard_error=error)
    return gains


def report(rows: Mapping[str, Mapping[str, list[float]]], gains: Mapping[str, dict]) -> None:
    """Print the rows, and the differences in accuracy."""
    cells = [
        dict(name=name, **{key: small_images.spread(found[key]) for key in FIGURES}) for name, found in rows.items()
    ]
    print(benchmark.table(cells, dict(name="", top1="top-1, %", circular="C-Cons, %", zeros="S-Cons, %")))
    for name, gain in gains.items():
        print(f"{name}: {small_images.verdict(gain['gap'], gain['standard_error'])}")


if __name__ == "__main__":
    sys.exit(main())
