"""Token dropping: training on a part of the patch tokens, a smaller part at the beginning of a run than at its end.

The share that is left out falls linearly over the run.  Every number of tokens is a shape of its own and has its own
compiled step, so the line becomes a staircase of a few phases.

Source: Jumbo (arXiv 2502.15021), Section 4.2; its code of 2025 for the rounding.
"""

from typing import Any, NamedTuple

from equivit import errors


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


def check(rates: Any, phases: Any) -> None:
    """ValueError unless `objective.token_drop` and `objective.token_drop_phases` are possible."""
    if rates is not None and not (
        isinstance(rates, tuple | list) and len(rates) == 2 and all(errors.is_number(r) and 0 <= r < 1 for r in rates)
    ):
        raise ValueError(
            f"config.objective.token_drop={rates!r} must be two shares in [0, 1), left out at the beginning and at the "
            "end, such as (0.9, 0.1), or None."
        )
    errors.whole("config.objective.token_drop_phases", phases)
