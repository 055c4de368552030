"""Masked autoencoding of blood cells with and without a Jumbo token: linear probes of frozen features.

    python -m experiments studies.jumbo_mae --source=npz:/data/pbc_wbc96.npz

ARMS are a plain ViT with its class token, and a Jumbo token of J = 3, as in the paper's Table 1: without an MLP of its
own, with it, and with it at a J-th of the learning rate.  A probe reads the class token, or the J rows of a Jumbo
token, which are wider; the arm without an MLP shows what this alone brings.  The recipe is `mae_small_images.py`'s: 36
patches, of which the encoder sees 9.

Each arm gets the rate with the best probe on a held-out fifth of the training images, for one seed; it is then trained
on all training images with every seed.  All arms take as long as Jumbo's --steps; steps are timed once, in turn.
Claim (paper: +4.9 points): Jumbo, with a J-th of the rate for its MLP, is ahead of plain.
"""

import functools
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from equivit.training import config as configs
from experiments import findings, flags
from experiments.findings import Claim
from experiments.studies import differences, held_out, mae_small_images, several_seeds

J = 3
JUMBO = [f"model.jumbo={J}"]
ARMS = {
    "plain": ("plain", []),
    "no MLP": ("jumbo", [*JUMBO, "model.jumbo_mlp=none"]),
    "Jumbo": ("jumbo", JUMBO),
    "Jumbo, rate / J": ("jumbo", [*JUMBO, f"optimizer.rates=('encoder.jumbo_mlp.*=1/{J}',)"]),
}
LONGEST = "Jumbo"  # whose steps set the time
PROBE, NEAREST, EXPLAINED = "eval/linear_probe/top1", "eval/knn/top1", "eval/reconstruction/explained"
FIGURES = {"probe": PROBE, "nearest": NEAREST, "explained": EXPLAINED}
COLUMNS = {"probe": "probe, %", "nearest": "20 nearest, %", "explained": "explained, %"}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = several_seeds.parser(__doc__, __file__, epochs=False)
    parser.add_argument("--steps", type=flags.at_least(1), default=700, help="of Jumbo (%(default)s)")
    parser.add_argument("--rates", default=[1.7e-4, 5e-4, 1.5e-3, 4.5e-3], type=flags.each_at_least(0, float))
    options = several_seeds.parse(parser, arguments)
    made = {arm: config_of(options, arm, options.steps) for arm in ARMS}
    images = held_out.prepared(made[LONGEST].data, options.workdir / "images.npz")
    settings = dict(steps=options.steps, override=options.override)
    path = options.workdir / "steps.json"
    seconds = several_seeds.planned(path, settings, lambda: several_seeds.step_seconds(made))
    rows = {arm: row(options, images, arm, seconds) for arm in ARMS}
    pairs = [(arm, "plain") for arm in ARMS if arm != "plain"] + [("Jumbo, rate / J", "no MLP")]
    gains = differences.gains(rows, pairs, list(FIGURES))
    losses = {arm: f"{statistics.fmean(row['loss']):.4f}" for arm, row in rows.items()}
    shown = {arm: {**row, "rate": f"{row['rate']:g}", "loss": losses[arm]} for arm, row in rows.items()}
    several_seeds.show(shown, COLUMNS, gains, {"steps": "steps", "rate": "rate", "loss": "training loss"})
    about = dict(steps=options.steps, rates=options.rates, seeds=options.seeds, overrides=options.override)
    return findings.finish(options, about | dict(rows=rows, gains=gains), claims(rows, judged=len(options.seeds) > 1))


def row(options, images: pathlib.Path, arm: str, seconds: Mapping[str, float]) -> dict:
    """The figures of an arm: its rate chosen, then a run for each seed, all as long as LONGEST's."""
    steps = round(options.steps * seconds[LONGEST] / seconds[arm])
    directory = options.workdir / arm.replace(" / ", "_over_")
    make = functools.partial(config_of, options, arm, steps)
    found = held_out.row(make, images, directory, options, FIGURES, chosen=PROBE, choosing=held_out.SPLITS)
    return dict(steps=steps, step_seconds=seconds[arm]) | found


def claims(rows: Mapping[str, Mapping], judged: bool) -> list[Claim]:
    mean = {arm: statistics.fmean(row["probe"]) for arm, row in rows.items()}
    gap = mean["Jumbo, rate / J"] - mean["plain"]
    return [Claim("Jumbo with a J-th of the rate, minus plain: linear probe", gap, at_least=0, judged=judged)]


def config_of(options, arm: str, steps: int, *overrides: str):
    kind, texts = ARMS[arm]
    texts = [*mae_small_images.SETTINGS, *several_seeds.length_in_steps(steps, warmup=10), *texts]
    texts += [*several_seeds.source(options), *options.override, *overrides]
    return configs.load(f"configs/mae.py:cifar,{kind}", texts)
