"""Self-attention of a field on a TPU, by the kernels of `kernels.attention`.

A head's vector has parts from all rows of irreps, which in the natural order of heads lie in the same lanes.  The
kernel needs them in different lanes (`attention/lanes.py`).  So the columns of the first linear map, and the rows of
the second, are permuted separately for each row of irreps.  Input, output and stored weights have the natural order.
"""

import jax
import jax.numpy as jnp
import numpy as np

from equivit.kernels.attention import arranged as arranged_attention
from equivit.kernels.attention.arranged import Parts
from equivit.kernels.attention.lanes import arrange, product
from equivit.kernels.isotypic_linear import Field, Linear, linear

NAME = "isotypic_attention"


def attention(implementation: str, parts: Parts, heads: int, field: Field, qkv: Linear, proj: Linear) -> Field:
    """Self-attention of a field whose heads have `parts` channels in each row of irreps."""
    (three, bias), proj = arranged(qkv, proj, parts, heads)
    side_by_side = tuple(jax.lax.collapse(jnp.moveaxis(w, 1, 2), 2) for w in three)
    arrays = linear(field, (side_by_side, bias))
    with jax.named_scope("attention"):
        y = arranged_attention.attend(implementation, parts, heads, *arrays)
    return linear(y, proj)


def supported(field: Field, parts: tuple[int, ...], heads: int, backward: bool = False) -> bool:
    """Whether there is a kernel for such fields, or for the derivative."""
    arrangement = arrange(parts, heads)
    return arrangement is not None and arranged_attention.fits(field[0], arrangement, backward)


def arranged(qkv: Linear, proj: Linear, parts: tuple[int, ...], heads: int) -> tuple[Linear, Linear]:
    """Permute the columns of the first map and the rows of the second to the kernel's placement of heads.

    The weights of the first map are [i, k, C, qkv width / k].  k is 3, one matrix each for queries, keys and values,
    unless these share registers: in one matrix their columns would have to move among the lanes again.
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
