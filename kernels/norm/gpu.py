"""`fork` on a Hopper GPU: a kernel for each direction.  Other derivatives are the reference's."""

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from equivit.derivatives import linear
from equivit.kernels import dispatch
from equivit.kernels.hopper import norm as norm_kernel
from equivit.kernels.hopper import norm_gradient
from equivit.kernels.hopper.vectors import of_field, packed
from equivit.kernels.isotypic_linear import Field
from equivit.kernels.norm import reference
from equivit.kernels.norm.reference import Norm


def supported(field: Field, dtype: DTypeLike) -> bool:
    """Whether there are kernels for this field and dtype of the standardised field."""
    return len(field) == 2 and norm_gradient.supported(field[0].shape[-1], field[0].dtype, dtype)


def fork(field: Field, norm: Norm, dtype: DTypeLike) -> tuple[Field, Field]:
    """An octic field, and the field standardised in a dtype."""
    with jax.named_scope("norm"):
        return _fork(norm, jnp.dtype(dtype), field)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _fork(norm, dtype, field):
    def plain(*field):
        return reference.fork(field, norm, dtype)[1]

    def kernel(lines, planes):
        c = lines.shape[-1]
        (parameters,) = packed(of_field(jnp.ones((4, c)), jnp.ones(2 * c), jnp.zeros(c)))
        return norm_kernel.forward(lines, planes, parameters, norm=norm, dtype=dtype)

    field = dispatch.stored(field)  # the kernels need it in memory, where the sum after the branch then reads it
    return field, dispatch.run("norm", "gpu", plain, {"gpu": dispatch.on_rows(kernel, 2)}, field)


@_fork.defjvp
def _derivative(norm, dtype, fields, slopes):
    def along(field, slope):
        return jax.jvp(functools.partial(reference.fork, norm=norm, dtype=dtype), (field,), (slope,))[1]

    field, y = _fork(norm, dtype, *fields)
    return (field, y), linear(along, functools.partial(_pullback, norm, dtype), field, *slopes)


def _pullback(norm, dtype, field, gradients):
    def plain(lines, planes, *gradients):
        pull = jax.vjp(lambda field: reference.fork(field, norm, dtype), (lines, planes))[1]
        return pull((gradients[:2], gradients[2:]))[0]

    @jax.custom_jvp
    def run(*arrays):
        kernel = dispatch.on_rows(functools.partial(norm_gradient.backward, norm=norm), 6)
        return dispatch.run("norm", "gpu", plain, {"gpu": kernel}, arrays)

    run.defjvp(functools.partial(jax.jvp, plain))
    return run(*field, *gradients[0], *gradients[1])
