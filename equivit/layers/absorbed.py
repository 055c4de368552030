"""A residual branch whose gradients need fewer passes over the tokens.

The vectors of a branch scale(body(norm(x))) can become parts of the maps next to them.  For standardised tokens z, the
norm's scale s and bias n, the layer scale t, and the first and the last map of the body:

    (s z + n) W + b = z (diag(s) W) + (n W + b)          t (h W + b) = h (W diag(t)) + t b

The gradients of s, n and t are sums over all tokens on the left, and sums over the entries of W on the right.
"""

from typing import Any

import jax
import jax.numpy as jnp

from equivit.kernels import mesh


def absorbed(norm: Any, body: Any, scale: Any) -> tuple[Any, Any]:
    """A norm without vectors and a body with both: body'(norm'(x)) = scale(body(norm(x))).

    Args:
      body: `MAPS` names its first and its last linear map; a body that also reads their biases on their own has none.
      scale: None for no layer scale.
    """
    body = jax.tree.map(lambda a: a, body)  # a copy, whose maps are replaced
    first, last = body.MAPS
    setattr(body, first, _after(norm, getattr(body, first)))
    if scale is not None:
        setattr(body, last, _before(scale, getattr(body, last)))
    return norm.standardise, body


def read_dtype(body: Any) -> Any:
    """The dtype in which the first map of a body reads tokens."""
    weights, _ = getattr(body, body.MAPS[0]).arrays()
    return weights[0].dtype


def _after(norm, linear):
    """The map of standardised tokens: the norm's scale and bias, then the linear map."""
    weights, bias = linear.arrays()
    invariant = _wide(_invariant(weights))
    shift = (_over(norm.bias[...], invariant, -1) * invariant).sum(0)
    weights = [_wide(w) * _over(s, w, -1) for w, s in zip(weights, norm.scales, strict=True)]
    return _holding(linear, weights, shift if bias is None else shift + bias)


def _before(scale, linear):
    """The linear map, then the layer scale."""
    weights, bias = linear.arrays()
    bias = None if bias is None else bias * _invariant(scale.scales, vector=True)
    return _holding(linear, [_wide(w) * _over(s, w, -2) for w, s in zip(weights, scale.scales, strict=True)], bias)


def _invariant(leaves, vector=False):
    """The array of the invariant component, or the only one."""
    return leaves[0] if leaves[0].ndim == 2 - vector else leaves[0][0]


def _over(vector, weight, axis):
    """The vector for each entry of a weight, which has one axis more."""
    axes = [i for i in range(weight.ndim) if i != weight.ndim + axis]
    return jax.lax.broadcast_in_dim(vector, weight.shape, axes)  # one operation, whose transpose is one sum


def _wide(weight):
    return weight.astype(jnp.promote_types(weight.dtype, jnp.float32))


def _holding(linear, weights, bias):
    """A copy of a map with other arrays; its weights keep their dtype."""
    pairs = zip(weights, linear.arrays()[0], strict=True)
    return linear.holding(*mesh.gathered((tuple(w.astype(old.dtype) for w, old in pairs), bias)))
