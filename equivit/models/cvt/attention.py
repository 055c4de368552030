"""Attention with convolved queries, keys and values: the parts of CvT (arXiv 2103.15808, Section 3)."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import errors
from equivit.layers import dense, polyphase
from equivit.layers.convolution import Conv, NormedConv, Pair
from equivit.layers.dropout import split
from equivit.layers.grid import Layout
from equivit.models.staged import branch_path, join_prefix, split_prefix
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice
from kernels.attention import attend, side_by_side


class ConvEmbed(nnx.Module):
    """An overlapping convolution, then a layer norm, at the beginning of a stage (CvT, Section 3.1).

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      kernel, stride, padding, mode: of the convolution.
    """

    def __init__(
        self,
        in_channels: int,
        width: int,
        *,
        kernel: Pair,
        stride: Pair,
        padding: Pair,
        mode: str,
        eps: float,
        rngs: nnx.Rngs,
    ):
        self.conv = Conv(in_channels, width, kernel=kernel, stride=stride, padding=padding, mode=mode, rngs=rngs)
        self.norm = dense.LayerNorm(width, eps=eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))

    def adaptive(self, x: jax.Array, select: str) -> tuple[jax.Array, Choice]:
        """The tokens at the phase chosen by the content, [B, h w / stride^2, width], and the choice.

        Args:
          x: [B, h, w, in_channels] on a torus; the stride divides h and w.  With "output" it is 2, the kernel 2 or 3.
          select: "output" takes the phase with the largest norm of the convolution; "input" takes the phase with the
            largest norm of the inputs at the first tap, which is almost free.
        """
        if select == "output":
            return polyphase.largest_phase(self, x)
        choice = shifts.strongest(polyphase.lattice_norms(x, self.conv.stride))
        return self.at(x, choice), choice

    def at(self, x: jax.Array, choice: Choice) -> jax.Array:
        """The tokens at the chosen phase of each map: [B, h, w, in_channels] -> [B, h w / stride^2, width]."""
        y = self.conv.circular(shifts.roll(x, -shifts.phases(choice.index, self.conv.stride)))
        return jax.lax.collapse(self.norm(y), 1, 3)

    def at_each_phase(self) -> Callable[[jax.Array], list[jax.Array]]:
        """The convolution at all phases: [B, h, w, in_channels] -> [B, h/2, w/2, width] for each."""
        filters = polyphase.filters(self.conv.kernel[...])
        bias, padding = self.conv.bias[...], self.conv.padding

        def at_each_phase(x):
            y = polyphase.convolved(jnp.roll(x, padding, (1, 2)), filters)
            return [y[p][q] + bias for p in range(2) for q in range(2)]

        return at_each_phase

    def normed(self, y: jax.Array) -> jax.Array:
        """Convolved tokens after the norm."""
        return self.norm(y)


class ConvAttention(nnx.Module):
    """Attention over a map; queries, keys and values are linear maps of three convolutions of it (Eq. 2).

    Tokens before the map, such as the class token, are not convolved.

    Shapes: [*B, prefix + h w, width] -> the same.

    Args:
      stride: of the convolutions for keys and values; (2, 2) leaves a quarter of them.
      mode: of the convolutions' padding.
      select: the content chooses one phase for keys and values: the phase with the largest norm of both after their
        batch norms ("output"), or of the map ("input"); None: the first phase.  If a phase is chosen, their
        convolutions are circular, whatever the mode.

    Raises:
      ValueError: `num_heads` does not divide `width`.
    """

    def __init__(
        self, width: int, num_heads: int, *, stride: Pair, mode: str, select: str | None = None, rngs: nnx.Rngs
    ):
        errors.divides("ConvAttention: num_heads", num_heads, width, f"{width=}")
        self.conv_q, self.conv_k, self.conv_v = (
            NormedConv(width, width, kernel=(3, 3), stride=s, mode=mode, groups=width, rngs=rngs)
            for s in ((1, 1), stride, stride)
        )
        self.q, self.k, self.v, self.proj = (dense.Linear(width, width, rngs=rngs) for _ in range(4))
        self.num_heads, self.stride, self.select = num_heads, stride, select

    def __call__(self, x: jax.Array, layout: Layout, *, train: bool = False) -> jax.Array:
        prefix, grid = split_prefix(x, layout)
        queries = self.conv_q(grid, train=train)
        keys, values = self.keys_and_values(grid, train=train)
        q, k, v = (
            self._heads(linear(join_prefix(prefix, y)))
            for linear, y in ((self.q, queries), (self.k, keys), (self.v, values))
        )
        with jax.named_scope("attention"):
            # The official code and weights divide products by the root of the full width; `attend` divides by the root
            # of a head's width.
            q = q * self.num_heads**-0.5
        y = attend(q, k, v)
        return self.proj(side_by_side(y))

    def keys_and_values(self, x: jax.Array, *, train: bool) -> tuple[jax.Array, jax.Array]:
        """The maps of keys and of values, [*B, h, w, width] each, before their linear maps; they must share a grid."""
        if self.select is None:
            return self.conv_k(x, train=train), self.conv_v(x, train=train)
        if self.select == "output" and not train:
            return self._strongest(x)[:2]
        x = shifts.roll(x, -shifts.phases(self.choice(x).index, self.stride))
        return self.conv_k.circular(x, train=train), self.conv_v.circular(x, train=train)

    def choice(self, x: jax.Array) -> Choice:
        """The phase of keys and values for maps [B, h, w, width].

        Both share it: with separate phases, a shift could pair keys with other values.  Batch norms use their running
        statistics here, in training too, so the choice depends on each image alone.
        """
        if self.select == "output":
            return self._strongest(x)[2]
        return shifts.strongest(polyphase.lattice_norms(jax.lax.stop_gradient(x), self.stride))

    def _strongest(self, x: jax.Array) -> tuple[jax.Array, jax.Array, Choice]:
        """Keys and values at the phase with the largest norm, by running statistics, and the choice."""
        maps = [part.everywhere(x) for part in (self.conv_k, self.conv_v)]
        squares = (jnp.square(polyphase.lattice_norms(jax.lax.stop_gradient(y), self.stride)) for y in maps)
        choice = shifts.strongest(jnp.sqrt(functools.reduce(operator.add, squares)))
        phase = shifts.phases(choice.index, self.stride)
        keys, values = (shifts.component(y, phase, self.stride) for y in maps)
        return keys, values, choice

    def choice_of(self, x: jax.Array, layout: Layout) -> Choice:
        """`choice` for tokens [B, prefix + h w, width]."""
        return self.choice(split_prefix(x, layout)[1])

    def _heads(self, x: jax.Array) -> jax.Array:
        """[*B, N, width] -> [*B, num_heads, N, head channels]."""
        return jnp.einsum("...nhd->...hnd", x.reshape(*x.shape[:-1], self.num_heads, x.shape[-1] // self.num_heads))


class ConvBlock(nnx.Module):
    """x + path(attention(norm1(x))), then x + path(mlp(norm2(x))).

    `path` is dropout, then stochastic depth.

    Shapes: [*B, prefix + h w, width] -> the same.

    Args:
      norm1, attention, norm2, mlp: the parts.
      dropout: probability of zeroing an entry of a branch.
    """

    def __init__(self, *, norm1, attention: ConvAttention, norm2, mlp, dropout: float = 0.0):
        self.norm1, self.attention = norm1, attention
        self.norm2, self.mlp = norm2, mlp
        self.dropout = dropout

    def __call__(
        self,
        x: jax.Array,
        layout: Layout,
        *,
        rate: float | jax.Array = 0.0,
        phase: int = 0,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """The tokens after the block.

        Args:
          rate: probability of dropping a branch for a sample.
          phase: unused; all blocks are alike.
          train: whether batch norms use and record the statistics of this batch.
          key: for dropout and stochastic depth; None disables both.
        """
        keys = split(key)
        branch = self.attention(self.norm1(x), layout, train=train)
        x = x + branch_path(branch, self.dropout, rate, keys[0])
        return x + branch_path(self.mlp(self.norm2(x)), self.dropout, rate, keys[1])
