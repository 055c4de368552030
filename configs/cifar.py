"""Small ViTs of every family on CIFAR-10 or CIFAR-100 at 32 px, patch 4.  Cost: not measured.

From no paper: a shortened DeiT III recipe, with the usual augmentation at this size.
Ours: only the short runs in experiments/studies/README.md.

    python -m equivit.train --config=configs/cifar.py:10,H8 --config.data.source=npz:/data/cifar10.npz --workdir=/tmp/c
    python -m equivit.train --config=configs/cifar.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: 10 or 100 (10 by default), a family (plain, H8, I8, D8, H2, D2; H8 by default), quicktest.
"""

from equivit.configs import recipes
from equivit.training import config


def get_config(mode: str = "10,H8"):
    w = recipes.words(mode, "quicktest", classes=("10", "100"), family=recipes.FAMILIES)
    family, classes = w.family or "H8", int(w.classes or 10)
    c = config.get_base()
    c.epochs, c.batch_size = 100, 512
    c.model.update(name=f"{recipes.FAMILIES[family]}_ti16", family=family, image_size=(32, 32), patch_size=4)
    c.model.update(num_classes=classes, drop_path=0.1)
    c.data.update(source=f"tfds:cifar{classes}", image_size=(32, 32), channels=3, workers=2)
    c.data.augment.update(crop="pad", rand_augment="rand-m9-mstd0.5-inc1")
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=1.0)
    c.schedule.update(lr=1e-3, warmup_epochs=5)
    c.checkpoint.every_seconds = 120
    c.evaluation.update(every_epochs=10, suite=("accuracy", "orientation"), corruption_crop_ratio=1.0)
    if w.quicktest:
        recipes.small(c, width=64, depth=2, num_heads=2, num_classes=10)
    return c
