"""The tokens before the patches: class token and registers, or the rows of a Jumbo token."""

import jax
import jax.numpy as jnp
from flax import nnx


def token(shape: tuple[int, ...], std: float, rngs: nnx.Rngs) -> nnx.Param:
    """A learned token, initially normal with standard deviation `std`; it gets no weight decay."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape), decay=False)


class Prefix(nnx.Module):
    """An optional class token, with or without its own position, and registers.

    Shapes: -> [P, width], the class token first.

    Args:
      width: width of a token; in fields, of the invariant component, which alone is learned.
      class_token, class_position: whether they exist; a position needs its token.
      registers: number of registers.
      token_std, position_std, register_std: initial standard deviations.
    """

    def __init__(
        self,
        width: int,
        *,
        class_token: bool,
        class_position: bool,
        registers: int,
        token_std: float,
        position_std: float,
        register_std: float,
        rngs: nnx.Rngs,
    ):
        self.class_token = token((width,), token_std, rngs) if class_token else None
        self.class_position = token((width,), position_std, rngs) if class_token and class_position else None
        self.registers = token((registers, width), register_std, rngs) if registers else None
        self.number = int(class_token) + registers

    def __call__(self) -> jax.Array:
        parts = []
        if self.class_token is not None:
            first = self.class_token[...]
            parts.append((first if self.class_position is None else first + self.class_position[...])[None])
        if self.registers is not None:
            parts.append(self.registers[...])
        return jnp.concatenate(parts)


class JumboRows(nnx.Module):
    """The J rows of a Jumbo token.  Shapes: -> [J, width]."""

    def __init__(self, number: int, width: int, *, std: float, rngs: nnx.Rngs):
        self.jumbo_token = token((number, width), std, rngs)
        self.number = number

    def __call__(self) -> jax.Array:
        return self.jumbo_token[...]
