"""Which blocks' attention becomes depthwise convolution, and how: small ViTs, half of their blocks replaced.

    python -m experiments studies.depthwise_small_images --data=cifar10 --source=npz:/data/cifar10.npz
    python -m experiments studies.depthwise_small_images --data=blood_cells --source=npz:/data/pbc_wbc96.npz --epochs=9
    python -m experiments studies.depthwise_small_images --data=camvid --source=npz:/data/camvid_240x180.npz

The same command resumes its runs: for each seed as many as rows, the pretraining, and the gates of DSP-2S.  On CamVid
the decoder has transposed convolutions, in the pretraining a linear map, so that stage 1 begins with a new decoder.

The stages are the paper's (configs/depthwise.py).  A model with a class token is pretrained on the same data for as
long as stage 1, which continues with patch tokens alone.  Sigma of that model is measured on 1000 training images, half
of the blocks are replaced, and stage 2 trains for half of the epochs with half of the batch, all rows alike.  ROWS has
the choices.  Each row is evaluated on test images before and after its stage 2; beside that is the squared error of its
modules before it, relative to the attention's outputs.  Prints accuracy or mean IoU, the chosen blocks, and each
difference beside the paper's on COCO.  The rows of a seed share its stage 1, so tests are paired.
Claim: before stage 2, the squared error with taps of least squares is at most 0.6 of the error with normal taps.
"""

import argparse
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from equivit.depthwise import fit, selection
from equivit.depthwise.replacement import backbone, with_backbone
from equivit.depthwise.training_images import TrainingImages
from equivit.evaluation import runner
from equivit.layers.rngs import Keys
from equivit.models import saved
from equivit.training import checkpoints, sharding
from equivit.training import config as configs
from experiments import findings, flags
from experiments.findings import Claim
from experiments.studies import differences, several_seeds

RECIPE = "configs/depthwise.py"
BATCH = 50  # for Sigma and fits
WARMUP = 0.1  # of the epochs
# A ViT of patches alone, as deep and wide as a CPU trains in a minute.
SHARED = ["model.width=48", "model.depth=6", "model.num_heads=3", "model.drop_path=0.0", "model.replaced=()"]
SHARED += ["precision=float32", "schedule.lr=1e-3", "data.workers=0", "checkpoint.every_steps=None"]
SHARED += several_seeds.QUIET
CLASS_TOKEN = ["model.class_token=True", "model.pool=class"]
LEAST = 0.6  # of the error of normal taps, at most, by taps of least squares


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
    form: str = "released"
    start: str | None = None  # of the taps (`fit.fit`); None: the form's own


class Figures(NamedTuple):
    """The figure of test images before and after stage 2, and the error of the modules before; None without one."""

    before: float | None
    after: float
    error: float | None


