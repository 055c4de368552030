"""The base of image models' configurations: values derived from common fields."""

from typing import Any

import numpy as np

from equivit import errors


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
        """The rate of stochastic depth of each block, [depth]; None where there is none."""
        first, last = self.drop_path if isinstance(self.drop_path, tuple) else (self.drop_path,) * 2
        return np.linspace(first, last, self.depth, dtype=np.float32) if first or last else None


class StagedConfig(ImageConfig):
    """Base of a configuration with `depths`, the blocks of each stage."""

    depths: Any

    @property
    def depth(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    def check_stages(self, *names: str) -> None:
        """ValueError unless each of these fields has as many entries as `depths`."""
        for name in names:
            if len(value := getattr(self, name)) != len(self.depths):
                raise ValueError(
                    f"{_family(self)}: {name}={value} and depths={self.depths} must have one entry per stage each."
                )

    def check_heads(self, num_heads: tuple[int, ...], widths: tuple[int, ...]) -> None:
        """ValueError unless the heads of each stage divide its width."""
        for stage, (heads, width) in enumerate(zip(num_heads, widths, strict=True)):
            what = f"the width of stage {stage}, {width}"
            errors.divides(f"{_family(self)}: num_heads[{stage}]", heads, width, what)


def _family(config: Any) -> str:
    return type(config).__name__.removesuffix("Config")
