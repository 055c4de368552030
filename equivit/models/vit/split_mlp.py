"""One MLP for some tokens, another for the rest."""

from flax import nnx

from equivit.layers.grid import Layout
from equivit.symmetry.fields import TokensT, join, rows


class SplitMlp(nnx.Module):
    """Prefix tokens from index `first` on go through `special`, all other tokens through `common`.

    Shapes: [*B, N, C] or a field -> the same.  Source: Jumbo, Section 4.7.
    """

    def __init__(self, common: nnx.Module, special: nnx.Module, first: int):
        self.common, self.special, self.first = common, special, first

    def __call__(self, x: TokensT, layout: Layout) -> TokensT:
        first, stop = self.first, layout.prefix
        special = self.special(rows(x, first, stop))
        others = self.common(join(rows(x, 0, first), rows(x, stop)))
        return join(rows(others, 0, first), special, rows(others, first))
