"""Views of an image for self-distillation: two global and several local ones, with independent colour changes.

`MaskedViews` also has patch masks for the global ones: the batches of DINOv2.

Source: DINO (Caron et al. 2021), DINOv2 (Oquab et al. 2023, arXiv 2304.07193).
"""

from typing import Any, NamedTuple

import ml_collections
import numpy as np
from PIL import Image

from equivit.data import colour, crops, masking
from equivit.data import config as data_config
from equivit.data.batches import Batch, Share

USED_UP = ("image", "map", "label")  # entries of an example removed from its row
# Keys of `data.augment` without effect on views, and the values that turn them off.
WITHOUT_EFFECT = {"three_augment": False, "rand_augment": None, "color_jitter": 0.0, "photometric": False}
WITHOUT_EFFECT |= {"erase": 0.0, "circular_shift": 0.0}


class Kind(NamedTuple):
    """Views of one size; `rates` has the colour changes of each."""

    name: str
    size: tuple[int, int]
    scale: tuple[float, float]
    rates: tuple[colour.Rates, ...]


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
        self.ratio, self.flip, self.octic = tuple(augment.ratio), augment.flip, augment.octic
        self.device = augment.device
        size = tuple(config.train_image_size or config.image_size)
        self.kinds = [Kind("global", size, tuple(augment.scale), (first, second))]
        if options.locals:
            sizes = tuple(options.local_size), tuple(options.local_scale)
            self.kinds.append(Kind("local", *sizes, (local,) * options.locals))

    def __call__(self, example: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """The views of an example."""
        row = {name: value for name, value in example.items() if name not in USED_UP}
        for kind in self.kinds:
            row |= self._views(kind, example["image"], rng)
        return row

    def _views(self, kind: Kind, image: Image.Image, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """The entries `<name>_crops`, uint8 [V, H, W, C], and `<name>_colours` if the device changes colours."""
        drawn = []
        for rates in kind.rates:  # draw everything before the pixels: caches stay warm
            crop = crops.random_resized_crop(rng, image.size, *kind.size, scale=kind.scale, ratio=self.ratio)
            drawn.append((crop, crops.draw_orientation(rng, self.flip, self.octic), colour.draw(rng, rates)))
        made = [
            colour.changed(crops.oriented(crop(image), orientation), colour.Changes() if self.device else changes)
            for crop, orientation, changes in drawn
        ]
        entries = {f"{kind.name}_crops": np.stack(made)}
        if self.device:
            entries[f"{kind.name}_colours"] = colour.packed([changes for *_, changes in drawn])
        return entries


class MaskedViews(Views):
    """`Views` with "masks" in each batch, bool [B, 2, N], True where a patch is masked.

    The masks of a group are drawn together, with ratios spread evenly over its masked crops (`masking.batch_masks`).
    With n micro-batches, each of which takes every n-th image, this holds within each micro-batch, so that all have the
    same largest number of masked patches.

    Args:
      config: the `data` section.
      channels: channels of the images.
      grid: (h, w), the patches of a global crop; N = h w.
      share: share of the crops that are masked.
      ratio: smallest and largest masked share of such a crop's patches.
      groups: number of groups of consecutive images.
      micro_batches: `optimizer.accumulation`.
      largest: most patches in one rectangle; None: half of the grid.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        channels: int,
        *,
        grid: tuple[int, int],
        share: float,
        ratio: tuple[float, float],
        groups: int,
        micro_batches: int = 1,
        largest: int | None = None,
    ):
        super().__init__(config, channels)
        self.grid, self.groups, self.micro_batches = grid, groups, micro_batches
        self.options: dict[str, Any] = dict(share=share, ratio=ratio, max_patches=largest)

    def finish(self, batch: Batch, rng: np.random.Generator, share: Share) -> Batch:
        """The batch with its masks."""
        size, parts = share.batch_size // self.groups, self.micro_batches
        rngs = rng.spawn(self.groups)
        whole = range(share.rows.start // size, -(-share.rows.stop // size))  # the groups of this process's images
        masks = np.concatenate([self._masks(rngs[group], size // parts) for group in whole])
        start = share.rows.start - whole.start * size
        return {**batch, "masks": masks[start : start + share.size]}

    def _masks(self, rng, images):
        """The masks of a group, bool [images * micro-batches, 2, N]."""
        parts = [
            masking.batch_masks(one, 2 * images, self.grid, **self.options) for one in rng.spawn(self.micro_batches)
        ]
        return np.stack([part.reshape(images, 2, -1) for part in parts], axis=1).reshape(-1, 2, parts[0].shape[-1])
