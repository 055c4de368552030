"""Masked autoencoding of blood cells by small plain, H8, I8 and D8 ViTs: frozen features, and turned reconstructions.

    python -m experiments studies.mae_small_images --source=npz:/data/pbc_wbc96.npz

The recipe is configs/mae.py:cifar at 48 px in patches of 8, with raw pixels as targets and training images in all eight
orientations.  Accuracy is of a linear probe and of 20 nearest neighbours on the encoder's frozen features, after
training and at the start.  "turned" is the largest deviation, relative to the reconstruction, of the reconstruction of
a turned image under the turned mask from the turned reconstruction.  The picture shows both.  20 minutes on one core.

Claims: every model explains most of the variance of removed patches; "turned" is rounding for I8 and D8, and not for
the others.
"""

import numpy as np
from matplotlib.figure import Figure

from equivit.data import loader
from equivit.data.pixels import normalize
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import findings, flags, pictures
from experiments.findings import Claim
from experiments.studies import differences, several_seeds

FAMILIES = ("plain", "H8", "I8", "D8")
EQUIVARIANT = ("I8", "D8")
SETTINGS = ["data.image_size=(48,48)", "model.image_size=(48,48)", "model.patch_size=8", "model.width=96"]
SETTINGS += ["model.depth=4", "model.num_heads=3", "objective.decoder_width=96", "objective.decoder_heads=3"]
SETTINGS += ["objective.target=pixels", "data.augment.scale=(0.4,1.0)", "data.augment.octic=True", "data.workers=0"]
SETTINGS += ["data.source=npz:pbc_wbc96.npz", "batch_size=64", "schedule.warmup_epochs=1", "log.to=()"]
SETTINGS += ["evaluation.every_epochs=None", "evaluation.suite=('reconstruction','knn','linear_probe')"]
SETTINGS += [f"evaluation.linear_probe.{text}" for text in ("steps=1000", "batch_size=256", "augment=False")]
ACCURACIES = ("linear_probe/top1", "knn/top1", "linear_probe/accuracy_mean")
IMAGES = (3, 8, 14)  # of the test split, for the picture
ROUNDING = 1e-4  # of float32, through eight blocks


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.set_defaults(epochs=6, seeds=[0])
    parser.add_argument("--rows", default=list(FAMILIES), type=flags.one_of(FAMILIES), help="(all)")
    options = several_seeds.parse(parser, arguments)
    rows, shown = {}, {}
    for family in options.rows:
        rows[family] = runs(family, options)
        shown[family] = turned(*trained(family, options, options.seeds[0]))
    gains = gains_of(rows)
    claims = show(rows, gains)
    draw(shown, findings.picture(options))
    settings = dict(seeds=options.seeds, epochs=options.epochs, overrides=options.override)
    return findings.finish(options, dict(rows=rows, gains=gains, **settings), claims)


def place(family, options, seed):
    return options.workdir / family / f"seed_{seed}"


def config_of(family, options, seed):
    texts = [*SETTINGS, f"seed={seed}", *several_seeds.length_in_epochs(options.epochs)]
    texts += [*several_seeds.source(options), *options.override]
    return configs.load(f"configs/mae.py:cifar,{family}", texts)


def trained(family, options, seed):
    """The config and the model of a finished run."""
    run = checkpoints.load_run(place(family, options, seed))
    return run.config, run.model


def runs(family, options) -> dict[str, list]:
    """The figures of a model, one for each seed."""
    found = []
    for seed in options.seeds:
        config = config_of(family, options, seed)
        before = several_seeds.at_start(config, place(family, options, seed))
        after = several_seeds.trained(config, place(family, options, seed))
        row = {f"start {figure}": before[figure] for figure in ACCURACIES}
        row |= {figure: after[f"eval/{figure}"] for figure in (*ACCURACIES, EXPLAINED)}
        row["turned"] = deviation(turned(*trained(family, options, seed)))
        found.append(row)
    return {key: [row[key] for row in found] for key in found[0]}


