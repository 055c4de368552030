"""Invariantizations: maps from a field to channels invariant under the group (octic ViTs, Appendix C).

Each maps a field to a dense array [*B, N, out_features] token by token.  The token axis is optional: a field averaged
over its tokens, [4, *B, C], is mapped to [*B, out_features].  Those that learn nothing leave `rngs` unused.  Inputs
other than fields of their group and width raise ValueError.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit.layers.isotypic import channels
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC, Group


class InvariantComponent(nnx.Module):
    """The invariant component: width / order channels.

    Args:
      absolute: take its absolute value, as the official octic code does; Eq. 13 does not.
    """

    def __init__(self, width: int, *, group: Group, absolute: bool = True, rngs: nnx.Rngs | None = None):
        self.out_features, self.absolute = channels("Linear invariant", width, group), absolute
        self.group, self.width = group, width

    def __call__(self, x: Isotypic) -> jax.Array:
        _check(self, x)
        return jnp.abs(x.lines[0]) if self.absolute else x.lines[0]


class PowerSpectrum(nnx.Module):
    """The magnitude of each irrep: A1, |A2|, |B1|, |B2|, and the norm of each copy of E (Eq. 15); 6/8 of the width.

    FLIP: sym and |asym|, the full width.
    """

    def __init__(self, width: int, *, group: Group, rngs: nnx.Rngs | None = None):
        self.out_features = channels("PowerSpectrum", width, group) * sum(len(i.seeds) for i in group.irreps)
        self.group, self.width = group, width

    def __call__(self, x: Isotypic) -> jax.Array:
        _check(self, x)
        parts = [x.lines[0], *jnp.abs(x.lines[1:])]
        return jnp.concatenate(parts if x.planes is None else [*parts, _norm(x.planes)], axis=-1)


class TripleCorrelation(nnx.Module):
    """The 15 invariant polynomials of degree three (Eq. 14); 15/8 of the width.  OCTIC only."""

    def __init__(self, width: int, *, group: Group, rngs: nnx.Rngs | None = None):
        self.out_features = 15 * _octic_channels("TripleCorrelation", width, group)
        self.group, self.width = group, width

    def __call__(self, x: Isotypic) -> jax.Array:
        _check(self, x)
        a1, *_ = components = _components(x)
        quadratic, cubic = _quadratic(*components), _cubic(*components)
        return jnp.concatenate([a1**3, *(a1 * p for p in quadratic), *cubic], axis=-1).astype(x.dtype)


class Polynomial(nnx.Module):
    """The 32 polynomials that generate all invariant polynomials (Eq. 16); 32/8 of the width.  OCTIC only."""

    def __init__(self, width: int, *, group: Group, rngs: nnx.Rngs | None = None):
        self.out_features = 32 * _octic_channels("Polynomial", width, group)
        self.group, self.width = group, width

    def __call__(self, x: Isotypic) -> jax.Array:
        _check(self, x)
        c = _components(x)
        parts = [c[0], *_quadratic(*c), *_cubic(*c), *_quartic(*c), *_quintic(*c)]
        return jnp.concatenate(parts, axis=-1).astype(x.dtype)


class MaxFiltering(nnx.Module):
    """For each learned reference y_k, the largest <g y_k, x> over the group (Eq. 17).

    Args:
      references: the number of references; None: twice the width, as in the paper.
    """

    def __init__(self, width: int, *, group: Group, references: int | None = None, rngs: nnx.Rngs):
        self.out_features, self.group, self.width = references or 2 * width, group, width
        y = jax.random.normal(rngs.params(), (self.out_features, width))
        channels("MaxFiltering", width, group)
        self.references = nnx.Param(y / jnp.linalg.norm(y, axis=-1, keepdims=True), product=True)

    def __call__(self, x: Isotypic) -> jax.Array:
        _check(self, x)
        y = fields.from_dense(self.references[...], self.group)
        x = x.astype(y.dtype)
        moved = jnp.stack([fields.to_dense(fields.act_on_channels(g, y)) for g in self.group.elements])
        return jnp.einsum("...d,gkd->g...k", fields.to_dense(x), moved).max(0)


class Canonisation(nnx.Module):
    """Transform each token to match a learned reference best: g* x, g* = argmax <y, g x> (Eq. 18); the full width.

    Ties go to the first element in the group's order.  The products use the transformed token, so all transforms of a
    token give bit-identical products.
    """

    def __init__(self, width: int, *, group: Group, rngs: nnx.Rngs):
        channels("Canonisation", width, group)
        y = jax.random.normal(rngs.params(), (width,))
        self.reference = nnx.Param(y / jnp.linalg.norm(y))
        self.out_features, self.group, self.width = width, group, width

    def __call__(self, x: Isotypic) -> jax.Array:
        _check(self, x)
        moved = jnp.stack([fields.to_dense(fields.act_on_channels(g, x)) for g in self.group.elements])
        best = (moved * self.reference[...]).sum(-1).argmax(0)
        return jnp.take_along_axis(moved, best[None, ..., None], axis=0)[0]


KINDS = {
    "linear": InvariantComponent,
    "linear_signed": functools.partial(InvariantComponent, absolute=False),
    "power_spectrum": PowerSpectrum,
    "triple_correlation": TripleCorrelation,
    "polynomial": Polynomial,
    "max_filtering": MaxFiltering,
    "canonisation": Canonisation,
}


def create(kind: str, width: int, *, group: Group, rngs: nnx.Rngs) -> Any:
    """The invariantization called `kind`; it has `out_features`.

    Raises:
      ValueError: an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"invariantization {kind!r} is not one of {', '.join(KINDS)}.")
    return KINDS[kind](width, group=group, rngs=rngs)


