"""Masked autoencoding of ImageNet-1k, ViT-B/16 and ViT-L/16, plain and with a Jumbo token (J = 3).

Sources: MAE (arXiv 2111.06377), Appendix A.1, for the recipe; Jumbo (arXiv 2502.15021), Section 4.3 and Table 1.
Expected top-1 of a linear probe, from the paper's Table 1: B 68.1 %, B+Jumbo 73.0 %, L 73.0 %, L+Jumbo 74.0 %; its
baselines are those of the JAX version of MAE, B for 1600 epochs and L for 800.  Ours: not trained yet, cost not known.

    python -m equivit.train --config=configs/mae.py:B,jumbo --workdir=/tmp/mae --config.data.source=tfds:imagenet2012
    python -m equivit.train --config=configs/mae.py:B,jumbo,fork --workdir=/tmp/mae_fork
    python -m equivit.train --config=configs/mae.py:cifar,jumbo --workdir=/tmp/c --config.data.source=npz:cifar10.npz
    python -m equivit.train --config=configs/mae.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: B, L or cifar (a small model at 32 px, patch 4, in no paper); plain or jumbo; 800 or 1600
(epochs; by default 1600 for B and 800 for L); fork: what the JAX version that the paper used does otherwise (raw
pixels as targets, one mask for the images of a device, of which a TPU v4-64 has 32, a sin-cos table that includes the
last frequency, tanh-GELU, and in Jumbo's own MLP a residual after the norm); quicktest.

Weights begin as in the rest of this library, normal with deviation 0.02; MAE draws them by Xavier's rule.
"""

from equivit import errors
from equivit.training import config

WORDS = ("B", "L", "cifar", "plain", "jumbo", "800", "1600", "fork", "quicktest")


def get_config(mode: str = "B,jumbo"):
    words = mode.split(",")
    for word in words:
        if word not in WORDS:
            near = errors.nearest(word, WORDS)
            raise ValueError(f"config mode {word!r} is not one of {', '.join(WORDS)}{near}.")
    size = next((word for word in words if word in ("B", "L", "cifar")), "B")
    c = config.get_base("mae")
    c.epochs = next((int(word) for word in words if word in ("800", "1600")), 800 if size == "L" else 1600)
    c.batch_size = 4096
    variant = {"B": "b16", "L": "l16", "cifar": "ti16"}[size]
    c.model = _model(variant, jumbo="jumbo" in words, fork="fork" in words)
    c.model.update(image_size=(224, 224), num_classes=None, dtype="bfloat16")
    c.data.update(source="tfds:imagenet2012", eval_split="validation", image_size=(224, 224), channels=3, workers=16)
    c.data.augment.update(crop="random_resized", scale=(0.2, 1.0), flip=0.5)
    c.optimizer.update(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.05, clip=None)
    c.schedule.update(lr=1.5e-4 * 4096 / 256, warmup_lr=0.0, min_lr=0.0, warmup_epochs=40)
    c.checkpoint.every_steps = 1000
    c.evaluation.update(every_epochs=20, suite=("reconstruction",))
    if "fork" in words:
        c.objective.update(target="pixels", variance="biased", groups=32)
        c.schedule.update(warmup_lr=1e-6, min_lr=1e-5)
        c.data.crop_ratio = 0.875
    if size == "cifar":
        _cifar(c)
    return _quicktest(c) if "quicktest" in words else c


def _model(variant: str, *, jumbo: bool, fork: bool) -> dict:
    """The encoder; the decoder needs patches that have been through all of it."""
    if jumbo and fork:
        return dict(name=f"jumbo_vit_mae_{variant}")
    if jumbo:
        whole = dict(last_patch_mlp=True, wide_norm=False, layer_scale=None, norm_eps=1e-6)
        return dict(name=f"jumbo_vit_{variant}", position="sincos", **whole)
    if fork:
        return dict(name=f"vit_{variant}", position="sincos_inclusive", mlp="gelu_tanh", layer_scale=None)
    return dict(name=f"vit_{variant}", position="sincos", layer_scale=None)


def _cifar(c):
    """Small images, and a run that a CPU can make a beginning of."""
    c.epochs = 100 if c.epochs == 1600 else c.epochs
    c.batch_size = 256
    c.model.update(patch_size=4, image_size=(32, 32), dtype=None)
    c.data.update(source="tfds:cifar10", eval_split="test", image_size=(32, 32), crop_ratio=1.0, workers=2)
    c.objective.update(decoder_width=128, decoder_depth=2, decoder_heads=4)
    c.schedule.update(lr=1e-3, warmup_epochs=5)
    c.checkpoint.update(every_steps=None, every_seconds=120)
    c.evaluation.every_epochs = 10


def _quicktest(c):
    """The same run made small: every part of the recipe, two steps, on a laptop CPU."""
    c.epochs, c.steps, c.batch_size, c.schedule.warmup_epochs = None, 2, 8, None
    c.model.update(width=48, depth=2, num_heads=2, patch_size=8, image_size=(32, 32))
    c.data.update(
        source="synthetic", eval_split="test", image_size=(32, 32), workers=0, train_examples=16, eval_examples=8
    )
    c.objective.update(decoder_width=32, decoder_depth=1, decoder_heads=2)
    if c.objective.groups:
        c.objective.groups = 4
    c.checkpoint.every_steps, c.log.every_steps, c.evaluation.every_epochs = 1, 1, None
    return c
