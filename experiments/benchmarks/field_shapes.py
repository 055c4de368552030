"""Shapes of octic fields for tests and benchmarks: realistic ones from the models, and awkward ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a field, lines [4, *batch, tokens, channels], and its hidden width in the MLP."""

    name: str  # the model, or what makes the shape awkward
    batch: tuple[int, ...]
    tokens: int
    channels: int  # per component, width / 8
    hidden: int  # channels per component in the hidden layer

    def field(self, channels: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two arrays of a field with this number of channels."""
        return (4, *self.batch, self.tokens, channels), (2, *self.batch, self.tokens, 2 * channels)

    def weights(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of w_lines, w_planes and bias of the first linear map."""
        c, f = self.channels, self.hidden
        return (4, c, f), (2 * c, 2 * f), (f,)

    def mlp_branch(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of `octic_branch.Weights` for `octic_mlp`: norm, first map, second map, layer scale."""
        return self._branch(self.hidden, self.hidden)

    def attention_branch(self) -> tuple[tuple[int, ...], ...]:
        """The same for `octic_attention`."""
        return self._branch(3 * self.channels, self.channels)

    def _branch(self, first: int, second: int) -> tuple[tuple[int, ...], ...]:
        c = self.channels
        vectors = (4, c), (2 * c,), (c,)
        maps = (4, c, first), (2 * c, 2 * first), (first,), (4, second, c), (2 * second, 2 * c), (c,)
        return (*vectors, *maps, *vectors[:2])


# The paper's models at the batch size of its benchmark: octic ViTs, Table 1 and Appendix D.4.
REALISTIC = (
    Shape("ViT-S", (64,), 197, 48, 192),
    Shape("ViT-B", (64,), 197, 96, 384),
    Shape("ViT-L", (64,), 196, 128, 512),
    Shape("ViT-L, class token", (64,), 197, 128, 512),
    Shape("ViT-H", (64,), 256, 160, 640),
    Shape("ViT-H, class token", (64,), 257, 160, 640),
    Shape("ViT-G", (64,), 256, 208, 1024),
    Shape("ViT-e", (64,), 256, 224, 1920),
    Shape("ViT-22B", (64,), 256, 768, 3072),
)
AWKWARD = (
    Shape("no batch", (), 5, 3, 5),
    Shape("two batch axes", (2, 3), 7, 12, 20),
    Shape("one token", (4,), 1, 16, 8),
    Shape("odd tokens", (3,), 37, 24, 40),
    Shape("a row more than a tile", (2,), 33, 5, 130),
    Shape("ragged blocks", (1,), 1030, 8, 136),
)
