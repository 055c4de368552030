"""Which blocks' attention becomes depthwise convolution, and how: small ViTs, half of their blocks replaced.

    python -m experiments studies.depthwise_small_images --data=cifar10 --source=npz:/data/cifar10.npz
    python -m experiments studies.depthwise_small_images --data=blood_cells --source=npz:/data/pbc_wbc96.npz --epochs=9
    python -m experiments studies.depthwise_small_images --data=camvid --source=npz:/data/camvid_240x180.npz

The same command resumes its runs: for each seed as many as rows, the pretraining, and the gates of DSP-2S.  On CamVid
the decoder has transposed convolutions, in the pretraining a linear map, so that stage 1 begins with a new decoder.

The stages are the paper's (configs/depthwise.py).  A model with a class token is pretrained on the same data for as
long as stage 1, which continues with patch tokens alone.  Sigma of that model is measured on 1000 training images, half
of the blocks are replaced, and stage 2 trains for half of the epochs with half of the batch.  ROWS has the choices.
The rows of a seed share its stage 1; differences are judged as if they did not, which is cautious.  Prints accuracy or
mean IoU of test images, the chosen blocks, and each difference beside the paper's on COCO.
Claim: before stage 2, the squared error of the replaced modules with taps of least squares is at most 0.6 of the error
with Gaussian taps.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from equivit.depthwise import fit, selection
from equivit.depthwise.training_images import TrainingImages
from equivit.models import saved
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import findings, flags
from experiments.findings import Claim
from experiments.studies import several_seeds

RECIPE = "configs/depthwise.py"
BATCH = 50  # for Sigma and fits
WARMUP = 0.1  # of the epochs
# A ViT of patches alone, as deep and wide as a CPU trains in a minute.
SHARED = ["model.width=48", "model.depth=6", "model.num_heads=3", "model.drop_path=0.0", "model.replaced=()"]
SHARED += ["precision=float32", "schedule.lr=1e-3", "data.workers=0", "checkpoint.every_steps=None"]
SHARED += several_seeds.QUIET
CLASS_TOKEN = ["model.class_token=True", "model.pool=class"]
LEAST = 0.6  # of the error of Gaussian taps, at most, by taps of least squares


class Study(NamedTuple):
    """A data set and its trainings."""

    mode: str  # of configs/depthwise.py, without the stage
    keys: Sequence[str]  # of the config, for every run
    epochs: int  # of stage 1
    batch_size: int  # of stage 1
    figure: str  # of the final report, compared
    rows: Sequence[str]  # names of ROWS
    pretraining: Sequence[str] = ()  # more keys, for the pretraining


class Row(NamedTuple):
    """A row of the table: the stage, what chooses the blocks (None: none are replaced), and what replaces them."""

    stage: str = "stage2"
    blocks: str | None = "lowest"
    kind: str = "dw"
    fitted: bool = False


ROWS = {
    "stage 1": Row("stage1", None),
    "attention": Row(blocks=None),
    "lowest": Row(),  # Sigma
    "highest": Row(blocks="highest"),
    "random": Row(blocks="random"),  # others with each seed
    "damage": Row(blocks="damage"),  # the least to the residual stream (`fit.damage`)
    "DSP-2S": Row(blocks="gates"),  # that gates chose in a stage 2 of their own
    "least squares": Row(fitted=True),  # taps fitted to the attention, not Gaussian
    "one-stage": Row("one_stage"),  # the pretrained model is replaced at once
    "frozen": Row("frozen"),  # the replaced modules alone are trained
    "ens_dw": Row(kind="ens_dw"),  # heads ensembled
}
IMAGES = ["data.eval_split=test", "data.crop_ratio=1.0", "data.augment.crop=pad"]
CIFAR10 = [*IMAGES, "data.source=npz:cifar10.npz", "data.image_size=(32,32)", "model.image_size=(32,32)"]
CIFAR10 += ["model.patch_size=4", *several_seeds.CIFAR10]
CELLS = [*IMAGES, "data.source=npz:pbc_wbc96.npz", "data.image_size=(48,48)", "model.image_size=(48,48)"]
CELLS += ["model.patch_size=6"]
CAMVID = ["data.source=npz:camvid.npz", "data.split=train", "data.eval_split=test", "data.void=(11,)"]
CAMVID += ["data.image_size=(96,128)", "model.image_size=(96,128)", "model.num_classes=11", "model.patch_size=8"]
CAMVID += ["objective.width=16", "objective.blocks=(1,2,4)"]
FEW = ("stage 1", "attention", "lowest", "highest")
STUDIES = {
    "cifar10": Study("in1k,mae_b16", CIFAR10, 2, 64, "accuracy/top1", tuple(ROWS)),
    "blood_cells": Study("in1k,mae_b16", CELLS, 3, 64, "accuracy/top1", (*FEW, "random")),
    "camvid": Study("coco,mae_b16", CAMVID, 10, 8, "segmentation/miou", FEW, ["objective.decoder=linear"]),
}
# Pairs of rows, and by how many points the paper has the first above the second: ViT-L, 12 of 24 blocks, mean IoU on
# COCO (Tables 2, 5 and A.1); None: not in the paper.
PAIRS = {
    ("attention", "stage 1"): None,
    ("stage 1", "lowest"): 0.08,
    ("attention", "lowest"): None,
    ("lowest", "highest"): 4.49,
    ("lowest", "random"): None,
    ("lowest", "damage"): None,
    ("lowest", "DSP-2S"): 1.95,
    ("lowest", "one-stage"): 0.32,
    ("lowest", "frozen"): 0.83,
    ("lowest", "ens_dw"): 2.03,
    ("least squares", "lowest"): None,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    study = STUDIES[options.data]
    seeds = [Runs(study, options, seed) for seed in options.seeds]
    found = [{row: runs.row(row) for row in options.rows} for runs in seeds]
    rows = {row: [one[row] for one in found] for row in options.rows}
    gains, chosen, claims = gains_of(rows), {f"seed {runs.seed}": runs.choices() for runs in seeds}, []
    if "least squares" in rows:
        worst = max(runs.error() for runs in seeds)
        text = "squared error before stage 2, least squares over Gaussian taps"
        claims.append(Claim(text, worst, at_most=LEAST, judged=len(seeds) > 1))
    show(study, rows, gains, chosen)
    settings = dict(epochs=options.epochs, shared=[*SHARED, *study.keys, *options.override], figure=study.figure)
    return findings.finish(options, dict(rows=rows, gains=gains, chosen=chosen, **settings), claims)


def _options(arguments) -> argparse.Namespace:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--rows", type=flags.one_of(list(ROWS)), help="(all that the data set has)")
    parser.add_argument("--images", type=int, default=1000, help="for Sigma and fits (%(default)s)")
    options = several_seeds.parse(parser, arguments, STUDIES)
    study = STUDIES[options.data]
    options.rows, options.epochs = options.rows or list(study.rows), options.epochs or study.epochs
    options.workdir = options.workdir / options.data
    return options


# ---- Runs


@dataclasses.dataclass(frozen=True)
class Runs:
    """All runs of a seed, each trained when it is needed, or read where it has ended."""

    study: Study
    options: argparse.Namespace
    seed: int

    @property
    def place(self) -> pathlib.Path:
        """The directory of the runs."""
        return self.options.workdir / f"seed_{self.seed}"

    def row(self, name: str) -> float:
        row, keys = ROWS[name], {}
        if row.blocks is not None:
            keys = {"model.replaced": tuple((block, row.kind) for block in self.blocks(row.blocks))}
        if row.fitted:
            init = self.start()
        elif row.stage in ("stage1", "one_stage"):  # from the model with a class token
            self.trained("pretraining", "stage1", [*CLASS_TOKEN, *self.study.pretraining])
            init = self.place / "pretraining"
        else:
            init = self.stage1()
        return self.trained(name, row.stage, **keys, init=init)

    def stage1(self) -> pathlib.Path:
        """The run directory of stage 1."""
        self.row("stage 1")
        return self.place / "stage_1"

    def trained(self, name: str, stage: str, texts: Sequence[str] = (), **keys: Any) -> float:
        texts = [*texts, *(f"{key}={value}" for key, value in keys.items())]
        found = several_seeds.trained(self.config(stage, texts), self.place / name.replace(" ", "_"))
        return found[f"eval/{self.study.figure}"]

    def config(self, stage: str, texts: Sequence[str]) -> Any:
        """The config of a stage; it has the recipe's share of stage 1's epochs and batch."""
        study, options = self.study, self.options
        first, own = (configs.load(f"{RECIPE}:{study.mode},{word}", SHARED) for word in ("stage1", stage))
        epochs = options.epochs * own.epochs / first.epochs
        batch_size = study.batch_size * own.batch_size // first.batch_size
        sizes = [f"epochs={epochs}", f"schedule.warmup_epochs={WARMUP * epochs}", f"batch_size={batch_size}"]
        sizes += several_seeds.source(options)
        texts = [*SHARED, *study.keys, *sizes, *texts, *options.override, f"seed={self.seed}"]
        return configs.load(f"{RECIPE}:{study.mode},{stage}", texts)

    # ---- What stage 1 knows

    def blocks(self, choice: str) -> tuple[int, ...]:
        """The half of the blocks that a choice replaces."""
        if choice == "gates":
            number = len(self.scores("sigma")) // 2
            keys = [
                f"objective.gates={number}",
                "objective.cooling=None",
            ]  # the run is shorter than the recipe's cooling
            self.trained("gates", "gated", keys, init=self.stage1())
            chosen = _vit(checkpoints.load_run(self.place / "gates").model).config.replaced
            return tuple(one.block for one in chosen)
        scores = self.scores("damage" if choice == "damage" else "sigma")
        order = choice if choice in selection.ORDERS else "lowest"
        return selection.select(scores, len(scores) // 2, order, seed=self.seed)

    def choices(self) -> dict[str, list]:
        """The blocks of every choice among the rows, and the scores of all blocks."""
        wanted = dict.fromkeys(row.blocks for name in self.options.rows if (row := ROWS[name]).blocks)
        found = {choice: list(self.blocks(choice)) for choice in wanted}
        scores = ["sigma"] * bool(found) + ["damage"] * ("damage" in found)
        return found | {f"{score} of all": self.scores(score).tolist() for score in scores}

    def scores(self, name: str) -> np.ndarray:
        """Sigma of the blocks of stage 1's model, or the damage of their replacement; cached in a file."""
        stage1 = self.stage1()

        def measure():
            model, images = self.measured(stage1)
            scores = fit.damage(model, images) if name == "damage" else selection.sigma(model, images).blocks
            return scores.tolist()

        return np.array(findings.cached(self.place / f"{name}.json", measure))

    def measured(self, stage1: pathlib.Path) -> tuple[Any, TrainingImages]:
        """The model of stage 1 and the images that it is measured on."""
        run = checkpoints.load_run(stage1)
        return _vit(run.model), TrainingImages(run.config.data, self.options.images, batch_size=BATCH, seed=self.seed)

    def start(self) -> pathlib.Path:
        """A saved model: stage 1 with taps of least squares; beside it the errors of both kinds of taps."""
        place = self.place / "start"
        if not (place / "errors.json").is_file():
            where, (model, batches) = dict.fromkeys(self.blocks("lowest")), self.measured(self.stage1())
            _, gaussian = fit.fit(model, where, batches, start="normal")
            model, errors = fit.fit(model, where, batches, start="least_squares")
            saved.save(place, model)
            means = dict(least_squares=statistics.fmean(errors.values()), gaussian=statistics.fmean(gaussian.values()))
            (place / "errors.json").write_text(json.dumps(means))
        return place

    def error(self) -> float:
        """Squared errors of replaced modules before stage 2, with taps of least squares over those with Gaussian."""
        errors = findings.read_json(self.start() / "errors.json")
        return errors["least_squares"] / errors["gaussian"]


