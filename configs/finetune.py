"""Fine-tuning of a masked autoencoder on ImageNet-1k, with layer-wise decay of the learning rate.

Source: MAE (arXiv 2111.06377), Appendix A.1 and its public code, which also gives the expected top-1 of plain models:
B 83.66, L 85.95.  The paper of Jumbo does not fine-tune.  Ours: not trained yet.
Cost of the public code: 7 h 11 min for B, 8 h 52 min for L on 32 V100.

    python -m equivit.train --config=configs/finetune.py:L,plain --config.init=mae:mae_pretrain_vit_large.pth \
        --workdir=/tmp/finetuned_l
    python -m equivit.train --config=configs/finetune.py:quicktest --workdir=/tmp/quicktest     # from random weights

--config.init names a run, a saved model or weights, for the model of configs/mae.py in the same mode.  A plain model's
classifier reads the mean patch token through a new norm, as in the public code, which drops the pretrained norm.
Differences: the public code trains the positions, at 0.0037 (B) or 0.00075 (L) of the rate; here they are fixed.  It
reports the best epoch; here the last one counts.

fork is the fine-tuning of Jumbo's MAE in the JAX version that its paper used (antofuller/jumbo_mae_tpu, loop_1.sh and
loop_2.sh of config/), without published results: 110 epochs, a rate that is not scaled by the batch, larger crops, no
erasing, equal stochastic depth in all blocks.  Its scripts try rates of 1e-3 and 3e-3 with a weight decay of 0.06 to
0.09; here the first of each, unless lr= and wd= set others.

    python -m equivit.train --config=configs/finetune.py:B,jumbo,fork,lr=3e-3,wd=0.07 --config.init=/tmp/mae_fork \
        --workdir=/tmp/finetuned_fork_3e-3

That code differs: its rates decay to 0.65^12 before the first block, with the last block at the head's full rate, here
to 0.65^13; the Jumbo tokens and their MLP use the full rate; it mixes with one random permutation, the same in each
step; one version ignores the given weight decay and uses optax's 1e-4; and it reports the best epoch.

Modes, joined by commas (B,jumbo if none is given): B, L or cifar (default B); plain or jumbo (default plain); H8, I8 or
D8 (an octic encoder); fork (the paper's code has only B,jumbo); lr=..., wd=... (with fork); quicktest.
"""

from equivit.configs import recipes
from equivit.training import config


def get_config(mode: str = "B,jumbo"):
    values = dict(lr=float, wd=float)
    w = recipes.words(mode, "fork", "quicktest", values=values, **recipes.MAE)
    if not w.fork and (w.lr, w.wd) != (None, None):
        raise ValueError(f"config mode={mode!r}: lr= and wd= are for the scripts of the fork; add 'fork'.")
    large, cifar = w.size == "L", w.size == "cifar"
    c = config.get_base()
    c.epochs, c.batch_size, c.precision = (50 if large else 100), 1024, "mixed"
    recipes.mae_encoder(c, w, crop_ratio=0.875)
    c.model.update(drop_path=(0.0, 0.2 if large else 0.1), head_std=2e-5)  # stochastic depth grows with depth
    if w.family == "D8" and w.kind != "jumbo":
        c.model.update(pool="mean")
    elif w.kind != "jumbo":
        c.model.update(pool="mean", fc_norm=True)
    if cifar:
        c.batch_size, c.evaluation.corruption_crop_ratio = 256, 1.0
    c.data.augment.update(crop="random_resized", rand_augment="rand-m9-mstd0.5-inc1", erase=0.25)
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    c.objective.mix_groups = 1 if cifar else 32  # one for each GPU of the original
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=None, layer_decay=0.75 if large else 0.65)
    lr = (1e-3 if large else 5e-4) * c.batch_size / 256
    c.schedule.update(lr=lr, warmup_lr=0.0, min_lr=1e-6, warmup_epochs=5)
    c.checkpoint.every_steps, c.evaluation.every_epochs = 1000, 5
    if w.fork:
        c.epochs = 110
        c.model.update(drop_path=(0.1, 0.1), head_std=0.02)
        c.data.augment.update(scale=(0.2, 1.0), erase=0.0)
        c.optimizer.update(weight_decay=0.06 if w.wd is None else w.wd, layer_decay=0.65)
        c.schedule.update(lr=1e-3 if w.lr is None else w.lr, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=10)
    if w.quicktest:
        recipes.small(c, width=48, depth=2, num_heads=2, patch_size=8, num_classes=10)
        c.data.crop_ratio = 1.0
    return c
