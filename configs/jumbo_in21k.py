"""Jumbo on ImageNet-21k, 50 epochs with token dropping from 90 % to 10 %; the ablations and the alternatives.

Source: Jumbo (arXiv 2502.15021), Sections 4.2, 4.6 and 4.7, Appendix A.3.1.
Expected top-1 from the paper.  Table 5: base 46.95, with registers 45.73, wide 47.08; small 44.61, with registers
41.48, alternative1 41.51, alternative2 42.11.  Table 4, small: unshared 44.95, no_mlp 43.64, lora 44.94, j=10 45.62.
Ours: not trained yet.  Cost: not in the paper.

    python -m equivit.train --config=configs/jumbo_in21k.py:small --config.data.source=folder:in21k --workdir=/tmp/s
    python -m equivit.train --config=configs/jumbo_in21k.py:quicktest --workdir=/tmp/quicktest

The data are the 10,450 classes of the processed Winter 2021 release (Ridnik et al. 2021), as class folders train/ and
val/.  The training code is not public.  Not in the paper: whether the token-drop rate changes by step or by epoch (here
in ten phases), stochastic depth (here 0; 0.1 in the public constructors), label smoothing (here 0), and the parameters
without weight decay (here vectors, tokens and positions).
Modes, joined by commas: small or base (small by default); unshared, no_mlp, lora (rank 8) or linear_lora; j=<J>;
registers, and with them wide (width 1024), alternative1 (a separate MLP for class token and registers) or alternative2
(a separate MLP for registers); drop_path=<rate of stochastic depth, 0>; quicktest.
"""

from equivit.configs import recipes
from equivit.training import config

SIZES = {"small": "s16", "base": "b16"}
JUMBO = {"unshared": "per_layer", "no_mlp": "none", "lora": "lora", "linear_lora": "linear_lora"}
REGISTERS = {"alternative1": "class_and_registers", "alternative2": "registers"}


def get_config(mode: str = "small"):
    choices = dict(values=dict(j=int, drop_path=float), size=SIZES, jumbo=JUMBO, alternative=REGISTERS)
    w = recipes.words(mode, "registers", "wide", "quicktest", **choices)
    if w.registers and (w.jumbo or w.j is not None):
        raise ValueError(f"config mode={mode!r}: {w.jumbo or 'j='!r} is for the Jumbo token; leave out 'registers'.")
    if not w.registers and (w.wide or w.alternative):
        raise ValueError(f"config mode={mode!r}: {w.alternative or 'wide'!r} is for registers; add 'registers'.")
    c = config.get_base()
    c.epochs, c.batch_size, c.precision = 50, 1024, "mixed"
    c.model.update(name=f"{'register' if w.registers else 'jumbo'}_vit_{SIZES[w.size or 'small']}")
    c.model.update(image_size=(224, 224), num_classes=10450, position_antialias=True)
    mlps = dict(jumbo_mlp=JUMBO.get(w.jumbo), register_mlp=REGISTERS.get(w.alternative))
    c.model.update(recipes.given(jumbo=w.j, drop_path=w.drop_path, **mlps))
    if w.wide:
        c.model.update(width=1024, num_heads=16)
    c.data.update(source="folder:imagenet21k", eval_split="val", image_size=(224, 224), channels=3, workers=16)
    c.data.interpolation = "bilinear"  # in evaluation, as in the released code
    c.data.augment.update(crop="random_resized", scale=(0.08, 1.0), flip=0.5, three_augment=True, color_jitter=0.3)
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=0.0, token_drop=(0.9, 0.1))
    c.optimizer.update(name="adamw", weight_decay=0.02, clip=1.0)
    c.schedule.update(lr=3e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=5)
    c.checkpoint.every_steps, c.evaluation.every_epochs = 1000, 1
    if w.quicktest:
        recipes.small(c, image_size=(64, 64), width=48, depth=2, num_heads=3, num_classes=10)
        c.objective.token_drop_phases = 2
    return c
