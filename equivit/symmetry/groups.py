"""The two groups of the pixel grid: FLIP (order 2, left-right mirror) and OCTIC (order 8, with quarter turns).

Everything follows from generators and one convention.

Elements are words in r (a quarter turn, anti-clockwise) and m (left-right mirror); a word m..r.. is a product, so "mr"
turns first, then mirrors.  The matrices of the irreps are given only for r and m (octic ViTs, Example 3.1).

The regular representation acts on functions phi on the group by (g phi)(h) = phi(g^-1 h).  Its Fourier matrix maps
isotypic components to those values.  The component of an irrep D paired with a seed vector w contributes
phi(h) = c <x, D(h) w>; c makes the matrix orthonormal.  A 1-D irrep has the seed 1; the two copies of the octic E have
the seeds (1, 1) and (1, -1), so all entries of the octic matrix are +-sqrt(2)/4 (Appendix A).
"""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Irrep:
    """An irreducible representation by its generators' matrices [d, d] and the seed vectors of its d copies."""

    name: str
    generators: dict[str, np.ndarray]
    seeds: tuple[np.ndarray, ...]

    @functools.cached_property
    def dimension(self) -> int:
        """Size of the matrices."""
        return len(self.generators["m"])

    @functools.cache  # noqa: B019  (only six instances, which live as long as the process)
    def __call__(self, element: str) -> np.ndarray:
        """The matrix of a word: letters apply from right to left."""
        letters = (self.generators[letter] for letter in element if letter != "e")
        return functools.reduce(np.matmul, letters, np.eye(self.dimension))


@dataclasses.dataclass(frozen=True)
class Group:
    """A finite group of the pixel grid.

    Attributes:
      name: "flip" or "octic".
      elements: all words, the identity "e" first.
      regular_order: the element at each position of a vector of the regular representation.
      irreps: in the order of the isotypic components.
    """

    name: str
    elements: tuple[str, ...]
    regular_order: tuple[str, ...]
    irreps: tuple[Irrep, ...]

    @functools.cached_property
    def order(self) -> int:
        """Number of elements."""
        return len(self.elements)

    @functools.cached_property
    def lines(self) -> tuple[Irrep, ...]:
        """The one-dimensional irreps, the trivial one first."""
        return tuple(irrep for irrep in self.irreps if irrep.dimension == 1)

    @functools.cached_property
    def planes(self) -> tuple[Irrep, ...]:
        """The two-dimensional irreps: (E,) or ()."""
        return tuple(irrep for irrep in self.irreps if irrep.dimension == 2)

    def check(self, element: str) -> str:
        """Return `element`; ValueError if the group does not have it."""
        if element not in self.elements:
            raise ValueError(f"group {self.name}: element {element!r} is not one of {', '.join(self.elements)}.")
        return element

    def product(self, g: str, h: str) -> str:
        """The element that applies h first, then g."""
        return self._by_key[_key(irrep(self.check(g)) @ irrep(self.check(h)) for irrep in self.irreps)]

    def inverse(self, g: str) -> str:
        """The element that undoes g."""
        return next(h for h in self.elements if self.product(g, h) == "e")

    def regular(self, g: str) -> np.ndarray:
        """Permutation matrix of g on the regular representation, in `regular_order`."""
        matrix, position = np.zeros((self.order, self.order)), {h: i for i, h in enumerate(self.regular_order)}
        for i, h in enumerate(self.regular_order):
            matrix[i, position[self.product(self.inverse(g), h)]] = 1
        return matrix

    @functools.cached_property
    def fourier(self) -> np.ndarray:
        """Q [order, order], orthonormal: regular = Q isotypic.  Columns: each irrep, copy by copy, row by row."""
        columns = []
        for irrep in self.irreps:
            for seed in irrep.seeds:
                values = np.stack([irrep(h) @ seed for h in self.regular_order])
                columns.extend((values / np.linalg.norm(values[:, 0])).T)
        return np.stack(columns, axis=1)

    @functools.cached_property
    def _by_key(self) -> dict[bytes, str]:
        return {_key(irrep(g) for irrep in self.irreps): g for g in self.elements}

    def __reduce__(self):
        return _named, (self.name,)  # copies are the same object: code compares groups by `is`

    def __hash__(self):
        return hash(self.name)

    def __eq__(self, other):
        return isinstance(other, Group) and self.name == other.name


def _named(name: str) -> Group:
    return GROUPS[name]


def _key(matrices: Iterable[np.ndarray]) -> bytes:
    """The matrices of all irreps, which determine an element."""
    return b"".join(np.rint(matrix).astype(np.int8).tobytes() for matrix in matrices)


def _line(name: str, r: int, m: int) -> Irrep:
    return Irrep(name, {"r": np.array([[r]]), "m": np.array([[m]])}, (np.array([1.0]),))


OCTIC = Group(
    name="octic",
    elements=("e", "r", "rr", "rrr", "m", "mr", "mrr", "mrrr"),
    regular_order=("e", "rrr", "rr", "r", "m", "mrrr", "mrr", "mr"),
    irreps=(
        _line("A1", r=1, m=1),
        _line("A2", r=1, m=-1),
        _line("B1", r=-1, m=1),
        _line("B2", r=-1, m=-1),
        Irrep(
            "E",
            {"r": np.array([[0, -1], [1, 0]]), "m": np.array([[-1, 0], [0, 1]])},
            (np.array([1.0, 1.0]), np.array([1.0, -1.0])),
        ),
    ),
)

FLIP = Group(
    name="flip",
    elements=("e", "m"),
    regular_order=("e", "m"),
    irreps=(_line("sym", r=1, m=1), _line("asym", r=1, m=-1)),
)

GROUPS = {group.name: group for group in (FLIP, OCTIC)}
