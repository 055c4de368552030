"""Transforms from an example to a row of a batch: training augmentation and evaluation crop of the `data` section.

A transform takes an example, whose "image" and "map" are PIL images, and a generator for all randomness; it returns a
new dict.  Unknown entries pass through.  It is small and can be pickled.
"""

from typing import Any

import ml_collections
import numpy as np
from PIL import Image

from equivit.data import augment, crops, rand_augment
from equivit.data import config as data_config


class Train:
    """Crop, orientation, colour changes, random erasing and circular shift, in this order, if enabled.

    Colour changes are 3-Augment, RandAugment, colour jitter and photometric distortion.  Padding around a smaller crop
    keeps the mean colour.

    Shapes: "image" of any size -> uint8 [H, W, C]; "map" of the same size -> int32 [H, W].

    Raises:
      ValueError: on construction, if a value in the `data` section is invalid or has no effect here.
    """

    def __init__(self, config: ml_collections.ConfigDict, channels: int):
        data_config.check(config)
        self.height, self.width = config.train_image_size or config.image_size
        self.crop_ratio, self.interpolation = config.crop_ratio, config.interpolation
        self.mean, self.std = _statistics(config, channels)
        self.options = options = config.augment.to_dict()
        if options["device"]:
            raise ValueError(
                "config.data.augment.device=True: only the views of DINOv2 change their colours on the accelerator; "
                "set it to False."
            )
        self.fit, self.fill = config.fit, tuple(min(255, round(255 * float(value))) for value in self.mean)
        policy = options["rand_augment"]
        self.policy = None if policy is None else rand_augment.parse(policy, self.fill)

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Augment the example; a label map is cropped, turned and shifted with its image.

        Raises:
          ValueError: RandAugment with a label map, which would not follow its geometric changes.
        """
        options, image = self.options, example["image"]
        crop = self._crop(rng, image, example.get("map"))
        orientation = crops.draw_orientation(rng, options["flip"], options["octic"])
        image = crops.oriented(crop(image), orientation)
        if options["three_augment"]:
            image = augment.three_augment(image, rng)
        if self.policy is not None:
            image = self.policy(image, rng)
        if options["color_jitter"]:
            image = augment.colour_jitter(image, rng, options["color_jitter"])
        if options["photometric"]:
            image = augment.photometric_distortion(image, rng)
        pixels = crops.pixels(self._padded(image))
        row = {**example, "image": augment.random_erasing(pixels, rng, options["erase"], self.mean, self.std)}
        if "map" in example:
            if self.policy is not None:
                raise ValueError("config.data.augment.rand_augment: label maps cannot follow it; set it to None.")
            row["map"] = np.asarray(self._padded(crops.oriented(crop(example["map"]), orientation)))
        return augment.circular_shift(row, rng, options["circular_shift"]) if options["circular_shift"] else row

    def _padded(self, image: Image.Image) -> Image.Image:
        return crops.padded(image, self.height, self.width, self.fill)

    def _crop(self, rng: np.random.Generator, image: Image.Image, labels: Image.Image | None) -> crops.Geometry:
        options, size = self.options, (self.height, self.width)
        match options["crop"]:
            case "random_resized" | "random_resized_clipped" as crop:
                drawn, clipped = dict(scale=options["scale"], ratio=options["ratio"]), crop == "random_resized_clipped"
                return crops.random_resized_crop(rng, image.size, *size, **drawn, clipped=clipped)
            case "simple_random":
                return crops.simple_random_crop(rng, image.size, *size)
            case "pad":
                return crops.padded_crop(rng, *size)
            case "scaled":
                scaled = dict(fit=self.fit, ratio=options["fit_ratio"], interpolation=self.interpolation)
                return crops.scaled_crop(rng, image, *size, **scaled, labels=labels, max_share=options["max_share"])
            case "centre":
                return lambda image: crops.central(image, *size, self.crop_ratio, self.interpolation)
            case _:
                return lambda image: crops.resize(image, *size)


class Evaluation:
    """Resizes to cover image_size / crop_ratio, keeping the aspect ratio, and crops image_size from the centre.

    With `eval_crop="squash"` nothing is cropped, and the aspect ratio is lost.  With `eval_crop="whole"` nothing is
    cropped either: one step resizes the image to `fit`, keeping the aspect ratio, with each side rounded up to a
    multiple of `multiple`.  The label map stays unchanged, so that scores use the size of the labels.

    Shapes: "image" of any size -> uint8 [H, W, C]; "map" of the same size -> int32 [H, W], or its own size if whole.
    """

    def __init__(self, config: ml_collections.ConfigDict):
        data_config.check(config)
        self.height, self.width = config.image_size
        self.crop_ratio, self.interpolation = config.crop_ratio, config.interpolation
        self.kind, self.fit, self.multiple = config.eval_crop, config.fit, config.multiple

    def __call__(self, example: dict[str, Any], rng: np.random.Generator | None = None) -> dict[str, Any]:
        """Transform the example; nothing is random."""
        row = {**example, "image": crops.pixels(self._crop(example["image"]))}
        if "map" in example:
            row["map"] = np.asarray(example["map"] if self.kind == "whole" else self._crop(example["map"]))
        return row

    def _crop(self, image: Image.Image) -> Image.Image:
        if self.kind == "whole":
            size = crops.rounded_up(*crops.fitted(image.size, self.fit), self.multiple)
            return crops.resize(image, *size, self.interpolation)
        if self.kind == "squash":
            return crops.resize(image, self.height, self.width, self.interpolation)
        return crops.central(image, self.height, self.width, self.crop_ratio, self.interpolation)


def _statistics(config: ml_collections.ConfigDict, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per channel, float64 [C]; a single number applies to all channels."""
    values = []
    for name in ("mean", "std"):
        value = np.array(getattr(config, name), float)
        if value.shape not in ((1,), (channels,)):
            raise ValueError(
                f"config.data.{name}={getattr(config, name)} must hold {channels} numbers, one per channel."
            )
        values.append(np.broadcast_to(value, channels))
    return tuple(values)
