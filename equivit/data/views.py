"""Views of an image for self-distillation: two global and several local ones, with independent colour changes.

Source: DINO (Caron et al. 2021), DINOv2 (Oquab et al. 2023, arXiv 2304.07193).
"""

import dataclasses
from typing import Any

import ml_collections
import numpy as np
from PIL import Image

from equivit.data import colour, crops
from equivit.data import config as data_config

USED_UP = ("image", "map", "label")  # entries of an example removed from its row
# Keys of `data.augment` without effect on views, and the values that turn them off.
WITHOUT_EFFECT = {"three_augment": False, "rand_augment": None, "color_jitter": 0.0, "photometric": False}
WITHOUT_EFFECT |= {"erase": 0.0, "circular_shift": 0.0}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Views of one size; `rates` has the colour changes of each."""

    name: str
    size: tuple[int, int]
    scale: tuple[float, float]
    ratio: tuple[float, float]
    flip: float
    octic: bool
    rates: tuple[colour.Rates, ...]
    device: bool

    def views(self, image: Image.Image, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The entries `<name>_crops`, uint8 [V, H, W, C], and `<name>_colours` if the device changes colours."""
        drawn = []
        for rates in self.rates:  # draw everything before the pixels: caches stay warm
            crop = crops.random_resized_crop(rng, image.size, *self.size, scale=self.scale, ratio=self.ratio)
            drawn.append((crop, crops.draw_orientation(rng, self.flip, self.octic), colour.draw(rng, rates)))
        made = [
            colour.changed(crops.oriented(crop(image), orientation), colour.Changes() if self.device else changes)
            for crop, orientation, changes in drawn
        ]
        entries = {f"{self.name}_crops": np.stack(made)}
        if self.device:
            entries[f"{self.name}_colours"] = colour.packed([changes for *_, changes in drawn])
        return entries


class Views:
    """Two global views of an image and `data.views.locals` local ones.

    A view is a random part of the image, resized (bicubic), flipped (with `data.augment.octic` also rotated), with
    changed colours (`colour.py`).  Global views have the size of training images and the scale, ratio and flip of
    `data.augment`; local ones have `local_size` and `local_scale`.  `blur` has probabilities for the first global view,
    the second, and local ones; only the second global view is solarised.  With `data.augment.device` the colours are
    changed later, on the accelerator (`device_colour.py`).

    Shapes: "image" of any size -> "global_crops" uint8 [2, H, W, C] and, if there are local views, "local_crops" uint8
    [L, h, w, C]; with `data.augment.device` also "global_colours" float32 [2, 11] and "local_colours" [L, 11].  The
    image, its map and its label are dropped; other entries pass through.

    Raises:
      ValueError: on construction, if a value in the `data` section is invalid or has no effect on views.
    """

    def __init__(self, config: ml_collections.ConfigDict, channels: int):
        data_config.check(config)
        options, augment = config.views, config.augment
        if augment.crop != "random_resized":
            raise ValueError(f"config.data.augment.crop={augment.crop!r}: views need 'random_resized'.")
        for name, off in WITHOUT_EFFECT.items():
            if augment[name] != off:
                raise ValueError(
                    f"config.data.augment.{name}={augment[name]!r} has no effect on views; set it to {off!r} "
                    "(config.data.views says how their colours change)."
                )
        jitter = (tuple(options.jitter), options.jitter_rate, options.grey)
        first, second, local = (colour.Rates(*jitter, blur, solarise=0.0) for blur in options.blur)
        second = second._replace(solarise=options.solarise)
        shared: dict[str, Any] = dict(
            ratio=tuple(augment.ratio), flip=augment.flip, octic=augment.octic, device=augment.device
        )
        size = tuple(config.train_image_size or config.image_size)
        self.kinds = [Kind("global", size, tuple(augment.scale), **shared, rates=(first, second))]
        if options.locals:
            sizes = tuple(options.local_size), tuple(options.local_scale)
            self.kinds.append(Kind("local", *sizes, **shared, rates=(local,) * options.locals))

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The views of an example."""
        row = {name: value for name, value in example.items() if name not in USED_UP}
        for kind in self.kinds:
            row |= kind.views(example["image"], rng)
        return row
