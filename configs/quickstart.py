"""A first run: an octic ViT on scikit-learn's digits, without a download.  Two minutes on two CPU cores.

    python -m equivit.train --config=configs/quickstart.py --workdir=runs/quickstart       # what `make quickstart` runs
    python -m equivit.train --config=configs/quickstart.py:plain --workdir=runs/plain      # a plain ViT, for comparison
    python -m equivit.train --config=configs/quickstart.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: a family (plain, H8, I8, D8, H2, D2; H8 by default), quicktest.  Results: experiments/studies.
"""

from equivit.configs import recipes
from equivit.training import config


def get_config(mode: str = "H8"):
    w = recipes.words(mode, "quicktest", family=recipes.FAMILIES)
    family = w.family or "H8"
    c = config.get_base()
    c.epochs, c.batch_size = 24, 32
    c.model.update(name=f"{recipes.FAMILIES[family]}_ti16", family=family, image_size=(32, 32), patch_size=4)
    c.model.update(width=96, depth=4, num_heads=3, in_channels=1, num_classes=10, layer_scale=0.1)
    c.model.unroll = True  # faster on a CPU: each block's saved activations are separate arrays
    # Mean and standard deviation of the training images.
    c.data.update(source="digits", image_size=(32, 32), channels=1, mean=(0.305,), std=(0.349,))
    c.data.augment.update(crop="pad", flip=0.0)  # a mirrored 2 is not a 2
    c.objective.update(loss="cross_entropy", label_smoothing=0.1)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=1.0)
    c.schedule.update(lr=2e-3, warmup_epochs=3)
    c.checkpoint.every_seconds = 20
    c.evaluation.update(suite=("accuracy", "orientation"))
    c.log.every_steps = 44  # an epoch
    if w.quicktest:
        recipes.small(c, batch_size=32, width=48, depth=2, num_heads=2)
        c.data.update(source="digits", train_examples=128, eval_examples=64)
    return c
