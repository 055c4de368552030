"""What is done to one image: the training augmentation and the evaluation crop, as the `data` section says.

A transform is small, can be pickled, and takes all its randomness from the generator that it is given.
"""

import ml_collections
import numpy as np
from PIL import Image

from equivit.data import augment, crops, rand_augment, section


class Train:
    """Crop, flip, 3-Augment, RandAugment, colour jitter and random erasing, in this order, each if asked for.

    Shapes: PIL image of any size -> uint8 [H, W, C].

    Raises:
      ValueError: when built, if a value in the `data` section is impossible.
    """

    def __init__(self, config: ml_collections.ConfigDict, channels: int):
        section.check(config)
        self.height, self.width = config.train_image_size or config.image_size
        self.mean, self.std = _statistics(config, channels)
        self.options = options = config.augment.to_dict()
        self.policy = None
        if options["rand_augment"] is not None:
            fill = tuple(min(255, round(255 * float(value))) for value in self.mean)
            self.policy = rand_augment.parse(options["rand_augment"], fill)

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """The augmented pixels, with all randomness taken from `rng`."""
        options = self.options
        image = self._crop(image, rng)
        if rng.random() < options["flip"]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        if options["three_augment"]:
            image = augment.three_augment(image, rng)
        if self.policy is not None:
            image = self.policy(image, rng)
        if options["color_jitter"]:
            image = augment.colour_jitter(image, rng, options["color_jitter"])
        return augment.random_erasing(_pixels(image), rng, options["erase"], self.mean, self.std)

    def _crop(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        match self.options["crop"]:
            case "random_resized":
                scale, ratio = self.options["scale"], self.options["ratio"]
                return crops.random_resized_crop(image, rng, self.height, self.width, scale=scale, ratio=ratio)
            case "simple_random":
                return crops.simple_random_crop(image, rng, self.height, self.width)
            case "pad":
                return crops.padded_crop(image, rng, self.height, self.width)
            case _:
                return crops.resize(image, self.height, self.width)


class Evaluation:
    """Resizes with the aspect kept, so that image_size / crop_ratio is covered, and cuts image_size from the centre.

    Shapes: PIL image of any size -> uint8 [H, W, C].
    """

    def __init__(self, config: ml_collections.ConfigDict):
        section.check(config)
        self.height, self.width = config.image_size
        self.crop_ratio = config.crop_ratio

    def __call__(self, image: Image.Image) -> np.ndarray:
        """The pixels that are evaluated."""
        image = crops.cover(image, int(self.height / self.crop_ratio), int(self.width / self.crop_ratio))
        return _pixels(crops.centre(image, self.height, self.width))


def _pixels(image: Image.Image) -> np.ndarray:
    pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def _statistics(config: ml_collections.ConfigDict, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation per channel, float64 [C]; one number stands for all channels."""
    values = []
    for name in ("mean", "std"):
        value = np.array(getattr(config, name), float)
        if value.shape not in ((1,), (channels,)):
            raise ValueError(
                f"config.data.{name}={getattr(config, name)} must hold {channels} numbers, one per channel."
            )
        values.append(np.broadcast_to(value, channels))
    return tuple(values)
