"""The DeiT III recipe on ImageNet-1k for ViT-L/16: the plain baseline of octic ViTs.

Source: octic ViTs, Appendix D.1 and Table 5a (400 epochs); DeiT III (arXiv 2204.07118) for 800 epochs.
Expected top-1, plain, 400 epochs at 224 px: L/16 84.2 %, H/14 84.6 % (octic ViTs, Table 2).  Ours: not trained yet.
The public code keeps the weights of the best epoch on the validation images; here those of the last one count.
For H2 and D2 its script decays tokens and positions too, by an accident of names, which is not followed.
Cost of the octic models in the paper: 36 to 39 hours on 16 (L), 55 to 58 on 32 (H) A100-40GB.

    python -m equivit.train --config=configs/deit3.py --workdir=/tmp/vit_l --config.data.source=tfds:imagenet2012
    python -m equivit.train --config=configs/deit3.py:quicktest --workdir=/tmp/quicktest     # a minute on a laptop CPU

Modes, joined by commas: a family (plain by default, H8, I8, D8, H2, D2), 400 or 800 (epochs), quicktest.  The other
families are also configs/octic_l.py; ViT-H/14 is configs/octic_h.py.
"""

from configs import recipes
from equivit.training import config


def get_config(mode: str = "plain"):
    w = recipes.words(mode, "quicktest", family=recipes.FAMILIES, epochs=("400", "800"))
    family, long = w.family or "plain", w.epochs == "800"
    side = 192 if long else 224
    c = config.get_base()
    c.epochs, c.batch_size, c.precision = (800 if long else 400), 2048, "mixed"
    c.model.update(
        name=f"{recipes.FAMILIES[family]}_l16",
        family=family,
        image_size=(side, side),
        drop_path=0.45 if long else 0.4,
    )
    c.data.update(
        source="tfds:imagenet2012", eval_split="validation", image_size=(side, side), channels=3, workers=16, repeats=3
    )
    c.data.augment.update(crop="random_resized", scale=(0.08, 1.0), flip=0.5, three_augment=True, color_jitter=0.3)
    c.objective.update(loss="bce", mixup=0.8, cutmix=1.0, ema=0.99996)
    c.objective.mix_groups = 32 if long or family == "D2" else 16  # one for each GPU of the original
    c.optimizer.update(name="lamb", weight_decay=0.05 if long else 0.02, eps=1e-8, clip=1.0)
    c.schedule.update(lr=3e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=5, per_epoch=True)
    c.checkpoint.every_steps = 1000
    c.evaluation.update(every_epochs=5, suite=("accuracy", "orientation"))
    if w.quicktest:
        # Four patches a side, so that quarter turns move something; the smallest width of sixteen octic channels.
        tiny = dict(width=64, depth=4, num_heads=2, mlp_dim=128, num_classes=10)
        recipes.small(c, batch_size=12, image_size=(64, 64), **tiny)
    return c
