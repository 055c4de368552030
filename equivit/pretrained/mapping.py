"""Tables of foreign names and logical tensors, one per format, used to read and write files.

A format lists rows, which give a foreign name for each of our names; "#" stands for any number.  A pair only moves
entries (transposes, reshapes, splits), so a round trip is bit-exact.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical
from equivit.models.model import abstract_model

STORED = (nnx.Param, nnx.BatchStat)  # variables in files: parameters and running statistics
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a name, as the 7 of "blocks.7.mlp.fc1"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Foreign tensors, and the logical tensors with the same entries.

    Attributes:
      theirs: the foreign names.
      ours: the logical names; empty in a row, whose key has them.
      write: our tensors -> foreign tensors; a tuple if there are several.
      read: foreign tensors -> our tensors; None if the only tensor just has another shape.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    write: Callable[..., Any]
    read: Callable[..., Any] | None


# The foreign name of a module or a tensor, by ours.  If a module has several, each is an equal part of its outputs.  A
# pair also converts a tensor.
Rows = Mapping[str, str | tuple[str, ...] | Pair]


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
      pairs: all tensors with a counterpart in our model.
      constants: all others.
    """

    pairs: Sequence[Pair]
    constants: Sequence[Constant] = ()

    def __add__(self, other: "Table") -> "Table":
        return Table([*self.pairs, *other.pairs], [*self.constants, *other.constants])

    def inside(self, module: str) -> "Table":
        """The same table with our tensors inside a module of the model."""
        pairs = [dataclasses.replace(p, ours=tuple(f"{module}.{name}" for name in p.ours)) for p in self.pairs]
        return dataclasses.replace(self, pairs=pairs)


def same(theirs: str) -> Pair:
    """A foreign tensor equal to ours."""
    return Pair((theirs,), (), lambda x: x, lambda x: x)


def reshaped(theirs: str, write: Callable[[np.ndarray], np.ndarray]) -> Pair:
    """A foreign tensor of another shape than ours."""
    return Pair((theirs,), (), write, None)


def moved(theirs: str, axes: tuple[int, ...]) -> Pair:
    """A foreign tensor that is ours with permuted axes: (1, 0) for a matrix, (2, 3, 1, 0) for a kernel OIHW."""
    return Pair((theirs,), (), lambda x: x.transpose(np.argsort(axes)), lambda x: x.transpose(axes))


def pointwise(theirs: str) -> Pair:
    """A kernel [out, in, 1, 1], which is our matrix [in, out]."""
    return Pair((theirs,), (), lambda x: x.T[..., None, None], lambda x: x[..., 0, 0].T)


