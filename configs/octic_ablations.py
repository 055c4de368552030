"""Ablations of octic ViTs on ViT-L/16: how many octic blocks (Figure 4b), and which invariantization (Table 4).

Table 4, D8, top-1 / top-5 in the paper: linear 79.2 / 94.7, polynomial 79.4 / 94.8, triple_correlation 76.8 / 93.7,
canonisation 79.5 / 94.9, max_filtering 77.9 / 93.9, power_spectrum 79.5 / 94.9.  Figure 4b, H8 and I8 over k of 24
blocks: the paper takes k = 12; I8 is worse for small k.  Ours: not trained yet.
The public code keeps the weights of the best epoch on the validation images; here those of the last one count.
For H2 and D2 its script decays tokens and positions too, by an accident of names, which is not followed.
Cost in the paper: 3840 A100-40GB hours for the invariantizations, about 1950 for each family of Figure 4b.

    python -m equivit.train --config=configs/octic_ablations.py:I8,k=6 --workdir=/tmp/i8_k6
    python -m equivit.train --config=configs/octic_ablations.py:D8,invariant=canonisation --workdir=/tmp/d8_canonisation
    python -m equivit.train --config=configs/octic_ablations.py:quicktest --workdir=/tmp/quicktest

experiments/tables/octic/number_of_blocks.py draws Figure 4b from the runs, invariants.py prints Table 4.
Modes, joined by commas: a family (D8 by default), k=<octic blocks>, invariant=<kind>, 400 or 800 (epochs), quicktest.
"""

from configs import recipes
from equivit.training import config


def get_config(mode: str = "D8"):
    values = dict(k=int, invariant=str)
    w = recipes.words(mode, "quicktest", family=recipes.FAMILIES, epochs=("400", "800"), values=values)
    family, long = w.family or "D8", w.epochs == "800"
    if w.invariant is not None and family[0] not in "ID":
        raise ValueError(f"config mode={mode!r}: invariant= is for I8, D8 and D2; {family} has no invariantization.")
    side = 192 if long else 224
    c = config.get_base()
    c.epochs, c.batch_size, c.precision = (800 if long else 400), 2048, "mixed"
    c.model.update(
        name=f"{recipes.FAMILIES[family]}_l16",
        family=family,
        image_size=(side, side),
        drop_path=0.45 if long else 0.4,
    )
    if w.k is not None:
        c.model.equivariant_blocks = w.k
    if w.invariant is not None:
        c.model.invariant = w.invariant
    c.data.update(
        source="tfds:imagenet2012", eval_split="validation", image_size=(side, side), channels=3, workers=16, repeats=3
    )
    c.data.augment.update(crop="random_resized", scale=(0.08, 1.0), flip=0.5, three_augment=True, color_jitter=0.3)
    c.objective.update(loss="bce", mixup=0.8, cutmix=1.0, ema=0.99996)
    c.objective.mix_groups = 32 if long or family == "D2" else 16  # one for each GPU of the original
    c.optimizer.update(name="lamb", weight_decay=0.05 if long else 0.02, eps=1e-8, clip=1.0)
    c.schedule.update(lr=3e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=5, per_epoch=True)
    c.checkpoint.every_steps = 1000
    c.evaluation.update(every_epochs=5, suite=("accuracy", "orientation"))
    if w.quicktest:
        # Four patches a side, so that quarter turns move something; the smallest width of sixteen octic channels.
        tiny = dict(width=64, depth=4, num_heads=2, mlp_dim=128, num_classes=10)
        recipes.small(c, batch_size=12, image_size=(64, 64), **tiny)
        if w.k is not None:
            c.model.equivariant_blocks = min(w.k, 2)
    return c
