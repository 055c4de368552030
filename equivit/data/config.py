"""The `data` section of a configuration."""

import dataclasses
from typing import Annotated, Any, Literal

from ml_collections import ConfigDict

from equivit import errors, sections
from equivit.constraints import (
    Above0,
    Below1,
    NonNegativeFloat,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Seed,
    Share,
    Size,
    Words,
)
from equivit.data import corruptions, crops, rand_augment, reading, sources
from equivit.intervals import Interval

# "random_resized_clipped" draws one box and clips it to the image, where "random_resized" draws until one fits.
# "scaled" resizes by a random ratio with `interpolation`, crops at random and pads with the mean colour.  "centre" is
# the evaluation crop, with its crop_ratio and interpolation.
CROPS = ("random_resized", "random_resized_clipped", "simple_random", "pad", "scaled", "centre", "none")
MOST_VIEWS = 256  # local views of an image
LARGEST_SIDE = 2**15  # pixels per side of a model's image, or of the resized image it is cropped from
# The keys that prepare an image for a model, in evaluation and for predictions.
PREPARATION = ("image_size", "mean", "std", "eval_crop", "fit", "multiple", "crop_ratio", "interpolation", "max_pixels")
Pixels = Annotated[
    int, Interval(1, reading.PIL_PIXELS, words=f"positive and at most {reading.PIL_PIXELS}, the most that Pillow opens")
]
Side = Annotated[int, Interval(1, LARGEST_SIDE)]
Sides = Annotated[tuple[Side, Side], Words(f"(longer, shorter side) in pixels, at most {LARGEST_SIDE}")]
ViewSize = Annotated[tuple[Side, Side], Words(f"(height, width) in pixels, at most {LARGEST_SIDE}")]
Jitter = Annotated[
    tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Annotated[float, Interval(0, 0.5)]],
    Words("(brightness, contrast, saturation, hue), zero or more, hue at most 0.5"),
]
FitRatio = Annotated[float, Interval(0, 16, "(")]


@dataclasses.dataclass(frozen=True)
class AugmentConfig:
    """`data.augment`: random changes of training images."""

    crop: Annotated[str, OneOf(CROPS)] = "random_resized"
    scale: tuple[Above0, Above0] = (0.08, 1.0)
    ratio: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    fit_ratio: tuple[FitRatio, FitRatio] = (0.5, 2.0)  # crop="scaled": relative to `fit`, or to the image's size
    max_share: Above0 = 1.0  # crop="scaled": largest share of one class among labelled pixels; ten tries
    flip: Share = 0.5
    octic: bool = False  # instead of flips, any of the eight orientations of a square crop
    three_augment: bool = False
    rand_augment: str | None = None  # such as "rand-m9-mstd0.5-inc1"
    color_jitter: NonNegativeFloat = 0.0
    photometric: bool = False  # brightness, contrast, saturation and hue, as MMSegmentation changes them
    erase: Share = 0.0
    circular_shift: Share = 0.0  # largest shift in either direction along each axis, as a fraction of the image
    device: bool = False  # change the colours of views on the accelerator (data/device_colour.py)


@dataclasses.dataclass(frozen=True)
class ViewsConfig:
    """`data.views`: several crops of an image (data/views.py); `data.augment` describes the two global ones."""

    locals: Annotated[int, Interval(0, MOST_VIEWS)] = 8  # local views of an image
    local_size: ViewSize = (96, 96)
    local_scale: tuple[Above0, Above0] = (0.05, 0.32)
    jitter: Jitter = (0.4, 0.4, 0.2, 0.1)  # strengths of brightness, contrast, saturation and hue
    jitter_rate: Share = 0.8
    grey: Share = 0.2
    blur: tuple[Share, Share, Share] = (1.0, 0.1, 0.5)  # rates of the first global view, the second, and local ones
    solarise: Share = 0.2  # of the second global view


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """`data`: the source, and the loading of its images for training and evaluation."""

    source: str = "digits"
    split: str = "train"
    eval_split: str = "test"
    image_size: Size = (32, 32)  # height, width
    train_image_size: Size | None = None  # size of the images loaded for training; None: image_size
    channels: Annotated[Literal[1, 3], Words("1 (grey) or 3 (RGB)")] | None = None  # None: as in the source
    train_examples: PositiveInt | None = None  # None: all
    eval_examples: PositiveInt | None = None
    # Share of each class of `split` that is not for training but the split "held_out" (data/held_out.py).
    held_out: Below1 = 0.0
    split_seed: Seed = 0  # chooses the images of "held_out"
    workers: Annotated[int, Interval(0, 1024)] = 0  # processes that decode and augment; 0: threads
    max_pixels: Pixels = reading.MAX_PIXELS  # of an image file; a larger one counts as unreadable
    repeats: PositiveInt = 1  # copies of an example in one batch (repeated augmentation)
    resume: Literal["same_order", "new_order"] = "same_order"  # "new_order": a resumed run starts a new epoch
    void: tuple[int, ...] = (255,)  # label values without a class; their names in a source's `classes` are dropped
    fit: Sides | None = None  # (longer, shorter side) to fit images in, for crop="scaled" and eval_crop="whole"
    # "squash": no crop, the aspect ratio is lost; "whole": images differ in size, and label maps keep their size
    eval_crop: Literal["centre", "squash", "whole"] = "centre"
    multiple: Side = 1  # eval_crop="whole": each side is resized up to the next multiple
    crop_ratio: Above0 = 1.0  # evaluation: fraction of the resized side kept by the centre crop
    interpolation: Annotated[str, OneOf(crops.INTERPOLATIONS)] = "bicubic"  # evaluation: antialiased resizing
    corruption: Annotated[str, OneOf(corruptions.NAMES)] | None = None  # evaluation: of ImageNet-C, such as "fog"
    severity: Annotated[int, OneOf(corruptions.SEVERITIES)] = 5  # of the corruption
    mean: tuple[Share, ...] = (0.485, 0.456, 0.406)  # per channel, for values in 0..1
    std: tuple[Above0, ...] = (0.229, 0.224, 0.225)
    augment: AugmentConfig = AugmentConfig()
    views: ViewsConfig = ViewsConfig()


