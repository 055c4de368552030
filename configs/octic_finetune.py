"""Fine-tuning at a higher resolution, DeiT III's last stage: 20 epochs of AdamW at 224 px or more.

Source: DeiT III (arXiv 2204.07118), Section 4 and its public commands.  It follows an 800-epoch run, which trains L/16
at 192 px and H/14 at 154 px; positions are resized once to the new grid and trained there.  As in the public commands,
an epoch has each image once, and the rate is constant after the warm-up (--min-lr keeps its default, 1e-5).
Ours: not trained yet.

    python -m equivit.train --config=configs/octic_finetune.py:H,H8 --config.init=/tmp/octic_h --workdir=/tmp/h_224
    python -m equivit.train --config=configs/octic_finetune.py:quicktest --workdir=/tmp/quicktest

The public code selects the best epoch; here the last epoch counts.  It has no command for H/14 at 378 px, which uses
the drop path of 224 px.
Modes, joined by commas (L,H8 if none is given): L or H (default L), a family (default plain), 384 (pixels; H/14: 378),
quicktest.
"""

from equivit.configs import recipes
from equivit.training import config


def get_config(mode: str = "L,H8"):
    w = recipes.words(mode, "quicktest", size=("L", "H"), family=recipes.FAMILIES, pixels=("384",))
    family, huge = w.family or "plain", w.size == "H"
    side = (378 if huge else 384) if w.pixels else 224
    c = config.get_base()
    c.epochs, c.batch_size, c.precision = 20, 512, "mixed"
    c.model.update(name=f"{recipes.FAMILIES[family]}_{'h14' if huge else 'l16'}", family=family)
    c.model.update(image_size=(side, side), drop_path=0.55 if huge else 0.4 if w.pixels else 0.45)
    c.data.update(source="tfds:imagenet2012", eval_split="validation", image_size=(side, side), channels=3, workers=16)
    c.data.augment.update(crop="random_resized", scale=(0.08, 1.0), flip=0.5, rand_augment="rand-m9-mstd0.5-inc1")
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=1.0, label_smoothing=0.1, ema=0.99996)
    c.objective.mix_groups = 16 if huge else 8  # one for each GPU of the original
    c.optimizer.update(name="adamw", weight_decay=0.1, eps=1e-8, clip=None)
    c.schedule.update(lr=1e-5, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=5, per_epoch=True)
    c.checkpoint.every_steps = 1000
    c.evaluation.update(every_epochs=5, suite=("accuracy", "orientation"))
    if w.quicktest:
        recipes.small_deit3(c, patch=14 if huge else 16)
    return c
