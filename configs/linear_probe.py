"""Linear probe of a masked autoencoder on ImageNet-1k: a classifier on frozen features, trained by LARS.

Sources: MAE (arXiv 2111.06377), Appendix A.1 and its public code; Jumbo (arXiv 2502.15021), Section 4.3 and Table 1.
Expected top-1 from Table 1 of Jumbo: B 68.1, B,jumbo 73.0, L 73.0, L,jumbo 74.0.  Ours: not trained yet.
Cost of MAE's public code: 2 h 20 min for B on 32 V100.

    python -m equivit.train --config=configs/linear_probe.py:B,jumbo --config.init=/tmp/mae --workdir=/tmp/probe
    python -m equivit.train --config=configs/linear_probe.py:B,plain --config.init=mae:mae_pretrain_vit_base.pth \
        --workdir=/tmp/probe_mae
    python -m equivit.train --config=configs/linear_probe.py:quicktest --workdir=/tmp/quicktest    # from random weights

--config.init names a run, a saved model or weights, for the model of configs/mae.py in the same mode.  The classifier
reads the class token or the merged Jumbo token; with --config.model.pool=mean (plain models only), the mean patch
token.  Here batch statistics are of the whole batch and the last epoch counts; in MAE's public code statistics are of
each GPU's 512 images, and the best epoch counts.
Modes, joined by commas (B,jumbo if none is given): B, L or cifar (default B); plain or jumbo (default plain); H8, I8 or
D8 (an octic encoder; without a Jumbo token, the classifier of D8 reads the mean of the tokens' invariants); fork: the
head, the crops, the LARS (optax's), and the first and last learning rate of the JAX version that the paper used (the
last until November 2025, then 1e-6); sgd: its alternative to LARS; quicktest.
"""

from equivit.configs import recipes
from equivit.training import config


def get_config(mode: str = "B,jumbo"):
    w = recipes.words(mode, "fork", "sgd", "quicktest", **recipes.MAE)
    c = config.get_base("linear_probe")
    c.epochs, c.batch_size = (50 if w.size == "L" and not w.fork else 90), (4096 if w.sgd else 16384)
    c.precision = "mixed"
    recipes.mae_encoder(c, w, crop_ratio=0.875)
    if w.size == "cifar":
        c.batch_size, c.evaluation.corruption_crop_ratio = 1024, 1.0
    crop, smallest = ("random_resized", 0.2) if w.fork else ("random_resized_clipped", 0.08)
    c.data.augment.update(crop=crop, scale=(smallest, 1.0), flip=0.5)
    name = "sgd" if w.sgd else "lars_optax" if w.fork else "lars"
    c.optimizer.update(name=name, momentum=0.9, weight_decay=0.0, clip=None)
    c.schedule.update(lr=3.0 if w.sgd else 0.1 * c.batch_size / 256, warmup_lr=0.0, min_lr=0.0)
    c.schedule.warmup_epochs = None if w.sgd else 10
    if w.fork:
        c.schedule.update(warmup_lr=1e-6, min_lr=1e-5)
        c.objective.update(affine=True, eps=1e-5, momentum=0.01, weight_std=0.02)
    c.checkpoint.every_steps, c.evaluation.every_epochs = 1000, 5
    if w.quicktest:
        recipes.small(c, width=48, depth=2, num_heads=2, patch_size=8, num_classes=10)
        c.data.crop_ratio = 1.0
    return c
