"""Fine-tuning at a higher resolution, DeiT III's last stage: 20 epochs of AdamW at 224 px or more.

Source: DeiT III (arXiv 2204.07118), Section 4 and its public commands.  It follows an 800-epoch run, which trains L/16
at 192 px and H/14 at 154 px; positions are resized by the model.  Ours: not trained yet.

    python -m equivit.train --config=configs/octic_finetune.py:H,H8 --config.init=/tmp/octic_h --workdir=/tmp/h_224
    python -m equivit.train --config=configs/octic_finetune.py:quicktest --workdir=/tmp/quicktest

Modes, joined by commas: L or H, a family, 384 (pixels; H/14: 378), quicktest.
"""

from configs import deit3


def get_config(mode: str = "L,H8"):
    words = mode.split(",")
    size = "H" if "H" in words else "L"
    large = "384" in words
    c = deit3.recipe(size, ["800", *(word for word in words if word not in ("L", "H", "384"))])
    c.schedule.per_epoch = False
    if "quicktest" not in words:
        side = {("L", False): 224, ("H", False): 224, ("L", True): 384, ("H", True): 378}[size, large]
        c.data.image_size, c.epochs, c.batch_size = (side, side), 20, 512
    c.data.repeats = 3
    c.data.augment.update(three_augment=False, rand_augment="rand-m9-mstd0.5-inc1", color_jitter=0.0)
    c.objective.update(loss="cross_entropy", label_smoothing=0.1)
    c.optimizer.update(name="adamw", weight_decay=0.1, clip=None)
    c.schedule.update(lr=1e-5, warmup_lr=1e-6, min_lr=1e-6)
    return c
