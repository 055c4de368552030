"""Equivariant layers, from fields to fields: the isotypic counterparts of `dense.py`.

Shapes are as in `Isotypic` with C = width / order: lines [4, *B, N, C], planes [2, *B, N, 2C]; for FLIP lines [2, *B,
N, C] alone.  Source: octic ViTs, Section 3.2; for FLIP, "Flopping for FLOPs" (arXiv 2502.05169).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike

from equivit import errors
from equivit.kernels.attention import weights
from equivit.kernels.d8_gelu import d8_gelu
from equivit.kernels.isotypic_attention import head_by_head, irrep_by_irrep, isotypic_attention
from equivit.kernels.isotypic_linear import add_to_first, linear
from equivit.kernels.norm import Norm, fork, normalise, standardise
from equivit.kernels.octic_linear_gelu import octic_feed_forward
from equivit.layers import dense
from equivit.layers.dense import WEIGHT_INIT, patchify, uniform, unpatchify
from equivit.layers.grid import Layout, check_images
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import FLIP, OCTIC, Group


def channels(name: str, width: int, group: Group) -> int:
    """Channels per component, width / order; ValueError if it is no integer or `group` is no group."""
    if not isinstance(group, Group):
        raise ValueError(f"{name}: group={errors.shown(group)} must be groups.OCTIC or groups.FLIP.")
    if width % group.order:
        raise ValueError(
            f"{name}: width {width} must be divisible by {group.order}, the order of the {group.name} group; "
            f"{errors.multiples(width, group.order)}."
        )
    return width // group.order


def check(name: str, x: Any, layer: Any) -> None:
    """Raise ValueError unless x is a field of the group and width of `layer`, with `lines` [i, C, ...] and `planes`."""
    if not isinstance(x, Isotypic) or (x.planes is None) != (layer.planes is None):
        raise fields.not_a_field(name, x, FLIP if layer.planes is None else OCTIC)
    if x.lines.shape[-1] != layer.lines.shape[1]:
        width = layer.lines.shape[1] * x.group.order
        raise ValueError(f"{name}: x of shape {list(x.shape)} has width {x.shape[-1]}; the layer reads width {width}.")


def line_names(group: Group) -> tuple[str, ...]:
    """Names of the 1-D irreps, for the logical tensors of a stacked leaf."""
    return tuple(irrep.name for irrep in group.lines)


class Linear(nnx.Module):
    """A linear map that commutes with the group.

    By Schur's lemma an irrep maps only to its own kind, so four C x C' matrices and one 2C x 2C' matrix, shared by both
    rows of E, replace a dense 8C x 8C' one: 64/12 = 5.33 times fewer multiplications (FLIP: two matrices, 2 times
    fewer).  Only the invariant component has a bias; a bias elsewhere would break the symmetry.

    Args:
      copies: copies of E in the output, 2 in a field; 1 for a layer that reads one (`Unpatchify`).
      init: draws the weights of each irrep; the bias starts at 0.

    Raises:
      ValueError: the order of the group does not divide a width.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        copies: int = 2,
        init: Initializer = WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        c, c_out = channels("Linear in", in_features, group), channels("Linear out", out_features, group)
        lines = init(rngs.params(), (len(group.lines), c, c_out))
        self.lines = nnx.Param(lines, tensors=line_names(group), product=True)
        planes = init(rngs.params(), (2 * c, copies * c_out)) if group.planes else None
        # Any: it is None exactly when fields have no planes, which types cannot express.
        self.planes: Any = None if planes is None else nnx.Param(planes, tensors="E", product=True)
        self.bias: Any = nnx.Param(jnp.zeros(c_out)) if bias else None

    def __call__(self, x: Isotypic) -> Isotypic:
        check("Linear", x, self)
        leaves, structure = jax.tree.flatten(x.astype(self.lines[...].dtype))
        return jax.tree.unflatten(structure, linear(tuple(leaves), self.arrays()))

    def arrays(self) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
        """The weights, one array per leaf of a field, and the bias."""
        return _leaves(self), None if self.bias is None else self.bias[...]

    def holding(self, weights: tuple[jax.Array, ...], bias: jax.Array | None) -> "Linear":
        """A copy of the map with these arrays."""
        copy = jax.tree.map(lambda a: a, self)
        copy.lines, copy.bias = self.lines.replace(weights[0]), None if bias is None else nnx.data(nnx.Param(bias))
        copy.planes = None if self.planes is None else self.planes.replace(weights[1])
        return copy


