"""Self-attention of a field on a TPU, by the kernels of `kernels.attention`.

A head's vector has parts from all rows of irreps, which in the natural order of heads lie in the same lanes.  The
kernel wants them in different ones (`attention/lanes.py`), so the first linear map makes them there: its columns, and
the rows of the second, are permuted, for every row of irreps in its own way.  The field that comes and goes, and the
weights that are stored, have the natural order.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kernels.attention import arranged as arranged_attention
from kernels.attention.lanes import arrange, product
from kernels.isotypic_linear import Field, Linear, linear

NAME = "isotypic_attention"
Parts = tuple[int, ...]


def attention(implementation: str, parts: Parts, heads: int, field: Field, qkv: Linear, proj: Linear) -> Field:
    """Self-attention of a field, of heads that have `parts` channels in each row of irreps."""
    (three, bias), proj = arranged(qkv, proj, parts, heads)
    side_by_side = tuple(jax.lax.collapse(jnp.moveaxis(w, 1, 2), 2) for w in three)
    arrays = linear(field, (side_by_side, bias))
    with jax.named_scope("attention"):
        y = arranged_attention.attend(implementation, parts, heads, *arrays)
    return linear(y, proj)


def supported(field: Field, parts: tuple[int, ...], heads: int, backward: bool = False) -> bool:
    """Whether there is a kernel for such fields, or for its derivative."""
    arrangement = arrange(parts, heads)
    return arrangement is not None and arranged_attention.fits(field[0], arrangement, backward)


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
