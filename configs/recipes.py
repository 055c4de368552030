"""Shared parts of configs: modes, `:quicktest`, names of models, and recipes' common settings.

Configs import only this file and deit3.py; each config states everything else.
"""

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from ml_collections import ConfigDict

from equivit import errors

# Families of octic ViTs, and their models in the zoo.
FAMILIES = {"plain": "vit", "H8": "octic_vit", "I8": "octic_vit", "D8": "octic_vit", "H2": "flip_vit", "D2": "flip_vit"}


def words(
    mode: str, *flags: str, values: Mapping[str, Callable[[str], Any]] | None = None, **choices: Iterable[str]
) -> SimpleNamespace:
    """Parse a mode, words joined by commas: an attribute for each flag, value and choice (None if not given).

        w = words("I8,k=6", "quicktest", family=("H8", "I8"), values=dict(k=int))
        w.family, w.k, w.quicktest  # "I8", 6, False

    Args:
      flags: optional words.
      values: parsers of the text in `name=text`, by name.
      choices: groups of mutually exclusive words, by name.

    Raises:
      ValueError: an unknown word, a value that cannot be parsed, or two words that exclude each other.
    """
    values, choice = values or {}, {word: name for name, group in choices.items() for word in group}
    known = [*choice, *flags, *(f"{name}=..." for name in values)]
    result = SimpleNamespace(**dict.fromkeys([*choices, *values]), **dict.fromkeys(flags, False))
    given = {}
    for word in mode.split(","):
        name, equals, text = word.partition("=")
        if equals and name in values:
            try:
                value = values[name](text)
            except ValueError:
                kind = "a whole number" if values[name] is int else "a number"
                raise ValueError(f"config mode={word!r}: {text!r} is not {kind}.") from None
        else:
            errors.one_of("config mode", word, known)
            name, value = choice.get(word, word), (word if word in choice else True)
        if name in given:
            raise ValueError(f"config mode={mode!r}: {given[name]!r} and {word!r} exclude each other.")
        given[name] = word
        setattr(result, name, value)
    return result


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None, from words that were given."""
    return {name: value for name, value in fields.items() if value is not None}


def small(
    c: ConfigDict, *, batch_size: int = 8, image_size: tuple[int, int] = (32, 32), source: str = "synthetic", **model
) -> None:
    """Shrink a recipe for `:quicktest`: two steps of a small model on synthetic images, within a minute on a laptop.

    `model` holds fields of the model to change.
    """
    c.epochs, c.steps, c.batch_size, c.precision = None, 2, batch_size, "float32"
    c.model.update(image_size=image_size, **model)
    c.data.update(source=source, split="train", eval_split="test", image_size=image_size, workers=0)
    c.data.update(train_examples=2 * batch_size, eval_examples=batch_size)
    if c.objective.get("mix_groups", 1) > 1:
        c.objective.mix_groups = 4
    c.schedule.update(warmup_epochs=None, warmup_steps=None, per_epoch=False)
    c.checkpoint.every_steps, c.log.every_steps, c.evaluation.every_epochs = 1, 1, None


# Choices of words for `mae_encoder`.
MAE = dict(size=("B", "L", "cifar"), kind=("plain", "jumbo"), family=("H8", "I8", "D8"))


def mae_encoder(c: ConfigDict, w: SimpleNamespace, *, crop_ratio: float) -> None:
    """The encoder of configs/mae.py, from which linear_probe.py and finetune.py start, and its images.

    The decoder needs fully encoded patches: Jumbo's `last_patch_mlp`.  Weights use Xavier initialisation, as in MAE.
    `w.fork` is the JAX version that the paper used: truncated normal weights, zero tokens, a sin-cos table that
    includes the last frequency, tanh-GELU, and in Jumbo's MLP a residual after the norm.  Octic models have learned
    positions.
    """
    if w.fork and w.family:
        raise ValueError(
            f"config mode: 'fork' is the JAX version of MAE, which has no octic models; leave out {w.family}."
        )
    cifar, jumbo = w.size == "cifar", w.kind == "jumbo"
    variant, side = {"L": "l16", "cifar": "ti16"}.get(w.size, "b16"), 32 if cifar else 224
    if w.family:
        c.model = dict(name=f"octic_{'jumbo_' if jumbo else ''}vit_{variant}", family=w.family, layer_scale=None)
        c.model.update(init="xavier_uniform")
    elif jumbo and w.fork:
        c.model = dict(name=f"jumbo_vit_mae_{variant}", init="truncated_normal")
    elif w.fork:
        c.model = dict(name=f"vit_{variant}", position="sincos_inclusive", mlp="gelu_tanh", layer_scale=None)
        c.model.update(init="truncated_normal", token_std=0.0)
    else:
        c.model = dict(name=f"vit_{variant}", position="sincos", layer_scale=None, init="xavier_uniform")
    if jumbo and not w.fork:
        c.model.update(last_patch_mlp=True, wide_norm=w.family == "D8", norm_eps=1e-6)  # D8 needs the wide norm
        c.model.name = c.model.name if w.family else f"jumbo_vit_{variant}"
    c.model.image_size = c.data.image_size = (side, side)
    c.data.update(source="tfds:imagenet2012", eval_split="validation", channels=3, crop_ratio=crop_ratio, workers=16)
    if cifar:
        c.precision, c.model.patch_size = "float32", 4
        c.data.update(source="tfds:cifar10", eval_split="test", crop_ratio=1.0, workers=2)


def small_deit3(c: ConfigDict, patch: int) -> None:
    """`small` for DeiT III: four patches per side, so that quarter turns move patches; sixteen octic channels."""
    tiny = dict(width=64, depth=4, num_heads=2, mlp_dim=128, num_classes=10)
    small(c, batch_size=24, image_size=(4 * patch, 4 * patch), **tiny)


# Hierarchical ViTs as in their public codes for ImageNet-1k on eight GPUs; `small` is for `:quicktest`.
# RandAugment follows Tables A3 to A5 of "Making Vision Transformers Truly Shift-Equivariant".
SWIN = dict(side=224, resized=256)  # pixels of an image, and of its shorter side before the centre crop
SWIN |= dict(batch_size=1024, epochs=300, precision="mixed", clip=5.0, rand_augment="rand-m9-n2-mstd0.5-inc1")
SWIN |= dict(schedule=dict(lr=1e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=20))
SWIN |= dict(small=dict(width=16, depths=(1, 1), num_heads=(1, 2), window_size=(4, 4)))
SWIN |= dict(model=dict(drop_path=(0.0, 0.2)), circular={})  # fields for circular images: no convolution of Swin pads
CVT = SWIN | dict(batch_size=2048, clip=None)
CVT |= dict(schedule=dict(lr=2e-3, warmup_lr=1e-6, min_lr=1e-5, warmup_epochs=5))
CVT |= dict(small=dict(widths=(8, 16, 32), depths=(1, 1, 1), num_heads=(1, 1, 2)))
CVT |= dict(model=dict(drop_path=(0.0, 0.0, 0.1)), circular=dict(padding="circular"))  # of each stage's last block
MVIT = SWIN | dict(batch_size=256, precision="float32", clip=1.0, rand_augment="rand-m10-n6-mstd0.5-inc1")
MVIT |= dict(schedule=dict(lr=2.5e-4, warmup_lr=1e-8, min_lr=1e-6, warmup_epochs=70))
MVIT |= dict(small=dict(width=16, depths=(1, 1), num_heads=(1, 2)))
MVIT |= dict(model=dict(drop_path=(0.0, 0.1)), circular=dict(padding="circular"))
HIERARCHICAL = {"swin_t": SWIN, "swinv2_t": SWIN | dict(side=256, resized=292), "cvt_13": CVT, "mvitv2_t": MVIT}


def hierarchical(
    c: ConfigDict,
    name: str,
    *,
    torus: bool,
    adaptive: bool = False,
    augmented: bool = False,
    shifted: bool = False,
    epochs: int | None = None,
    batch_size: int | None = None,
) -> None:
    """Train a hierarchical ViT as in its public code, on image centres with random flips.

    The warm-up scales with the number of epochs, and learning rates scale with the batch size.

    Args:
      torus: convolutions pad circularly instead of with zeros.
      adaptive: the model is shift-equivariant.
      augmented: RandAugment and erasing in training.
      shifted: circular shifts in training.
    """
    own = HIERARCHICAL[name]
    c.epochs, c.batch_size, c.precision = epochs or own["epochs"], batch_size or own["batch_size"], own["precision"]
    c.model.update(name=name, image_size=(own["side"],) * 2, **own["model"], **(own["circular"] if torus else {}))
    c.data.update(image_size=(own["side"],) * 2, channels=3, crop_ratio=own["side"] / own["resized"])
    c.data.augment.update(crop="centre", flip=0.5)
    c.objective.update(loss="cross_entropy", mixup=0.8, cutmix=1.0, label_smoothing=0.1)
    c.optimizer.update(name="adamw", weight_decay=0.05, eps=1e-8, clip=own["clip"])
    warmup, scale = own["schedule"]["warmup_epochs"] * c.epochs / own["epochs"], c.batch_size / own["batch_size"]
    rates = {rate: own["schedule"][rate] * scale for rate in ("lr", "warmup_lr", "min_lr")}
    c.schedule.update(warmup_epochs=warmup, **rates)
    if adaptive:
        c.model.adaptive = True
    if augmented:
        c.data.augment.update(rand_augment=own["rand_augment"], erase=0.25)
    if shifted:
        c.data.augment.circular_shift = 1.0
    c.checkpoint.every_steps = 1000
    c.evaluation.update(every_epochs=10, suite=("accuracy", "shift"))
