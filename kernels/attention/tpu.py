"""Attention on a TPU, one program per image, with whole rows of the softmax in VMEM.

The reference for one head of q, k and v [N, d], and its derivative from the gradient g of y:

    weights = softmax(q k^T / sqrt(d))                               y = weights v
    dw = g v^T      ds = weights * (dw - sum(weights * dw)) / sqrt(d)
    dq = ds k       dk = ds^T q                                      dv = weights^T g

The kernels compute these lines for all heads of an image in one straight-line program; the compiler overlaps the
softmax of one head with the products of another.  The matrix units take registers of 128 lanes, full or not, and a head
has fewer channels.  So the kernels process a register full of heads, a unit (`lanes.py`), which a `_Reader` gathers
from the arrays and a `_Writer` scatters back:

  - A product over the channels of a head runs over all lanes of its unit, with one factor 0 outside the head's lanes.
    This takes the matrix units no longer, and no lane has to move.
  - weights v: with two heads in a register, the products are [y | *] and [* | y'], and a select gives [y | y'].  With 1
    in the other half of v, * is the sum of the weights, which the division needs: the opposite select gives [s' | s],
    and a rotation by half a register gives [s | s'].  The matrix units compute these sums at no cost.
  - N is the whole axis of a block, so the compiler masks the rest of the last register of keys.  A register for a
    single key, the 129th or the 257th, would cost as much as a full one.  So the forward pass adds that key to the
    softmax separately, as a row; the backward pass does not.

`experiments/benchmarks/tpu_compile.py` estimates their cycles.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from equivit.kernels.attention.lanes import LANES, Arrangement, Exchange, Piece, Pieces
from equivit.kernels.tpu import blocks
from equivit.kernels.tpu.blocks import up

NAME = "attention"
# JAX 0.10 moved it from pltpu to pl.
_reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal
# Float32 matrices [N, N] that the compiler is assumed to keep, for one head and the next.
MATRICES = 6
STRIP = 16  # rows of a register in bfloat16


def buffers(dtype: DTypeLike, tokens: int, lanes: tuple[int, int], backward: bool = False) -> int | None:
    """Number of images the kernel buffers of the arrays other than q, k and v; None if VMEM cannot hold one.

    q, k and v have two buffers, one of them being filled.  With two for the other arrays as well, nothing waits.  The
    backward pass can use one: it stores the results of an image before it computes the next.

    Args:
      lanes: lanes of a token in q, k and v together, and in y.
    """
    qkv, y = (up(tokens, 16) * n * jnp.dtype(dtype).itemsize for n in lanes)
    free = blocks.VMEM_BYTES - matrix_bytes(tokens) - 2 * qkv
    # Forward, a single buffer saves little, and the compiler also keeps the open registers of y in a `_Writer`.
    needed = {2: 2 * (qkv + y), 1: qkv + y} if backward else {2: 3 * y}
    fitting = (count for count, used in needed.items() if used <= free)
    return next(fitting, None) if dtype in (jnp.float32, jnp.bfloat16) else None


def matrix_bytes(tokens: int) -> int:
    """Bytes of the matrices [N, N] that the compiler is assumed to keep."""
    return MATRICES * up(tokens, 16) * up(tokens, LANES) * 4


def forward(*qkv: jax.Array, arrangement: Arrangement, scale: float, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Attention of arrays [k, *B, N, qkv width], placed by `arrangement` -> [k, *B, N, width]."""

    def body(*refs):
        n = len(refs) // 2
        attend_image(refs[:n], refs[n:], arrangement, scale)

    sources = itertools.accumulate(map(len, qkv[:-1]), initial=0)
    widths = [arrangement.widths[i] for i in sources]
    single = buffers(qkv[0].dtype, qkv[0].shape[-2], arrangement.token_widths) == 1
    return blocks.by_blocks(body, qkv, widths=widths, single=single, name=NAME, interpret=interpret)


def attend_image(qkv: Sequence[jax.Ref], y: Sequence[jax.Ref], arrangement: Arrangement, scale: float) -> None:
    """In a kernel: write the attention of references [k, N, qkv width] to references [k, N, width]."""
    read, write = _Reader(qkv, arrangement), _Writer(y, arrangement)
    for q, k, v, y_pieces in arrangement.units:
        y_unit = _attend(read.gather(q, 0), read.gather(k), read.gather(v), scale, arrangement.period)
        write.scatter(y_pieces, y_unit)
    write.close()


