"""Tables of foreign names and logical tensors, one per format, used to read and write files.

A pair only moves entries (transposes, reshapes, splits), so a round trip is bit-exact.  `Joined` is the reverse:
several foreign tensors form one of ours.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from equivit import logical
from equivit.models.vit.config import ViTConfig


@dataclasses.dataclass(frozen=True)
class Pair:
    """One foreign tensor and its logical tensors.

    Attributes:
      theirs: the foreign name.
      ours: the logical names.
      read: foreign tensor -> our tensors.
      write: our tensors -> foreign tensor.
    """

    theirs: str
    ours: tuple[str, ...]
    read: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    write: Callable[..., np.ndarray]

    @property
    def names(self) -> tuple[str, ...]:
        """The foreign names."""
        return (self.theirs,)

    def written(self, *ours: np.ndarray) -> tuple[np.ndarray, ...]:
        """Our tensors -> foreign tensors, in the order of `names`."""
        return (self.write(*ours),)


@dataclasses.dataclass(frozen=True)
class Joined:
    """One logical tensor whose last axis a foreign format splits into equal parts: matrices [out, in] or vectors [out].

    Attributes:
      names: the foreign names of the parts.
      ours: the logical name, alone in a tuple.
    """

    names: tuple[str, ...]
    ours: tuple[str]

    def read(self, *parts: np.ndarray) -> tuple[np.ndarray]:
        """Foreign tensors -> our tensor."""
        return (np.concatenate([part.T for part in parts], axis=-1),)

    def written(self, whole: np.ndarray) -> tuple[np.ndarray, ...]:
        """Our tensor -> foreign tensors."""
        return tuple(part.T for part in np.split(whole, len(self.names), axis=-1))


@dataclasses.dataclass(frozen=True)
class Constant:
    """A foreign tensor without a counterpart in our model.

    Attributes:
      name: the foreign name.
      value: the value to write.
      what: a description for messages.
      fixed: whether a file must have exactly this value; a tensor without effect on outputs may have any.
    """

    name: str
    value: np.ndarray
    what: str
    fixed: bool = True


@dataclasses.dataclass(frozen=True)
class Table:
    """All tensors of one kind of file, or of a part of it; `+` joins parts.

    Attributes:
      pairs: a `Pair` or `Joined` for each tensor.
      constants: tensors without a counterpart in our model.
    """

    pairs: Sequence[Pair | Joined]
    constants: list[Constant] = dataclasses.field(default_factory=list)

    def __add__(self, other: "Table") -> "Table":
        return Table([*self.pairs, *other.pairs], [*self.constants, *other.constants])

    def inside(self, module: str) -> "Table":
        """The same table with our tensors inside a module of the model."""
        pairs = [dataclasses.replace(p, ours=tuple(f"{module}.{name}" for name in p.ours)) for p in self.pairs]
        return dataclasses.replace(self, pairs=pairs)


def named(theirs: str, last: str) -> str:
    """The foreign name of a tensor of a map or norm: "x", "bias" -> "x.bias"; "x_{}", "bias" -> "x_bias"."""
    return theirs.format(last) if "{}" in theirs else f"{theirs}.{last}"


def moved(theirs: str, ours: str, axes: tuple[int, ...]) -> Pair:
    """Our tensor is theirs with permuted axes: (1, 0) for a matrix, (2, 3, 1, 0) for a kernel OIHW."""
    return Pair(theirs, (ours,), lambda x: (x.transpose(axes),), lambda x: x.transpose(np.argsort(axes)))


def same(theirs: str, ours: str, ones: int = 0) -> Pair:
    """Our tensor is theirs without its first `ones` axes, of size one."""
    return Pair(theirs, (ours,), lambda x: (x.reshape(x.shape[ones:]),), lambda x: x.reshape(*(1,) * ones, *x.shape))


def grid(theirs: str, ours: str, size: tuple[int, int], ones: int = 1) -> Pair:
    """A table of positions: [h w, C] after `ones` axes of size one <-> [h, w, C]."""
    lead = (1,) * ones
    return Pair(theirs, (ours,), lambda x: (x.reshape(*size, -1),), lambda x: x.reshape(*lead, -1, x.shape[-1]))


def linear(theirs: str, ours: str, *, bias: bool = True) -> list[Pair]:
    """A matrix [out, in] and its bias."""
    pairs = [moved(named(theirs, "weight"), f"{ours}.weight", (1, 0)), same(named(theirs, "bias"), f"{ours}.bias")]
    return pairs if bias else pairs[:1]


def joined(theirs: tuple[str, ...], ours: str, *, bias: bool = True) -> list[Joined]:
    """Matrices [out, in] and biases that form one of our linear maps, such as queries, keys and values."""
    lasts = ("weight", "bias")[: 1 + bias]
    return [Joined(tuple(named(name, last) for name in theirs), (f"{ours}.{last}",)) for last in lasts]


def norm(theirs: str, ours: str) -> list[Pair]:
    """A dense layer norm."""
    return [same(named(theirs, "weight"), f"{ours}.scale"), same(named(theirs, "bias"), f"{ours}.bias")]


def conv(theirs: str, ours: str, *, bias: bool) -> list[Pair]:
    """A kernel OIHW and its bias."""
    pairs = [
        moved(named(theirs, "weight"), f"{ours}.kernel", (2, 3, 1, 0)),
        same(named(theirs, "bias"), f"{ours}.bias"),
    ]
    return pairs if bias else pairs[:1]


def batch_norm(theirs: str, ours: str) -> list[Pair]:
    """A batch norm with its running statistics."""
    statistics = (("running_mean", "mean"), ("running_var", "variance"))
    return [*norm(theirs, ours), *(same(named(theirs, a), f"{ours}.{b}") for a, b in statistics)]


def isotypic_norm(theirs: str, ours: str, irreps: Iterable[str]) -> list[Pair]:
    """A layer norm between fields."""
    return [*isotypic_scale(f"{theirs}.scaling", ours, irreps), same(f"{theirs}.scaling.beta", f"{ours}.bias")]


def isotypic_scale(theirs: str, ours: str, irreps: Iterable[str]) -> list[Pair]:
    """One factor per channel of each irrep."""
    return [same(f"{theirs}.alpha_{irrep}", f"{ours}.{irrep}") for irrep in irreps]


def isotypic_block(
    index: int, config: ViTConfig, irreps: tuple[str, ...], stem: str, scales: tuple[str, str]
) -> list[Pair]:
    """An isotypic block; `stem` is the format's name of an irrep's linear map; the trivial irrep comes first."""
    at = f"blocks.{index}"

    def maps(theirs, ours, bias=True):
        pairs = [moved(f"{at}.{theirs}.{stem}_{i}.weight", f"{at}.{ours}.{i}", (1, 0)) for i in irreps]
        return [*pairs, same(f"{at}.{theirs}.{stem}_{irreps[0]}.bias", f"{at}.{ours}.bias")] if bias else pairs

    pairs = isotypic_norm(f"{at}.norm1", f"{at}.norm1", irreps) + isotypic_norm(f"{at}.norm2", f"{at}.norm2", irreps)
    pairs += maps("attn.qkv", "attention.qkv", config.qkv_bias) + maps("attn.proj", "attention.proj")
    pairs += maps("mlp.fc1", "mlp.fc1") + maps("mlp.fc2", "mlp.fc2")
    if config.layer_scale is not None:
        for i, scale in enumerate(scales, 1):
            pairs += isotypic_scale(f"{at}.{scale}", f"{at}.scale{i}", irreps)
    return pairs


def check(table: Table, names: Iterable[str], what: str) -> None:
    """ValueError unless the table has exactly the logical tensors of these names."""
    known = {name for pair in table.pairs for name in pair.ours}
    if wrong := sorted(known ^ set(names)):
        raise ValueError(f"{what}: the format has no such model; no counterpart for {', '.join(wrong)}.")


def read(
    table: Table, state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], what: str
) -> dict[str, np.ndarray]:
    """Convert foreign tensors to logical ones in float32; `shapes` are the shapes of the model's logical tensors.

    Raises:
      ValueError: one message with all tensors that are missing, unexpected, misshapen, not finite in float32, or wrong
        constants.
    """
    expected = {name: shape for pair in table.pairs for name, shape in _foreign_shapes(pair, shapes).items()}
    expected |= {constant.name: constant.value.shape for constant in table.constants}
    fits = {name for name in expected.keys() & state.keys() if state[name].shape == expected[name]}
    wrong = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "misshapen": [
            f"{name} {state[name].shape}, expected {shape}"
            for name, shape in expected.items()
            if name in state and name not in fits
        ],
        "not floating point": [
            f"{name} ({state[name].dtype})"
            for pair in table.pairs
            for name in pair.names
            if name in fits and not jnp.issubdtype(state[name].dtype, jnp.floating)
        ],
        "not finite, as after a run that diverged": [
            name for pair in table.pairs for name in pair.names if name in fits and not logical.is_finite(state[name])
        ],
        "wrong constants": [
            f"{c.name}, which must be {c.what}"
            for c in table.constants
            if c.name in fits and c.fixed and not np.array_equal(state[c.name], c.value)
        ],
    }
    if any(wrong.values()):
        lines = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        raise ValueError(f"{what}: the tensors do not fit.  {lines}.")
    result = {}
    for pair in table.pairs:
        theirs = (state[name].astype(np.float32) for name in pair.names)
        result |= zip(pair.ours, pair.read(*theirs), strict=True)
    return result


def write(table: Table, tensors: Mapping[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """Convert logical tensors to foreign ones, with constants.

    Raises:
      ValueError: the format cannot hold a tensor of the model.
    """
    check(table, tensors, what)
    state = {}
    for pair in table.pairs:
        state |= zip(pair.names, pair.written(*(np.asarray(tensors[name]) for name in pair.ours)), strict=True)
    return state | {constant.name: constant.value for constant in table.constants}


def _foreign_shapes(pair: Pair | Joined, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    theirs = pair.written(*(np.broadcast_to(np.float32(0), shapes[name]) for name in pair.ours))
    return {name: tensor.shape for name, tensor in zip(pair.names, theirs, strict=True)}
