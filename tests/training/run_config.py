"""The config of the runs that the tests start as commands: small, and random in every way."""

from equivit.training.config import get_base


def get_config(mode="full"):
    config = get_base()
    config.update(steps=16, batch_size=16)
    config.model = dict(name="vit_ti16", width=32, depth=2, num_heads=2, patch_size=4, drop_path=0.2)
    config.data.update(image_size=(16, 16), mean=(0.5,), std=(0.5,), workers=2)
    config.data.augment.update(three_augment=True, color_jitter=0.3)
    config.objective.update(mixup=0.8, cutmix=1.0, ema=0.9)
    config.optimizer.update(accumulation=2)
    config.schedule.update(lr=3e-3, warmup_steps=5)
    config.checkpoint.every_steps = 2  # as lines are: one after a resume averages the steps since its checkpoint
    config.log.update(every_steps=2, to=())
    if mode == "processes":
        config.steps, config.schedule.length = 6, 60  # one program for runs of 6 and of 60 steps
        config.data.update(workers=0, eval_examples=32)
        config.objective.update(mixup=0.0, cutmix=0.0)
        config.optimizer.accumulation = 1
        config.log.every_steps = 1
        config.checkpoint.every_steps = 3
    if mode == "soak":  # tests/soak.py; a checkpoint at every other step, so that many kills meet one
        config.update(steps=30, batch_size=16)
        config.data.update(source="synthetic", eval_examples=32)
        config.log.every_steps = 1
        config.checkpoint.every_steps = 2
    if mode == "statistics":
        config.update(steps=5, batch_size=16)
        config.model = dict(name="mobilenetv4_conv_small", stem_width=8, head_width=8, drop_path=0.2)
        config.model.stages = ("uib 3/0 s2 e2 8",)
        config.data.update(workers=0, eval_examples=32)
        config.optimizer.accumulation = 1
        config.schedule.warmup_steps = 2
        config.checkpoint.every_steps = 4
    return config
