"""The DeiT III recipe on ImageNet-1k, for ViT-L/16 and ViT-H/14 of every family; plain ViT-L/16 by itself.

Source: octic ViTs, Appendix D.1 and Table 5a (400 epochs); DeiT III (arXiv 2204.07118) for 800 epochs.
Expected top-1, plain, 400 epochs at 224 px: L/16 84.2 %, H/14 84.6 % (octic ViTs, Table 2).  Ours: not trained yet.
Cost, from the paper, of its octic models: 36 to 39 hours on 16 (L), 55 to 58 on 32 (H) A100-40GB.

    python -m equivit.train --config=configs/deit3.py --workdir=/tmp/vit_l --config.data.source=tfds:imagenet2012
    python -m equivit.train --config=configs/deit3.py:quicktest --workdir=/tmp/quicktest     # a minute on a laptop CPU

Modes, joined by commas: a family (plain, H8, I8, D8, H2, D2), 400 or 800 (epochs), quicktest.
"""

from equivit.training import config

FAMILIES = {"plain": "vit", "H8": "octic_vit", "I8": "octic_vit", "D8": "octic_vit", "H2": "flip_vit", "D2": "flip_vit"}
VARIANTS = {
    "L": dict(model="l16", image=224, drop_path=0.4, long_image=192, long_drop_path=0.45),
    # The 800-epoch recipe trains H/14 at 160 px, of which its patches see 154.
    "H": dict(model="h14", image=224, drop_path=0.5, long_image=154, long_drop_path=0.6),
}


def get_config(mode: str = "plain"):
    return recipe("L", mode.split(","))


def recipe(size: str, words: list[str], **model):
    """The configuration for a size, "L" or "H", the words of a mode, and further options of the model."""
    words, c = check(words), config.get_base()
    family = next((word for word in words if word in FAMILIES), "plain")
    variant, long = VARIANTS[size], "800" in words
    side = variant["long_image"] if long else variant["image"]
    drop_path = variant["long_drop_path"] if long else variant["drop_path"]
    c.epochs, c.batch_size = (800 if long else 400), 2048
    c.model.update(
        name=f"{FAMILIES[family]}_{variant['model']}",
        family=family,
        image_size=(side, side),
        drop_path=drop_path,
        dtype="bfloat16",
        **model,
    )
    c.data.update(
        source="tfds:imagenet2012", eval_split="validation", image_size=(side, side), channels=3, workers=16, repeats=3
    )
    c.data.augment.update(crop="random_resized", scale=(0.08, 1.0), flip=0.5, three_augment=True, color_jitter=0.3)
    c.objective.update(loss="bce", mixup=0.8, cutmix=1.0, ema=0.99996)
    c.optimizer.update(name="lamb", weight_decay=0.05 if long else 0.02, eps=1e-8, clip=1.0)
    c.schedule.update(lr=3e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=5, per_epoch=True)
    c.checkpoint.every_steps = 1000
    c.evaluation.update(every_epochs=5, suite=("accuracy", "orientation"))
    return quicktest(c) if "quicktest" in words else c


def quicktest(c):
    """The same run made small: every part of the recipe, two steps, on a laptop CPU."""
    c.epochs, c.steps, c.batch_size = None, 2, 12
    # Four patches a side, so that quarter turns move something; the smallest width that sixteen octic channels allow.
    side = 4 * (14 if c.model.name.endswith("14") else 16)
    c.model.update(width=64, depth=4, num_heads=2, mlp_dim=128, image_size=(side, side), num_classes=10)
    if c.model.get("equivariant_blocks") is not None:
        c.model.equivariant_blocks = min(c.model.equivariant_blocks, 2)
    c.data.update(
        source="synthetic", eval_split="test", image_size=(side, side), workers=0, train_examples=24, eval_examples=12
    )
    c.schedule.update(warmup_epochs=None, per_epoch=False)
    c.checkpoint.every_steps, c.log.every_steps, c.evaluation.every_epochs = 1, 1, None
    return c


def check(words: list[str], more: tuple[str, ...] = ()) -> list[str]:
    """The words of a mode; ValueError for one that is not known."""
    known = [*FAMILIES, "400", "800", "quicktest"]
    for word in words:
        if word not in known and word.partition("=")[0] not in more:
            extra = "".join(f", {name}=..." for name in more)
            near = config.nearest(word, known)
            raise ValueError(f"config mode {word!r} is not one of {', '.join(known)}{extra}{near}.")
    return words
