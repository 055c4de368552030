"""Differences between two rows of a study, and whether the seeds resolve them.

A difference is resolved where a two-sided t test gives p < 0.05: Welch's test, or the paired test where the runs of a
seed share something, such as a pretrained model or the test images.  No p is corrected for the number of comparisons.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scipy import special

LEVEL = 0.05  # a difference is resolved where p is smaller
Rows = Mapping[str, Mapping[str, Any]]  # values of each figure by the name of the variant
Gain = dict[str, float | None]


def difference(a: Sequence[float], b: Sequence[float]) -> Gain:
    """mean(a) - mean(b), "gap", its "standard_error" and "p" of Welch's test; None where one has a single value."""
    gap = statistics.fmean(a) - statistics.fmean(b)
    if min(len(a), len(b)) < 2:
        return dict(gap=gap, standard_error=None, p=None)
    parts = [statistics.variance(values) / len(values) for values in (a, b)]
    squares = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (a, b), strict=True))
    return _gain(gap, math.sqrt(sum(parts)), sum(parts) ** 2 / squares if squares else math.inf)


def paired_difference(a: Sequence[float], b: Sequence[float]) -> Gain:
    """The mean of a - b over the same seeds or sets; "standard_error" and "p" are of the single differences."""
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    gap = statistics.fmean(gaps)
    if len(gaps) < 2:
        return dict(gap=gap, standard_error=None, p=None)
    return _gain(gap, statistics.stdev(gaps) / math.sqrt(len(gaps)), len(gaps) - 1)


def _gain(gap: float, error: float, degrees: float) -> Gain:
    """A difference with the two-sided p of Student's t."""
    p = 2 * float(special.stdtr(degrees, -abs(gap) / error)) if error else float(gap == 0)
    return dict(gap=gap, standard_error=error, p=p)


def gains(
    rows: Rows, pairs: Iterable[tuple[str, str | None]], figures: Iterable[str], compare: Callable = difference
) -> dict[str, Gain]:
    """The difference between the two rows of each pair, in each figure that both have."""
    return {
        f"{name} - {other}, {figure}": compare(rows[name][figure], rows[other][figure])
        for name, other in pairs
        if name in rows and other in rows
        for figure in figures
        if rows[name][figure] and rows[other][figure]
    }


def resolved(gain: Mapping[str, Any]) -> bool:
    """Whether the seeds resolve a difference; one seed resolves nothing."""
    return gain["p"] is not None and gain["p"] < LEVEL


def verdict(gain: Mapping[str, Any]) -> str:
    """A difference in points, and whether the seeds resolve it."""
    points = f"{100 * gain['gap']:+.2f} points"
    if gain["p"] is None:
        return f"{points}; one seed resolves nothing"
    words = "resolved" if resolved(gain) else "not resolved"
    return f"{points}, standard error {100 * gain['standard_error']:.2f}, p = {gain['p']:.2g}: {words}"