# The tensors of a linear map, a convolution, a norm or a batch norm, by our last name.
TENSORS = {
    "weight": moved("weight", (1, 0)),
    "kernel": moved("weight", (2, 3, 1, 0)),
    "scale": same("weight"),
    "bias": same("bias"),
    "mean": same("running_mean"),
    "variance": same("running_var"),
}
# timm's names of the modules of a dense block, by ours.
BLOCK = {"attention.qkv": "attn.qkv", "attention.proj": "attn.proj"}
BLOCK |= {name: name for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")}


def inside(ours: str, theirs: str, rows: Mapping[str, str | tuple[str, ...]]) -> dict[str, Any]:
    """Rows of the parts of a module with these names."""
    return {
        f"{ours}.{name}": f"{theirs}.{row}" if isinstance(row, str) else tuple(f"{theirs}.{part}" for part in row)
        for name, row in rows.items()
    }


def normed(rows: Mapping[str, str], conv: str = "conv", norm: str = "norm") -> dict[str, Any]:
    """Rows of the convolution and the batch norm in each module; `conv` and `norm` are their foreign names."""
    parts = ((".conv", f".{conv}"), (".norm", f".{norm}"))
    return {ours + a: theirs + b for ours, theirs in rows.items() for a, b in parts}


def isotypic_norm(ours: str, theirs: str, irreps: Iterable[str]) -> dict[str, Any]:
    """Rows of a layer norm between fields."""
    rows = {f"{ours}.{irrep}": f"{theirs}.scaling.alpha_{irrep}" for irrep in irreps}
    return rows | {f"{ours}.bias": f"{theirs}.scaling.beta"}


def isotypic_blocks(depth: int, irreps: tuple[str, ...], stem: str, scales: tuple[str, str]) -> dict[str, Any]:
    """Rows of the first blocks; `stem` is the format's name of an irrep's linear map; the trivial irrep comes first."""
    rows: dict[str, Any] = {}
    for at in (f"blocks.{i}" for i in range(depth)):
        for name, theirs in BLOCK.items():
            if name.startswith("norm"):
                rows |= isotypic_norm(f"{at}.{name}", f"{at}.{theirs}", irreps)
                continue
            rows |= {f"{at}.{name}.{i}": moved(f"{at}.{theirs}.{stem}_{i}.weight", (1, 0)) for i in irreps}
            rows[f"{at}.{name}.bias"] = f"{at}.{theirs}.{stem}_{irreps[0]}.bias"
        for number, scale in enumerate(scales, 1):
            rows |= {f"{at}.scale{number}.{irrep}": f"{at}.{scale}.alpha_{irrep}" for irrep in irreps}
    return rows


def named(theirs: str, last: str) -> str:
    """The foreign name of a tensor of a map or norm: "x", "bias" -> "x.bias"; "x_{}", "bias" -> "x_bias"."""
    return theirs.format(last) if "{}" in theirs else f"{theirs}.{last}"


def table(config: Any, rows: Rows, constants: Sequence[Constant] = ()) -> Table:
    """The table of a model, without its tensors that have no row."""
    return Table(pairs(shapes(config), rows), constants)


def pairs(names: Iterable[str], rows: Rows) -> list[Pair]:
    """A pair for each of our names with a row, in the order of rows; a row with numbers precedes one with "#"."""
    found, order = [], {key: place for place, key in enumerate((*rows, *TENSORS))}
    for name in names:
        for key in (name, NUMBER.sub("#", name)):
            module, _, last = key.rpartition(".")
            if key in rows:
                row: Any = rows[key]
                place, pair = (order[key],), same(row) if isinstance(row, str) else row
            elif module in rows and last in TENSORS:
                place, pair = (order[module], order[last]), _in_module(rows[module], TENSORS[last])
            else:
                continue
            theirs = tuple(_numbered(theirs, NUMBER.findall(name)) for theirs in pair.theirs)
            found.append((place, dataclasses.replace(pair, theirs=theirs, ours=(name,))))
            break
    return [pair for _, pair in sorted(found, key=lambda one: one[0])]


def _in_module(row: Any, tensor: Pair) -> Pair:
    (last,), read = tensor.theirs, tensor.read or (lambda array: array)
    if isinstance(row, str):
        return dataclasses.replace(tensor, theirs=(named(row, last),))
    return Pair(
        tuple(named(part, last) for part in row),
        (),
        lambda whole: tuple(map(tensor.write, np.split(whole, len(row), axis=-1))),
        lambda *parts: np.concatenate([read(part) for part in parts], axis=-1),
    )


def _numbered(theirs: str, numbers: list[str]) -> str:
    left = iter(numbers)
    return re.sub("#", lambda _: next(left), theirs)


@functools.lru_cache(maxsize=8)
def abstract(config: Any) -> nnx.Module:
    """The model of a configuration, with shapes in place of arrays."""
    return abstract_model(config)


def shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each logical tensor in files."""
    tables = logical.tensors(abstract(config), STORED).values()
    return {tensor.name: tensor.shape for table in tables for tensor in table.flat}


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
    expected = {}
    for pair in table.pairs:
        blank = (np.broadcast_to(np.float32(0), shapes[name]) for name in pair.ours)
        expected |= {name: tensor.shape for name, tensor in _written(pair, blank).items()}
    expected |= {constant.name: constant.value.shape for constant in table.constants}
    fits = {name for name in expected.keys() & state.keys() if state[name].shape == expected[name]}
    paired = [name for pair in table.pairs for name in pair.theirs if name in fits]
    wrong = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "misshapen": [
            f"{name} {state[name].shape}, expected {shape}"
            for name, shape in expected.items()
            if name in state and name not in fits
        ],
        "not floating point": [
            f"{name} ({state[name].dtype})" for name in paired if not jnp.issubdtype(state[name].dtype, jnp.floating)
        ],
        "not finite, as after a run that diverged": [name for name in paired if not logical.is_finite(state[name])],
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
        theirs = [state[name].astype(np.float32) for name in pair.theirs]
        ours = theirs[0].reshape(shapes[pair.ours[0]]) if pair.read is None else pair.read(*theirs)
        result |= zip(pair.ours, _several(ours), strict=True)
    return result


def write(table: Table, tensors: Mapping[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """Convert logical tensors to foreign ones, with constants.

    Raises:
      ValueError: the format cannot hold a tensor of the model.
    """
    check(table, tensors, what)
    state = {}
    for pair in table.pairs:
        state |= _written(pair, [np.asarray(tensors[name]) for name in pair.ours])
    return state | {constant.name: constant.value for constant in table.constants}


def _written(pair: Pair, ours: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(pair.theirs, _several(pair.write(*ours)), strict=True))


def _several(tensors: Any) -> tuple[np.ndarray, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)
