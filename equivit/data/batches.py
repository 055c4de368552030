"""One process's rows of a batch: its share, and the arrays of all rows (`loader.py` reads and transforms them).

A transform turns one example into the arrays of one row, with the given generator for all randomness:

    row = transform(example, rng)  # {"image": uint8 [H, W, C], "label": 3, ...}

Several crops are entries of shape [G, H, W, C].  For work on the whole batch, such as masks with ratios spread over it,
a transform also has

    batch = transform.finish(batch, rng, share)

which runs after collation, on this process's rows.  All processes get the same `rng` and must draw for the whole batch:
`rng.uniform(size=share.batch_size)[share.rows]`, or `rng.spawn(share.batch_size)[share.rows]` for a generator per row.
This keeps the batch the same for any number of processes.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_collections
import numpy as np

from equivit import errors

Batch = dict[str, np.ndarray]
Row = dict[str, Any]  # arrays, numbers, and for evaluation tuples of labels
Transform = Callable[[Row, np.random.Generator], Row]
MakeTransform = Callable[[ml_collections.ConfigDict, int], Transform]  # from the `data` section and the channels


@dataclasses.dataclass(frozen=True)
class Share:
    """The rows of a global batch that belong to one process: an equal slice for each."""

    batch_size: int
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self):
        if self.batch_size < 1 or self.batch_size % self.process_count:
            raise ValueError(
                f"batch_size={self.batch_size} must be positive and divisible by the {self.process_count} processes; "
                f"{errors.multiples(self.batch_size, self.process_count)}."
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(f"process_index={self.process_index} must be in 0..{self.process_count - 1}.")

    @property
    def size(self) -> int:
        """The number of this process's rows."""
        return self.batch_size // self.process_count

    @property
    def rows(self) -> slice:
        """This process's slice of the global batch."""
        return slice(self.process_index * self.size, (self.process_index + 1) * self.size)


def collate(rows: list[Row]) -> Batch:
    """Stack the rows entry by entry; numbers become int32 or float32.

    Raises:
      ValueError: the arrays of an entry differ in shape.
    """
    batch = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, np.ndarray) and len(shapes := {value.shape for value in values}) > 1:
            raise ValueError(
                f"'{name}': all rows of a batch must have the same shape; there are {sorted(shapes)}; "
                "with batch_size=1 they may differ."
            )
        dtype = {int: np.int32, float: np.float32}.get(type(first))
        batch[name] = np.stack(values) if dtype is None else np.array(values, dtype)
    return batch


def padded(batch: Batch, real: int, size: int) -> Batch:
    """The first `real` rows, then zeros up to `size` rows."""
    if real == size:
        return batch
    result = {name: np.zeros((size, *value.shape[1:]), value.dtype) for name, value in batch.items()}
    for name, value in batch.items():
        result[name][:real] = value[:real]
    return result


def finish(transform: Transform, batch: Batch, rng: np.random.Generator, share: Share) -> Batch:
    """The batch after `transform.finish`, if the transform has one."""
    return transform.finish(batch, rng, share) if hasattr(transform, "finish") else batch
