"""Fields split by irrep, and how a group acts on images, token grids and fields.

NumPy arrays stay on the host: acting on them compiles nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from equivit import errors
from equivit.symmetry.groups import FLIP, OCTIC, Group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Isotypic:
    """A field whose channels carry C copies of the regular representation, split by irrep.

    Batch, tokens and channels are the last three axes of every leaf, as in a dense array; the leading axis counts the
    irreps of one kind, so residual sums, token gathers and sharding map over leaves.

    Operators keep the symmetry: x + y, x - y, -x, 2 * x, x / 2, x[:, 1:] and x.mean().  Others raise an error.

    Attributes:
      lines: [4, *B, N, C], the 1-D irreps A1, A2, B1, B2 (FLIP: [2, *B, N, C], sym and asym).
      planes: [2, *B, N, 2C], the two rows of E, each with the channels of copy 1, then of copy 2 (FLIP: None).
    """

    lines: jax.Array
    planes: jax.Array | None

    @property
    def group(self) -> Group:
        """The group whose irreps the field is split by."""
        return FLIP if self.planes is None else OCTIC

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the entries."""
        return self.lines.dtype

    def astype(self, dtype: DTypeLike) -> "Isotypic":
        """The field cast to `dtype`."""
        return jax.tree.map(lambda leaf: leaf.astype(dtype), self)

    def __add__(self, other: "Isotypic") -> "Isotypic":
        return jax.tree.map(jnp.add, self, _addend(self, "+", other))

    def __sub__(self, other: "Isotypic") -> "Isotypic":
        return jax.tree.map(jnp.subtract, self, _addend(self, "-", other))

    def __radd__(self, other: Any) -> "Isotypic":
        return _addend(self, "+", other)  # an error: fields have been added by now

    def __rsub__(self, other: Any) -> "Isotypic":
        return _addend(self, "-", other)

    def __neg__(self) -> "Isotypic":
        return jax.tree.map(jnp.negative, self)

    def __mul__(self, factor: Any) -> "Isotypic":
        factor = _scalar(self, factor)
        return jax.tree.map(lambda leaf: leaf * factor, self)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Isotypic":
        divisor = _scalar(self, divisor)
        return jax.tree.map(lambda leaf: leaf / divisor, self)

    def __getitem__(self, index: Any) -> "Isotypic":
        """Index batch and tokens as in a dense array [*B, N, D]; channels stay whole.

        Raises:
          ValueError: the index reaches the channels.
        """
        entries = index if isinstance(index, tuple) else (index,)
        axes = sum(_indexed(one) for one in entries)
        reached = axes >= len(self.shape) or any(one is ... for one in entries[:-1])
        if reached and not (isinstance(entries[-1], slice) and entries[-1] == slice(None)):
            raise ValueError(
                f"{self.group.name} field of shape {list(self.shape)}: an index of channels is not equivariant; index "
                "batch and tokens, as in x[:, 1:] or x[..., :1, :]."
            )
        return jax.tree.map(jax.vmap(lambda part: part[index]), self)

    __iter__ = None  # else Python would iterate by __getitem__

    def mean(self, axis: int = -2) -> "Isotypic":
        """The mean over an axis of the dense array [*B, N, D], by default over its tokens.

        Raises:
          ValueError: `axis` is the channels, or there is no such axis.
        """
        axes = len(self.shape)
        if not isinstance(axis, int) or not -axes <= axis < axes or axis % axes == axes - 1:
            raise ValueError(
                f"{self.group.name} field of shape {list(self.shape)}: mean over axis {errors.shown(axis)} is not "
                "equivariant or there is no such axis; take a batch axis or -2, the tokens."
            )
        return jax.tree.map(lambda leaf: leaf.mean(axis % axes - axes), self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the equivalent dense array: [*B, N, D]."""
        return (*self.lines.shape[1:-1], self.lines.shape[-1] * self.group.order)

    __array_ufunc__ = None  # NumPy's numbers and arrays leave their operators to this class


def not_a_field(name: str, x: Any, group: Group | None = None) -> ValueError:
    """The error of a layer, of `group` if it is known, for an input x that is not a field of the group."""
    if isinstance(x, Isotypic) and group is not None:
        return ValueError(f"{name}: x is a field of the {x.group.name} group; the layer is of the {group.name} group.")
    make = f"fields.from_dense(x, {'group' if group is None else f'groups.{group.name.upper()}'})"
    return ValueError(f"{name}: x is {_kind(x)} and must be a field (Isotypic), such as {make}.")


def _kind(x: Any) -> str:
    return f"an array {list(x.shape)}" if hasattr(x, "shape") else type(x).__name__


def _addend(field: Isotypic, sign: str, other: Any) -> Isotypic:
    """`other`, if it is a field of the same group and rank; else ValueError."""
    if not isinstance(other, Isotypic) or field.group is not other.group:
        kind = f"{other.group.name} field" if isinstance(other, Isotypic) else type(other).__name__
        what, do = ("sum", "add") if sign == "+" else ("difference", "subtract")
        raise ValueError(
            f"{field.group.name} field {sign} {kind}: the {what} is not equivariant; {do} fields of the same group."
        )
    if other.lines.ndim != field.lines.ndim:  # leaves would broadcast an axis of irreps against one of the batch
        raise ValueError(
            f"{field.group.name} fields of shapes {list(field.shape)} {sign} {list(other.shape)}: both must have as "
            "many axes; position.add_positions adds position embeddings to a batch."
        )
    return other


def _indexed(entry: Any) -> int:
    """The number of axes that an entry of an index takes: one, or as many as a mask has."""
    if entry is None or entry is ...:
        return 0
    return entry.ndim if getattr(entry, "dtype", None) == np.bool_ else 1


def _scalar(field: Isotypic, factor: Any) -> Any:
    """`factor`, if it is one number; else ValueError."""
    if isinstance(factor, Isotypic) or np.ndim(factor) or not isinstance(factor, int | float | np.generic | jax.Array):
        kind = f"a {factor.group.name} field" if isinstance(factor, Isotypic) else _kind(factor)
        raise ValueError(
            f"{field.group.name} field times {kind}: the product is not equivariant; multiply by one number, or use "
            "isotypic.LayerScale."
        )
    return factor


Tokens = jax.Array | Isotypic  # dense tokens [*B, N, C], or a field
TokensT = TypeVar("TokensT", bound=Tokens)


def to_components(field: Isotypic) -> jax.Array:
    """All components on a leading axis, in the order of the Fourier matrix: [8, *B, N, C], A1 A2 B1 B2 E11 E12 E21 E22.

    Exy is copy x, row y of E.
    """
    if field.planes is None:
        return field.lines
    xp = _namespace(field.planes)
    return xp.concatenate([field.lines, *xp.split(field.planes, 2, axis=-1)])


def from_components(components: jax.Array) -> Isotypic:
    """The inverse of `to_components`: [8 or 2, *B, N, C] to a field; ValueError for another number of components."""
    if len(components) == FLIP.order:
        return Isotypic(components, None)
    if len(components) != OCTIC.order:
        raise ValueError(
            f"from_components: {len(components)} components {list(components.shape)} must be {FLIP.order} of the flip "
            f"group or {OCTIC.order} of the octic group, on the first axis."
        )
    return Isotypic(components[:4], _namespace(components).concatenate([components[4:6], components[6:8]], axis=-1))


def to_dense(field: Isotypic) -> jax.Array:
    """The components concatenated on the channel axis: [*B, N, D], [A1 | A2 | ... | E22].  Drops the group."""
    concatenate = _namespace(field.lines).concatenate
    if field.planes is None:
        return concatenate(list(field.lines), axis=-1)
    channels = field.lines.shape[-1]
    copies = [row[..., c : c + channels] for c in (0, channels) for row in field.planes]
    return concatenate([*field.lines, *copies], axis=-1)


def from_dense(dense: jax.Array, group: Group) -> Isotypic:
    """The inverse of `to_dense`: [*B, N, D] to a field of `group`."""
    if dense.shape[-1] % group.order:
        raise ValueError(
            f"from_dense: width {dense.shape[-1]} must be divisible by {group.order}, the order of {group.name}."
        )
    xp = _namespace(dense)
    return from_components(xp.stack(xp.split(dense, group.order, axis=-1)))


def to_regular(field: Isotypic) -> jax.Array:
    """Values on the group, [order, *B, N, C], by the inverse Fourier transform; g permutes the leading axis."""
    components = to_components(field)
    return jnp.einsum("ri,i...->r...", field.group.fourier.astype(components.dtype), components)


def from_regular(values: jax.Array) -> Isotypic:
    """The inverse of `to_regular`: the Fourier transform."""
    group = FLIP if len(values) == FLIP.order else OCTIC
    return from_components(jnp.einsum("ri,r...->i...", group.fourier.astype(values.dtype), values))


def invariant_part(array: jax.Array, group: Group) -> Isotypic:
    """The field whose invariant component is `array` [*B, N, C] and whose other components are zero."""
    lines = jnp.zeros((len(group.lines), *array.shape), array.dtype).at[0].set(array)
    planes = jnp.zeros((2, *array.shape[:-1], 2 * array.shape[-1]), array.dtype) if group.planes else None
    return Isotypic(lines, planes)


def take_invariant(field: Isotypic) -> jax.Array:
    """The invariant component: [*B, N, C]."""
    return field.lines[0]


def rows(x: TokensT, start: int, stop: int | None = None) -> TokensT:
    """Tokens start <= i < stop of an array or a field."""
    return jax.tree.map(lambda leaf: leaf[..., start:stop, :], x)


def join(*parts: TokensT) -> TokensT:
    """Concatenate arrays or fields along the token axis."""
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=-2), *parts)


def act_on_grid(element: str, array: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Rotate and mirror a pixel or token grid; `axes` are (height, width).  A quarter turn swaps their sizes."""
    for letter in reversed(element):
        array = {"e": lambda array, axes: array, "r": _turn, "m": _mirror}[letter](array, axes)
    return array


def act_on_torus(element: str, array: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """As `act_on_grid`, about a fixed first entry: for distances on a torus and phases of a patch lattice."""
    for letter in reversed(element):
        if letter == "r":
            array = _namespace(array).roll(_turn(array, axes), 1, axes[0])
        elif letter == "m":
            array = _namespace(array).roll(_mirror(array, axes), 1, axes[1])
    return array


def act_on_image(element: str, images: jax.Array) -> jax.Array:
    """Rotate and mirror images [*B, H, W, C]."""
    return act_on_grid(element, images, (images.ndim - 3, images.ndim - 2))


def act_on_tokens(element: str, tokens: jax.Array, grid: tuple[int, int], prefix: int = 0) -> jax.Array:
    """Move row-major tokens [*B, prefix + h w, C] of a grid (h, w); the first `prefix` tokens stay in place.

    Raises:
      ValueError: the number of tokens is not prefix + h w.
    """
    h, w = grid
    if tokens.shape[-2] != prefix + h * w:
        raise ValueError(f"act_on_tokens: {tokens.shape[-2]} tokens do not match {prefix=} plus a {h}x{w} grid.")
    head, patches = tokens[..., :prefix, :], tokens[..., prefix:, :]
    patches = patches.reshape(*tokens.shape[:-2], h, w, tokens.shape[-1])
    moved = act_on_image(element, patches)
    moved = moved.reshape(*tokens.shape[:-2], h * w, tokens.shape[-1])
    return _namespace(tokens).concatenate([head, moved], axis=-2)


def act_on_channels(element: str, field: Isotypic) -> Isotypic:
    """Apply each irrep's matrix; tokens stay where they are."""
    group = field.group
    group.check(element)
    signs = np.array([irrep(element)[0, 0] for irrep in group.lines], field.dtype)
    lines = field.lines * signs.reshape(-1, *(1,) * (field.lines.ndim - 1))
    if field.planes is None:
        return Isotypic(lines, None)
    (plane,) = group.planes
    first, second = plane(element).T.astype(field.dtype).reshape(2, 2, *(1,) * (field.planes.ndim - 1))
    return Isotypic(lines, first * field.planes[0] + second * field.planes[1])


def act(element: str, field: Isotypic, grid: tuple[int, int], prefix: int = 0) -> Isotypic:
    """The group action on a field over a token grid (h, w): tokens move like pixels, channels follow their irreps.

    The first `prefix` tokens (class, registers) have no position in the grid: only their channels change.

    Raises:
      ValueError: the group does not have the element, or the number of tokens is not prefix + h w.
    """
    field.group.check(element)
    moved = jax.tree.map(lambda leaf: act_on_tokens(element, leaf, grid, prefix), field)
    return act_on_channels(element, moved)


def unfold(part: Isotypic, scale: Callable[[int], float] = lambda dimension: 1.0) -> Isotypic:
    """Extend a map from a fundamental domain to the whole grid, invariant under the group.

    The part is padded with zeros and summed over the group: full = sum_g D(g) g(part).

    Args:
      part: components on the fundamental domain: OCTIC, the upper left quarter [*, q, q, C] of a square, with
        only the first row of E, [1, q, q, 2C]; FLIP, the left half [*, h, w/2, C].
      scale: maps the dimension of an irrep to its factor.

    Returns:
      The field over the whole grid, [*, H, W, C], with both rows of E.

    Source: octic ViTs, Eq. 11 and Section 3.2.1.
    """

    def padded(leaf):
        _, h, w, _ = leaf.shape
        return jnp.pad(leaf, ((0, 0), (0, h if part.group is OCTIC else 0), (0, w), (0, 0)))

    full = _sum_over_group(jax.tree.map(padded, part), act_on_grid)
    return Isotypic(full.lines * scale(1), None if full.planes is None else full.planes * scale(2))


def symmetric(part: Isotypic) -> Isotypic:
    """Average a map on a torus over the group, about its first entry, to an equivariant map of distances.

    Args:
      part: OCTIC, [4, M, M, C] and, with only the first row of E, [1, M, M, 2C]; FLIP, [2, h, w, C].

    Returns:
      The field R with R[g d] = g R[d] for each distance d, with both rows of E.
    """
    full = _sum_over_group(part, act_on_torus)
    return jax.tree.map(lambda leaf: leaf / full.group.order, full)


def _sum_over_group(part: Isotypic, move: Callable) -> Isotypic:
    """sum_g D(g) g(part), where `move` applies g to the grid."""
    group = part.group
    lines: Any = sum(
        move(g, part.lines, (1, 2))
        * np.array([irrep(g)[0, 0] for irrep in group.lines], part.dtype).reshape(-1, 1, 1, 1)
        for g in group.elements
    )
    if part.planes is None:
        return Isotypic(lines, None)
    (plane,) = group.planes
    planes: Any = sum(
        move(g, part.planes, (1, 2)) * plane(g)[:, 0].astype(part.dtype).reshape(2, 1, 1, 1) for g in group.elements
    )
    return Isotypic(lines, planes)


def _turn(array: jax.Array, axes: tuple[int, int]) -> jax.Array:
    return _namespace(array).rot90(array, 1, axes)


def _mirror(array: jax.Array, axes: tuple[int, int]) -> jax.Array:
    return _namespace(array).flip(array, axes[1])


def _namespace(array) -> Any:
    """numpy for NumPy arrays, else jax.numpy."""
    return np if isinstance(array, np.ndarray) else jnp