def preparation(section: ConfigDict) -> dict[str, Any]:
    """The values that prepare an image for the model of a run (`PREPARATION`)."""
    return {key: section[key] for key in PREPARATION}


def check(section: ConfigDict) -> None:
    """Raise ValueError for an invalid value; opening the source checks the number of channels."""
    sections.check("config.data", section, sections.types_of(DataConfig))
    for part in sources.parts(section.source):
        if part.partition(":")[0] not in sources.KINDS:
            errors.one_of("config.data.source", part, sources.forms())
    for key in ("split", "eval_split"):
        if not section[key]:
            raise ValueError(f"config.data.{key}='' must be the name of a split, such as {getattr(DataConfig, key)!r}.")
    if len(section.mean) != len(section.std):
        raise ValueError(
            f"config.data.mean={section.mean} and config.data.std={section.std} must have one entry per channel."
        )
    _check_resized(section)
    for key in ("augment.scale", "augment.ratio", "augment.fit_ratio", "views.local_scale"):
        subsection, _, name = key.partition(".")
        low, high = section[subsection][name]
        if low > high:
            raise ValueError(f"config.data.{key}={(low, high)} must be (smallest, largest), as {(high, low)}.")
    if section.augment.octic:
        _check_square(section)
    if section.augment.rand_augment is not None:
        rand_augment.parse(section.augment.rand_augment, fill=(0,))


def _check_square(section: ConfigDict) -> None:
    """Require square crops: a quarter turn changes the size of others."""
    key = "train_image_size" if section.train_image_size else "image_size"
    sizes = {key: section[key]} | ({"views.local_size": section.views.local_size} if section.views.locals else {})
    for key, (height, width) in sizes.items():
        if height != width:
            side = max(height, width)
            raise ValueError(
                f"config.data.{key}={(height, width)} must be square for data.augment.octic=True, as {(side, side)}."
            )


def _check_resized(section: ConfigDict) -> None:
    """Limit resized images: image_size / crop_ratio in evaluation, fit * fit_ratio in the scaled crop."""
    if (largest := max(section.image_size)) > LARGEST_SIDE * section.crop_ratio:
        fix = "take smaller images" if largest > LARGEST_SIDE else f"it must be {largest / LARGEST_SIDE:.3f} or more"
        raise ValueError(
            f"config.data.crop_ratio={section.crop_ratio} resizes images to more than {LARGEST_SIDE} pixels a side for "
            f"data.image_size={tuple(section.image_size)}; {fix}."
        )
    if section.fit is None:
        return
    longer, shorter = section.fit
    if longer < shorter:
        raise ValueError(f"config.data.fit={(longer, shorter)} must be (longer, shorter side), as {(shorter, longer)}.")
    if longer * section.augment.fit_ratio[1] > LARGEST_SIDE:
        raise ValueError(
            f"config.data.augment.fit_ratio={tuple(section.augment.fit_ratio)} resizes images to more than "
            f"{LARGEST_SIDE} pixels a side for data.fit={(longer, shorter)}; its second number may be "
            f"{LARGEST_SIDE / longer:.4g}."
        )
