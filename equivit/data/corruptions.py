"""ImageNet-C's 15 corruptions of single images (Hendrycks and Dietterich 2019), computed by a library.

The library, imagecorruptions-imaug, re-implements the code behind the official files and differs from it: motion blur
and snow do not use ImageMagick, and images are not saved as JPEG of quality 85.  The `data` section sets the crop
before the corruption.  To compare with published figures, use the official files, which are class folders
(`evaluation/protocols/corruptions.py` finds them).
"""

import dataclasses
import importlib.metadata
import threading

import ml_collections
import numpy as np
from PIL import Image

from equivit.data.order import CORRUPTIONS

# In the order of the tables.
NAMES = ("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur")
NAMES += ("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression")
SEVERITIES = (1, 2, 3, 4, 5)
SMALLEST = 32  # pixels per side
SEEDED = ("impulse_noise", "glass_blur")  # take a seed for their own generator; others use numpy's global one
LIBRARY = "imagecorruptions-imaug"

_ALONE = threading.Lock()  # one thread at a time uses numpy's global generator


@dataclasses.dataclass(frozen=True)
class Corruption:
    """One of NAMES at one severity; the result depends only on the seed, the pixels and the position in the split.

    Shapes: uint8 [H, W, C] -> the same; C is 1 or 3, and H and W at least 32.
    """

    name: str
    severity: int
    seed: int

    def __call__(self, pixels: np.ndarray, index: int) -> np.ndarray:
        """The corrupted pixels of the example at `index` of the split."""
        import imagecorruptions  # optional, and slow to import  # pyright: ignore[reportMissingImports]

        words = [CORRUPTIONS, self.seed, NAMES.index(self.name), self.severity, index]
        seeds = np.random.SeedSequence(words).generate_state(4)
        own = {"seed": int(seeds[0])} if self.name in SEEDED else {}
        function = imagecorruptions.corruption_dict[self.name]
        with _ALONE:
            before = np.random.get_state()
            np.random.seed(seeds)
            try:
                corrupted = function(
                    Image.fromarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3))), self.severity, **own
                )
            finally:
                np.random.set_state(before)
        corrupted = Image.fromarray(np.asarray(corrupted).astype(np.uint8))
        return np.asarray(corrupted) if pixels.shape[-1] == 3 else np.asarray(corrupted.convert("L"))[..., None]


def create(config: ml_collections.ConfigDict, seed: int) -> Corruption | None:
    """The corruption of a valid `data` section, or None.

    Raises:
      ValueError: images that are too small, or a missing library.
    """
    if config.corruption is None:
        return None
    if min(config.image_size) < SMALLEST:
        raise ValueError(
            f"config.data.image_size={tuple(config.image_size)}: corruptions need at least {SMALLEST} pixels per side."
        )
    _check_library()
    return Corruption(config.corruption, config.severity, seed)


def _check_library():
    """Check the distribution: two share the import name, and the older one fails on three corruptions with numpy 2."""
    try:
        importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"config.data.corruption: {LIBRARY} is not installed: pip install {LIBRARY} (after pip uninstall "
            "imagecorruptions, which has the same import name), or evaluate the official ImageNet-C files with "
            "config.data.source='folder:<dir>'."
        ) from None
