"""Fine-tuning of a masked autoencoder on ImageNet-1k, with a learning rate that decays from layer to layer.

Source: MAE (arXiv 2111.06377), Appendix A.1 and its public code, whose top-1 is expected of plain models: B 83.66,
L 85.95.  Jumbo is not fine-tuned in its paper.  Ours: not trained yet.
Cost of the public code: 7 h 11 min for B, 8 h 52 min for L on 32 V100.

    python -m equivit.train --config=configs/finetune.py:B,plain --config.init=/tmp/mae --workdir=/tmp/finetuned
    python -m equivit.train --config=configs/finetune.py:L,plain --config.init=mae:mae_pretrain_vit_large.pth \
        --workdir=/tmp/finetuned_l
    python -m equivit.train --config=configs/finetune.py:quicktest --workdir=/tmp/quicktest     # of a random model

As in configs/linear_probe.py, --config.init must be of a model as configs/mae.py makes it for the same words.  A plain
model's classifier reads the mean of the normalised patch tokens; the public code normalises after the mean.
Modes, joined by commas: B, L or cifar; plain or jumbo; fork (a model of that kind); quicktest.
"""

from configs import linear_probe
from equivit.training import config


def get_config(mode: str = "B,jumbo"):
    words = mode.split(",")
    large, c = "L" in words, linear_probe.begin(config.get_base(), words)
    c.epochs, c.batch_size = (50 if large else 100), (256 if "cifar" in words else 1024)
    c.model.drop_path = 0.2 if large else 0.1
    if not c.model.name.startswith("jumbo"):
        c.model.pool = "mean"
    c.data.augment.update(crop="random_resized", rand_augment="rand-m9-mstd0.5-inc1", erase=0.25)
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=None, layer_decay=0.75 if large else 0.65)
    lr = (1e-3 if large else 5e-4) * c.batch_size / 256
    c.schedule.update(lr=lr, warmup_lr=0.0, min_lr=1e-6, warmup_epochs=5)
    return linear_probe.quicktest(c) if "quicktest" in words else c
