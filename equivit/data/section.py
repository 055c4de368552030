"""The `data` section of a configuration: its keys, their defaults and their checks."""

from ml_collections import ConfigDict

from equivit import errors
from equivit.data import corruptions, rand_augment

DEFAULTS = dict(
    source="digits",
    split="train",
    eval_split="test",
    image_size=(32, 32),  # height, width
    train_image_size=None,  # of the images loaded for training; None: the same
    channels=None,  # None: as in the source
    train_examples=None,  # None: all
    eval_examples=None,
    workers=0,  # worker processes that decode and augment
    repeats=1,  # copies of an example in one batch (repeated augmentation)
    crop_ratio=1.0,  # evaluation: fraction of the resized side that the centre crop keeps
    corruption=None,  # evaluation: one of ImageNet-C's, such as "gaussian_noise" (data/corruptions.py)
    severity=5,  # of the corruption, 1 to 5
    mean=(0.485, 0.456, 0.406),  # per channel, of values in 0..1
    std=(0.229, 0.224, 0.225),
    augment=dict(
        crop="random_resized",
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        flip=0.5,
        three_augment=False,
        rand_augment=None,  # such as "rand-m9-mstd0.5-inc1"
        color_jitter=0.0,
        erase=0.0,
    ),
)
CROPS = ("random_resized", "simple_random", "pad", "none")
SOURCES = ("digits", "synthetic", "tfds:<name>", "folder:<dir>", "npz:<file>")


def check(section: ConfigDict) -> None:
    """ValueError for an invalid value; the number of channels is checked when the source is opened."""
    if section.source.partition(":")[0] not in {source.partition(":")[0] for source in SOURCES}:
        errors.one_of("config.data.source", section.source, SOURCES)
    for key in ("channels", "train_examples", "eval_examples"):
        errors.whole(f"config.data.{key}", section[key], optional=True)
    errors.whole("config.data.workers", section.workers, "zero or more")
    errors.whole("config.data.repeats", section.repeats)
    _check_size("image_size", section.image_size)
    if section.train_image_size is not None:
        _check_size("train_image_size", section.train_image_size)
    errors.number("config.data.crop_ratio", section.crop_ratio, "in (0, 1]")
    if section.corruption is not None:
        errors.one_of("config.data.corruption", section.corruption, corruptions.NAMES)
    errors.one_of("config.data.severity", section.severity, corruptions.SEVERITIES)
    if len(section.mean) != len(section.std):
        raise ValueError(
            f"config.data.mean={section.mean} and config.data.std={section.std} must have one entry per channel."
        )
    for mean, std in zip(section.mean, section.std, strict=True):
        errors.number("config.data.mean", mean, "in [0, 1]")
        errors.number("config.data.std", std, "in (0, 1]")
    _check_augment(section.augment)


def _check_augment(section: ConfigDict) -> None:
    errors.one_of("config.data.augment.crop", section.crop, CROPS)
    _check_interval("scale", section.scale, "in (0, 1]")
    _check_interval("ratio", section.ratio, "positive")
    errors.number("config.data.augment.flip", section.flip, "in [0, 1]")
    errors.number("config.data.augment.erase", section.erase, "in [0, 1]")
    errors.number("config.data.augment.color_jitter", section.color_jitter, "zero or more")
    if section.rand_augment is not None:
        rand_augment.parse(section.rand_augment, fill=(0,))


def _check_size(key: str, size: tuple[int, int]) -> None:
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise ValueError(f"config.data.{key}={size!r} must be (height, width) in pixels.")


def _check_interval(key: str, interval: tuple[float, float], rule: str) -> None:
    errors.pair(f"config.data.augment.{key}", interval, rule)
    if interval[0] > interval[1]:
        raise ValueError(f"config.data.augment.{key}={interval!r} must be (smallest, largest).")
