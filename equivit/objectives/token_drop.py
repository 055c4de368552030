"""Token dropping: train on a subset of the patch tokens that grows over the run.

The fraction of dropped tokens falls linearly over the run.  Each number of tokens needs a separate compiled step, so
the fraction is constant within each of a few phases.

Source: Jumbo (arXiv 2502.15021), Section 4.2; its code of 2025 for the rounding.
"""

from typing import NamedTuple


class Tokens(NamedTuple):
    """The number of used patch tokens of an image."""

    kept: int
    all: int

    def __str__(self) -> str:
        return f"tokens: {self.kept} of {self.all}"


def tokens_at(progress: float, rates: tuple[float, float], phases: int, tokens: int) -> Tokens:
    """The number of tokens used at a point of the run.

    Args:
      progress: the finished fraction of all steps, in [0, 1].
      rates: the dropped fractions in the first and last phase.
      phases: number of phases of equal length.
      tokens: N, the number of patch tokens of an image; int(rate N) of them are dropped.
    """
    phase = min(int(progress * phases), phases - 1)
    done = phase / max(phases - 1, 1)
    rate = rates[0] * (1 - done) + rates[1] * done
    return Tokens(tokens - int(rate * tokens), tokens)
