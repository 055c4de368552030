"""One MLP for some tokens, another for the others."""

from flax import nnx

from equivit.symmetry.fields import join, rows


class SplitMlp(nnx.Module):
    """Tokens first <= i < stop go through `special`, all others through `common` (Jumbo, Section 4.7).

    Shapes: [*B, N, C] or a field -> the same.
    """

    def __init__(self, common: nnx.Module, special: nnx.Module, first: int, stop: int):
        self.common, self.special, self.first, self.stop = common, special, first, stop

    def __call__(self, x):
        first, stop = self.first, self.stop
        special = self.special(rows(x, first, stop))
        others = self.common(join(rows(x, 0, first), rows(x, stop)))
        return join(rows(others, 0, first), special, rows(others, first))
