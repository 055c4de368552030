"""Token dropping: training on a part of the patch tokens, a smaller part at the beginning of a run than at its end.

The share that is left out falls linearly over the run.  Every number of tokens is a shape of its own and has its own
compiled step, so the line becomes a staircase of a few phases.

Source: Jumbo (arXiv 2502.15021), Section 4.2; its code of 2025 for the rounding.
"""

from typing import NamedTuple


class Tokens(NamedTuple):
    """How many of the patch tokens of an image are used."""

    kept: int
    all: int

    def __str__(self) -> str:
        return f"tokens: {self.kept} of {self.all}"


def tokens_at(progress: float, rates: tuple[float, float], phases: int, tokens: int) -> Tokens:
    """The tokens that are used once a share `progress`, in [0, 1], of the run is done.

    Args:
      progress: finished steps over all steps.
      rates: the share that is left out in the first phase and in the last one.
      phases: number of phases, all equally long.
      tokens: N, the patch tokens of an image; int(rate N) of them are left out.
    """
    phase = min(int(progress * phases), phases - 1)
    done = phase / max(phases - 1, 1)
    rate = rates[0] * (1 - done) + rates[1] * done
    return Tokens(tokens - int(rate * tokens), tokens)
