"""Adaptive polyphase sampling: apply a strided layer at the phase with the largest output norm.

For each map on a torus, an adaptive layer chooses the phase (row, column) of the lattice at which to apply a strided
convolution ("Making Vision Transformers Truly Shift-Equivariant", Eq. 13 to 23).  By definition this needs the
convolution at stride 1, which costs stride squared times as much.  The norms and convolutions here cost less and agree
up to rounding.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.derivatives import zero_slope
from equivit.kernels.neighbours import neighbours
from equivit.layers.dense import patchify
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice

Pair = tuple[int, int]
STRIDE = (2, 2)
# Two phases often differ by less than TF32 or bfloat16 resolves.
EXACT = jax.lax.Precision.HIGHEST

# ---- The phase with the largest norm


def differentiated_at_choice(at: Callable[[Any, Any, Choice], Any]) -> Callable[[Callable], Callable]:
    """Decorate `function(layer, x)`, which computes all phases and returns the output at one phase and the choice.

    The derivative is taken through `at(layer, x, choice)`, so other phases cost neither time nor memory.
    """

    def decorate(function):
        function = jax.custom_jvp(function)

        @function.defjvp
        def derivative(primals, tangents):
            y, choice = function(*primals)
            # Intermediate results of the chosen phase are recomputed from the maps.
            one_phase = jax.checkpoint(lambda layer, x: at(layer, x, choice), prevent_cse=False)
            return (y, choice), (jax.jvp(one_phase, primals, tangents)[1], jax.tree.map(zero_slope, choice))

        return function

    return decorate


@differentiated_at_choice(lambda layer, x, choice: layer.at(x, choice))
def largest_phase(layer: Any, x: jax.Array) -> tuple[jax.Array, Choice]:
    """The layer at the phase with the largest l2 norm: [B, h, w, C] on a torus -> [B, h w / 4, D], and the choice.

    Args:
      layer: an `nnx.Module` of stride 2.  `at_largest(x)` is the layer before a norm that may follow it, at the phase
        with the largest norm, [B, h/2, w/2, D], and the norms of all phases [B, 4], row-major.  `normed(y)` applies
        this norm.  `at(x, choice)` is the whole layer at the phase chosen for each map.
    """
    with jax.named_scope("linear"):
        y, norms = layer.at_largest(x)
        y = jax.lax.collapse(y, 1, 3).astype(x.dtype)
    return layer.normed(y), shifts.strongest(norms)


def at_chosen_phase(layer: Any, x: jax.Array, stride: Pair, select: str) -> tuple[jax.Array, Choice]:
    """`largest_phase`, or with select="input" the layer at the largest norm of x on the lattice, for any stride."""
    if select == "output":
        return largest_phase(layer, x)
    choice = shifts.strongest(lattice_norms(x, stride))
    return layer.at(x, choice), choice


# ---- The norm of each phase


def lattice_norms(x: jax.Array, stride: Pair) -> jax.Array:
    """The l2 norm of each polyphase component, in at least float32.

    Shapes: [B, H, W, C] -> [B, sh sw], phases in row-major order.
    """
    (sh, sw), (b, h, w, _) = stride, x.shape
    squares = jnp.square(x.astype(jnp.promote_types(x.dtype, jnp.float32))).sum(-1)
    return jnp.sqrt(squares.reshape(b, h // sh, sh, w // sw, sw).sum((1, 3))).reshape(b, sh * sw)


def embedding_norms(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, stride: Pair, padding: Pair = (0, 0)
) -> jax.Array:
    """The l2 norm of all tokens of a strided convolution, at each phase, in at least float32.

    With the taps E_a of the kernel, the squared norm at phase p is the sum of <E_a, E_b> x[p + a + n] x[p + b + n] over
    all pairs of taps a, b and all n of the lattice, plus the sums of 2 <E_a, bias> x[p + a + n] and |bias|^2.  The
    image enters through the sums of x[q + n] x[q + d + n] for each distance d = b - a and each place q modulo the
    stride.  They are products of blocks of stride x stride pixels with their neighbours.  For patches of 4 x 4 in 224 x
    224 pixels they take 27 M multiply-adds; the convolution at stride 1 takes 231 M.  The sum over a is a correlation
    on the torus of places, computed as a product of Fourier transforms.

    Shapes: [B, H, W, C] -> [B, sh sw], phases in row-major order.

    Args:
      kernel: [kh, kw, C, D].
      bias: [D].
      padding: offset of the first tap from the phase.
    """
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, kernel, bias = (a.astype(dtype) for a in (x, kernel, bias))
    lags, pairs, factors = _pairs(kernel.shape[:3], stride)
    taps = _blocks_of_taps(kernel, stride)
    linear = jnp.matmul(taps, bias, precision=EXACT).sum((0, 1))
    weights = jnp.asarray(factors, dtype) * _spectrum(_products_of_taps(taps, lags), linear, pairs, stride)
    turned = jnp.stack([-weights[:, 1], weights[:, 0]], 1)
    h, w = x.shape[1] // stride[0], x.shape[2] // stride[1]
    blocks = jnp.roll(x, padding, (1, 2)).reshape(len(x), h, stride[0], w, stride[1], x.shape[-1])
    planes = blocks.transpose(0, 2, 4, 5, 1, 3)
    products, total = _products_of_blocks(planes, lags, (kernel.shape[0], kernel.shape[1]))
    spectrum = _spectrum(products, total, pairs, stride)
    product = jnp.stack([(factor * spectrum).sum((1, 2)) for factor in (weights, turned)], 1)
    found = jnp.einsum("befg,pcfe,qcg->bpq", product, *_waves(stride, dtype), precision=EXACT)
    found = found.reshape(len(x), stride[0] * stride[1]) + h * w * jnp.square(bias).sum()
    return jnp.sqrt(jnp.maximum(found, 0))


def _products_of_blocks(planes: jax.Array, lags: list[Pair], taps: Pair) -> tuple[jax.Array, jax.Array]:
    """Sums of products of blocks with the blocks offset by `lags`, 0 for pixels that no kernel spans; sums of blocks.

    All share one matrix product: one wide product is faster than many narrow ones.  Positions come last, so neighbours
    are joined by copies of whole maps.

    Shapes: [B, sh, sw, C, h, w], the pixels of a block before its position -> [B, lags, entries, entries] and
    [B, entries].
    """
    b, *stride, channels, h, w = planes.shape
    entries = math.prod(stride) * channels
    spans = [(_met(i, taps[0], stride[0]), _met(j, taps[1], stride[1])) for i, j in lags]
    others = neighbours(planes, lags, spans)
    flat = (jax.lax.collapse(jax.lax.collapse(other, 4), 1, 4) for other in others)
    joined = jnp.concatenate([*flat, jnp.ones((b, 1, h * w), planes.dtype)], 1)
    product = jnp.einsum("bin,bjn->bij", planes.reshape(b, entries, h * w), joined, precision=EXACT)
    ends, products = np.cumsum([math.prod(other.shape[1:4]) for other in others]), []
    *parts, total = jnp.split(product, ends, -1)
    for part, other, span in zip(parts, others, spans, strict=True):
        missing = [(start, size - stop) for (start, stop), size in zip(span, stride, strict=True)]
        part = part.reshape(b, entries, *other.shape[1:4])
        products.append(jnp.pad(part, [(0, 0), (0, 0), *missing, (0, 0)]).reshape(b, entries, entries))
    return jnp.stack(products, 1), total[..., 0]


def _met(lag: int, taps: int, stride: int) -> Pair:
    """The range of rows of a block that a kernel can span together with rows of the block `lag` blocks before."""
    return max(0, 1 - taps - stride * lag), min(stride, taps + stride * (1 - lag) - 1)


def _blocks_of_taps(kernel: jax.Array, stride: Pair) -> jax.Array:
    """[kh, kw, C, D] -> [gh, gw, sh sw C, D], padded with zeros to gh x gw blocks."""
    short = [(0, -k % s) for k, s in zip(kernel.shape[:2], stride, strict=True)]
    kernel = jnp.pad(kernel, (*short, (0, 0), (0, 0)))
    grid = [k // s for k, s in zip(kernel.shape[:2], stride, strict=True)]
    blocks = patchify(jnp.moveaxis(kernel, -1, 0), stride)
    return jnp.moveaxis(blocks.reshape(-1, *grid, blocks.shape[-1]), 0, -1)


def _products_of_taps(taps: jax.Array, lags: list[Pair]) -> jax.Array:
    """Products of blocks with the blocks offset by `lags`: [gh, gw, entries, D] -> [lags, entries, entries]."""
    products = []
    for i, j in lags:
        one, other = taps[: len(taps) - i], taps[i:]
        one, other = (one[:, : one.shape[1] - j], other[:, j:]) if j >= 0 else (one[:, -j:], other[:, :j])
        products.append(jnp.einsum("hwid,hwjd->ij", one, other, precision=EXACT))
    return jnp.stack(products)


def _spectrum(products: jax.Array, total: jax.Array, pairs: np.ndarray, stride: Pair) -> jax.Array:
    """Fourier transforms (real, imaginary) of second and first moments over places modulo the stride.

    Shapes: products [*B, lags, entries, entries] and total [*B, entries] -> [*B, moments, 2, sh, sw // 2 + 1].
    """
    batch = total.shape[:-1]
    second = jax.lax.collapse(products, len(batch))[..., pairs]
    first = jnp.moveaxis(total.reshape(*batch, *stride, total.shape[-1] // math.prod(stride)), -1, -3)
    moments = jnp.concatenate([second, first], -3)
    return jnp.einsum("...pq,pcfe,qcg->...efg", moments, *_waves(stride, moments.dtype), precision=EXACT)


def _waves(stride: Pair, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The matrices of a complex Fourier transform along rows and a real one along columns.

    Matrices, because `jnp.fft` would gather the images of all devices on each.  Columns need only frequencies up to
    1/2.  Shapes: [sh, 2, sh, 2] and [sw, 2, sw // 2 + 1].
    """
    (sh, sw), number = stride, stride[1] // 2 + 1
    rows, columns = (2 * np.pi * np.outer(range(s), range(n)) / s for s, n in ((sh, sh), (sw, number)))
    real, imaginary = (np.stack(pair, -1) for pair in ((np.cos(rows), -np.sin(rows)), (np.sin(rows), np.cos(rows))))
    columns = np.stack([np.cos(columns), -np.sin(columns)], 1)
    return jnp.asarray(np.stack([real, imaginary], 1), dtype), jnp.asarray(columns, dtype)


@functools.lru_cache
def _pairs(size: tuple[int, int, int], stride: Pair) -> tuple[list[Pair], np.ndarray, np.ndarray]:
    """Index the second moments among the products of blocks.

    Returns:
      The required distances between two blocks; opposite distances are transposes.
      The index into the products [distances of blocks, entries, entries], for each distance of two taps, pair of
      channels and place of the first pixel: [moments, sh, sw].  Only one of two opposite distances is included.
      The multiplicity of each moment and frequency, divided by the number of places: [moments, 1, 1, sw // 2 + 1].
    """
    (kh, kw, channels), (sh, sw) = size, stride
    reach = [-(-(k + s - 1) // s) for k, s in zip((kh, kw), stride, strict=True)]
    lags = [(i, j) for i in range(reach[0]) for j in range(1 - reach[1], reach[1]) if (i, j) >= (0, 0)]
    number = np.zeros((reach[0], 2 * reach[1] - 1), int)
    number[tuple(np.transpose(lags))] = np.arange(len(lags))

    distances = np.array([(i, j) for i in range(kh) for j in range(1 - kw, kw) if (i, j) >= (0, 0)])
    shape = (len(distances), channels, channels, sh, sw)
    _, c, other_c, row, column = np.indices(shape, sparse=True)
    (down, other_row), (right, other_column) = (
        np.divmod(place + distances[:, axis, None, None, None, None], s)
        for axis, place, s in ((0, row, sh), (1, column, sw))
    )
    one, other = (row * sw + column) * channels + c, (other_row * sw + other_column) * channels + other_c
    back = (down == 0) & (right < 0)
    one, other = np.where(back, other, one), np.where(back, one, other)
    entries = sh * sw * channels
    pairs = (number[down, np.where(back, -right, right)] * entries + one) * entries + other
    pairs = np.broadcast_to(pairs, shape).reshape(-1, sh, sw).astype(np.int32)

    twice = np.full((len(pairs) + channels, 1, 1, sw // 2 + 1), 2 / (sh * sw))
    twice[: channels**2] /= 2  # a distance of 0 is its own opposite
    twice[..., 1 : (sw + 1) // 2] *= 2  # these frequencies count twice
    return lags, pairs, twice
