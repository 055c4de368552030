"""A public dense ViT made octic, without labels: the data and the steps of `equivit.octify`.

Source: none; the recipe is ours.  Expected: not known, nothing has been trained at this size.

    python -m equivit.octify --weights=dinov2:dinov2_vits14_pretrain.pth --family=I8 --config=configs/octify.py \
        --workdir=/tmp/octic --config.data.source=folder:/data/images
    python -m equivit.train --config=configs/octify.py:quicktest --workdir=/tmp/quicktest    # one stage, random teacher

The command sets the model, the teacher and the place of its features.  Modes: full (by default); small, for images of
48 px without an orientation, on a CPU; quicktest.
"""

from equivit.configs import recipes
from equivit.training import config

TEACHER = config.Missing("the teacher; python -m equivit.octify sets it.")


def get_config(mode: str = "full"):
    w = recipes.words(mode, "quicktest", size=("full", "small"))
    c = config.get_base("feature_matching")
    c.epochs, c.batch_size, c.precision = 20, 256, "mixed"
    c.model = dict(name="octic_vit_s16", num_classes=None)
    c.objective.teacher = "zoo:vit_pico16" if w.quicktest else TEACHER
    c.data.update(source="tfds:imagenet2012", eval_split="validation", channels=3, image_size=(224, 224), workers=16)
    c.data.augment.update(crop="random_resized", scale=(0.4, 1.0), flip=0.5)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=1.0)
    c.schedule.update(lr=5e-4, warmup_lr=0.0, min_lr=0.0, warmup_epochs=0.5)
    c.checkpoint.every_steps = 500
    c.evaluation.update(every_epochs=None, suite=("knn", "linear_probe"))
    c.evaluation.linear_probe.update(blocks=(1,), augment=False)  # the features that are matched, read once
    if w.size == "small":
        c.epochs, c.batch_size, c.precision = 8, 64, "float32"
        c.data.update(source="npz:pbc_wbc96.npz", eval_split="test", image_size=(48, 48), crop_ratio=1.0, workers=0)
        c.data.augment.octic = True
        c.schedule.lr, c.optimizer.betas = 6e-3, (0.9, 0.95)
        c.checkpoint.update(every_steps=None, every_seconds=120)
        c.evaluation.linear_probe.update(steps=2000, batch_size=256)
    if w.quicktest:
        recipes.small(c, name="octic_vit_pico16", transition_map=True)
        c.evaluation.knn.ks = (5,)
        c.evaluation.linear_probe.update(steps=2, batch_size=8)
    return c
