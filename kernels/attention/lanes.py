"""Placement of a head's channels in register lanes, so that selects gather its vector into one register.

A register has 128 lanes.  A head's d channels may come in parts from several arrays, its sources: a dense layer has one
source, an octic field six, one per row of an irrep.  Lane n of a source lies in lane n mod 128 of a register; moving it
to another lane is slow.  So heads are placed such that no two channels of a head share a lane.  Selecting by lane from
their registers then gives the head's whole vector.  Its order is the same for queries and keys, and for values and
results, so it does not matter.

Dense, d = 80: head 1 has lanes 80 to 127 of register 0 and lanes 0 to 31 of register 1.  Nothing needs to move.
Octic: in the natural order the parts of a head have the same lanes in every source.  So each source gets a separate
order of heads, listed in `places`; the linear maps before and after permute their columns and rows accordingly.  With d
= 64 two heads share a register, one in each half, and the selects that collect one collect both.  With d = 72 to 128
the rows of an irrep exchange blocks of lanes before heads are collected (`_exchanging`).
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linear_sum_assignment

LANES = 128  # lanes of a register
HALF = LANES // 2
LINES, PLANES = 4, 2  # rows of an octic field


class Piece(NamedTuple):
    """Lanes `start` to `stop` of a source's register (of each half, if two heads share it), after any exchange."""

    source: int
    register: int
    start: int
    stop: int


class Exchange(NamedTuple):
    """Sources that exchange blocks of lanes: among k = 2 or 4 sources, the n-th gets block b of source n ^ (b mod k).

    An exchange is its own inverse.
    """

    sources: range
    block: int


Pieces = tuple[Piece, ...]