ROW_WEIGHTS = {"official": 0.5, "balanced": 2.0}  # weight of a row of E, by weighting


def constants(eps: float, weighting: str) -> Norm:
    """The constants of a layer norm; ValueError for an unknown weighting."""
    if weighting not in ROW_WEIGHTS:
        raise ValueError(f"LayerNorm: {weighting=} must be 'official' or 'balanced'.")
    return Norm(eps, ROW_WEIGHTS[weighting])


class LayerNorm(nnx.Module):
    """Centres each irrep and divides by one common standard deviation; then a scale per channel and an invariant bias.

    sigma^2 = (sum of weighted variances + eps) / order.  "official" weights a row of E by 1/2, as in the public code
    and its checkpoints.  E then counts as one 1-D irrep although it holds half of the channels, so a field of unit
    variance gets standard deviation sqrt(8/5).  "balanced" weights a row of E by 2, its share.  For FLIP both agree.

    Nothing is drawn: `rngs` is unused, here and in the other layers that start from constants.
    """

    def __init__(
        self,
        width: int,
        *,
        group: Group,
        eps: float = 1e-5,
        weighting: str = "official",
        rngs: nnx.Rngs | None = None,
    ):
        c = channels("LayerNorm", width, group)
        self.lines = nnx.Param(jnp.ones((len(group.lines), c)), tensors=line_names(group), norm=True)
        self.planes: Any = nnx.Param(jnp.ones(2 * c), tensors="E", norm=True) if group.planes else None
        self.bias = nnx.Param(jnp.zeros(c), norm=True)
        self.constants = constants(eps, weighting)

    def __call__(self, x: Isotypic) -> Isotypic:
        check("LayerNorm", x, self)
        leaves, structure = jax.tree.flatten(x)
        leaves = normalise(tuple(leaves), self.scales, self.bias[...], self.constants)
        return jax.tree.unflatten(structure, leaves)

    @property
    def scales(self) -> tuple[jax.Array, ...]:
        """The scales, one array per leaf of a field."""
        return _leaves(self)

    @property
    def standardise(self) -> "Standardise":
        """The norm without scale and bias."""
        return Standardise(self.constants)


@dataclasses.dataclass(frozen=True)
class Standardise:
    """A layer norm without scale and bias; see `LayerNorm`."""

    constants: Norm

    def __call__(self, x: Isotypic) -> Isotypic:
        leaves, structure = jax.tree.flatten(x)
        return jax.tree.unflatten(structure, standardise(tuple(leaves), self.constants))

    def fork(self, x: Isotypic, dtype: DTypeLike) -> tuple[Isotypic, Isotypic]:
        """x, and the standardised field in a dtype."""
        leaves, structure = jax.tree.flatten(x)
        x, z = (jax.tree.unflatten(structure, y) for y in fork(tuple(leaves), self.constants, dtype))
        return x, z


class LayerScale(nnx.Module):
    """A learned factor per channel, the same for both rows of E."""

    def __init__(self, width: int, init: float, *, group: Group, rngs: nnx.Rngs | None = None):
        c = channels("LayerScale", width, group)
        self.lines = nnx.Param(jnp.full((len(group.lines), c), init, float), tensors=line_names(group))
        self.planes: Any = nnx.Param(jnp.full(2 * c, init, float), tensors="E") if group.planes else None

    def __call__(self, x: Isotypic) -> Isotypic:
        check("LayerScale", x, self)
        planes, lines = None if x.planes is None else x.planes * self.planes[...], self.lines[...]
        return Isotypic(x.lines * lines.reshape(len(lines), *(1,) * (x.lines.ndim - 2), -1), planes)

    @property
    def scales(self) -> tuple[jax.Array, ...]:
        """The scales, one array per leaf of a field."""
        return _leaves(self)


