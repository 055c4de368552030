"""Why adaptive models were less accurate: Swin and CvT on CIFAR-10 at 64 px, longer, each at its best learning rate.

    python -m experiments studies.adaptive_longer --source=npz:/data/cifar10.npz --entry=swin
    python -m experiments studies.adaptive_longer --source=npz:/data/cifar10.npz --model=cvt --entry=cvt

`adaptive_small_images.py` trains five epochs at one rate.  Here ARMS, in the circular setting of arXiv 2305.16316,
train for equal steps, each at the rate with the best accuracy on held-out training images: the ordinary model, the same
trained on circular shifts, the adaptive one, and the ordinary one that is tuned as an adaptive one for a third of the
steps once it is trained (Table A12).  "late" is the share of the fall of the training loss in the last tenth.

Objects of CIFAR-10 lie in the middle, and an ordinary model can learn where: "shifted" is the accuracy after random
circular shifts of the test images, "shifted, zeros" after shifts of up to 6 px to either side with zeros.
Claims: the adaptive model is at least as accurate as the ordinary one on shifted images (in the paper also on others);
no circular shift changes one of its classes.
"""

import argparse
import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from equivit.training import config as configs
from experiments import findings, flags
from experiments.findings import Claim
from experiments.studies import differences, held_out, several_seeds

SIDE = 64
# Names of the zoo, and sizes.
SWIN = ["model.width=48", "model.depths=(2,2)", "model.num_heads=(3,6)", "model.window_size=(4,4)"]
CVT = ["model.widths=(48,96)", "model.depths=(1,2)", "model.num_heads=(1,2)", "model.kernels=(11,3)"]
CVT += ["model.strides=(8,2)", "model.paddings=(5,1)"]
MODELS = {"swin": ("swin_t", [*SWIN, "model.patch_size=8"]), "cvt": ("cvt_13", CVT)}
ARMS = {"ordinary": "", "ordinary, trained on shifts": "da", "adaptive": "adaptive", "adaptive, tuned": "adapted=1"}
TUNED = 1 / 3  # of the steps
SHARED = [f"data.image_size=({SIDE},{SIDE})", f"model.image_size=({SIDE},{SIDE})", "data.crop_ratio=1.0"]
SHARED += ["precision=float32", "model.init=xavier_uniform", "objective.mix_groups=1", "objective.label_smoothing=0.0"]
SHARED += ["evaluation.shift.kinds=circular,zeros", "evaluation.shift.ranges=('full',12)"]
SHARED += [*several_seeds.SMALL, *several_seeds.QUIET, "data.train_examples=20000", "data.eval_examples=4000"]
CHOSEN = "eval/accuracy/top1"
FIGURES = {"top1": CHOSEN, "shifted": "eval/shift/circular_full_top1", "zeros": "eval/shift/zeros_12_top1"}
FIGURES |= {"circular": "eval/shift/circular_full", "standard": "eval/shift/zeros_12"}
COLUMNS = dict(top1="top-1, %", shifted="shifted, %", zeros="shifted, zeros, %", circular="C-Cons, %")
COLUMNS |= dict(standard="S-Cons, %")
TEXTS = dict(rate="rate", loss="training loss", late="late")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = several_seeds.parser(__doc__, __file__, epochs=False)
    parser.add_argument("--model", choices=MODELS, default="swin", help="(%(default)s)")
    parser.add_argument("--steps", type=flags.at_least(1), default=2500, help="(%(default)s)")
    parser.add_argument("--rates", default=[1e-3, 3e-3], type=flags.each_at_least(0, float), help="(1e-3,3e-3)")
    options = several_seeds.parse(parser, arguments)
    options.workdir /= options.model
    images = held_out.prepared(config_of(options, "ordinary").data, options.workdir / "images.npz")
    rows = {}
    for arm in ARMS:
        rows[arm] = row(options, images, arm, rows["ordinary"]["rate"] if rows else None)
    pairs = [(arm, "ordinary") for arm in rows if arm != "ordinary"]
    gains = differences.gains(rows, pairs, list(FIGURES))
    several_seeds.show({arm: row | texts(row) for arm, row in rows.items()}, COLUMNS, gains, TEXTS)
    about = dict(model=options.model, steps=options.steps, rates=options.rates, seeds=options.seeds)
    about |= dict(overrides=[*SHARED, *MODELS[options.model][1], *options.override])
    return findings.finish(options, about | dict(rows=rows, gains=gains), claims(rows))


def row(options: argparse.Namespace, images: pathlib.Path, arm: str, ordinary: float | None) -> dict:
    """The figures of an arm; `ordinary` is the rate of the ordinary runs, at which tuning begins."""

    def begin(seed, split):
        run = directory(options, "ordinary") / held_out.run_name(split, ordinary, seed)
        return [f"init={run}"] if arm == "adaptive, tuned" else []

    make, place = functools.partial(config_of, options, arm), directory(options, arm)
    splits = dict(choosing=held_out.SPLITS, begin=begin)
    return held_out.row(make, images, place, options, FIGURES, chosen=CHOSEN, **splits)


def directory(options: argparse.Namespace, arm: str) -> pathlib.Path:
    return options.workdir / arm.replace(", ", "_").replace(" ", "_")


def texts(row: Mapping) -> dict[str, str]:
    """The cells of TEXTS."""
    late = statistics.fmean(fall or 0 for fall in row["late_fall"])
    return dict(rate=f"{row['rate']:g}", loss=f"{statistics.fmean(row['loss']):.3f}", late=f"{100 * late:.1f} %")


def claims(rows: Mapping[str, Mapping]) -> list[Claim]:
    what = "images without a circular shift that changes their class"
    exact = [Claim(f"{arm}: {what}", min(rows[arm]["circular"]), at_least=1) for arm in ("adaptive", "adaptive, tuned")]
    gap = statistics.fmean(rows["adaptive"]["shifted"]) - statistics.fmean(rows["ordinary"]["shifted"])
    return [*exact, Claim("adaptive over ordinary on shifted images", gap, at_least=0)]


def config_of(options: argparse.Namespace, arm: str, *overrides: str):
    """The config of an arm; of the arm that is tuned without its `init`."""
    name, size = MODELS[options.model]
    steps = round(options.steps * (TUNED if arm == "adaptive, tuned" else 1))
    length = [*several_seeds.length_in_steps(steps, warmup=10), "schedule.warmup_lr=0.0", "schedule.min_lr=0.0"]
    texts = [*SHARED, *size, *length, *several_seeds.source(options), *options.override, *overrides]
    return configs.load(f"configs/adaptive_cifar.py:{','.join(filter(None, ['10', name, ARMS[arm]]))}", texts)
