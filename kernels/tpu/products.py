"""Products of tokens with a matrix on a TPU, where the matrix units hold one of the factors.

A unit holds 128 x 128 numbers of one factor and multiplies rows of the other by them.  If it holds the matrix, the rows
are tokens, and all pass once for every 128 channels of the result.  If it holds tokens, the rows are channels, and all
pass once for every 128 tokens; the result is transposed ("turned"): channels by tokens.  For 128 tokens and 160
channels, that is 160 rows instead of 256.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from equivit.kernels.tpu import blocks
from equivit.kernels.tpu.blocks import LANES, up

# Rows of a product in bfloat16 are a multiple of STEP; below FEWEST_ROWS, loading a unit is assumed to take longer than
# multiplying.
STEP, FEWEST_ROWS = 16, 64


class Part(NamedTuple):
    """A range of tokens, and whether their products are turned; a turned part has at most 128."""

    start: int
    size: int
    turned: bool

    @property
    def rows(self) -> slice:
        """The rows of a block."""
        return slice(self.start, self.start + self.size)


def parts(tokens: int, products: Sequence[tuple[int, int]]) -> tuple[Part, ...]:
    """Divide a block into parts whose products are turned, and the rest.

    Transposing a result back occupies the vector units.  By the compiler's estimates it pays if it saves a quarter of
    the rows, and only for more than 128 channels: with fewer, the matrix units wait for the vector units anyway.

    Args:
      tokens: tokens of the block.
      products: channels of a result, and the number of 128 x 128 products for every 128 of them.
    """

    def turned(size: int) -> bool:
        of_channels = sum(count * _rows(channels) for channels, count in products)
        of_tokens = sum(count * _rows(size) * -(-channels // LANES) for channels, count in products)
        return 4 * of_channels <= 3 * of_tokens and min(channels for channels, _ in products) > LANES

    starts = range(0, tokens, LANES)
    found = [Part(start, size, turned(size)) for start in starts for size in [min(LANES, tokens - start)]]
    first = next((i for i, part in enumerate(found) if not part.turned), len(found))
    rest = [Part(found[first].start, tokens - found[first].start, turned=False)] if first < len(found) else []
    return (*found[:first], *rest)


def _rows(size: int) -> int:
    return max(up(size, STEP), FEWEST_ROWS)


def dot(x: jax.Array, matrix: jax.Array, turned: bool) -> jax.Array:
    """The products of tokens [N, K] and a matrix [C, K], over K, in float32: [N, C], or turned [C, N]."""
    return blocks.dot(matrix, x, (1, 1)) if turned else blocks.dot(x, matrix, (1, 1))