ROWS = {
    "stage 1": Row("stage1", None),
    "attention": Row(blocks=None),
    "lowest": Row(),  # Sigma; the released form starts with a blur
    "highest": Row(blocks="highest"),
    "random": Row(blocks="random"),  # drawn by the seed
    "identity": Row(kind="identity"),  # nothing in place of attention
    "normal": Row(start="normal"),
    "least squares": Row(start="least_squares"),
    "printed": Row(form="printed"),  # starts with normal taps
    "printed least squares": Row(form="printed", start="least_squares"),
    "damage": Row(blocks="damage"),  # the least to the residual stream (`fit.damage`)
    "DSP-2S": Row(blocks="gates"),  # that gates chose in a stage 2 of their own
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
FEW = tuple(ROWS)[: list(ROWS).index("damage")]
STUDIES = {
    "cifar10": Study("in1k,mae_b16", CIFAR10, 2, 64, "accuracy/top1", tuple(ROWS)),
    "blood_cells": Study("in1k,mae_b16", CELLS, 3, 64, "accuracy/top1", FEW),
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
    ("random", "highest"): None,
    ("lowest", "identity"): None,
    ("attention", "identity"): None,
    ("lowest", "normal"): None,
    ("least squares", "lowest"): None,
    ("lowest", "printed"): None,
    ("normal", "printed"): None,
    ("least squares", "printed least squares"): None,
    ("lowest", "damage"): None,
    ("lowest", "DSP-2S"): 1.95,
    ("lowest", "one-stage"): 0.32,
    ("lowest", "frozen"): 0.83,
    ("lowest", "ens_dw"): 2.03,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    study = STUDIES[options.data]
    seeds = [Runs(study, options, seed) for seed in options.seeds]
    found = [{row: runs.row(row) for row in options.rows} for runs in seeds]
    after, before, errors = (by_row(found, field) for field in ("after", "before", "error"))
    gains, chosen, claims = gains_of(after), {f"seed {runs.seed}": runs.choices() for runs in seeds}, []
    gains_before = gains_of(before)
    if {"least squares", "normal"} <= errors.keys():
        worst = max(a / b for a, b in zip(errors["least squares"], errors["normal"], strict=True))
        text = "squared error before stage 2, taps of least squares over normal ones"
        claims.append(Claim(text, worst, at_most=LEAST, judged=len(seeds) > 1))
    show(study, {row: dict(before=before.get(row, []), after=after[row], error=errors.get(row)) for row in after})
    tell(chosen, {"before stage 2": gains_before, "after": gains})
    settings = dict(epochs=options.epochs, shared=[*SHARED, *study.keys, *options.override], figure=study.figure)
    figures = dict(rows=after, before=before, errors=errors, gains=gains, gains_before=gains_before)
    return findings.finish(options, dict(**figures, chosen=chosen, **settings), claims)


def by_row(found: Sequence[Mapping[str, Figures]], field: str) -> dict[str, list[float]]:
    """A field of all seeds by row, for the rows that have it."""
    values = {row: [getattr(one[row], field) for one in found] for row in found[0]}
    return {row: numbers for row, numbers in values.items() if None not in numbers}


def _options(arguments) -> argparse.Namespace:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--rows", type=flags.one_of(list(ROWS)), help="(all that the data set has)")
    parser.add_argument("--images", type=flags.at_least(1), default=1000, help="for Sigma and fits (%(default)s)")
    options = several_seeds.parse(parser, arguments, STUDIES)
    study = STUDIES[options.data]
    options.rows, options.epochs = options.rows or list(study.rows), options.epochs or study.epochs
    return options


# ---- Runs


@dataclasses.dataclass(frozen=True)
class Runs:
    """All runs of a seed, each trained when it is needed, or read where it has ended."""

    study: Study
    options: argparse.Namespace
    seed: int
    _figures: dict[tuple[str, ...], float] = dataclasses.field(default_factory=dict, init=False)  # of each run so far

    @property
    def place(self) -> pathlib.Path:
        """The directory of the runs."""
        return self.options.workdir / f"seed_{self.seed}"

    def row(self, name: str) -> Figures:
        """Train a row, unless it has ended."""
        row, keys = ROWS[name], {}
        if row.blocks is not None:
            entries = ((block, row.kind, 3, None, row.form) for block in self.blocks(row.blocks))
            keys = {"model.replaced": tuple(entries)}
        if row.stage in ("stage1", "one_stage"):  # from the model with a class token
            self.trained("pretraining", "stage1", [*CLASS_TOKEN, *self.study.pretraining])
            return Figures(None, self.trained(name, row.stage, **keys, init=self.place / "pretraining"), None)
        init, before = self.stage1(), dict(before=self.row("stage 1").after, error=None)
        if row.blocks is not None:
            init = self.place / "starts" / _slug(name)
            kept, settings = init.with_name(f"{init.name}.json"), dict(images=self.options.images)
            before = findings.cached(kept, lambda: self.started(row, init), settings)
        return Figures(before["before"], self.trained(name, row.stage, **keys, init=init), before["error"])

    def started(self, row: Row, place: pathlib.Path) -> dict[str, float]:
        """Save stage 1's model with a row's blocks replaced; its figure, and the mean error of the modules."""
        run, (vit, batches) = checkpoints.load_run(self.stage1()), self.measured(self.stage1())
        how = dict(kind=row.kind, form=row.form, start=row.start, rngs=Keys(self.seed))
        vit, errors = fit.fit(vit, dict.fromkeys(self.blocks(row.blocks or "")), batches, **how)
        model = with_backbone(run.model, vit)
        saved.save(place, model)
        protocol = self.study.figure.partition("/")[0]
        with jax.set_mesh(sharding.create_mesh(run.config.mesh)):
            scores = runner.scalars(runner.evaluate(model, run.config, protocol))
        return dict(before=scores[self.study.figure], error=statistics.fmean(errors.values()))

    def stage1(self) -> pathlib.Path:
        """The run directory of stage 1."""
        self.row("stage 1")
        return self.place / "stage_1"

    def trained(self, name: str, stage: str, texts: Sequence[str] = (), **keys: Any) -> float:
        run = (name, stage, *texts, *(f"{key}={value}" for key, value in keys.items()))
        if run not in self._figures:
            found = several_seeds.trained(self.config(stage, run[2:]), self.place / _slug(name))
            self._figures[run] = found[f"eval/{self.study.figure}"]
        return self._figures[run]

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
            # The run is shorter than the recipe's cooling.
            keys = [f"objective.gates={number}", "objective.cooling=None"]
            self.trained("gates", "gated", keys, init=self.stage1())
            chosen = backbone(checkpoints.load_run(self.place / "gates").model).config.replaced
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

        return np.array(findings.cached(self.place / f"{name}.json", measure, dict(images=self.options.images)))

    def measured(self, stage1: pathlib.Path) -> tuple[Any, TrainingImages]:
        """The model of stage 1 and the images that it is measured on."""
        run = checkpoints.load_run(stage1)
        return backbone(run.model), TrainingImages(
            run.config.data, self.options.images, batch_size=BATCH, seed=self.seed
        )


def _slug(name: str) -> str:
    """The directory of a row."""
    return name.replace(" ", "_")


# ---- What came of it


def gains_of(rows: Mapping[str, Sequence[float]]) -> dict[str, dict]:
    """The difference of each pair of rows, its standard error, and the paper's difference."""
    gains = {}
    for (name, other), paper in PAIRS.items():
        if name in rows and other in rows:
            gain = differences.paired_difference(rows[name], rows[other])
            gains[f"{name} - {other}"] = gain | dict(paper=paper)
    return gains


def order(gain: Mapping[str, Any]) -> str:
    """Whether the paper's order of two rows holds."""
    paper = f"in the paper {gain['paper']:+.2f}"
    if not differences.resolved(gain):
        return f"{paper}: not resolved here"
    return f"{paper}: {'the same' if gain['gap'] * gain['paper'] > 0 else 'another'} order"


def show(study: Study, rows: Mapping[str, Mapping]) -> None:
    """Print the rows: the figures before and after stage 2, and the mean error before it."""
    shown = {name: {**row, "error": row["error"] and statistics.fmean(row["error"])} for name, row in rows.items()}
    columns = dict(before="before stage 2", after=f"{study.figure}, %")
    several_seeds.show(shown, columns, {}, more=dict(error="squared error before"))


def tell(chosen: Mapping[str, Mapping], gains: Mapping[str, Mapping[str, Mapping]]) -> None:
    """Print the blocks of every seed, and the differences before and after stage 2."""
    for seed, choices in chosen.items():
        blocks = {choice: values for choice, values in choices.items() if not choice.endswith("of all")}
        print(f"{seed}:", ", ".join(f"{choice} {values}" for choice, values in blocks.items()))
    for when, pairs in gains.items():
        for name, gain in pairs.items():
            more = f"; {order(gain)}" if gain["paper"] and when == "after" else ""
            print(f"{when}: {name}: {differences.verdict(gain)}{more}")