def _leaves(layer: Any) -> tuple[jax.Array, ...]:
    """The parameters `lines` and, unless the group has only 1-D irreps, `planes`."""
    return (layer.lines[...],) if layer.planes is None else (layer.lines[...], layer.planes[...])


def branch_arrays(norm: LayerNorm, first: Linear, second: Linear, scale: LayerScale) -> list[jax.Array]:
    """The parameters of an octic branch, in the order of `octic_branch.Weights`."""
    arrays = [a[...] for part in (norm, first, second) for a in (part.lines, part.planes, part.bias)]
    return [*arrays, scale.lines[...], scale.planes[...]]


def gelu(x: Isotypic) -> Isotypic:
    """The exact GELU of the field's values on the group, which the group only permutes."""
    if not isinstance(x, Isotypic):
        raise fields.not_a_field("gelu", x)
    with jax.named_scope("activation"):
        if x.planes is not None:
            return Isotypic(*d8_gelu(x.lines, x.planes))
        return fields.from_regular(dense.gelu(fields.to_regular(x)))


class Mlp(nnx.Module):
    """Linear, GELU, linear."""

    MAPS = "fc1", "fc2"  # the first and the last

    def __init__(self, width: int, hidden: int, *, group: Group, init: Initializer = WEIGHT_INIT, rngs: nnx.Rngs):
        self.fc1 = Linear(width, hidden, group=group, init=init, rngs=rngs)
        self.fc2 = Linear(hidden, width, group=group, init=init, rngs=rngs)

    def __call__(self, x: Isotypic, layout: Layout | None = None) -> Isotypic:
        check("Mlp", x, self.fc1)
        if x.planes is None:
            return self.fc2(gelu(self.fc1(x)))
        field = tuple(jax.tree.leaves(x.astype(self.fc1.lines[...].dtype)))
        return Isotypic(*octic_feed_forward(field, self.fc1.arrays(), self.fc2.arrays()))


