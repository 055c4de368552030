"""Semantic segmentation on any label maps: a backbone with a decoder, fine-tuned or frozen.

Sources: UperNet (arXiv 1807.10221) as in Swin (arXiv 2103.14030), Section A2.3; a linear map of frozen features as in
DINOv2 (arXiv 2304.07193); transposed convolutions (`equivit/models/segmenter/decoders.py`).  From no paper, for your
own data; expected figures and cost are unknown.

    python -m equivit.train --config=configs/segment.py --workdir=/tmp/ade20k --config.init=/tmp/swin_t \
        --config.data.source=pairs:/data/ADEChallengeData2016 --config.data.split=training \
        --config.data.eval_split=validation --config.data.fit=(2048,512)
    python -m equivit.train --config=configs/segment.py:vit_s16,frozen --workdir=/tmp/linear --config.init=/tmp/vit_s \
        --config.data.source=npz:camvid.npz --config.data.void=(11,) --config.epochs=50
    python -m equivit.train --config=configs/segment.py:quicktest --workdir=/tmp/quicktest
    python -m equivit.evaluate --workdir=/tmp/ade20k --suite=segmentation,segmentation_shift --figures

Label maps come from folders (pairs:<dir>, `equivit/data/pairs.py`) or arrays (npz:<file>); data.void lists labels
without a class.  Training resizes by a random ratio, crops at random, flips, and changes colours.  Evaluation uses
whole images, and counts pixels at the original size of the labels.

Modes, joined by commas:
- the backbone: swin_t (by default), swinv2_t, cvt_13, mvitv2_t, vit_s16, or octic_vit_s16, of family D8;
- the decoder: upernet (default for staged backbones), linear (default otherwise), convolutions, octic (octic_vit_s16);
- adaptive: backbone and decoder are shift-equivariant;
- frozen: only the decoder is trained; quicktest.
"""

from equivit.configs import recipes
from equivit.training import config

COLUMNS = {"vit_s16": {}, "octic_vit_s16": dict(family="D8")}
BACKBONES = (*recipes.HIERARCHICAL, *COLUMNS)
SMALL = {name: own["small"] for name, own in recipes.HIERARCHICAL.items()}
SMALL |= dict.fromkeys(COLUMNS, dict(width=64, depth=2, num_heads=2))


def get_config(mode: str = "swin_t"):
    flags = ("adaptive", "frozen", "quicktest")
    w = recipes.words(mode, *flags, model=BACKBONES, decoder=("upernet", "linear", "convolutions", "octic"))
    name = w.model or "swin_t"
    decoder = w.decoder or ("linear" if name in COLUMNS else "upernet")
    side = 256 if name == "swinv2_t" else 224
    c = config.get_base("segmentation")
    c.epochs, c.batch_size, c.precision = 100, 16, "mixed"
    c.model = dict(name=name, image_size=(side, side), **COLUMNS.get(name, {}))
    c.model.drop_path = (0.0, 0.0, 0.1) if name == "cvt_13" else (0.0, 0.1)
    c.data.update(source="pairs:data", image_size=(side, side), channels=3, eval_crop="whole", multiple=32, workers=8)
    c.data.augment.update(crop="scaled", max_share=0.75, flip=0.5, photometric=True)
    c.objective.update(decoder=decoder, frozen=w.frozen)
    if decoder != "upernet":
        c.objective.auxiliary = 0.0
    if w.adaptive:
        c.model.adaptive, c.objective.equivariant, c.data.multiple = True, True, side
    c.optimizer.update(name="adamw", weight_decay=0.01, eps=1e-8, clip=None)
    c.schedule.update(name="poly", lr=1e-3 if w.frozen else 6e-5, warmup_lr=1e-9, min_lr=0.0, warmup_epochs=1)
    c.checkpoint.every_seconds = 300
    c.evaluation.update(every_epochs=10, suite=("segmentation",))
    if w.quicktest:
        recipes.small(c, source="synthetic_maps", num_classes=2, **SMALL[name])
        c.data.multiple, c.objective.width = 32, 16
    return c
