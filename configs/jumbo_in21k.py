"""Jumbo on ImageNet-21k, 50 epochs with token dropping from 90 % to 10 %; the ablations and the alternatives.

Source: Jumbo (arXiv 2502.15021), Sections 4.2, 4.6 and 4.7, Appendix A.3.1.
Expected top-1 from the paper.  Table 5: base 46.95, with registers 45.73, wide 47.08; small 44.61, with registers
41.48, alternative1 41.51, alternative2 42.11.  Table 4, small: unshared 44.95, no_mlp 43.64, lora 44.94, j=10 45.62.
Ours: not trained yet.  Cost: the paper does not say.

    python -m equivit.train --config=configs/jumbo_in21k.py:small --config.data.source=folder:in21k --workdir=/tmp/s
    python -m equivit.train --config=configs/jumbo_in21k.py:small,registers,alternative2 --workdir=/tmp/second
    python -m equivit.train --config=configs/jumbo_in21k.py:quicktest --workdir=/tmp/quicktest

The data are the 10,450 classes of the processed Winter 2021 release (Ridnik et al. 2021), as class folders train/ and
val/.  Whether tokens are dropped by step or by epoch is not said; here it is ten phases.
Modes, joined by commas: small or base; unshared, no_mlp, lora (rank 8) or linear_lora; j=<J>; registers, and with them
wide (width 1024), alternative1 (class token and registers have an MLP of their own) or alternative2 (registers have);
quicktest.
"""

from configs import jumbo_in1k
from equivit.training import config

SIZES = {"small": "s16", "base": "b16"}
JUMBO = {
    "unshared": dict(jumbo_mlp="per_layer"),
    "no_mlp": dict(jumbo_mlp="none"),
    "lora": dict(jumbo_mlp="lora"),
    "linear_lora": dict(jumbo_mlp="linear_lora"),
}
REGISTERS = {
    "wide": dict(width=1024, num_heads=16),
    "alternative1": dict(register_mlp="class_and_registers"),
    "alternative2": dict(register_mlp="registers"),
}


def get_config(mode: str = "small"):
    words, numbers = jumbo_in1k.read(mode, (*SIZES, *JUMBO, "registers", *REGISTERS, "quicktest"), j=int)
    registers, size = "registers" in words, SIZES["base" if "base" in words else "small"]
    for word in words:
        if word in (JUMBO if registers else REGISTERS):
            raise ValueError(
                f"config mode {word!r} is for {'Jumbo' if registers else 'registers'} and does not go here."
            )
    c = jumbo_in1k.recipe(config.get_base(), lr=3e-3)
    c.epochs = 50
    c.data.update(source="folder:imagenet21k", eval_split="val", image_size=(224, 224), train_image_size=None)
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=0.0, token_drop=(0.9, 0.1))
    c.optimizer.weight_decay = 0.02
    c.schedule.warmup_epochs = 5
    c.evaluation.every_epochs = 1
    jumbo_in1k.model(c, size, registers, numbers)
    c.model.num_classes = 10450
    for word in words:
        c.model.update((REGISTERS if registers else JUMBO).get(word, {}))
    if "quicktest" in words:
        jumbo_in1k.quicktest(c)
        c.objective.token_drop_phases = 2
        c.data.image_size = c.model.image_size = (64, 64)
    return c
