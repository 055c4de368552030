"""Label maps of small models on CamVid at equal epochs: mean IoU, and consistency under shifts and turns.

    python -m experiments studies.segmentation_camvid --source=npz:/data/camvid_240x180.npz

Frames of 240 x 180 pixels are resized to 128 x 96; training mirrors and does not crop; no backbone is pretrained.
mASCC is the share of pixels whose class follows a circular shift (Eq. 26 of shift-equivariant ViTs).  Claim: no shift
changes a label of an adaptive model.
"""

from experiments import flags
from experiments.studies import several_seeds

# Windows that divide both sides, for turned images too.
SWIN = ["model.width=32", "model.depths=(2,4)", "model.num_heads=(1,2)", "model.window_size=(4,4)"]
SWIN += ["model.patch_size=4", "objective.width=48"]
VIT = ["model.width=96", "model.depth=4", "model.num_heads=3", "model.patch_size=8", "model.layer_scale=0.1"]
VARIANTS = {
    "plain": ("vit_s16,linear", VIT),
    "D8": ("octic_vit_s16,linear", VIT),  # all of it turns with the image
    "swin": ("swin_t", SWIN),  # UperNet, zero padding
    "adaptive": ("swin_t,adaptive", SWIN),  # equivariant UperNet, interpolation around the torus
    "adaptive unpool": ("swin_t,adaptive", [*SWIN, "objective.upsampling=unpool"]),  # Listing A2.2
}
SHARED = ["data.image_size=(96,128)", "model.image_size=(96,128)", "data.void=(11,)", "data.eval_split=test"]
SHARED += ["data.eval_crop=centre", "data.augment.crop=none", "data.augment.photometric=False", "data.workers=0"]
SHARED += ["model.drop_path=0.0", "precision=float32", "batch_size=8", "schedule.lr=1e-3", "schedule.warmup_lr=1e-5"]
SHARED += ["evaluation.suite=segmentation,segmentation_shift,segmentation_orientation", *several_seeds.QUIET]
FIGURES = {"miou": "eval/segmentation/miou", "mascc": "eval/segmentation_shift/circular_full"}
FIGURES |= {"eight": "eval/segmentation_orientation/miou_mean", "same": "eval/segmentation_orientation/same"}
PAIRS = (("D8", "plain"), ("adaptive", "swin"), ("adaptive unpool", "adaptive"))
COLUMNS = dict(miou="mIoU, %", mascc="mASCC, %", eight="mIoU of eight, %", same="same in eight, %")


def main(arguments=None) -> int:
    parser = several_seeds.parser(__doc__, __file__)
    parser.add_argument("--rows", default=list(VARIANTS), type=flags.one_of(list(VARIANTS)), help="(all)")
    parser.set_defaults(epochs=40)
    options = several_seeds.parse(parser, arguments)
    rows = {}
    for name in options.rows:
        mode, keys = VARIANTS[name]
        texts = [*SHARED, *keys, f"epochs={options.epochs}", f"schedule.warmup_epochs={options.epochs / 20:g}"]
        found = several_seeds.reports(options, f"configs/segment.py:{mode}", texts, name.replace(" ", "_"))
        rows[name] = several_seeds.by_seed(found.values(), FIGURES)
    settings = dict(epochs=options.epochs, shared=[*SHARED, *options.override], variants=VARIANTS)
    several_seeds.conclude(options, rows, COLUMNS, PAIRS, FIGURES, **settings)
    return int(any(min(found["mascc"]) < 1 for name, found in rows.items() if name.startswith("adaptive")))
