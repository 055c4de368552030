"""The base class of image model configurations: values derived from common fields."""

from typing import Any

import numpy as np


class ImageConfig:
    """Base of a configuration with the fields `image_size`, `in_channels` and `drop_path`, and a `depth`."""

    image_size: Any
    in_channels: Any
    drop_path: Any
    depth: Any

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of one image: (height, width, channels)."""
        return *self.image_size, self.in_channels

    @property
    def rates(self) -> np.ndarray | None:
        """The stochastic-depth rate of each block, [depth]; None if all are 0."""
        first, last = self.drop_path if isinstance(self.drop_path, tuple) else (self.drop_path,) * 2
        return np.linspace(first, last, self.depth, dtype=np.float32) if first or last else None
