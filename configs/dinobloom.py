"""DINOv2 on unlabelled images of single blood cells, starting from natural-image weights: Table 7 of octic ViTs.

| mode  | 1-NN: wF1, Acc, bAcc | 20-NN            | linear           | A100-40GB hours |
|-------|----------------------|------------------|------------------|-----------------|
| plain | 78.0, 78.0, 57.6     | 83.1, 83.6, 54.9 | 84.6, 84.7, 62.2 | 5               |
| I8    | 78.1, 78.0, 61.3     | 83.5, 83.9, 55.7 | 85.0, 85.2, 61.9 | 6               |

The paper's values, in %, on the test split of BMC, by the protocol `hematology`.  The paper gives only 4,000 steps on
354,000 images of six data sets (Table 6); the rest is DinoBloom's public recipe (Koch et al. 2024, arXiv 2404.05022)
for ViT-L on 8 GPUs of 56 images.  It runs 4,000 of 100,000 steps, so the learning rate is still rising at the end.
Ours: not trained yet except for small models (experiments/tables/README.md).

    python -m equivit.train --config=configs/dinobloom.py:I8 --workdir=/data/cells --config.init=/data/dinov2 \
        --config.data.source=list:cells.txt
    python -m equivit.train --config=configs/dinobloom.py:plain --workdir=/data/cells14 \
        --config.init=dinov2:dinov2_vitl14_pretrain.pth --config.model.name=dinov2_vit_l14 \
        --config.data.source=folder:bmc+list:cells.txt
    python -m equivit.evaluate --workdir=/data/cells --suite=hematology \
        "--config.data.source=csv:bmc_{split}.csv"
    python -m equivit.train --config=configs/dinobloom.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: a family (plain, H8, I8 or D8; I8 by default), public (by default) or ending (all schedules end
after the 4,000 steps), quicktest.

Unlabelled images have no test split, so a run evaluates nothing; use `equivit.evaluate` on labelled cells.
Crops are turned and mirrored in all eight ways.  Blur rates, weight decay, and the new image order of a resumed run
follow DINOv2's public code (configs/dinov2.py).  The public recipe's loss counts a local crop that it does not use,
which halves the weight of the global term.  It resizes images to 224 px (Lanczos) first, and drops no branches;
here crops come from the original images, and branches are dropped as in configs/dinov2.py, in octic blocks per sample.
"""

import math

from equivit.configs import recipes
from equivit.training import config


def get_config(mode: str = "I8"):
    families = ("plain", "H8", "I8", "D8")
    w = recipes.words(mode, "quicktest", family=families, schedule=("public", "ending"))
    family, ending = w.family or "I8", w.schedule == "ending"
    octic = family != "plain"
    c = config.get_base("dinov2")
    c.steps, c.batch_size, c.precision = 4000, 448, "mixed"
    c.model = dict(name=f"{'octic_' if octic else ''}dinov2_vit_l16", image_size=(224, 224), num_classes=None)
    c.model.update(layer_scale=1e-5, drop_path=0.3, drop_path_groups=8)
    c.data.update(source="list:cells.txt", eval_split="test", image_size=(224, 224), channels=3, workers=16)
    c.data.resume = "new_order"
    c.data.augment.update(scale=(0.32, 1.0), octic=True)
    c.data.views.update(locals=0, blur=(0.0, 0.9, 0.5))
    c.objective.update(shared_head=False, groups=8, momentum=(0.994, 1.0), decay="by_name")
    c.objective.update(temperature_steps=15000, prototypes_start=500)
    c.optimizer.update(name="adamw", weight_decay=0.04, weight_decay_end=0.2, eps=1e-8, clip=3.0)
    c.schedule.update(lr=2e-4 * math.sqrt(c.batch_size / 1024), warmup_lr=0.0, min_lr=1e-6, inclusive=True)
    c.schedule.update(dict(warmup_steps=400) if ending else dict(warmup_steps=10000, length=100000))
    c.checkpoint.update(every_steps=500, teacher_every_steps=1000)
    if ending:
        c.objective.update(temperature_steps=600, prototypes_start=20)
    if octic:
        c.model.update(family=family, drop_path_fields="samples")
    if w.quicktest:
        recipes.small(c, width=64, depth=2, num_heads=2, patch_size=8, drop_path_groups=2)
        c.schedule.length = None
        c.objective.update(prototypes=32, hidden=16, bottleneck=8, groups=2)
    return c