def backward(*arrays: jax.Array, arrangement: Arrangement, scale: float, interpret: bool = False) -> tuple:
    """The gradient of the arguments of `forward`, from the arguments and the gradients of the results."""
    n = len(arrays) // 2

    def body(*refs):
        read, gradient = (_Reader(refs[i * n : (i + 1) * n], arrangement) for i in range(2))
        write = _Writer(refs[2 * n :], arrangement)
        for *unit, y in arrangement.units:
            q, k, v = (read.gather(pieces, rest) for pieces, rest in zip(unit, (0, None, None), strict=True))
            found = _gradients(q, k, v, gradient.gather(y, 0), scale, arrangement.period)
            for pieces, value in zip(unit, found, strict=True):
                write.scatter(pieces, value)
        write.close()

    widths = [a.shape[-1] for a in arrays[:n]]
    single = buffers(arrays[0].dtype, arrays[0].shape[-2], arrangement.token_widths, backward=True) == 1
    name = f"{NAME}_backward"
    return blocks.by_blocks(body, arrays, widths=widths, single=single, name=name, interpret=interpret)


def _attend(q, k, v, scale, period):
    """y of a unit, in float32, from its q, k and v [N, 128]."""
    if period == LANES:
        weights = _exponentials(q, k, scale)
        return _weighted(weights, v) * _inverse(sum(w.sum(-1, keepdims=True) for w in weights))
    first = _lanes(q) < period
    a, b = (
        _weighted(_exponentials(jnp.where(own, q, 0), k, scale), jnp.where(own, v, 1))
        for own in (first, _lanes(q) >= period)
    )
    return jnp.where(first, a, b) * _inverse(pltpu.roll(jnp.where(first, b, a), period, 1))


def _exponentials(q, k, scale):
    """The unnormalised weights of a head: of all keys, or of all but the last and of the last."""
    apart = len(k) - 1 if len(k) % LANES == 1 else len(k)
    if apart in (0, len(k)):
        return [_exponential(blocks.dot(q, k, (1, 1)), scale)]
    logits = blocks.dot(q, k[:apart], (1, 1))
    last = (q.astype(jnp.float32) * k[apart:].astype(jnp.float32)).sum(-1, keepdims=True)
    most = jnp.maximum(logits.max(-1, keepdims=True), last)
    return [_exponential(x, scale, most) for x in (logits, last)]


def _exponential(logits, scale, most=None):
    """exp(scale (logits - most)) as a power of 2, which the hardware computes; scale and base share one product."""
    most = logits.max(-1, keepdims=True) if most is None else most
    return jnp.exp2((logits - most) * (scale * math.log2(math.e)))


def _inverse(x):
    """1 / x for sums of weights, which are at least 1, so that special cases such as 0 and infinity can be skipped."""
    return _reciprocal(x, full_range=False)


def _weighted(weights, v):
    """Sums of v, weighted with `_exponentials`."""
    apart = weights[0].shape[1]
    y = blocks.dot(weights[0].astype(v.dtype), v[:apart])
    return y if apart == len(v) else y + weights[1] * v[apart:].astype(jnp.float32)


def _gradients(q, k, v, g, scale, period):
    """The gradients of q, k and v of a unit, in float32, from the gradient g of y."""
    if period == LANES:
        return _head_gradients(q, g, k, v, scale)
    first, second = _lanes(q) < period, _lanes(q) >= period
    (dq, dk, dv), (dq_second, dk_second, dv_second) = (
        _head_gradients(jnp.where(own, q, 0), jnp.where(own, g, 0), k, v, scale) for own in (first, second)
    )
    return jnp.where(first, dq, dq_second), dk + dk_second, dv + dv_second


def _head_gradients(q, g, k, v, scale):
    """The gradients of q (in the head's lanes), k and v (0 in other lanes), for q and g that are 0 in other lanes.

    The weights [N, N] stay unnormalised: q, g and one result are multiplied by the inverse sum and the scale instead.
    """
    weights = _exponential(blocks.dot(q, k, (1, 1)), scale)
    inverse = _inverse(weights.sum(-1, keepdims=True))
    d_weights = blocks.dot(g, v, (1, 1))
    delta = (weights * d_weights).sum(-1, keepdims=True) * inverse
    d_logits = (weights * (d_weights - delta)).astype(q.dtype)
    scaled_q, divided_g = ((x.astype(jnp.float32) * y).astype(x.dtype) for x, y in ((q, scale * inverse), (g, inverse)))
    dq = blocks.dot(d_logits, k) * (scale * inverse)
    return dq, blocks.dot(d_logits, scaled_q, (0, 0)), blocks.dot(weights.astype(g.dtype), divided_g, (0, 0))


def _lanes(x):
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)


