"""Label maps of small models on CamVid at equal epochs: how good, and how far they follow shifts and turns.

| row               | backbone               | decoder                                               |
|-------------------|------------------------|-------------------------------------------------------|
| plain             | ViT                    | linear                                                |
| D8                | D8 ViT, as wide        | linear; all of it turns with the image                |
| swin              | Swin                   | UperNet, zero padding                                 |
| adaptive          | adaptive Swin          | equivariant UperNet, interpolation around the torus   |
| adaptive, unpool  | adaptive Swin          | equivariant UperNet, unpooling (Listing A2.2)         |

CamVid's frames of 240 x 180 pixels are resized to 128 wide and 96 high; training cuts nothing and mirrors.  No backbone
is pretrained.  Not in a paper.

    python experiments/segmentation_camvid.py --source=npz:/data/camvid_240x180.npz

The same command resumes a run.  Mean IoU of the test frames; mASCC, the share of pixels whose class follows
a circular shift (Eq. 26 of shift-equivariant ViTs); mean IoU over the eight orientations, and the share of pixels whose
class is the same in all of them.  A difference is called resolved when it is larger than twice its standard error over
seeds.  Prints the table, writes JSON with every run's figures, versions and machine; exits 1 when a shift changes a
label of an adaptive model.
"""

import pathlib
import sys
from collections.abc import Mapping

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from equivit.training import config as configs
from experiments import benchmark, small_images

# Windows that divide both sides, for turned images too.
SWIN = ["model.width=32", "model.depths=(2,4)", "model.num_heads=(1,2)", "model.window_size=(4,4)"]
SWIN += ["model.patch_size=4", "objective.width=48"]
VIT = ["model.width=96", "model.depth=4", "model.num_heads=3", "model.patch_size=8", "model.layer_scale=0.1"]
VARIANTS = {
    "plain": ("vit_s16,linear", VIT),
    "D8": ("octic_vit_s16,linear", VIT),
    "swin": ("swin_t", SWIN),
    "adaptive": ("swin_t,adaptive", SWIN),
    "adaptive unpool": ("swin_t,adaptive", [*SWIN, "objective.upsampling=unpool"]),
}
SHARED = ["data.image_size=(96,128)", "model.image_size=(96,128)", "data.void=(11,)", "data.eval_split=test"]
SHARED += ["data.eval_crop=centre", "data.augment.crop=none", "data.augment.photometric=False", "data.workers=0"]
SHARED += ["model.drop_path=0.0", "precision=float32", "batch_size=8", "schedule.lr=1e-3", "schedule.warmup_lr=1e-5"]
SHARED += ["evaluation.suite=segmentation,segmentation_shift,segmentation_orientation", *small_images.QUIET]
FIGURES = {
    "miou": "segmentation/miou",
    "mascc": "segmentation_shift/circular_full",
    "eight": "segmentation_orientation/miou_mean",
    "same": "segmentation_orientation/same",
}


def main(arguments=None) -> int:
    parser = small_images.parser(__doc__, "segmentation_camvid")
    parser.add_argument("--rows", default=list(VARIANTS), type=benchmark.one_of(list(VARIANTS)), help="(all)")
    parser.set_defaults(epochs=40)
    options = parser.parse_args(arguments)
    rows = {name: row(name, options) for name in options.rows}
    gains = gains_of(rows)
    report(rows, gains)
    settings = dict(epochs=options.epochs, shared=[*SHARED, *options.override], variants=VARIANTS)
    small_images.write(options.out, dict(rows=rows, gains=gains, **settings))
    return int(any(min(found["mascc"]) < 1 for name, found in rows.items() if name.startswith("adaptive")))


def row(name: str, options) -> dict[str, list[float]]:
    """The figures of a variant, one for each seed; trains it or resumes its run."""
    mode, keys = VARIANTS[name]
    texts = [*SHARED, *keys, f"epochs={options.epochs}", f"schedule.warmup_epochs={options.epochs / 20:g}"]
    texts += [f"data.source={options.source}"] if options.source else []
    found = []
    for seed in options.seeds:
        config = configs.load(f"configs/segment.py:{mode}", [*texts, *options.override, f"seed={seed}"])
        place = options.workdir / name.replace(" ", "_") / f"seed_{seed}"
        found.append(small_images.trained(config, place))
    return {figure: [one[f"eval/{key}"] for one in found] for figure, key in FIGURES.items()}


def gains_of(rows: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict]:
    """How much a variant is above that which it is compared with, and the standard error."""
    gains, pairs = {}, [("D8", "plain"), ("adaptive", "swin"), ("adaptive unpool", "adaptive")]
    for name, other in pairs:
        if name in rows and other in rows:
            for figure in FIGURES:
                gap, error = small_images.difference(rows[name][figure], rows[other][figure])
                gains[f"{name} - {other}, {figure}"] = dict(gap=gap, standard_error=error)
    return gains


def report(rows: Mapping[str, Mapping[str, list[float]]], gains: Mapping[str, dict]) -> None:
    """Print the rows, and the differences."""
    columns = dict(miou="mIoU, %", mascc="mASCC, %", eight="mIoU of eight, %", same="same in eight, %")
    cells = [
        dict(name=name, **{key: small_images.spread(found[key]) for key in columns}) for name, found in rows.items()
    ]
    print(benchmark.table(cells, dict(name="", **columns)))
    for name, gain in gains.items():
        print(f"{name}: {small_images.verdict(gain['gap'], gain['standard_error'])}")


if __name__ == "__main__":
    sys.exit(main())
