"""Hold out a part of a split that has no test set: a share of the images of each class, chosen by a seed."""

import numpy as np

NAME = "held_out"  # the split of the images held out


def chosen(labels: np.ndarray | None, examples: int, share: float, seed: int) -> np.ndarray:
    """Whether each example is held out, bool [N].

    Of each class, the share is rounded, but at least one example is held out and one is left; a class of one example
    is left whole.  Examples without labels count as one class.

    Args:
      labels: int [N]; None without labels.
      examples: N.
      share: in (0, 1).
      seed: determines the examples, with the order of the source.
    """
    labels = np.zeros(examples, int) if labels is None else np.asarray(labels)
    held = np.zeros(examples, bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        number = min(max(1, round(share * len(members))), len(members) - 1)
        # Each class has a generator of its own: images added to one class move no image of another.
        held[np.random.default_rng([seed, int(label)]).permutation(members)[:number]] = True
    return held
