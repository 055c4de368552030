"""Self-supervised training of plain and octic ViTs by DINOv2 on ImageNet-1k: Table 3 of octic ViTs.

| mode    | GFLOPs | IN1k linear, k-NN | ADE20K linear, k-NN | VOC2012 linear, k-NN | A100-40GB hours |
|---------|--------|-------------------|---------------------|----------------------|-----------------|
| H,plain | 127.7  | 81.7, 81.0        | 34.7, 30.6          | 70.7, 60.9           | 672             |
| H,I8    | 77.7   | 81.9, 80.9        | 33.9, 29.2          | 70.6, 61.2           | 960             |
| H,H8    | 77.5   | 82.2, 81.4        | 35.1, 31.1          | 70.8, 61.7           | 1056            |
| L,plain | 61.8   | 80.9, 80.5        | 33.2, 28.4          | 69.1, 58.1           | 384             |
| L,I8    | 37.8   | 81.2, 80.4        | 32.6, 28.0          | 70.0, 59.6           | 608             |
| L,H8    | 37.7   | 81.3, 80.8        | 33.6, 29.4          | 69.1, 59.5           | 608             |
| L,D8    | 13.7   | 72.2, 71.0        | 23.7, 17.6          | 53.2, 42.5           | 736             |

GFLOPs are from `summarize` (the paper has 38.5 for L,I8, with polynomial invariants, and 13.5 for L,D8; the public D8
of DINOv2 computes invariants of every token).  Accuracies and mean IoU, in %, and hours are the paper's, for frozen
features of the teacher (Tables 3 and 8).  Ours: only `small` (experiments/studies/README.md).

    python -m equivit.train --config=configs/dinov2.py:L,H8 --workdir=/data/dinov2
    python -m equivit.train --config=configs/dinov2.py:small,I8 --workdir=/tmp/cells \
        --config.data.source=npz:pbc_wbc96.npz
    python -m equivit.train --config=configs/dinov2.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas:
- L (by default), H, both with patches of 16 px, or small: four blocks for images of 48 px, in no paper;
- a family: plain, H8 (by default), I8, D8 (with an invariantization of every token);
- official (by default, except for small) or intended.  The public code, and so the paper, inverts the blur
  probabilities of the crops; decays tokens, positions, the gains of prototypes and octic layer scales; drops branches
  of octic blocks per sample; starts octic layer scales at 1e-4, not 1e-5; shifts the resized positions of plain models
  by a tenth of a token; and reshuffles the images when a run resumes, so the result differs from an uninterrupted run.
  `intended` does none of this;
- quicktest.

In both versions: the initial momentum is 0.992 as in the code (0.8 in the paper's Table 5b), and no phase has larger
images.  Masks, KoLeo and dropped branches are drawn in groups of the original's batch on a GPU.  The original student
computes in bfloat16 throughout, here in mixed precision (--config.precision=bfloat16); its patch centre moves towards
the mean of the GPUs' means, here towards the mean of all masked patches.
"""

import math

from equivit.configs import recipes
from equivit.training import config

FAMILIES = ("plain", "H8", "I8", "D8")


def get_config(mode: str = "L,H8"):
    w = recipes.words(mode, "small", "quicktest", size=("L", "H"), family=FAMILIES, version=("official", "intended"))
    size, family = w.size or "L", w.family or "H8"
    official = w.version == "official" or (w.version is None and not w.small)
    octic = family != "plain"
    groups = 32 if octic or size == "H" else 16  # GPUs
    c = config.get_base("dinov2")
    c.steps, c.batch_size, c.precision = 125000, 1024, "mixed"
    c.model = dict(name=f"{'octic_' if octic else ''}dinov2_vit_{size.lower()}16", image_size=(224, 224))
    c.model.update(num_classes=None, layer_scale=1e-5, drop_path=0.3, drop_path_groups=groups)
    c.data.update(source="tfds:imagenet2012", eval_split="validation", image_size=(224, 224), crop_ratio=224 / 256)
    c.data.update(channels=3, workers=16)
    c.data.augment.update(scale=(0.32, 1.0), flip=0.5)
    c.objective.update(targets="centering", groups=groups)
    c.optimizer.update(name="adamw", weight_decay=0.04, weight_decay_end=0.4, eps=1e-8, clip=3.0, layer_decay=0.9)
    c.schedule.update(lr=4e-3 * math.sqrt(c.batch_size / 1024), warmup_lr=0.0, min_lr=1e-6, warmup_steps=12500)
    c.schedule.inclusive = True
    c.checkpoint.update(every_steps=1250, teacher_every_steps=12500)
    c.evaluation.update(every_steps=12500, suite=("knn",))
    if octic:
        c.model.family = family
    if official:
        c.objective.decay = "by_name"
        c.data.views.blur = (0.0, 0.9, 0.5)
        c.data.resume = "new_order"
        c.model.update(dict(layer_scale=1e-4, drop_path_fields="samples") if octic else dict(position_offset=0.1))
    if w.small or w.quicktest:
        small(c)
    if w.quicktest:
        recipes.small(c, width=64, depth=2, num_heads=2)
        c.objective.update(prototypes=32, hidden=16, bottleneck=8)
        c.data.views.update(locals=2, local_size=(16, 16))
        c.evaluation.suite, c.evaluation.knn.ks = ("knn",), (5,)
    return c


def small(c):
    """Shrink to a model that trains on a CPU in minutes, for images without an orientation, such as blood cells."""
    c.steps, c.epochs, c.batch_size, c.precision = None, 6, 64, "float32"
    c.model.update(image_size=(48, 48), patch_size=8, width=96, depth=4, num_heads=3)
    # The first norm divides the class token, which has no position, by its size: at 1e-6, gradients would reach 1000s.
    c.model.update(layer_scale=0.1, token_std=0.02, drop_path=0.0, drop_path_groups=None)
    c.data.update(source="npz:pbc_wbc96.npz", eval_split="test", image_size=(48, 48), crop_ratio=1.0, workers=0)
    c.data.augment.update(scale=(0.4, 1.0), octic=True)
    c.data.views.update(locals=4, local_size=(24, 24), local_scale=(0.15, 0.5))
    c.objective.update(prototypes=256, hidden=256, bottleneck=64, fixed_gains=True, groups=1, koleo=0.02)
    c.objective.update(targets="sinkhorn_knopp", teacher_temperature=(0.025, 0.025), temperature_steps=1)
    c.objective.update(momentum=(0.96, 1.0), prototypes_start=60)
    c.schedule.update(lr=1e-3, warmup_steps=None, warmup_epochs=0.5)
    c.checkpoint.update(every_steps=None, every_seconds=120, teacher_every_steps=None)
    c.evaluation.update(every_steps=None, suite=("knn", "linear_probe"))
    c.evaluation.linear_probe.update(steps=1000, batch_size=256, augment=False)