def _vit(model: Any) -> Any:
    return getattr(model, "backbone", model)


# ---- What came of it


def gains_of(rows: Mapping[str, Sequence[float]]) -> dict[str, dict]:
    """The difference of each pair of rows, its standard error, and the paper's difference."""
    gains = {}
    for (name, other), paper in PAIRS.items():
        if name in rows and other in rows:
            gains[f"{name} - {other}"] = several_seeds.difference(rows[name], rows[other]) | dict(paper=paper)
    return gains


def order(gap: float, error: float | None, paper: float) -> str:
    """Whether the paper's order of two rows holds."""
    if error is None or abs(gap) <= 2 * error:
        return f"in the paper {paper:+.2f}: not resolved here"
    return f"in the paper {paper:+.2f}: {'the same' if gap * paper > 0 else 'another'} order"


def show(study: Study, rows: Mapping, gains: Mapping, chosen: Mapping) -> None:
    """Print the rows, the blocks of every seed, and the differences."""
    shown = {name: {"figure": values} for name, values in rows.items()}
    several_seeds.show(shown, {"figure": f"{study.figure}, %"}, {})
    for seed, choices in chosen.items():
        blocks = {choice: values for choice, values in choices.items() if not choice.endswith("of all")}
        print(f"{seed}:", ", ".join(f"{choice} {values}" for choice, values in blocks.items()))
    for name, gain in gains.items():
        gap, error, paper = gain["gap"], gain["standard_error"], gain["paper"]
        print(f"{name}: {several_seeds.verdict(gap, error)}" + (f"; {order(gap, error, paper)}" if paper else ""))