class Arrangement(NamedTuple):
    """Placement of heads in the sources; each has one array for q, k and v together, and one for the result y."""

    period: int  # lanes per head: 64 if two share a register, else 128
    units: tuple[tuple[Pieces, ...], ...]  # for each register full of heads (two or one), the pieces of q, k, v and y
    places: tuple[tuple[tuple[int, ...], ...], ...]  # by source, and q, k, v and y: the first lane of every head's part
    qkv_widths: tuple[int, ...]  # of each source's arrays in lanes, whole registers
    widths: tuple[int, ...]
    exchanges: tuple[Exchange, ...] = ()  # applied before heads are gathered, and again after y is scattered

    @property
    def token_widths(self) -> tuple[int, int]:
        """Lanes of a token in all sources, for q, k and v together and for y."""
        return sum(self.qkv_widths), sum(self.widths)

    def lanes(self, source: int, part: int) -> np.ndarray:
        """The lanes [4, heads, part] of each head's channels of q, k, v and y in a source."""
        return np.array(self.places[source])[..., None] + np.arange(part)

    def matrix(self, source: int, channels: int) -> np.ndarray:
        """0/1 matrix [heads x part, width of the source] that takes y from the natural order to its lanes.

        A product with it is exact, leaves 0 in unused lanes, and has a derivative without a scatter.
        """
        return _matrix(self._natural(source, channels)[3], self.widths[source])

    def qkv_matrices(self, source: int, channels: int) -> np.ndarray:
        """As `matrix`, for q, k and v [3, heads x part, width], or for (q | k | v) [1, 3 x heads x part, qkv width].

        The first form applies where q, k and v are consecutive: zeros between them would slow the product down.
        """
        lanes, width = self._natural(source, channels)[:3], self.qkv_widths[source]
        if width != 3 * self.widths[source]:
            return _matrix(lanes.ravel(), width)[None]
        return np.stack([_matrix(lanes[i] - i * width // 3, width // 3) for i in range(3)])

    def _natural(self, source, channels):
        """The lanes [4, heads x part] of channels in the natural order."""
        return self.lanes(source, channels // len(self.places[source][0])).reshape(4, channels)

    def placed(self, source: int, y: jax.Array) -> jax.Array:
        """[..., heads x part] in the natural order -> [..., width of the source]."""
        return product("...c,cw->...w", y, self.matrix(source, y.shape[-1]))


def product(subscripts: str, x: jax.Array, matrix: np.ndarray) -> jax.Array:
    """The product of an array and one or more `Arrangement.matrix`, in the dtype of the array."""
    return jnp.einsum(subscripts, x, matrix.astype(x.dtype), precision=jax.lax.Precision.HIGHEST)


def _matrix(lanes, width):
    matrix = np.zeros((lanes.size, width), np.float32)
    matrix[np.arange(lanes.size), lanes] = 1
    return matrix


@functools.cache
def arrange(parts: tuple[int, ...], heads: int) -> Arrangement | None:
    """Place heads with `parts` channels in each source; None if no placement was found."""
    packed, exchanging = _packed(parts, heads), _exchanging(parts, heads)
    if packed is None or exchanging is None or sum(exchanging.widths) > sum(packed.widths):
        return packed or exchanging
    return exchanging


def _exchanging(parts: tuple[int, ...], heads: int) -> Arrangement | None:
    """Place octic parts in blocks that the rows of an irrep exchange; None for other parts, or if 8 does not divide
    heads.

    A part is a block.  Four blocks of lines, or two of planes, are a group of d / 2 lanes.  After the exchange, a group
    of one row has all lines, or all planes, of a head, so a head has two pieces.  The exchange takes two selects per
    register of lines and one per register of planes, for any number of heads.
    """
    line, group = parts[0], sum(parts) // 2
    if parts != (line,) * LINES + (2 * line,) * PLANES or not HALF < sum(parts) <= LANES or heads % 8:
        return None
    exchanges = Exchange(range(LINES), line), Exchange(range(LINES, LINES + PLANES), 2 * line)
    lines = _places_of_lines(heads, LANES // group)
    planes = _places_of_planes(lines[1], LANES // group)
    places, pieces, widths = [], [], []
    for (sources, block), (registers, groups, rows) in zip(exchanges, (lines, planes), strict=True):
        starts = LANES * registers + group * groups
        places += [tuple(map(tuple, (starts + block * (rows ^ i)).tolist())) for i in range(len(sources))]
        numbers = np.stack([sources[0] + rows, registers, group * groups, group * (groups + 1)], -1)
        pieces.append([[Piece(*head) for head in array] for array in numbers.tolist()])
        widths += [(LANES * (registers[:3].max() + 1), LANES * (registers[3].max() + 1))] * len(sources)
    units = tuple(tuple((pieces[0][i][head], pieces[1][i][head]) for i in range(4)) for head in range(heads))
    qkv_widths, widths = (tuple(map(int, w)) for w in zip(*widths, strict=True))
    return Arrangement(LANES, units, tuple(places), qkv_widths, widths, exchanges)


def _places_of_lines(heads: int, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For q, k, v and y [4, heads]: the register, group and row of a head's lines after the exchange.

    Group and row form a slot.  q and k of a head share one slot, v and y another.  y takes the fewest registers and, in
    them, the fewest slots; v takes the same slots of the last registers; q and k take the rest.  ViT-H has 12 slots: v
    takes eight of them in registers 2 and 3, q all of register 0, k all of register 1, and the last four heads of q and
    k the rest.
    """
    slots = LINES * groups
    y_registers = -(-heads // slots)
    y_register, v_slot = np.divmod(np.arange(heads), -(-heads // y_registers))
    taken = np.bincount(v_slot, minlength=slots)
    fewest = -(-3 * heads // slots)
    registers = next(n for n in itertools.count(fewest) if ((n - taken) // 2).sum() >= heads)
    pairs = [(i, slot) for i in range(registers // 2) for slot in range(slots) if 2 * i + 1 < registers - taken[slot]]
    pair, q_slot = np.array(pairs[:heads]).T
    apart = (registers - y_registers) // 2  # pairs of registers without v: first q, then k
    q, k = np.where(pair < apart, (pair, apart + pair), (2 * pair, 2 * pair + 1))
    slot = np.stack([q_slot, q_slot, v_slot, v_slot])
    return np.stack([q, k, registers - 1 - y_register, y_register]), slot // LINES, slot % LINES


def _places_of_planes(groups_of_lines: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `_places_of_lines`, with separate registers for q, k and v; a head's planes avoid the group of its lines.

    Such places always exist, since no group has the lines of more than half of the heads.
    """
    heads = groups_of_lines.shape[1]
    registers = -(-heads // (PLANES * groups))
    register, group, row = (a.ravel() for a in np.indices((registers, groups, PLANES)))
    far = np.abs(register - np.arange(heads)[:, None] // (PLANES * groups))
    first, second = (
        linear_sum_assignment(far + heads * registers * (group == lines[:, None]))[1] for lines in groups_of_lines[::2]
    )
    place = np.stack([first, first, second, second])
    return register[place] + registers * np.array([[0], [1], [2], [0]]), group[place], row[place]


def _packed(parts: tuple[int, ...], heads: int) -> Arrangement | None:
    """Place parts consecutively in each source: q, then k, then v; None if no order was found.

    A single source, and the first of the longest parts, keep the heads in their natural order.
    """
    period = HALF if 2 * sum(parts) == LANES else LANES
    units, rest = divmod(heads * period, LANES)
    if sum(parts) > LANES or rest:
        return None
    widths = tuple(-(-heads * part // LANES) * LANES for part in parts)
    used = np.zeros((units, period), int)  # lanes taken in each unit so far
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
    starts = [np.array([[0], [1], [2], [0]]) * width + firsts[i] for i, width in enumerate(widths)]  # of q, k, v, y

    def pieces(j, unit):
        return tuple(
            piece for i, part in enumerate(parts) for piece in _pieces(i, int(starts[i][j, unit]), part, period)
        )

    halves = np.arange(0, LANES, period)
    return Arrangement(
        period,
        tuple(tuple(pieces(j, unit) for j in range(4)) for unit in range(units)),
        tuple(tuple(map(tuple, (lanes[..., None] + halves).reshape(4, -1).tolist())) for lanes in starts),
        tuple(3 * width for width in widths),
        widths,
    )


def _slots(part: int, width: int, period: int) -> np.ndarray:
    """The first lanes of consecutive parts; with two heads in a register, in its first half."""
    if period == LANES:
        return np.arange(width // part) * part
    return (np.arange(0, width, LANES)[:, None] + np.arange(period // part) * part).ravel()


def _pieces(source: int, first: int, part: int, period: int) -> list[Piece]:
    """The pieces of the part at lane `first`; it may begin in one register and end in the next."""
    register, start = divmod(first, LANES)
    stop = start + part
    pieces = [Piece(source, register, start, min(stop, period))]
    return pieces if stop <= period else [*pieces, Piece(source, register + 1, 0, stop - period)]
