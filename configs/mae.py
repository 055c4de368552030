"""Masked autoencoding of ImageNet-1k, ViT-B/16 and ViT-L/16, plain and with a Jumbo token (J = 3).

Sources: MAE (arXiv 2111.06377), Appendix A.1, for the recipe; Jumbo (arXiv 2502.15021), Section 4.3 and Table 1.
Expected top-1 of a linear probe, from the paper's Table 1: B 68.1 %, B+Jumbo 73.0 %, L 73.0 %, L+Jumbo 74.0 %; its
baselines are those of the JAX version of MAE, B for 1600 epochs and L for 800.  Ours: not trained yet, cost not known.

    python -m equivit.train --config=configs/mae.py:B,jumbo --workdir=/tmp/mae --config.data.source=tfds:imagenet2012
    python -m equivit.train --config=configs/mae.py:B,jumbo,fork --workdir=/tmp/mae_fork
    python -m equivit.train --config=configs/mae.py:cifar,jumbo --workdir=/tmp/c --config.data.source=npz:cifar10.npz
    python -m equivit.train --config=configs/mae.py:D8 --workdir=/tmp/mae_D8 --config.data.source=tfds:imagenet2012
    python -m equivit.train --config=configs/mae.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas (B,jumbo if none is given): B, L or cifar (default B; cifar is a small model at 32 px, patch 4,
in no paper); plain or jumbo (default plain); H8, I8 or D8 (an octic encoder, in no paper); 800 or 1600 (epochs; default
1600 for B, 800 for L, 100 for cifar); fork: differences of the JAX version that the paper used (raw pixels as targets,
one mask for all images of a device, with 32 devices in a TPU v4-64, truncated normal weights, zero tokens, a sin-cos
table that includes the last frequency, tanh-GELU, and in Jumbo's MLP a residual after the norm); quicktest.

With I8 and D8 the decoder is octic too: the reconstruction of a turned image under the turned mask is the turned
reconstruction.  The dense blocks of H8 end the symmetry, so its decoder is dense and nothing is equivariant.

Differences: in MAE's public code class and mask tokens decay, here no token does.  The JAX version has 1281167 / 4096
steps an epoch, here 312 full batches (for 1600 epochs 500,455 and 499,200 steps); its patch bias starts at zero.
"""

from equivit.configs import recipes
from equivit.training import config


def get_config(mode: str = "B,jumbo"):
    w = recipes.words(mode, "fork", "quicktest", **recipes.MAE, epochs=("800", "1600"))
    c = config.get_base("mae")
    c.epochs, c.batch_size, c.precision = int(w.epochs or (800 if w.size == "L" else 1600)), 4096, "mixed"
    recipes.mae_encoder(c, w, crop_ratio=0.875 if w.fork else 1.0)
    c.model.num_classes = None
    c.objective.decoder = "equivariant" if w.family in ("I8", "D8") else "dense"
    c.data.augment.update(crop="random_resized", scale=(0.2, 1.0), flip=0.5)
    c.optimizer.update(name="adamw", betas=(0.9, 0.95), eps=1e-8, weight_decay=0.05, clip=None)
    c.schedule.update(lr=1.5e-4 * 4096 / 256, warmup_lr=0.0, min_lr=0.0, warmup_epochs=40)
    c.checkpoint.every_steps = 1000
    c.evaluation.update(every_epochs=20, suite=("reconstruction",))
    if w.fork:
        c.objective.update(target="pixels", variance="biased", groups=32)
        c.schedule.update(warmup_lr=1e-6, min_lr=1e-5)
    if w.size == "cifar":  # short enough for first results on a CPU
        c.epochs, c.batch_size = int(w.epochs or 100), 256
        c.objective.update(decoder_width=128, decoder_depth=2, decoder_heads=4)
        c.schedule.update(lr=1e-3, warmup_epochs=5)
        c.checkpoint.update(every_steps=None, every_seconds=120)
        c.evaluation.every_epochs = 10
    if w.quicktest:
        recipes.small(c, width=48, depth=2, num_heads=2, patch_size=8)
        c.objective.update(decoder_width=32, decoder_depth=1, decoder_heads=2, groups=4 if w.fork else None)
    return c
