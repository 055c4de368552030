"""Swin or SwinV2 with UperNet on ADE20K: Table 5 of truly shift-equivariant ViTs.

Source: arXiv 2305.16316, Sections 5.5, 5.6 and A3.2, with the cited schedule of MMSegmentation's Swin and UperNet.
Expected, from the paper: mean IoU and, after the comma, mASCC, in %.

| model             | circular     | standard     |
|-------------------|--------------|--------------|
| swin_t            | 42.93, 87.32 | 44.2, 93.37  |
| swin_t,adaptive   | 43.44, 100   | 44.43, 93.48 |
| swinv2_t          | 43.86, 88.16 | 44.26, 93.23 |
| swinv2_t,adaptive | 44.42, 100   | 46.11, 93.59 |

Ours: not trained yet; adaptive models have exactly 100 under circular shifts for any weights.  Cost: not in the paper,
which trains on four A100.

    python -m equivit.train --config=configs/adaptive_ade20k.py:swin_t,adaptive --workdir=/tmp/a_swin_t \
        --config.init=/tmp/a_swin_t_imagenet --config.data.source=pairs:/data/ADEChallengeData2016
    python -m equivit.train --config=configs/adaptive_ade20k.py:quicktest --workdir=/tmp/quicktest

As in the paper, a backbone starts from configs/adaptive_imagenet.py's model for the same shifts (--config.init).

Modes, joined by commas: swin_t or swinv2_t (swin_t by default); adaptive; circular or standard, the kind of shifts
(circular by default), which sets the decoder's padding, image sizes and evaluation; ratio; unpool; quicktest.

Where the paper contradicts itself or is silent:
- Tables A6 to A8 resize images to a fixed size; MMSegmentation, which the text follows, by 0.5 to 2.
  Here circular shifts use the fixed size, or with `ratio` the random one, which standard shifts always use.
- Table A7 resizes test images to 2042 x 512, the text to 2048 x 512, which is used here.
- Listing A2.2 restores features by unpooling, which leaves zeros between them; Section 4 does not decide.  Here they
  are interpolated around the torus, or with `unpool` unpooled; logits are interpolated in both cases.
- The paper names no equivariant pyramid pooling: ours is `equivit/models/segmenter/pyramid_pooling.py`.
- Adaptive models need sizes that all their grids divide, for standard shifts too: there an adaptive Swin is trained on
  crops of 448 pixels, the ordinary one on 512.  Test images are resized up to the next such size, except for
  ordinary models under standard shifts, which take the next multiple of 4.
- Ranges of shifts are not given: here circular shifts cover the whole image, others 32 pixels to either side.
"""

from equivit.configs import recipes
from equivit.training import config

SIZES = {"swin_t": (224, (1792, 448)), "swinv2_t": (256, (2048, 512))}


def get_config(mode: str = "swin_t"):
    flags = ("adaptive", "ratio", "unpool", "quicktest")
    w = recipes.words(mode, *flags, model=SIZES, shifts=("circular", "standard"))
    name, standard = w.model or "swin_t", w.shifts == "standard"
    for word, needs in (("unpool", w.adaptive), ("ratio", not standard)):
        if getattr(w, word) and not needs:
            fix = "add 'adaptive'" if word == "unpool" else "leave it out, standard shifts have it"
            raise ValueError(f"config mode={mode!r}: {word!r} has no effect here; {fix}.")
    unit, fit = SIZES[name] if not standard else (SIZES[name][0], (2048, 512))
    side = fit[1] // unit * unit if w.adaptive else fit[1]
    c = config.get_base("segmentation")
    c.steps, c.batch_size, c.precision = 160_000, 16, "mixed"
    c.model = dict(name=name, image_size=(unit, unit), drop_path=(0.0, 0.3), num_classes=150)
    c.data.update(source="pairs:ADEChallengeData2016", split="training", eval_split="validation", channels=3)
    c.data.update(image_size=(side, side), fit=fit, eval_crop="whole", interpolation="bilinear", workers=8)
    c.data.augment.update(crop="scaled", max_share=0.75, flip=0.5, photometric=True)
    c.data.augment.fit_ratio = (0.5, 2.0) if standard or w.ratio else (1.0, 1.0)
    c.data.multiple = 4 if standard and not w.adaptive else unit
    c.objective.update(decoder="upernet", padding="zeros" if standard else "circular")
    if w.adaptive:
        c.model.adaptive, c.objective.equivariant = True, True
        c.objective.upsampling = "unpool" if w.unpool else "interpolate"
    c.optimizer.update(name="adamw", weight_decay=0.01, eps=1e-8, clip=None)
    c.schedule.update(name="poly", lr=6e-5, warmup_lr=6e-11, min_lr=0.0, warmup_steps=1500)
    c.checkpoint.every_steps = 4000
    c.evaluation.suite = ("segmentation", "segmentation_shift")
    c.evaluation.shift.update(kinds=("zeros" if standard else "circular",), ranges=(64,) if standard else ("full",))
    if w.quicktest:
        recipes.small(c, source="synthetic_maps", num_classes=2, **recipes.HIERARCHICAL[name]["small"])
        c.data.update(fit=None, multiple=32)
        c.objective.width, c.evaluation.shift.ranges = 16, ("full",)
    return c
