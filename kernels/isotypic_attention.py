"""Self-attention of a field: linear map to queries, keys and values, softmax attention of all heads, and linear map.

A head's vector has parts from all rows of irreps, which in the natural order of heads lie in the same lanes.  The
kernel wants them in different ones (`attention_lanes.py`), so on a TPU the first map makes them there: its columns, and
the rows of the second, are permuted, for every row of irreps in its own way.  The field that comes and goes, and the
weights that are stored, have the natural order.

Shapes: lines [i, *B, N, C] and, unless the group has only 1-D irreps, planes [2, *B, N, 2C] -> the same.
Source: octic ViTs, Section 3.2.2.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kernels import attention, dispatch
from kernels.attention_lanes import arrange, product
from kernels.isotypic_linear import Field, Linear, linear

NAME = "isotypic_attention"


def reference(field: Field, qkv: Linear, proj: Linear, heads: int) -> Field:
    """The definition, in plain jnp."""
    return linear(attention.rows_reference(heads, *linear(field, qkv)), proj)


def isotypic_attention(
    field: Field,
    qkv: Linear,
    proj: Linear,
    heads: int,
    *,
    implementation: str = "auto",
    plain: Callable[[Field, Linear, Linear, int], Field] = reference,
) -> Field:
    """Self-attention of a field, by the kernels of `attention` and under their conditions.

    Args:
      field: lines [i, *B, N, C] and planes [2, *B, N, 2C], or lines alone.
      qkv: weights [i, C, 3C] and [2C, 6C], outputs ordered (q | k | v) x heads x channels; bias [3C] or None.
      proj: weights [i, C, C] and [2C, 2C]; bias [C] or None.
      heads: their channels, 1 / heads of all, are at most 128.
      implementation: as for `attention`.
      plain: what runs on other platforms, and wherever there is no kernel for the derivative: `reference` or a function
        that equals it.

    Raises:
      ValueError: an unknown implementation, or no kernel for these shapes or dtypes.
    """
    chosen = dispatch.chosen(NAME, implementation)
    parts = tuple(w.shape[-1] // (3 * heads) for x, w in zip(field, qkv[0], strict=True) for _ in x)

    def default(field, qkv, proj):
        return plain(field, qkv, proj, heads)

    kernels = {}
    if supported(field, parts, heads):
        for key in ("tpu", "interpret"):
            kernels[key] = functools.partial(_on_tpu, key, parts, heads)
            if not supported(field, parts, heads, backward=True):
                kernels[key] = _with_derivative_of(default, kernels[key])
    missing = chosen != "auto" and chosen not in kernels
    if chosen == "xla" or missing and implementation == "auto":
        return plain(field, qkv, proj, heads)
    if missing:
        raise dispatch.no_kernel(NAME, implementation, field, f" and {heads} heads")
    return dispatch.select(NAME, chosen, default, kernels, field, qkv, proj)


def _on_tpu(implementation: str, parts: tuple[int, ...], heads: int, field: Field, qkv: Linear, proj: Linear):
    (three, bias), proj = arranged(qkv, proj, parts, heads)
    side_by_side = tuple(jax.lax.collapse(jnp.moveaxis(w, 1, 2), 2) for w in three)
    arrays = linear(field, (side_by_side, bias))
    with jax.named_scope("attention"):
        y = attention.attend_arranged(implementation, parts, heads, *arrays)
    return linear(y, proj)


def _with_derivative_of(plain: Callable[..., Field], kernel: Callable[..., Field]) -> Callable[..., Field]:
    """The kernel, but under differentiation `plain`: where it has no backward kernel, XLA would have to move lanes."""
    call = jax.custom_jvp(kernel)
    call.defjvp(functools.partial(jax.jvp, plain))
    return call


def supported(field: Field, parts: tuple[int, ...], heads: int, backward: bool = False) -> bool:
    """Whether there is a kernel for such fields, as `attention.supported`."""
    arrangement = arrange(parts, heads)
    return arrangement is not None and attention.fits(field[0], arrangement, backward)


def arranged(qkv: Linear, proj: Linear, parts: tuple[int, ...], heads: int) -> tuple[Linear, Linear]:
    """The maps with the columns of the first, and the rows of the second, where the kernel wants the heads.

    The weights of the first are [i, k, C, qkv width / k], of which k = 3, one matrix each for queries, keys and values,
    unless these share registers: side by side their columns would have to move among the lanes once more.
    """
    arrangement = arrange(parts, heads)
    if arrangement is None:
        raise ValueError(f"{NAME}: no arrangement of {heads} heads of {parts} channels.")

    first, second, sources = [], [], iter(range(len(parts)))
    for w, p in zip(qkv[0], proj[0], strict=True):
        rows, each = (len(w), "i") if w.ndim == 3 else (2, "")  # rows of E share their weights
        numbers, c = [next(sources) for _ in range(rows)], p.shape[-1]
        maps = np.stack([arrangement.qkv_matrices(i, c) for i in numbers])
        first.append(product(f"{each}akc,ikcw->ikaw", w.reshape(*w.shape[:-1], *maps.shape[1:3]), maps))
        second.append(product(f"{each}cd,icw->iwd", p, np.stack([arrangement.matrix(i, c) for i in numbers])))
    bias = qkv[1]
    if bias is not None:
        maps = arrangement.qkv_matrices(0, bias.size // 3)
        bias = product("kc,kcw->kw", bias.reshape(maps.shape[:2]), maps).ravel()
    return (tuple(first), bias), (tuple(second), proj[1])
