"""Shared by the small trainings of depthwise attention: their stages, the choices of blocks, and the comparisons.

As in the paper, by configs/depthwise.py: a model with a class token is pretrained, here on the same data and for as
long as stage 1, which goes on with patch tokens alone.  Of its model Sigma is measured on 1000 training images, half of
the blocks are replaced, and stage 2 trains for half of the epochs with half of the batch.

| row           | blocks                                              | otherwise                                  |
|---------------|-----------------------------------------------------|--------------------------------------------|
| stage 1       | none                                                | no stage 2                                 |
| attention     | none                                                | stage 2 all the same                       |
| lowest        | lowest Sigma                                        |                                            |
| highest       | highest Sigma                                       |                                            |
| random        | random, others with each seed                       |                                            |
| damage        | least damage to the residual stream (`fit.damage`)  |                                            |
| DSP-2S        | those that gates chose in a stage 2 of their own    |                                            |
| least squares | lowest Sigma                                        | taps fitted to the attention, not Gaussian |
| one-stage     | lowest Sigma                                        | the pretrained model is replaced at once   |
| frozen        | lowest Sigma                                        | the replaced modules alone are trained     |
| ens_dw        | lowest Sigma                                        | heads ensembled, in place of dw            |

A seed draws everything, so that the rows of a seed share its stage 1.  Differences are judged as if they did not, which
is cautious.
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
from experiments import benchmark, small_images
from experiments.benchmark import Claim

RECIPE = "configs/depthwise.py"
IMAGES, BATCH = 1000, 50  # for Sigma and fits
WARMUP = 0.1  # of the epochs
# A ViT of patches alone, as deep and wide as a CPU trains in a minute.
SHARED = ["model.width=48", "model.depth=6", "model.num_heads=3", "model.drop_path=0.0", "model.replaced=()"]
SHARED += ["precision=float32", "schedule.lr=1e-3", "data.workers=0", "checkpoint.every_steps=None"]
SHARED += small_images.QUIET
CLASS_TOKEN = ["model.class_token=True", "model.pool=class"]
LEAST = 0.6  # the error of taps of least squares, as a share of that of Gaussian ones, at most


class Study(NamedTuple):
    """A data set, and what is trained on it.

    Attributes:
      mode: of configs/depthwise.py, without the stage.
      keys: of the config, for every run.
      pretraining: more of them, for the pretraining.
      epochs, batch_size: of stage 1.
      figure: what is compared, of the final report.
      rows: names of ROWS.
    """

    mode: str
    keys: Sequence[str]
    epochs: int
    batch_size: int
    figure: str
    rows: Sequence[str]
    pretraining: Sequence[str] = ()


class Row(NamedTuple):
    """A row of the table: the stage, what chooses the blocks (None: none are replaced), and what replaces them."""

    stage: str = "stage2"
    blocks: str | None = "lowest"
    kind: str = "dw"
    fitted: bool = False


ROWS = {
    "stage 1": Row("stage1", None),
    "attention": Row(blocks=None),
    "lowest": Row(),
    "highest": Row(blocks="highest"),
    "random": Row(blocks="random"),
    "damage": Row(blocks="damage"),
    "DSP-2S": Row(blocks="gates"),
    "least squares": Row(fitted=True),
    "one-stage": Row("one_stage"),
    "frozen": Row("frozen"),
    "ens_dw": Row(kind="ens_dw"),
}
# What is compared, and by how many points the paper has the first above the second: ViT-L, 12 of 24 blocks, mean IoU on
# COCO (Tables 2, 5 and A.1); None: the paper does not have it.
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


def main(study: Study, description: str, name: str, arguments: Sequence[str] | None) -> int:
    """Train what has not been trained, print and write the table; the exit status."""
    options = _options(study, description, name, arguments)
    seeds = [Runs(study, options, seed) for seed in options.seeds]
    found = [{row: runs.row(row) for row in options.rows} for runs in seeds]
    rows = {row: [one[row] for one in found] for row in options.rows}
    gains, chosen = gains_of(rows), {f"seed {runs.seed}": runs.choices() for runs in seeds}
    claims = claims_of([runs.errors() for runs in seeds]) if "least squares" in rows else []
    report(study, rows, gains, chosen, claims)
    settings = dict(epochs=options.epochs, shared=[*SHARED, *study.keys, *options.override], figure=study.figure)
    results = dict(rows=rows, gains=gains, chosen=chosen, claims=[str(claim) for claim in claims], **settings)
    small_images.write(options.out, results)
    return int(any(claim.holds is False for claim in claims))


def _options(study, description, name, arguments) -> argparse.Namespace:
    parser = small_images.parser(description, name)
    parser.add_argument("--rows", default=list(study.rows), type=benchmark.one_of(study.rows), help="(all)")
    parser.add_argument("--images", type=int, default=IMAGES, help="for Sigma and fits (%(default)s)")
    parser.set_defaults(epochs=study.epochs)
    return parser.parse_args(arguments)


# ---- Runs


@dataclasses.dataclass(frozen=True)
class Runs:
    """All runs of a seed, each trained when it is needed, or read where it has ended."""

    study: Study
    options: argparse.Namespace
    seed: int

    @property
    def place(self) -> pathlib.Path:
        """Where they are."""
        return self.options.workdir / f"seed_{self.seed}"

    def row(self, name: str) -> float:
        """The figure of a row."""
        row, keys = ROWS[name], {}
        if row.blocks is not None:
            keys = {"model.replaced": tuple((block, row.kind) for block in self.blocks(row.blocks))}
        keys["init"] = self.pretrained() if row.stage in ("stage1", "one_stage") else self.stage1()
        if row.fitted:
            keys["init"] = self.start()
        return self.trained(name, row.stage, **keys)

    def pretrained(self) -> pathlib.Path:
        """The run of the model with a class token."""
        self.trained("pretraining", "stage1", CLASS_TOKEN + list(self.study.pretraining))
        return self.place / "pretraining"

    def stage1(self) -> pathlib.Path:
        """The run of stage 1."""
        self.row("stage 1")
        return self.place / "stage_1"

    def trained(self, name: str, stage: str, texts: Sequence[str] = (), **keys: Any) -> float:
        """The figure of a run."""
        texts = [*texts, *(f"{key}={value}" for key, value in keys.items())]
        found = small_images.trained(self.config(stage, texts), self.place / name.replace(" ", "_"))
        return found[f"eval/{self.study.figure}"]

    def config(self, stage: str, texts: Sequence[str]) -> Any:
        """The config of a stage, which has the share of stage 1's epochs and batch that the recipe gives it."""
        study, options = self.study, self.options
        first, own = (configs.load(f"{RECIPE}:{study.mode},{word}", SHARED) for word in ("stage1", stage))
        epochs = options.epochs * own.epochs / first.epochs
        batch_size = study.batch_size * own.batch_size // first.batch_size
        sizes = [f"epochs={epochs}", f"schedule.warmup_epochs={WARMUP * epochs}", f"batch_size={batch_size}"]
        sizes += [f"data.source={options.source}"] if options.source else []
        texts = [*SHARED, *study.keys, *sizes, *texts, *options.override, f"seed={self.seed}"]
        return configs.load(f"{RECIPE}:{study.mode},{stage}", texts)

    # ---- What stage 1 knows

    def blocks(self, choice: str) -> tuple[int, ...]:
        """Half of the blocks."""
        if choice == "gates":
            number = len(self.scores("sigma")) // 2
            self.trained("gates", "gated", [f"objective.gates={number}"], init=self.stage1())
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
        """Sigma of the blocks of stage 1's model, or the damage of their replacement; kept in a file."""
        stage1, path = self.stage1(), self.place / f"{name}.json"
        if not path.is_file():
            measure = dict(sigma=_sigma, damage=fit.damage)[name]
            path.write_text(json.dumps(measure(*self.measured(stage1)).tolist()))
        return np.array(json.loads(path.read_text()))

    def measured(self, stage1: pathlib.Path) -> tuple[Any, TrainingImages]:
        """The model of stage 1 and the images that it is measured on."""
        run = checkpoints.load_run(stage1)
        return _vit(run.model), TrainingImages(run.config.data, self.options.images, batch_size=BATCH, seed=self.seed)

    def start(self) -> pathlib.Path:
        """The model of stage 1 with taps of least squares, saved; beside it the errors of both sorts of taps."""
        place = self.place / "start"
        if not (place / "errors.json").is_file():
            where, (model, batches) = dict.fromkeys(self.blocks("lowest")), self.measured(self.stage1())
            _, gaussian = fit.fit(model, where, batches, method="normal")
            model, errors = fit.fit(model, where, batches, method="least_squares")
            saved.save(place, model)
            means = dict(least_squares=statistics.fmean(errors.values()), gaussian=statistics.fmean(gaussian.values()))
            (place / "errors.json").write_text(json.dumps(means))
        return place

    def errors(self) -> dict[str, float]:
        """Squared errors of replaced modules before stage 2, as shares of the squares of the attention's outputs."""
        return json.loads((self.start() / "errors.json").read_text())


