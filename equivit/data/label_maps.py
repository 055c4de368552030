"""The mapping from numbers in label map files to classes."""

import dataclasses

import numpy as np

from equivit import errors
from equivit.data.crops import VOID


class MapError(ValueError):
    """A label map that does not match its source.  More than one file will be wrong, so it ends a run."""


@dataclasses.dataclass(frozen=True)
class Legend:
    """The meaning of the numbers in a source's label maps.

    Attributes:
      names: the names of the numbers 0, 1, ...
      void: the numbers that mean "no class".  They need no name; if one has a name, later labels move down, so that
        labels are 0, 1, ... without gaps.
    """

    names: tuple[str, ...]
    void: tuple[int, ...]

    def __post_init__(self):
        if not self.numbers:
            raise ValueError(
                f"data.void={self.void} leaves none of the classes {errors.listed(self.names)}; list fewer."
            )
        if self.void == (255,) and len(self.names) > 256:  # the default, for maps of 8 bits
            raise ValueError(
                f"data.void=(255,) would leave out the class {errors.shown(self.names[255])}, one of "
                f"{len(self.names)}; set data.void=() to keep it, or list another number too."
            )

    @property
    def numbers(self) -> tuple[int, ...]:
        """The number of each class in the files."""
        return tuple(number for number in range(len(self.names)) if number not in self.void)

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of each class."""
        return tuple(self.names[number] for number in self.numbers)

    def labels(self, numbers: np.ndarray) -> np.ndarray:
        """The labels, 0..classes-1 or VOID.  VOID itself is kept.

        Shapes: int [H, W] -> int32 [H, W].

        Raises:
          MapError: a number that is neither a class nor void.
        """
        outside = np.isin(numbers, (*self.void, VOID))
        known = (numbers >= 0) & (numbers < len(self.names))
        if not (outside | known).all():
            found = np.unique(numbers[~(outside | known)]).tolist()
            raise MapError(
                f"its label map holds {errors.listed(found)}, but the {len(self.numbers)} classes are "
                f"{self.numbers[0]}..{self.numbers[-1]} and data.void={self.void}; a number that means 'no class' "
                f"belongs there, as data.void={(*self.void, found[0])}."
            )
        table = np.full(len(self.names), VOID, np.int32)
        table[list(self.numbers)] = np.arange(len(self.numbers))
        return np.where(outside, np.int32(VOID), table[np.where(known, numbers, 0)])
