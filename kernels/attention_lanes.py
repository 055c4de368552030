"""Where the channels of a head lie among the lanes of registers, so that selects make its vector one register.

A register has 128 lanes.  A head's d channels may come in parts from several arrays, its sources: a dense layer has
one, an octic field six, one for each row of an irrep.  Lane n of a source lies in lane n mod 128 of a register, and
moving it to another one is slow.  So heads are placed such that no two channels of a head share a lane: the select,
by lane, of the registers that they lie in is then the head's whole vector, in an order that is the same for queries,
keys and values, and therefore does not matter.

Dense, d = 80: head 1 has lanes 80 to 127 of register 0 and lanes 0 to 31 of register 1.  Nothing needs to move.
Octic: in the natural order the parts of a head have the same lanes in every source.  So each source gets an order of
heads of its own, which `places` tells, and the linear maps before and after have their columns and rows in that order.
With d = 64 two heads share a register, one in each half, and the selects that collect one collect both.
With d = 72 to 128, eight heads share selects.  The four rows of lines have each part in a block of 16 lanes and first
exchange blocks: block b of row n then comes from row n ^ (b mod 4), by two selects for each register.  Half a register
now has all lines of a head, and its planes lie in the other half, in two pieces more.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

LANES = 128  # of a register
HALF = LANES // 2
BLOCK = 16  # lanes that sources exchange
EXCHANGING = 4  # sources


class Piece(NamedTuple):
    """Lanes `start` to `stop` of a register of a source; if two heads share a register, of each of its halves.

    Of sources that exchange blocks, those that the source has after it.
    """

    source: int
    register: int
    start: int
    stop: int


class Arrangement(NamedTuple):
    """How heads lie in the sources.

    Attributes:
      period: lanes that a head has: 64 if two share a register, else 128.
      units: for each register full of heads, that is, for two heads or one, the pieces that it is selected from.
      places: for each source, the first lane of the part of every head.
      widths: of the sources in lanes, whole registers.
      exchange: whether the first four sources exchange blocks.
    """

    period: int
    units: tuple[tuple[Piece, ...], ...]
    places: tuple[tuple[int, ...], ...]
    widths: tuple[int, ...]
    exchange: bool = False

    def lanes(self, source: int, part: int) -> np.ndarray:
        """The lanes [heads, part] of a source in which the channels of each head lie."""
        return np.array(self.places[source])[:, None] + np.arange(part)

    def matrix(self, source: int, channels: int) -> np.ndarray:
        """Zeros and ones [heads x part, width of the source], which take channels in the natural order to their lanes.

        A product with it is exact, leaves 0 in lanes of no head, and has a derivative without a scatter.
        """
        lanes = self.lanes(source, channels // len(self.places[source]))
        matrix = np.zeros((lanes.size, self.widths[source]), np.float32)
        matrix[np.arange(lanes.size), lanes.ravel()] = 1
        return matrix

    def placed(self, source: int, x: jax.Array) -> jax.Array:
        """[..., heads x part] in the natural order -> [..., width of the source]."""
        return product("...c,cw->...w", x, self.matrix(source, x.shape[-1]))


def product(subscripts: str, x: jax.Array, matrix: np.ndarray) -> jax.Array:
    """The product of an array and an `Arrangement.matrix`, or several of one width, in the dtype of the array."""
    return jnp.einsum(subscripts, x, matrix.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


@functools.cache
def arrange(parts: tuple[int, ...], heads: int) -> Arrangement | None:
    """Places for heads that have `parts` channels in each source; None if none were found."""
    packed, exchanging = _packed(parts, heads), _exchanging(parts, heads)
    if packed is None or exchanging is None or sum(exchanging.widths) > sum(packed.widths):
        return packed or exchanging
    return exchanging


def _exchanging(parts: tuple[int, ...], heads: int) -> Arrangement | None:
    """Lines in blocks, which their sources exchange; None for other parts, or heads that do not fill registers."""
    line, plane = parts[0], parts[-1]
    if parts != (line,) * EXCHANGING + (plane,) * 2 or sum(parts) <= HALF or max(line, plane // 2) > BLOCK or heads % 8:
        return None
    slots = HALF // plane  # of planes in half a register
    units, places = [], np.zeros((len(parts), heads), int)
    for head in range(heads):
        register, (half, n) = head // 8, divmod(head % 8, 4)
        places[:EXCHANGING, head] = [LANES * register + HALF * half + BLOCK * (n ^ i) for i in range(EXCHANGING)]
        # Of the heads that have their lines in this half, and so their planes in the other, the one of this number.
        there, slot = divmod(head // 8 * 4 + n, slots)
        starts = [HALF * (1 - half) + plane * ((slot + i) % slots) for i in range(2)]
        places[EXCHANGING:, head] = [LANES * there + start for start in starts]
        planes = (Piece(EXCHANGING + i, there, start, start + plane) for i, start in enumerate(starts))
        units.append((Piece(n, register, HALF * half, HALF * (half + 1)), *planes))
    registers = [heads // 8] * EXCHANGING + [-(-heads // 2 // slots)] * 2
    places = tuple(tuple(row.tolist()) for row in places)
    return Arrangement(LANES, tuple(units), places, tuple(LANES * n for n in registers), exchange=True)


def _packed(parts: tuple[int, ...], heads: int) -> Arrangement | None:
    """Parts that lie one after the other in each source; None if no order of them was found.

    One source, and the first of the longest parts, have the heads in their natural order.
    """
    period = HALF if 2 * sum(parts) == LANES else LANES
    units, rest = divmod(heads * period, LANES)
    if sum(parts) > LANES or rest:
        return None
    widths = tuple(-(-heads * part // LANES) * LANES for part in parts)
    used = np.zeros((units, period), int)  # lanes that a unit has so far
    firsts: dict[int, np.ndarray] = {}
    for i in sorted(range(len(parts)), key=lambda i: -parts[i]):  # long parts have the fewest choices
        slots = _slots(parts[i], widths[i], period)
        lanes = np.array([np.isin(np.arange(period), (slot + np.arange(parts[i])) % period) for slot in slots], int)
        overlap = used @ lanes.T
        unit, slot = linear_sum_assignment(overlap)
        if overlap[unit, slot].any():
            return None
        used += lanes[slot]
        firsts[i] = slots[slot]
    return Arrangement(
        period,
        tuple(
            tuple(piece for i, part in enumerate(parts) for piece in _pieces(i, firsts[i][unit], part, period))
            for unit in range(units)
        ),
        tuple(tuple(int(n) + half for n in firsts[i] for half in range(0, LANES, period)) for i in range(len(parts))),
        widths,
    )


def _slots(part: int, width: int, period: int) -> np.ndarray:
    """The first lanes of parts that lie one after the other; with two heads in a register, in its first half."""
    if period == LANES:
        return np.arange(width // part) * part
    return (np.arange(0, width, LANES)[:, None] + np.arange(period // part) * part).ravel()


def _pieces(source: int, first: int, part: int, period: int) -> list[Piece]:
    """The part from lane `first` on; a part that begins in one register may end in the next."""
    register, start = divmod(int(first), LANES)
    stop = start + part
    pieces = [Piece(source, register, start, min(stop, period))]
    return pieces if stop <= period else [*pieces, Piece(source, register + 1, 0, stop - period)]
