"""Jumbo on ImageNet-1k: distillation from DeiT III, 400 epochs at 128 px, then 20 at 224 px.

Source: Jumbo (arXiv 2502.15021), Section 4.1 and Appendix A.3.1; Table 12 for J and multiplier.
Expected top-1 from the paper, Jumbo with J=6.  128 px, lr 3e-3 / 1e-3 (Table 8): pico 62.4 / 60.8, nano 67.7 / 68.4,
tiny 73.3 / 73.5, small 79.3 / 79.3.  224 px (Table 6): pico 69.0, nano 74.0, tiny 78.4, small 82.7.  16 registers, 224
px: nano 61.0, tiny 74.5, small 81.9.  Ours: not trained yet.  Cost: the paper does not say.

    W=configs/jumbo_in1k.py D="--config.data.source=folder:imagenet" T=--config.objective.teacher
    python -m equivit.train --config=$W:tiny,lr=3e-3 $D $T=timm:deit3_base.safetensors --workdir=/tmp/tiny_128
    python -m equivit.train --config=$W:tiny,224 $D $T=timm:deit3_large.safetensors --workdir=/tmp/tiny_224 \
        --config.init=/tmp/tiny_128
    python -m equivit.train --config=$W:quicktest --workdir=/tmp/quicktest

The teachers are timm's deit3_base_patch16_224.fb_in22k_ft_in1k, and deit3_large for the second stage.
Modes, joined by commas: pico, nano, tiny, small or base; registers; 128 or 224 (pixels, the stage); lr=<peak, 1e-3>;
j=<J>, multiplier=<hidden width of the Jumbo MLP over its width, 4>; quicktest.  The text has J=6 for base too, its
released checkpoint 3, which is the default here.
"""

from equivit.training import config

SIZES = {"pico": "pico16", "nano": "nano16", "tiny": "ti16", "small": "s16", "base": "b16"}
STAGES = ("128", "224")


def get_config(mode: str = "small"):
    words, numbers = read(mode, (*SIZES, *STAGES, "registers", "quicktest"), lr=float, j=int, multiplier=float)
    size = next((SIZES[word] for word in words if word in SIZES), SIZES["small"])
    c = recipe(config.get_base("distillation"), numbers.get("lr", 1e-3))
    c.objective.teacher = "timm:deit3_base_patch16_224.fb_in22k_ft_in1k.safetensors"
    if "224" in words:
        second_stage(c)
    model(c, size, "registers" in words, numbers)
    return quicktest(c) if "quicktest" in words else c


def recipe(c, lr: float):
    """The first stage."""
    c.epochs, c.batch_size = 400, 1024
    c.data.update(
        source="tfds:imagenet2012",
        eval_split="validation",
        image_size=(128, 128),
        train_image_size=(224, 224),  # what the teacher sees
        channels=3,
        workers=16,
    )
    c.data.augment.update(crop="random_resized", scale=(0.08, 1.0), flip=0.5, three_augment=True, color_jitter=0.3)
    c.objective.update(mixup=0.8, cutmix=1.0)
    c.optimizer.update(name="adamw", weight_decay=0.05, clip=1.0)
    c.schedule.update(lr=lr, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=40)
    c.checkpoint.every_steps = 1000
    c.evaluation.every_epochs = 5
    return c


def second_stage(c):
    """20 epochs at the teacher's size."""
    c.epochs, c.batch_size = 20, 512
    c.data.image_size = (224, 224)
    c.data.augment.update(three_augment=False, rand_augment="rand-m9-mstd0.5-inc1")
    c.objective.teacher = "timm:deit3_large_patch16_224.fb_in22k_ft_in1k.safetensors"
    c.optimizer.weight_decay = 0.1
    c.schedule.update(lr=5e-5, warmup_epochs=5)


def model(c, size: str, registers: bool, numbers: dict):
    """Jumbo or registers of a size, with the J and the multiplier of `numbers`."""
    name = f"register_vit_{size}" if registers else f"jumbo_vit_{size}"
    c.model.update(name=name, image_size=c.data.image_size, position_antialias=True, dtype="bfloat16")
    if registers and ("j" in numbers or "multiplier" in numbers):
        raise ValueError("config mode: j= and multiplier= are of the Jumbo token; leave them out with registers.")
    names = {"j": "jumbo", "multiplier": "jumbo_multiplier"}
    c.model.update({names[key]: value for key, value in numbers.items() if key in names})


def read(mode: str, known: tuple[str, ...], **kinds: type) -> tuple[list[str], dict[str, float]]:
    """The words of a mode, and its numbers by name; ValueError for a word that is not known or no number."""
    words, numbers = [], {}
    for word in mode.split(","):
        name, equals, value = word.partition("=")
        if equals and name in kinds:
            try:
                numbers[name] = kinds[name](value)
            except ValueError:
                raise ValueError(f"config mode '{word}': {value!r} is not a number of the kind wanted.") from None
        elif word in known:
            words.append(word)
        else:
            names = [*known, *(f"{name}=..." for name in kinds)]
            raise ValueError(f"config mode {word!r} is not one of {', '.join(names)}{config.nearest(word, names)}.")
    return words, numbers


def quicktest(c):
    """The same run made small: every part of the recipe, two steps, on a laptop CPU."""
    c.epochs, c.steps, c.batch_size = None, 2, 8
    c.model.update(width=48, depth=2, num_heads=3, image_size=(32, 32), num_classes=10, dtype=None)
    c.data.update(source="synthetic", eval_split="test", workers=0, train_examples=16, eval_examples=8)
    c.data.image_size = (32, 32)
    if c.objective.name == "distillation":
        c.data.train_image_size, c.objective.teacher = (48, 48), "zoo:vit_pico16"
    c.schedule.warmup_epochs = None
    c.checkpoint.every_steps, c.log.every_steps, c.evaluation.every_epochs = 1, 1, None
    return c