def _check(layer: Any, x: Any) -> None:
    name = type(layer).__name__
    if not isinstance(x, Isotypic) or x.group is not layer.group:
        raise fields.not_a_field(name, x, layer.group)
    if x.shape[-1] != layer.width:
        raise ValueError(f"{name}: x of shape {list(x.shape)} has width {x.shape[-1]}; the layer reads {layer.width}.")


def _octic_channels(name: str, width: int, group: Group) -> int:
    if group is not OCTIC:
        raise ValueError(
            f"{name} is defined only for the octic group, not for {group.name}; power_spectrum works for both."
        )
    return channels(name, width, group)


def _norm(rows: jax.Array) -> jax.Array:
    """Norm over the leading axis, with gradient 0 at zero, as in an initial class token."""
    wide = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))  # squares overflow and underflow in float16
    squares = jnp.square(wide).sum(0)
    zero = squares == 0
    return jnp.where(zero, squares, jnp.sqrt(jnp.where(zero, jnp.ones_like(squares), squares))).astype(rows.dtype)


def _components(x: Isotypic) -> tuple[jax.Array, ...]:
    """A1, A2, B1, B2, E11, E12, E21, E22 in at least float32: products of four numbers overflow half precision."""
    return tuple(fields.to_components(x).astype(np.promote_types(x.dtype, np.float32)))


def _quadratic(a1, a2, b1, b2, u1, v1, u2, v2):
    """Invariants of degree two, without A1: u, v are the rows of E, 1 and 2 its copies."""
    return u2**2 + v2**2, u1 * u2 + v1 * v2, u1**2 + v1**2, b2**2, b1**2, a2**2


def _cubic(a1, a2, b1, b2, u1, v1, u2, v2):
    return (
        b2 * u2 * v2,
        b2 * (v1 * u2 + u1 * v2),
        b2 * u1 * v1,
        b1 * (u2**2 - v2**2),
        b1 * (u1 * u2 - v1 * v2),
        b1 * (u1**2 - v1**2),
        a2 * (v1 * u2 - u1 * v2),
        a2 * b1 * b2,
    )


def _quartic(a1, a2, b1, b2, u1, v1, u2, v2):
    return (
        u2**4 + v2**4,
        u1 * u2**3 + v1 * v2**3,
        u1**2 * u2**2 + v1**2 * v2**2,
        u1**3 * u2 + v1**3 * v2,
        u1**4 + v1**4,
        b1 * b2 * (v1 * u2 - u1 * v2),
        a2 * b2 * (u2**2 - v2**2),
        a2 * b2 * (u1 * u2 - v1 * v2),
        a2 * b2 * (u1**2 - v1**2),
        a2 * b1 * u2 * v2,
        a2 * b1 * (v1 * u2 + u1 * v2),
        a2 * b1 * u1 * v1,
    )


def _quintic(a1, a2, b1, b2, u1, v1, u2, v2):
    return (
        a2 * u2 * v2 * (u2**2 - v2**2),
        a2 * (v1 * u2**3 - u1 * v2**3),
        a2 * u1 * v1 * (u2**2 - v2**2),
        a2 * u1 * v1 * (u1 * u2 - v1 * v2),
        a2 * u1 * v1 * (u1**2 - v1**2),
    )
