"""The `data` section of a configuration: its keys, their defaults and their checks."""

from typing import Annotated, Any, Literal

from ml_collections import ConfigDict

from equivit import constraints, errors
from equivit.constraints import (
    Above0,
    Interval,
    NonNegativeFloat,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Share,
    Size,
    Words,
)
from equivit.data import corruptions, crops, rand_augment, reading, sources

DEFAULTS = dict(
    source="digits",
    split="train",
    eval_split="test",
    image_size=(32, 32),  # height, width
    train_image_size=None,  # of the images loaded for training; None: the same
    channels=None,  # None: as in the source
    train_examples=None,  # None: all
    eval_examples=None,
    workers=0,  # processes that decode and augment, which the commands start; 0: threads
    max_pixels=reading.MAX_PIXELS,  # of an image file; a larger one counts as unreadable
    repeats=1,  # copies of an example in one batch (repeated augmentation)
    resume="same_order",  # "new_order": a run that is resumed begins an epoch, in another order of the examples
    void=(255,),  # numbers in label maps that mean "no class"; the name of one in a source's `classes` is left out
    fit=None,  # (longer, shorter side): images are resized to fit in it, by crop="scaled" and eval_crop="whole"
    eval_crop="centre",  # "squash": no crop, the aspect is lost; "whole": images differ in size, label maps keep theirs
    multiple=1,  # eval_crop="whole": each side is resized up to the next multiple
    crop_ratio=1.0,  # evaluation: fraction of the resized side that the centre crop keeps
    interpolation="bicubic",  # evaluation: of the resizing, which is antialiased; or "bilinear"
    corruption=None,  # evaluation: one of ImageNet-C's, such as "gaussian_noise" (data/corruptions.py)
    severity=5,  # of the corruption, 1 to 5
    mean=(0.485, 0.456, 0.406),  # per channel, of values in 0..1
    std=(0.229, 0.224, 0.225),
    augment=dict(
        crop="random_resized",
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        fit_ratio=(0.5, 2.0),  # crop="scaled": of `fit`, or of the image's own size
        max_share=1.0,  # crop="scaled": largest share of one class among the labelled pixels, if ten tries find it
        flip=0.5,
        octic=False,  # in place of the flip, any of the eight orientations of a square crop
        three_augment=False,
        rand_augment=None,  # such as "rand-m9-mstd0.5-inc1"
        color_jitter=0.0,
        photometric=False,  # brightness, contrast, saturation and hue, as MMSegmentation changes them
        erase=0.0,
        circular_shift=0.0,  # largest shift either way, as a fraction of the image; along each axis for itself
        device=False,  # of views (data/views.py): colours are changed on the accelerator (data/device_colour.py)
    ),
    views=dict(  # several crops of an image (data/views.py); the global two as data.augment has them
        locals=8,  # local views of an image
        local_size=(96, 96),
        local_scale=(0.05, 0.32),
        jitter=(0.4, 0.4, 0.2, 0.1),  # strengths of brightness, contrast, saturation and hue
        jitter_rate=0.8,
        grey=0.2,
        blur=(1.0, 0.1, 0.5),  # rates for the first global view, the second, and local ones
        solarise=0.2,  # of the second global view
    ),
)
# "random_resized_clipped" draws one box and clips it to the image, where "random_resized" draws until one fits.
# "scaled" resizes by a random ratio, cuts at random and fills up with the mean colour, with interpolation.
# "centre" is the crop of evaluation, with its crop_ratio and interpolation.
CROPS = ("random_resized", "random_resized_clipped", "simple_random", "pad", "scaled", "centre", "none")
EVAL_CROPS = ("centre", "squash", "whole")
RESUMES = ("same_order", "new_order")
MOST_VIEWS = 256  # local ones of an image
LARGEST_SIDE = 2**15  # pixels of an image that a model may be given, or that one is cut from
Channels = Annotated[Literal[1, 3], Words("1 (grey) or 3 (RGB)")]
Corruption = Annotated[str, OneOf(corruptions.NAMES)]
Pixels = Annotated[
    int,
    Interval(1, reading.PIL_PIXELS, words=f"positive and at most {reading.PIL_PIXELS}, the most that Pillow opens"),
]
Side = Annotated[int, Interval(1, LARGEST_SIDE)]
Sides = Annotated[tuple[Side, Side], Words(f"(longer, shorter side) in pixels, at most {LARGEST_SIDE}")]
Jitter = Annotated[
    tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, Annotated[float, Interval(0, 0.5)]],
    Words("(brightness, contrast, saturation, hue), zero or more, hue at most 0.5"),
]
FitRatio = Annotated[float, Interval(0, 16, "(")]
TYPES: dict[str, Any] = dict(
    source=str,
    split=str,
    eval_split=str,
    image_size=Size,
    train_image_size=Size | None,
    channels=Channels | None,
    train_examples=PositiveInt | None,
    eval_examples=PositiveInt | None,
    workers=Annotated[int, Interval(0, 1024)],
    max_pixels=Pixels,
    repeats=PositiveInt,
    resume=Annotated[str, OneOf(RESUMES)],
    void=tuple[int, ...],
    fit=Sides | None,
    eval_crop=Annotated[str, OneOf(EVAL_CROPS)],
    multiple=Annotated[int, Interval(1, LARGEST_SIDE)],
    crop_ratio=Above0,
    interpolation=Annotated[str, OneOf(crops.INTERPOLATIONS)],
    corruption=Corruption | None,
    severity=Annotated[int, OneOf(corruptions.SEVERITIES)],
    mean=tuple[Share, ...],
    std=tuple[Above0, ...],
    augment=dict(
        crop=Annotated[str, OneOf(CROPS)],
        scale=tuple[Above0, Above0],
        ratio=tuple[PositiveFloat, PositiveFloat],
        fit_ratio=tuple[FitRatio, FitRatio],
        max_share=Above0,
        flip=Share,
        octic=bool,
        three_augment=bool,
        rand_augment=str | None,
        color_jitter=NonNegativeFloat,
        photometric=bool,
        erase=Share,
        circular_shift=Share,
        device=bool,
    ),
    views=dict(
        locals=Annotated[int, Interval(0, MOST_VIEWS)],
        local_size=Annotated[tuple[Side, Side], Words(f"(height, width) in pixels, at most {LARGEST_SIDE}")],
        local_scale=tuple[Above0, Above0],
        jitter=Jitter,
        jitter_rate=Share,
        grey=Share,
        blur=tuple[Share, Share, Share],
        solarise=Share,
    ),
)


def check(section: ConfigDict) -> None:
    """ValueError for an invalid value; the number of channels is checked when the source is opened."""
    constraints.check_section("config.data", section, TYPES)
    for part in sources.parts(section.source):
        if part.partition(":")[0] not in sources.KINDS:
            errors.one_of("config.data.source", part, sources.forms())
    for key in ("split", "eval_split"):
        if not section[key]:
            raise ValueError(f"config.data.{key}='' must be the name of a split, such as {DEFAULTS[key]!r}.")
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
    """A quarter turn of a crop that is not square has another size."""
    key = "train_image_size" if section.train_image_size else "image_size"
    sizes = {key: section[key]} | ({"views.local_size": section.views.local_size} if section.views.locals else {})
    for key, (height, width) in sizes.items():
        if height != width:
            side = max(height, width)
            raise ValueError(
                f"config.data.{key}={(height, width)} must be square for data.augment.octic=True, as {(side, side)}."
            )


def _check_resized(section: ConfigDict) -> None:
    """Evaluation first resizes images to image_size / crop_ratio; the scaled crop resizes them to fit * fit_ratio."""
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
