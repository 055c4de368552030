"""The assignment of examples to rows and batches, a function of only the seed and the batch number."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

# The first word of each seed, so that all random streams differ.
SHUFFLES, EXAMPLES, CORRUPTIONS, BATCHES, SHIFTS, RESUMED = 1, 2, 3, 4, 5, 6


class Rows(NamedTuple):
    """The rows of one global batch."""

    epoch: int
    examples: np.ndarray  # int64 [B], positions in the source
    positions: np.ndarray  # int64 [B], position of each row in the epoch


@dataclasses.dataclass(frozen=True)
class TrainOrder:
    """Every epoch is a new permutation of the examples, cut into batches; an incomplete last batch is dropped.

    With `repeats` r > 1 (repeated augmentation, Hoffer et al. 2020), a batch has ceil(B / r) distinct examples, each r
    times in consecutive rows; the last one fewer times if r does not divide B.  An epoch then has floor(n / 256) * 256
    samples (n if n < 256), as with the DeiT sampler, so it sees about 1/r of the examples.
    """

    num_examples: int
    batch_size: int
    repeats: int
    seed: int
    first: int = 0  # number of the first batch

    def __post_init__(self):
        for name in ("batch_size", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative.")
        if not self.steps_per_epoch:
            raise ValueError(
                f"batch_size={self.batch_size} must not exceed the {self.samples_per_epoch} samples of an epoch "
                f"({self.num_examples} examples, repeats={self.repeats})."
            )

    @property
    def samples_per_epoch(self) -> int:
        """Rows of an epoch before the last, incomplete batch is dropped."""
        whole = self.repeats == 1 or self.num_examples < 256
        return self.num_examples if whole else self.num_examples // 256 * 256

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.samples_per_epoch // self.batch_size

    def rows(self, batch: int) -> Rows:
        """The rows of global batch number `batch`, counted over all epochs."""
        epoch, step = divmod(batch - self.first, self.steps_per_epoch)
        distinct = -(-self.batch_size // self.repeats)
        examples = permutation(self.seed, epoch, self.num_examples)[step * distinct : (step + 1) * distinct]
        examples = np.repeat(examples, self.repeats)[: self.batch_size]
        return Rows(epoch, examples, step * self.batch_size + np.arange(self.batch_size))

    def reshuffled(self, first: int) -> "TrainOrder":
        """A fresh shuffle, seeded by `first` and `seed`; batch number `first` begins an epoch."""
        seed = int(np.random.default_rng([RESUMED, self.seed, first]).integers(2**63))
        return dataclasses.replace(self, seed=seed, first=first)

    def generator(self, epoch: int, position: int) -> np.random.Generator:
        """The generator for the augmentation of one row."""
        return np.random.default_rng([EXAMPLES, self.seed, epoch, position])

    def batch_generator(self, batch: int) -> np.random.Generator:
        """The generator for a whole global batch, the same in every process."""
        return np.random.default_rng([BATCHES, self.seed, batch])


@functools.lru_cache(maxsize=2)  # two epochs overlap when workers run ahead
def permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    """The order of the examples in an epoch, int64 [length]."""
    return np.random.default_rng([SHUFFLES, seed, epoch]).permutation(length)
