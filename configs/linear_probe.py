"""Linear probe of a masked autoencoder on ImageNet-1k: a classifier on frozen features, trained by LARS.

Sources: MAE (arXiv 2111.06377), Appendix A.1 and its public code; Jumbo (arXiv 2502.15021), Section 4.3 and Table 1.
Expected top-1 from Table 1 of Jumbo: B 68.1, B,jumbo 73.0, L 73.0, L,jumbo 74.0.  Ours: not trained yet.
Cost of MAE's public code: 2 h 20 min for B on 32 V100.

    python -m equivit.train --config=configs/linear_probe.py:B,jumbo --config.init=/tmp/mae --workdir=/tmp/probe
    python -m equivit.train --config=configs/linear_probe.py:B,plain --config.init=mae:mae_pretrain_vit_base.pth \
        --workdir=/tmp/probe_mae
    python -m equivit.train --config=configs/linear_probe.py:quicktest --workdir=/tmp/quicktest     # of a random model

The run, the saved model or the weights that --config.init names must be those of a model as configs/mae.py makes it
for the same words.  The classifier reads the class token or the merged Jumbo token; --config.model.pool=mean, of a
plain model, the mean patch token.
Modes, joined by commas: B, L or cifar; plain or jumbo; fork: the head, the crops
and the last learning rate of the JAX version that the paper used; sgd: its alternative to LARS; quicktest.
"""

from configs import mae
from equivit.training import config


def get_config(mode: str = "B,jumbo"):
    words = mode.split(",")
    fork, sgd = "fork" in words, "sgd" in words
    c = begin(config.get_base("linear_probe"), [word for word in words if word != "sgd"])
    c.epochs, c.batch_size = (50 if "L" in words and not fork else 90), (4096 if sgd else 16384)
    if "cifar" in words:
        c.batch_size = 1024
    c.data.augment.update(crop="random_resized", scale=(0.2 if fork else 0.08, 1.0), flip=0.5)
    c.optimizer.update(name="sgd" if sgd else "lars", momentum=0.9, weight_decay=0.0, clip=None)
    c.schedule.update(lr=3.0 if sgd else 0.1 * c.batch_size / 256, warmup_lr=0.0, min_lr=1e-6 if fork else 0.0)
    c.schedule.warmup_epochs = None if sgd else 10
    if fork:
        c.objective.update(affine=True, eps=1e-5, momentum=0.01, weight_std=0.02)
    return quicktest(c) if "quicktest" in words else c


def begin(c, words: list[str]):
    """Model and data as configs/mae.py has them for the same words; the model gets a head."""
    before = mae.get_config(",".join(words) or "B,jumbo")
    c.model = before.model
    del c.model["num_classes"]
    for key in ("source", "eval_split", "image_size", "channels", "workers", "train_examples", "eval_examples"):
        c.data[key] = before.data[key]
    c.data.crop_ratio = 0.875 if c.data.image_size == (224, 224) else 1.0
    c.checkpoint.every_steps, c.evaluation.every_epochs = 1000, 5
    return c


def quicktest(c):
    """The same run made small; the model and the data are so already."""
    c.epochs, c.steps, c.batch_size, c.schedule.warmup_epochs = None, 2, 8, None
    c.model.update(num_classes=10, dtype=None)
    c.checkpoint.every_steps, c.log.every_steps, c.evaluation.every_epochs = 1, 1, None
    return c
