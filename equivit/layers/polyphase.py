"""Adaptive polyphase sampling: apply a strided layer at the phase with the largest output norm.

For each map on a torus, an adaptive layer chooses the phase (row, column) of the lattice at which to apply a strided
convolution ("Making Vision Transformers Truly Shift-Equivariant", Eq. 13 to 23).  By definition this needs the
convolution at stride 1, which costs stride squared times as much.  The norms and convolutions here cost less and agree
up to rounding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivit.derivatives import zero_slope
from equivit.kernels.neighbours import Neighbour, neighbour_products
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


def corner_norms(x: jax.Array, stride: Pair) -> jax.Array:
    """The l2 norm of the four corners of all blocks that begin at each phase; it turns and mirrors with the map.

    A block that begins at phase p is mirrored to one that begins at -p, but its first pixel becomes a last one.
    `lattice_norms` therefore changes under mirrors, and this does not.  Blocks of 2 x 2 all have the same norm.

    Shapes: [B, H, W, C] -> [B, sh sw], phases in row-major order.
    """
    squares = jnp.square(lattice_norms(x, stride)).reshape(len(x), *stride)
    for axis in (1, 2):
        squares += jnp.roll(squares, 1, axis)  # the last pixel of a block, modulo the stride, is the one before it
    return jnp.sqrt(squares).reshape(len(x), stride[0] * stride[1])


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
    others, moments, factors = _moments(kernel.shape[:3], stride)
    waves = tuple(jnp.asarray(wave, dtype) for wave in _waves(stride))
    weights = _spectrum(_products_of_taps(kernel, bias, stride, others), moments, waves) * jnp.asarray(factors, dtype)
    turned = jnp.stack([-weights[:, :, 1], weights[:, :, 0]], 2)
    spectrum = _spectrum(neighbour_products(jnp.roll(x, padding, (1, 2)), stride, others), moments, waves)
    product = jnp.stack([(factor * spectrum).sum((3, 4)) for factor in (weights, turned)], -1)
    squares = jnp.einsum("begf,pec,cqgf->bpq", product, *waves, precision=EXACT)
    tokens = (x.shape[1] // stride[0]) * (x.shape[2] // stride[1])
    squares = squares.reshape(len(x), stride[0] * stride[1]) + tokens * jnp.square(bias).sum()
    return jnp.sqrt(jnp.maximum(squares, 0))


def _products_of_taps(kernel: jax.Array, bias: jax.Array, stride: Pair, others: Sequence[Neighbour]) -> jax.Array:
    """`neighbour_products` of a kernel, with the bias in place of 1: [kh, kw, C, D] -> [entries, others + 1]."""
    short = [(0, -k % s) for k, s in zip(kernel.shape[:2], stride, strict=True)]
    kernel = jnp.pad(kernel, (*short, (0, 0), (0, 0)))
    (kh, kw, channels, width), (sh, sw) = kernel.shape, stride
    blocks = kernel.reshape(kh // sh, sh, kw // sw, sw, channels, width).swapaxes(1, 2)
    flat, products = jax.lax.collapse(blocks, 2, 5), []
    for (i, j), rows, columns in others:
        one, other = flat[: len(flat) - i], blocks[i:, :, slice(*rows), slice(*columns)]
        one, other = (one[:, : one.shape[1] - j], other[:, j:]) if j >= 0 else (one[:, -j:], other[:, :j])
        products.append(jnp.einsum("hwid,hwjd->ij", one, jax.lax.collapse(other, 2, 5), precision=EXACT))
    linear = jnp.einsum("hwid,d->i", flat, bias, precision=EXACT)
    return jnp.concatenate([*products, linear[:, None]], 1)


def _spectrum(products: jax.Array, moments: np.ndarray, waves: Sequence[jax.Array]) -> jax.Array:
    """Fourier transforms of second and first moments over places modulo the stride.

    Moments come last, so that both transforms are matrix products without transposes.

    Shapes: [*B, entries, others + 1] -> [*B, sh // 2 + 1, sw, 2, moments], real and imaginary.
    """
    places = jax.lax.collapse(products, products.ndim - 2)[..., moments]
    rows = jnp.einsum("...pqm,pec->...ecqm", places, waves[0], precision=EXACT)
    return jnp.einsum("...ecqm,cqgf->...egfm", rows, waves[1], precision=EXACT)


def _waves(stride: Pair) -> tuple[np.ndarray, np.ndarray]:
    """The matrices of a real Fourier transform along rows and a complex one along columns.

    Matrices, because `jnp.fft` would gather the images of all devices on each.  Rows need only frequencies up to 1/2.
    Shapes: [sh, sh // 2 + 1, 2] and [2, sw, sw, 2].
    """
    (sh, sw), number = stride, stride[0] // 2 + 1
    rows, columns = (2 * np.pi * np.outer(range(s), range(n)) / s for s, n in ((sh, number), (sw, sw)))
    real, imaginary = (
        np.stack(pair, -1) for pair in ((np.cos(columns), -np.sin(columns)), (np.sin(columns), np.cos(columns)))
    )
    return np.stack([np.cos(rows), -np.sin(rows)], -1), np.stack([real, imaginary])


@functools.lru_cache
def _moments(size: tuple[int, int, int], stride: Pair) -> tuple[list[Neighbour], np.ndarray, np.ndarray]:
    """Index the moments among the products of blocks.

    Returns:
      The neighbours that a kernel spans together with a block; products with opposite ones are transposes.
      The index into the products [entries, others + 1], for each second moment (distance of two taps and pair of
      channels) and each first one (channel), and place of the first pixel: [sh, sw, moments].  Only one of two opposite
      distances is included.
      The multiplicity of each frequency and moment, divided by the number of places: [sh // 2 + 1, 1, 1, moments].
    """
    (kh, kw, channels), (sh, sw) = size, stride
    reach = [-(-(k + s - 1) // s) for k, s in zip((kh, kw), stride, strict=True)]
    lags = [(i, j) for i in range(reach[0]) for j in range(1 - reach[1], reach[1]) if (i, j) >= (0, 0)]
    others = [Neighbour((i, j), _met(i, kh, sh), _met(j, kw, sw)) for i, j in lags]
    number = np.zeros((reach[0], 2 * reach[1] - 1), int)
    number[tuple(np.transpose(lags))] = np.arange(len(lags))
    found = _columns(others, (sh, sw, channels))

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
    width = found.max() + 2  # the last column has the sums of entries
    second = one * width + found[number[down, np.where(back, -right, right)], other]
    first = np.arange(channels)[:, None, None] + channels * np.arange(sh * sw).reshape(stride)
    moments = np.concatenate([second.reshape(-1, sh, sw), first * width + width - 1])

    twice = np.full((sh // 2 + 1, 1, 1, len(moments)), 2 / (sh * sw))
    twice[..., : channels**2] /= 2  # a distance of 0 is its own opposite
    twice[1 : (sh + 1) // 2] *= 2  # these frequencies count twice
    return others, np.moveaxis(moments, 0, -1).astype(np.int32), twice


def _met(lag: int, taps: int, stride: int) -> Pair:
    """The range of rows of a block that a kernel can span together with rows of the block `lag` blocks before."""
    return max(0, 1 - taps - stride * lag), min(stride, taps + stride * (1 - lag) - 1)


def _columns(others: Sequence[Neighbour], block: tuple[int, int, int]) -> np.ndarray:
    """The column of the products for each entry of each neighbour, -1 for none: [neighbours, entries]."""
    columns, count = np.full((len(others), *block), -1), 0
    for number, (_, rows, places) in enumerate(others):
        part = columns[number, slice(*rows), slice(*places)]
        part[...] = count + np.arange(part.size).reshape(part.shape)
        count += part.size
    return columns.reshape(len(others), -1)
