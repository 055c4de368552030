"""Products of two arrays, and the linear map of tokens.

In bfloat16 a product is a primitive, so that its form can depend on the platform.  Its gradients are such products too,
with axes ordered like the factor's.  In float32 this pays only for fields.
"""

import functools
import string

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from equivit.kernels import dispatch
from equivit.kernels.product import cpu
from equivit.kernels.product.axes import joined, split

LINEAR = "...c,cd->...d"  # a linear map of tokens
# Marks products for `remat="dots"`, whose policy skips our own primitives and products with a batch axis, such as the
# weighted sums of values in attention, which are small.
named_product = functools.partial(checkpoint_name, name="product")


Map = tuple[jax.Array, jax.Array | None]  # a linear map: weight [C, D] and bias [D], or None


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x W + b in the dtype of W; a bias of None is 0.  Shapes: [*B, N, C], [C, D], [D] -> [*B, N, D]."""
    with jax.named_scope("linear"):
        y = named_product(einsum(LINEAR, x.astype(weight.dtype), weight))
        if bias is None or bias.dtype == y.dtype:
            return y if bias is None else y + bias
        return y + jnp.broadcast_to(bias, y.shape).astype(y.dtype)  # as in `add_bias`, without a call of its own


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """y + bias in the dtype of y, for a bias that broadcasts against it.

    The gradient of the bias is summed in the bias's own dtype, which may be wider.
    """
    if bias.dtype == y.dtype:
        return y + bias
    return y + jnp.broadcast_to(bias, y.shape).astype(y.dtype)  # cast last, so that the sum is in the dtype of the bias


def einsum(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """`jnp.einsum` of two arrays.  Both have every summed axis; "..." in y stands for the last axes of "..." in x."""
    if x.dtype == y.dtype == jnp.bfloat16:
        return bilinear(axes, x, y)
    return jnp.matmul(x, y) if axes == LINEAR else jnp.einsum(axes, x, y)  # which converters support better


def bilinear(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """`einsum` as the primitive in any dtype; `jnp.einsum` if `using` asks for the reference."""
    if dispatch.AUTO.get() == "reference":
        return jnp.matmul(x, y) if axes == LINEAR else jnp.einsum(axes, x, y)
    dtype = jnp.result_type(x, y)
    x, y = x.astype(dtype), y.astype(dtype)  # the casts give each gradient the dtype of its factor
    (of_x, of_y), result = axes.split("->")[0].split(","), axes.split("->")[1]
    first, ahead = (a.ndim - len(of.replace("...", "")) for a, of in ((x, of_x), (y, of_y)))
    named = string.ascii_uppercase[:first]
    of_x, of_y = of_x.replace("...", named), of_y.replace("...", named[first - ahead :])
    axes = f"{of_x},{of_y}->{result.replace('...', named)}"
    precision = jax.config.jax_default_matmul_precision  # set at run time  # pyright: ignore[reportAttributeAccessIssue]
    return _bound(x, y, axes=axes, precision=precision)


def _bound(x: jax.Array, y: jax.Array, *, axes: str, precision: str | None) -> jax.Array:
    # Within shard_map, the gradient of a factor is summed over the devices that only the other factor varies over.
    over = _varying(x) | _varying(y)
    x, y = (jax.lax.pcast(factor, tuple(over - _varying(factor)), to="varying") for factor in (x, y))
    return _product.bind(x, y, axes=axes, precision=precision)


def _varying(x) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _computed(x, y, *, axes: str, precision: str | None):
    return jnp.einsum(axes, x, y, precision=precision)


def _aval(x, y, **options):
    return jax.make_jaxpr(functools.partial(_computed, **options))(x, y).out_avals[0]


def _x_gradient(dz, x, y, *, axes: str, precision: str | None):
    of_x, of_y, of_z = split(axes)
    return _bound(dz, y, axes=f"{of_z},{of_y}->{of_x}", precision=precision)


def _y_gradient(dz, x, y, *, axes: str, precision: str | None):
    of_x, of_y, of_z = split(axes)
    return _bound(x, dz, axes=f"{of_x},{of_z}->{of_y}", precision=precision)


def _batched(factors, at, *, axes: str, precision: str | None):
    """Add the batch axis in front, to each factor that has it and to the result."""
    new = next(letter for letter in string.ascii_letters if letter not in axes)
    moved = [x if i is None else jnp.moveaxis(x, i, 0) for x, i in zip(factors, at, strict=True)]
    of_x, of_y = ("" if i is None else new for i in at)
    x_axes, y_axes, z_axes = split(axes)
    return _bound(*moved, axes=f"{of_x}{x_axes},{of_y}{y_axes}->{new}{z_axes}", precision=precision), 0


_product = Primitive("bilinear_product")
_product.def_impl(jax.jit(_product.bind, static_argnames=("axes", "precision")))
_product.def_abstract_eval(_aval)
ad.defbilinear(_product, _x_gradient, _y_gradient)
batching.primitive_batchers[_product] = _batched
mlir.register_lowering(_product, mlir.lower_fun(_computed, multiple_results=False))
mlir.register_lowering(_product, cpu.lowered, platform="cpu")
# Batch and tokens, not the rows of E with them.
_on_gpu = functools.partial(joined, last=2)
mlir.register_lowering(_product, mlir.lower_fun(_on_gpu, multiple_results=False), platform="cuda")
