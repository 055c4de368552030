"""Attention with convolved queries, keys and values: the parts of CvT (arXiv 2103.15808, Section 3)."""

from typing import Any

import jax
from flax import nnx
from jax.nn.initializers import Initializer

from equivit import errors
from equivit.kernels.attention import attend, head_by_head, side_by_side
from equivit.kernels.phases import at_largest, pool
from equivit.layers import dense, polyphase
from equivit.layers.convolution import Conv, NormedConv, Pair
from equivit.layers.grid import Layout
from equivit.models.staged import join_prefix, split_prefix
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice


class ConvEmbed(nnx.Module):
    """An overlapping convolution, then a layer norm, at the beginning of a stage (CvT, Section 3.1).

    Shapes: [*B, H, W, in_channels] -> [*B, h, w, width].

    Args:
      eps: epsilon of the norm.
      options: kernel, stride, padding and mode of the convolution (`Conv`).
    """

    def __init__(self, in_channels: int, width: int, *, eps: float, rngs: nnx.Rngs, **options: Any):
        self.conv = Conv(in_channels, width, rngs=rngs, **options)
        self.norm = dense.LayerNorm(width, eps=eps)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.conv(x))

    def adaptive(self, x: jax.Array, select: str) -> tuple[jax.Array, Choice]:
        """The tokens at the phase chosen by the content, [B, h w / stride^2, width], and the choice.

        Args:
          x: [B, h, w, in_channels] on a torus; the stride divides h and w.  With "output" it is 2, the kernel 2 or 3.
          select: takes the largest norm of the convolution ("output") or of the inputs at the first tap ("input").
        """
        return polyphase.at_chosen_phase(self, x, self.conv.stride, select)

    def at(self, x: jax.Array, choice: Choice) -> jax.Array:
        """The tokens at the chosen phase of each map: [B, h, w, in_channels] -> [B, h w / stride^2, width]."""
        y = self.conv.circular(shifts.roll(x, -shifts.phases(choice.index, self.conv.stride)))
        return jax.lax.collapse(self.norm(y), 1, 3)

    def at_largest(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The convolution at the phase with the largest norm, and the norms of all four phases.

        Shapes: [B, h, w, in_channels] -> [B, h/2, w/2, width] and [B, 4].
        """
        return at_largest(x, *self.conv.affine(), padding=self.conv.padding)

    def normed(self, y: jax.Array) -> jax.Array:
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
        self,
        width: int,
        num_heads: int,
        *,
        stride: Pair,
        mode: str,
        select: str | None = None,
        init: Initializer = dense.WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        errors.divides("ConvAttention: num_heads", num_heads, width, f"{width=}")
        self.conv_q, self.conv_k, self.conv_v = (
            NormedConv(width, width, kernel=(3, 3), stride=s, mode=mode, groups=width, rngs=rngs)
            for s in ((1, 1), stride, stride)
        )
        self.q, self.k, self.v, self.proj = (dense.Linear(width, width, init=init, rngs=rngs) for _ in range(4))
        self.num_heads, self.stride, self.select = num_heads, stride, select

    def __call__(self, x: jax.Array, layout: Layout, *, train: bool = False) -> jax.Array:
        prefix, grid = split_prefix(x, layout)
        queries = self.conv_q(grid, train=train)
        keys, values = self.keys_and_values(grid, train=train)
        q, k, v = (
            head_by_head(linear(join_prefix(prefix, y)), self.num_heads)
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
            return _strongest(self, x)[0]
        return self.at(x, self.choice(x), train=train)

    def at(self, x: jax.Array, choice: Choice, *, train: bool = False) -> tuple[jax.Array, jax.Array]:
        """The maps of keys and of values at the chosen phase of each map."""
        x = shifts.roll(x, -shifts.phases(choice.index, self.stride))
        return self.conv_k.circular(x, train=train), self.conv_v.circular(x, train=train)

    def choice(self, x: jax.Array) -> Choice:
        """The phase of keys and values for maps [B, h, w, width].

        Both share it: with separate phases, a shift could pair keys with other values.  Batch norms use their running
        statistics here, in training too, so the choice depends on each image alone.
        """
        x = jax.lax.stop_gradient(x)
        if self.select == "output":
            return _strongest(self, x)[1]
        return shifts.strongest(polyphase.lattice_norms(x, self.stride))


@polyphase.differentiated_at_choice(lambda attention, x, choice: attention.at(x, choice))
def _strongest(attention: ConvAttention, x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Choice]:
    """Keys and values at the phase with the largest norm, by running statistics, and the choice."""
    parts = attention.conv_k, attention.conv_v
    kernels = tuple(part.conv.kernel[...] for part in parts)
    affines = tuple(part.affine() for part in parts)
    with jax.named_scope("linear"):
        y, norms = pool((x[:, None],) * 2, kernels, affines, stride=attention.stride, padding=parts[0].conv.padding)
    keys, values = (a[:, 0].astype(affine[0].dtype) for a, affine in zip(y, affines, strict=True))
    return (keys, values), shifts.strongest(norms)
