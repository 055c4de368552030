"""The final norm, and the features that the head reads.

`readout(x, layout)` returns the head's input, [*B, features].  `normed` returns all tokens after the final norm, and
`roles` splits tokens into class token, registers and patches, as dense arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.kernels.attention import attend, side_by_side, split_heads
from equivit.layers.grid import Layout
from equivit.layers.jumbo import divide, merge
from equivit.layers.parts import identity
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic, Tokens, TokensT, join, rows


class Roles(NamedTuple):
    """Tokens by role: cls [*B, D] or None, registers [*B, R, D], patches [*B, N, D]."""

    cls: jax.Array | None
    registers: jax.Array
    patches: jax.Array


class _Readout(nnx.Module):
    """Norm and roles of tokens that start with an optional class token and registers."""

    def __init__(self, norm: Callable, *, class_token: bool, invariant: nnx.Module | None = None):
        self.norm, self.invariant, self.class_token = norm, invariant, class_token

    def normed(self, x: TokensT, layout: Layout) -> TokensT:
        """All tokens after the final norm."""
        return self.norm(x)

    def roles(self, x: Tokens, layout: Layout) -> Roles:
        """Tokens by role, fields as concatenated components."""
        x, first = to_dense(x), int(self.class_token)
        cls = x[..., 0, :] if self.class_token else None
        return Roles(cls, x[..., first : layout.prefix, :], x[..., layout.prefix :, :])


class ClassReadout(_Readout):
    """The class token after the norm; for a field, its invariants (D2)."""

    def __call__(self, x: Tokens, layout: Layout) -> jax.Array:
        cls = jax.tree.map(lambda leaf: leaf[..., 0, :], self.norm(x))
        return cls if self.invariant is None else self.invariant(cls)


class MeanReadout(_Readout):
    """The mean patch token after the norm; for a field, the mean of the tokens' invariants (D8).

    Args:
      pool_first: use the invariants of the mean instead.
    """

    def __init__(self, norm: nnx.Module, *, pool_first: bool = False, **options):
        super().__init__(norm, **options)
        self.pool_first = pool_first

    def __call__(self, x: Tokens, layout: Layout) -> jax.Array:
        patches = rows(self.norm(x), layout.prefix)
        if self.invariant is None:
            return patches.mean(-2)
        if self.pool_first:
            return self.invariant(jax.tree.map(lambda leaf: leaf.mean(-2), patches))
        return self.invariant(patches).mean(-2)


class BlocksReadout(_Readout):
    """The class tokens of some blocks after the norm, then the mean patch token of the last (DINOv2's linear heads).

    Called with the tokens of the earlier blocks too.  Shapes: n of [*B, P + N, D] -> [*B, n D], or [*B, (n + 1) D].

    Args:
      patches: whether to append the mean patch token.
    """

    def __init__(self, norm: Callable, *, patches: bool, class_token: bool):
        super().__init__(norm, class_token=class_token)
        self.patches = patches

    def __call__(self, x: jax.Array, layout: Layout, earlier: Sequence[jax.Array] = ()) -> jax.Array:
        tokens = [self.norm(y[..., 0, :]) for y in (*earlier, x)]
        mean = [self.norm(rows(x, layout.prefix)).mean(-2)] if self.patches else []
        return jnp.concatenate([*tokens, *mean], axis=-1)


class FcNormReadout(_Readout):
    """The norm of the mean patch token (MAE's fine-tuning).  It normalises each token if `layout.reads_patches`."""

    def __init__(self, fc_norm: nnx.Module, *, class_token: bool):
        super().__init__(identity, class_token=class_token)
        self.fc_norm = fc_norm

    def normed(self, x: jax.Array, layout: Layout) -> jax.Array:
        """All tokens, after the norm if the patches are read."""
        return self.fc_norm(x) if layout.reads_patches else x

    def __call__(self, x, layout: Layout) -> jax.Array:
        return self.fc_norm(rows(x, layout.prefix).mean(-2))


class AttentionReadout(_Readout):
    """A learned query attends to the patch tokens after the norm; then y + mlp(norm(y)) (SigLIP's head).

    Args:
      query: the learned token [D].
      qkv, proj, num_heads: as in an attention, for q of the query, and k and v of the patches.
      mlp_norm, mlp: applied to the attended token.
    """

    def __init__(
        self, norm: Callable, *, query: nnx.Param, qkv: Any, proj: Any, num_heads: int, mlp_norm: Any, mlp: Any
    ):
        super().__init__(norm, class_token=False)
        self.query, self.qkv, self.proj, self.num_heads = query, qkv, proj, num_heads
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(self, x: jax.Array, layout: Layout) -> jax.Array:
        patches = rows(self.norm(x), layout.prefix)
        query = jnp.broadcast_to(self.query[...].astype(x.dtype), (*patches.shape[:-2], 1, patches.shape[-1]))
        q, k, v = split_heads(self.qkv(jnp.concatenate([query, patches], axis=-2)), self.num_heads)
        y = self.proj(side_by_side(attend(q[..., :1, :], k[..., 1:, :], v[..., 1:, :])))
        return (y + self.mlp(self.mlp_norm(y)))[..., 0, :]


class JumboReadout(nnx.Module):
    """The merged Jumbo token; with `patches`, concatenated with the mean patch token.

    Args:
      norm: norm of the merged token if `standardise` is given, otherwise of each row.
      standardise: normalises the patches if `layout.reads_patches`; the head reads their mean unnormalised.
      invariant: the invariantization of a merged token that is a field; or None.
      takes_invariant: in a field, the Jumbo token has only the invariant part.
    """

    def __init__(
        self, norm, *, standardise, patches: bool = False, invariant: Any = None, takes_invariant: bool = False
    ):
        self.norm, self.invariant = norm, invariant
        self.standardise, self.patches, self.takes_invariant = standardise, patches, takes_invariant

    def __call__(self, x: Any, layout: Layout) -> jax.Array:
        x = self.normed(x, layout)
        token = self.token(x, layout)
        token = token if self.invariant is None else self.invariant(token)
        if not self.patches:
            return token[..., 0, :]
        return jnp.concatenate([token[..., 0, :], rows(x, layout.prefix).mean(-2)], axis=-1)

    def token(self, x: Tokens, layout: Layout) -> Any:
        """The merged token, one row."""
        token = rows(x, 0, layout.prefix)
        if self.takes_invariant and isinstance(token, Isotypic):
            token = fields.take_invariant(token)
        return merge(token)

    def normed(self, x: Any, layout: Layout) -> Any:
        """All tokens after the final norm."""
        if self.standardise is None:
            return self.norm(x)
        token, patches = divide(self.norm(self.token(x, layout)), layout.prefix), rows(x, layout.prefix)
        if isinstance(patches, Isotypic) and isinstance(token, jax.Array):
            token = fields.invariant_part(token, patches.group)
        return join(token, self.standardise(patches) if layout.reads_patches else patches)

    def roles(self, x: Tokens, layout: Layout) -> Roles:
        """The merged token [*B, J width], no registers, and the patches."""
        patches = to_dense(rows(x, layout.prefix))
        return Roles(to_dense(self.token(x, layout))[..., 0, :], patches[..., :0, :], patches)


Readout = ClassReadout | MeanReadout | BlocksReadout | FcNormReadout | AttentionReadout | JumboReadout


def to_dense(x: Tokens) -> jax.Array:
    """The concatenated components of a field; a dense array is returned unchanged."""
    return x if isinstance(x, jax.Array) else fields.to_dense(x)
