"""The base class of image model configurations: common fields, and values derived from them."""

import dataclasses
from typing import Annotated, Any

import numpy as np

from equivit.constraints import Below1, OneOf, PositiveInt, Size
from equivit.layers.stack import REMAT


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """Base of a configuration, which also has a `depth`, the number of blocks.

    Attributes:
      image_size: (height, width); the model takes any size.
      num_classes: None for no head.
      drop_path: probability of dropping a branch of a block for a sample, used when a key is given; a pair gives the
        rates of the first and the last block, with linear growth between.
      remat: how blocks are run, with `unroll` if there is such a field (`layers/stack.py`).
    """

    image_size: Size = (224, 224)
    in_channels: PositiveInt = 3
    num_classes: PositiveInt | None = 1000
    drop_path: Below1 | tuple[Below1, Below1] = 0.0
    remat: Annotated[str, OneOf(REMAT)] = "none"

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """The shape of one image: (height, width, channels)."""
        return *self.image_size, self.in_channels

    @property
    def map_widths(self: Any) -> tuple[int, ...]:
        """Channels of the last map of each stage; for a model without stages, of its only one."""
        return getattr(self, "widths", None) or (self.width,)

    @property
    def rates(self: Any) -> np.ndarray | None:
        """The stochastic-depth rate of each block, [depth]; None if all are 0."""
        first, last = self.drop_path if isinstance(self.drop_path, tuple) else (self.drop_path,) * 2
        return np.linspace(first, last, self.depth, dtype=np.float32) if first or last else None