def turned(config, model) -> dict[str, dict[str, np.ndarray]]:
    """The rows of `pictures.reconstructed` by element of the group, which turns some test images and their masks."""
    pixels = next(iter(loader.evaluate(config.data, batch_size=max(IMAGES) + 1).batches()))["image"][np.array(IMAGES)]
    images = np.asarray(normalize(pixels, config.data.mean, config.data.std))
    mask = pictures.random_mask(model, images)

    def of(g):
        rows = pictures.reconstructed(model, fields.act_on_image(g, images), fields.act_on_grid(g, mask, (1, 2)))
        colours = {name: row * np.array(config.data.std) + np.array(config.data.mean) for name, row in rows.items()}
        return colours | {"back": fields.act_on_image(OCTIC.inverse(g), colours[PREDICTED])}

    return {g: of(g) for g in OCTIC.elements}


def deviation(each) -> float:
    """The largest deviation of reconstructions, turned back, from the upright one, whose largest entry it divides."""
    upright = each["e"]["back"]
    return float(max(np.abs(rows["back"] - upright).max() for rows in each.values()) / np.abs(upright).max())


def gains_of(rows) -> dict[str, differences.Gain]:
    """The difference of each octic model to the plain one, and of each model's accuracies to its own start."""
    pairs = [(family, "plain") for family in rows if family != "plain"]
    gains = differences.gains(rows, pairs, list(COLUMNS))
    for figure in ACCURACIES:
        for family, row in rows.items():
            gains[f"{family} - its start, {figure}"] = differences.paired_difference(
                row[figure], row[f"start {figure}"]
            )
    return gains


def show(rows, gains) -> list[Claim]:
    """Print the table and the differences; returns the claims."""
    print("\nblood cells: accuracy in percent")
    several_seeds.show(rows, COLUMNS, gains)
    claims = []
    for family, row in rows.items():
        print(f"{family}: turned {max(row['turned']):.1e}, explained {max(row[EXPLAINED]):.3f}")
        claims.append(Claim(f"{family}: explained variance of removed patches", min(row[EXPLAINED]), at_least=0.8))
        bound = dict(at_most=ROUNDING) if family in EQUIVARIANT else dict(at_least=100 * ROUNDING)
        claims.append(Claim(f"{family}: deviation of turned reconstructions", max(row["turned"]), **bound))
    return claims


def draw(shown, path) -> None:
    """Two lines per image, upright and turned by 90 degrees: image, what is seen, and each model's reconstruction."""
    first = next(iter(shown.values()))
    columns = [("image", {g: rows["image"] for g, rows in first.items()})]
    columns += [("seen", {g: np.nan_to_num(rows["seen"], nan=0.5) for g, rows in first.items()})]
    columns += [(family, {g: rows[PREDICTED] for g, rows in each.items()}) for family, each in shown.items()]
    columns += [(f"{family},\ndifference", deviations(each)) for family, each in shown.items()]
    figure = Figure(figsize=(1.1 * len(columns), 2.25 * len(IMAGES)), layout="constrained")
    grid = figure.subplots(2 * len(IMAGES), len(columns))
    for k, (title, panels) in enumerate(columns):
        grid[0, k].set_title(title, fontsize=9)
        for line, axes in enumerate(grid[:, k]):
            g = "er"[line % 2]
            if g in panels:
                axes.imshow(np.clip(panels[g][line // 2], 0, 1), interpolation="nearest")
            axes.set_axis_off()
    figure.savefig(path, dpi=100)


def deviations(each) -> dict[str, np.ndarray]:
    """In the lines of turned images: the reconstruction minus the turned reconstruction, four times as strong."""
    return {"r": 0.5 + 4 * (each["r"][PREDICTED] - fields.act_on_image("r", each["e"][PREDICTED]))}


PREDICTED, EXPLAINED = "seen and\npredicted", "reconstruction/explained"
COLUMNS = {"start linear_probe/top1": "probe at start", "linear_probe/top1": "probe", "start knn/top1": "k-NN at start"}
COLUMNS |= {"knn/top1": "k-NN", "linear_probe/accuracy_mean": "probe, eight", EXPLAINED: "explained"}