def _vit(model: Any) -> Any:
    return getattr(model, "backbone", model)


def _sigma(model, batches):
    return selection.sigma(model, batches).blocks


# ---- What came of it


def gains_of(rows: Mapping[str, Sequence[float]]) -> dict[str, dict]:
    """By how much the first row of each pair is above the second, and the standard error."""
    gains = {}
    for (name, other), paper in PAIRS.items():
        if name in rows and other in rows:
            gap, error = small_images.difference(rows[name], rows[other])
            gains[f"{name} - {other}"] = dict(gap=gap, standard_error=error, paper=paper)
    return gains


def claims_of(errors: Sequence[Mapping[str, float]]) -> list[Claim]:
    """That taps of least squares begin nearer to the attention, of every seed; of a single one it is not judged."""
    worst = max(one["least_squares"] / one["gaussian"] for one in errors)
    text = "squared error before stage 2, least squares over Gaussian taps"
    return [Claim(text, worst, at_most=LEAST, judged=len(errors) > 1)]


def order(gap: float, error: float | None, paper: float) -> str:
    """Whether the paper's order of two rows holds."""
    if error is None or abs(gap) <= 2 * error:
        return f"in the paper {paper:+.2f}: not resolved here"
    return f"in the paper {paper:+.2f}: {'the same' if gap * paper > 0 else 'another'} order"


def report(study: Study, rows: Mapping, gains: Mapping, chosen: Mapping, claims: Sequence[Claim]) -> None:
    """Print the rows, the blocks of every seed, the differences, and the claims."""
    cells = [dict(name=name, figure=small_images.spread(values)) for name, values in rows.items()]
    print(benchmark.table(cells, dict(name="", figure=f"{study.figure}, %")))
    for seed, choices in chosen.items():
        blocks = {choice: values for choice, values in choices.items() if not choice.endswith("of all")}
        print(f"{seed}:", ", ".join(f"{choice} {values}" for choice, values in blocks.items()))
    for name, gain in gains.items():
        said = small_images.verdict(gain["gap"], gain["standard_error"])
        paper = gain["paper"]
        print(f"{name}: {said}" + (f"; {order(gain['gap'], gain['standard_error'], paper)}" if paper else ""))
    for claim in claims:
        print(claim)