class Attention(nnx.Module):
    """Multi-head self-attention.

    Products of queries and keys are invariant, so weighted sums of values are equivariant.  The outputs of `qkv` are
    ordered (q | k | v) x heads x channels in each irrep; a head's vector is [A1 | A2 | B1 | B2 | E row 0 | E row 1], of
    width / num_heads channels.

    Raises:
      ValueError: `num_heads` is not a positive integer, or a head's channels are not divisible by the order of the
        group.
    """

    MAPS = "qkv", "proj"  # the first and the last

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        group: Group,
        qkv_bias: bool = True,
        init: Initializer = WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        channels("Attention", width, group)
        if not isinstance(num_heads, int) or num_heads < 1:
            raise ValueError(
                f"Attention: num_heads={errors.shown(num_heads)} must be a positive integer; times {group.order}, the "
                f"order of the {group.name} group, it must divide {width=}."
            )
        unit = num_heads * group.order
        if width % unit:
            raise ValueError(
                f"Attention: {width=} must be divisible by {num_heads=} times {group.order}, the order of the "
                f"{group.name} group; the nearest is {max(1, round(width / unit)) * unit}."
            )
        self.qkv = Linear(width, 3 * width, group=group, bias=qkv_bias, init=init, rngs=rngs)
        self.proj = Linear(width, width, group=group, init=init, rngs=rngs)
        self.num_heads = num_heads

    def __call__(self, x: Isotypic, layout: Layout | None = None) -> Isotypic:
        check("Attention", x, self.qkv)
        leaves, structure = jax.tree.flatten(x.astype(self.qkv.lines[...].dtype))
        leaves = isotypic_attention(tuple(leaves), self.qkv.arrays(), self.proj.arrays(), self.num_heads)
        return jax.tree.unflatten(structure, leaves)

    def weights(self, x: Isotypic, rows: int | None = None, layout: Layout | None = None) -> jax.Array:
        """The attention weights [*B, num_heads, rows, N] of the first `rows` tokens; None: of all tokens."""
        q, k, _ = self.heads(x)
        return weights(q[..., :rows, :], k)

    def heads(self, x: Isotypic) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q, k and v, each [*B, num_heads, N, head channels]."""
        return head_by_head(tuple(jax.tree.leaves(self.qkv(x))), self.num_heads)

    def projected(self, y: jax.Array) -> Isotypic:
        """The output projection of weighted sums of values [*B, num_heads, N, head channels]."""
        leaves = irrep_by_irrep(y, 1 if self.qkv.planes is None else 2)
        return self.proj(Isotypic(*leaves, *(None,) * (2 - len(leaves))))


class PatchEmbed(nnx.Module):
    """Image to field, by kernels that transform with the patch, unfolded from a fundamental domain.

    OCTIC learns six quarter kernels (one for each 1-D irrep and each copy of E), FLIP two half kernels.

    Shapes: [*B, H, W, in_channels] -> a field of (H/ph) (W/pw) tokens, in row-major order.

    Args:
      init: draws a dense kernel [ph pw in_channels, width], whose variance the unfolded kernels get; None: PyTorch's
        uniform for convolutions, which the bias always uses.

    Raises:
      ValueError: the patch cannot be folded: OCTIC needs a square patch of even side, at least 4 (at 2 pixels the
        kernels of A2 and B1 vanish); FLIP an even patch width.  Or images that `grid.check_images` refuses.
    """

    def __init__(
        self,
        patch_size: tuple[int, int],
        in_channels: int,
        width: int,
        *,
        group: Group,
        init: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        c, domain = channels("PatchEmbed", width, group), fundamental_domain(patch_size, group)
        bound = 1 / math.sqrt(in_channels * domain[0] * domain[1])
        shape = (*domain, in_channels, c)
        pixels = math.prod(shape[:-1])
        parts = patch_size[0] * patch_size[1] // math.prod(domain)  # unfolding divides the variance by their number

        def draw(kernels):
            if init is None:
                return uniform(rngs.params(), (kernels, *shape), bound)
            part = init(rngs.params(), (parts * pixels, width))[:pixels, : kernels * c]
            return math.sqrt(parts) * jnp.moveaxis(part.reshape(*shape[:-1], kernels, c), -2, 0)

        lines = draw(len(group.lines))
        self.lines = nnx.Param(lines, tensors=line_names(group), product=True)
        planes = draw(2) if group.planes else None
        self.planes = nnx.Param(planes, tensors=("E1", "E2"), product=True) if group.planes else None
        self.bias = nnx.Param(uniform(rngs.params(), (c,), bound))
        self.patch_size, self.group = patch_size, group

    def kernels(self) -> Isotypic:
        """The unfolded kernels: lines [4, ph, pw, in, C], planes [2, ph, pw, in, 2C]."""
        lines, planes = self.lines[...], None
        shape = (*self.patch_size, lines.shape[-2], -1)
        if self.planes is not None:  # concatenate the two copies of E on the channel axis
            planes = jnp.moveaxis(self.planes[...], 0, -2)
            planes = planes.reshape(1, *planes.shape[:2], -1)
        full = fields.unfold(Isotypic(lines.reshape(*lines.shape[:3], -1), planes), _kernel_scale(self.group))
        return jax.tree.map(lambda leaf: leaf.reshape(len(leaf), *shape), full)

    def __call__(self, images: jax.Array) -> Isotypic:
        with jax.named_scope("linear"):
            full = self.kernels()
            check_images(images, full.lines.shape[-2], self.patch_size)
            patches = patchify(images, self.patch_size).astype(full.dtype)
            size = patches.shape[-1]
            y = jax.tree.map(lambda k: jnp.einsum("...p,ipc->i...c", patches, k.reshape(len(k), size, -1)), full)
            y = y.astype(self.bias[...].dtype)
            return Isotypic(add_to_first(y.lines, self._bias()), y.planes)

    def _bias(self) -> jax.Array:
        """The bias of the invariant component, scaled like the kernels for FLIP, as in the official code."""
        return self.bias[...] if self.group is OCTIC else _kernel_scale(FLIP)(1) * self.bias[...]

    def affine(self) -> tuple[jax.Array, jax.Array]:
        """The kernel [ph, pw, in, width] and the bias [width] of the same map to dense tokens, A1 to E22."""
        kernel = fields.to_dense(self.kernels())
        return kernel, jnp.pad(self._bias(), (0, kernel.shape[-1] - len(self.bias[...])))

    def filters(self) -> dict[str, jax.Array]:
        """The unfolded kernels [ph, pw, in, C] by feature type: each 1-D irrep, and each copy of E.

        A copy of E gives the first of its two rows; the second is the same kernel, rotated.
        """
        full = self.kernels()
        found = dict(zip(line_names(self.group), full.lines, strict=True))
        if full.planes is not None:
            found["E, copy 1"], found["E, copy 2"] = jnp.split(full.planes[0], 2, axis=-1)
        return found


def fundamental_domain(size: tuple[int, int], group: Group, name: str = "patch size") -> tuple[int, int]:
    """The size of the part of a grid whose transforms cover the grid: a quarter (OCTIC) or the left half (FLIP)."""
    h, w = size
    if group is FLIP:
        if w % 2:
            raise ValueError(f"{name} {h}x{w}: the width must be even for the flip group; {errors.multiples(w, 2)}.")
        return h, w // 2
    if h != w or h % 2 or h < 4:
        lower = max(4, h // 2 * 2)
        near = f"{lower}x{lower} and {lower + 2}x{lower + 2}"
        raise ValueError(
            f"{name} {h}x{w}: must be square, even and at least 4 for the octic group; nearest are {near}."
        )
    return h // 2, w // 2


def _kernel_scale(group: Group) -> Callable[[int], float]:
    """Factors that give an unfolded kernel the variance of an unconstrained one."""
    if group is FLIP:
        return {1: math.sqrt(0.5)}.__getitem__
    return {1: math.sqrt(2) / 4, 2: 0.5}.__getitem__


class Unpatchify(nnx.Module):
    """Field to image: a linear map to the pixels of a fundamental domain of the patch, and all their transforms.

    Every equivariant linear map from a token to its patch has this form: it is the transpose of `PatchEmbed`.

    Shapes: field of N = h w tokens, grid (h, w) -> [*B, h ph, w pw, out_channels].

    Args:
      copies: copies of E that the linear map computes.  Pixels depend on the first alone; the official layer computes
        2, so half of its weights of E have no effect.
    """

    def __init__(
        self,
        width: int,
        patch_size: tuple[int, int],
        out_channels: int,
        *,
        group: Group,
        copies: int = 1,
        init: Initializer = WEIGHT_INIT,
        rngs: nnx.Rngs,
    ):
        channels("Unpatchify", width, group)
        self.domain = fundamental_domain(patch_size, group)
        pixels = math.prod(self.domain) * out_channels * group.order
        self.linear = Linear(width, pixels, group=group, copies=copies, init=init, rngs=rngs)
        self.patch_size, self.out_channels = patch_size, out_channels

    def __call__(self, x: Isotypic, grid: tuple[int, int]) -> jax.Array:
        return unpatchify(self.patches(x), grid, self.patch_size)

    def patches(self, x: Isotypic) -> jax.Array:
        """The pixels of each token's patch, [*B, N, ph pw out_channels], in `patchify`'s order."""
        x = self.linear(x)
        group, h, w = x.group, *self.domain
        pad = [(0, 0)] * (x.lines.ndim - 2) + [(0, self.patch_size[0] - h), (0, self.patch_size[1] - w), (0, 0)]
        patches: Any = 0
        for g in group.elements:
            part = fields.act_on_channels(group.inverse(g), x)
            values = part.lines.sum(0) * math.sqrt(1 / 2 if group is FLIP else 1 / 16)
            if part.planes is not None:
                values = values + part.planes[0, ..., : values.shape[-1]] * (math.sqrt(2) / 4)
            values = values.reshape(*values.shape[:-1], h, w, self.out_channels)
            patches = patches + fields.act_on_image(g, jnp.pad(values, pad))
        return jax.lax.collapse(patches, -3)