class _Registers:
    """The registers [N, 128] of references [k, N, width], each of k sources."""

    def __init__(self, refs: Sequence[jax.Ref], arrangement: Arrangement):
        self.sources = [(ref, i) for ref in refs for i in range(ref.shape[0])]
        self.period = arrangement.period
        self.exchanges = {i: exchange for exchange in arrangement.exchanges for i in exchange.sources}

    def stored(self, source: int, register: int) -> jax.Array:
        """The register as stored."""
        ref, i = self.sources[source]
        return ref[i, :, register * LANES : (register + 1) * LANES]

    def store(self, source: int, register: int, x: jax.Array) -> None:
        """Write the register."""
        ref, i = self.sources[source]
        ref[i, :, register * LANES : (register + 1) * LANES] = x.astype(ref.dtype)


class _Reader(_Registers):
    """Gathers units of heads from their sources."""

    def __init__(self, refs, arrangement):
        super().__init__(refs, arrangement)
        self.exchanged = {}  # registers after the exchange, by source and register

    def gather(self, pieces: Pieces, rest: int | None = None):
        """Select the unit [N, 128] from its pieces; all other lanes hold `rest`, or anything if it is None."""
        value = rest if sum(piece.stop - piece.start for piece in pieces) < self.period else None
        for piece in pieces:
            x = self._register(piece.source, piece.register)
            value = x if value is None else _select(piece, self.period, x, value)
        return value

    def _register(self, source, register):
        exchange = self.exchanges.get(source)
        if exchange is None:
            return self.stored(source, register)
        if (source, register) not in self.exchanged:
            places = [(i, register) for i in exchange.sources]
            arrays = _exchanged(exchange, [self.stored(*place) for place in places])
            self.exchanged.update(zip(places, arrays, strict=True))
        return self.exchanged[source, register]


class _Writer(_Registers):
    """Scatters units of heads to their sources.

    A register of several units stays open until the last one: reading and writing it for each takes more instructions.
    """

    def __init__(self, refs, arrangement):
        super().__init__(refs, arrangement)
        self.open = {}  # unfinished registers, by source and register

    def scatter(self, pieces: Pieces, value: jax.Array) -> None:
        """The inverse of `gather`; lanes of no head become 0."""
        for piece in pieces:
            place = piece.source, piece.register
            if piece.stop - piece.start == self.period:
                self.store(piece.source, piece.register, value)
            else:
                x = value.astype(self.sources[piece.source][0].dtype)
                self.open[place] = _select(piece, self.period, x, self.open.get(place, 0))

    def close(self) -> None:
        """Write the open registers."""
        for source, register in self.open:
            exchange = self.exchanges.get(source)
            if exchange is not None and source == exchange.sources[0]:
                places = [(i, register) for i in exchange.sources]
                arrays = _exchanged(exchange, [self.open[place] for place in places])
                self.open.update(zip(places, arrays, strict=True))
        for (source, register), x in self.open.items():
            self.store(source, register, x)


def _exchanged(exchange: Exchange, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The sources [N, 128] after the exchange: one select for every bit of a block's number."""
    for bit in (1, 2):
        if bit < len(arrays):

            def own(lanes, bit=bit):
                return jax.lax.div(lanes, exchange.block) & bit == 0

            arrays = [_select_lanes(own, x, arrays[n ^ bit]) for n, x in enumerate(arrays)]
    return arrays


def _select(piece: Piece, period: int, x: jax.Array, other: jax.Array | int) -> jax.Array:
    """x in the lanes of a piece, `other` (an array or 0) elsewhere."""

    def own(lanes):
        lanes = lanes & (period - 1)
        return (lanes >= piece.start) & (lanes < piece.stop)

    return _select_lanes(own, x, other)


def _select_lanes(own: Callable[[jax.Array], jax.Array], x: jax.Array, other: jax.Array | int) -> jax.Array:
    """x in the lanes where `own` is true, `other` elsewhere.

    Two rows of bfloat16 share 32 bits, which the compiler would unpack for a select; as integers they stay packed.
    """
    rows = len(x) // STRIP * STRIP if x.dtype == jnp.bfloat16 else 0
    if rows in (0, len(x)):
        return _selected(own, x, other, packed=rows > 0)
    others = (other, other) if isinstance(other, int) else (other[:rows], other[rows:])
    first = _selected(own, x[:rows], others[0], packed=True)
    return jnp.concatenate([first, _selected(own, x[rows:], others[1], packed=False)])


def _selected(own, x, other, packed):
    if packed:
        x, other = (a if isinstance(a, int) else pltpu.bitcast(a, jnp.int32) for a in (x, other))
    y = jnp.where(own(_lanes(x)), x, other)
    return pltpu.bitcast(y, jnp.bfloat16) if packed else y
