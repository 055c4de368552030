"""Small ViTs of every family on CIFAR-10 or CIFAR-100 at 32 px, patch 4.  Cost: not measured.

Not in a paper; the recipe is DeiT III's, shortened, with the augmentation usual at this size.
Ours: only the short runs in README.md.

    python -m equivit.train --config=configs/cifar.py:10,I8 --workdir=/tmp/cifar10
    python -m equivit.train --config=configs/cifar.py:10,H8 --config.data.source=npz:/data/cifar10.npz --workdir=/tmp/c
    python -m equivit.train --config=configs/cifar.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: 10 or 100, a family (plain, H8, I8, D8, H2, D2), quicktest.
"""

from configs import deit3
from equivit.training import config


def get_config(mode: str = "10,H8"):
    words = mode.split(",")
    deit3.check([word for word in words if word not in ("10", "100")])
    family = next((word for word in words if word in deit3.FAMILIES), "H8")
    classes = 100 if "100" in words else 10
    c = config.get_base()
    c.epochs, c.batch_size = 100, 512
    c.model.update(
        name=f"{deit3.FAMILIES[family]}_ti16",
        family=family,
        patch_size=4,
        image_size=(32, 32),
        num_classes=classes,
        drop_path=0.1,
    )
    c.data.update(source=f"tfds:cifar{classes}", image_size=(32, 32), channels=3, workers=2)
    c.data.augment.update(crop="pad", rand_augment="rand-m9-mstd0.5-inc1")
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=1.0)
    c.schedule.update(lr=1e-3, warmup_epochs=5)
    c.checkpoint.every_seconds = 120
    c.evaluation.update(every_epochs=10, suite=("accuracy", "orientation"))
    if "quicktest" in words:
        c.epochs, c.steps, c.batch_size, c.schedule.warmup_epochs = None, 2, 8, None
        c.model.update(width=64, depth=2, num_heads=2)
        c.data.update(source="synthetic", workers=0, train_examples=16, eval_examples=8)
    return c
