"""Foreign names and logical tensors: one table of pairs per format, used to read files and to write them.

A pair only moves entries (transposes, reshapes, splits), so that going there and back is exact to the bit.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from equivit.models.vit_config import ViTConfig


@dataclasses.dataclass(frozen=True)
class Pair:
    """One foreign tensor and the logical tensors that it holds.

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


@dataclasses.dataclass(frozen=True)
class Constant:
    """A foreign tensor that our model does not hold.

    Attributes:
      name: the foreign name.
      value: what is written.
      what: what it is, for messages.
      fixed: whether a file must have just this value; a tensor that no output depends on may have any.
    """

    name: str
    value: np.ndarray
    what: str
    fixed: bool = True


@dataclasses.dataclass(frozen=True)
class Table:
    """All tensors of one kind of file."""

    pairs: list[Pair]
    constants: list[Constant]


def moved(theirs: str, ours: str, axes: tuple[int, ...]) -> Pair:
    """Our tensor is theirs with its axes in another order: (1, 0) for a matrix, (2, 3, 1, 0) for a kernel OIHW."""
    return Pair(theirs, (ours,), lambda x: (x.transpose(axes),), lambda x: x.transpose(np.argsort(axes)))


def same(theirs: str, ours: str, ones: int = 0) -> Pair:
    """Our tensor is theirs without its first `ones` axes, which have one entry."""
    return Pair(theirs, (ours,), lambda x: (x.reshape(x.shape[ones:]),), lambda x: x.reshape(*(1,) * ones, *x.shape))


def grid(theirs: str, ours: str, size: tuple[int, int]) -> Pair:
    """A table of positions: [1, h w, C] <-> [h, w, C]."""
    return Pair(theirs, (ours,), lambda x: (x.reshape(*size, -1),), lambda x: x.reshape(1, -1, x.shape[-1]))


def patch_embed() -> list[Pair]:
    """A dense patch embedding."""
    kernel = moved("patch_embed.proj.weight", "patch_embed.kernel", (2, 3, 1, 0))
    return [kernel, same("patch_embed.proj.bias", "patch_embed.bias")]


def linear(theirs: str, ours: str, *, bias: bool = True) -> list[Pair]:
    """A matrix [out, in] and its bias."""
    weight = moved(f"{theirs}.weight", f"{ours}.weight", (1, 0))
    return [weight, same(f"{theirs}.bias", f"{ours}.bias")] if bias else [weight]


def norm(theirs: str, ours: str) -> list[Pair]:
    """A dense layer norm."""
    return [same(f"{theirs}.weight", f"{ours}.scale"), same(f"{theirs}.bias", f"{ours}.bias")]


def mlp(theirs: str, ours: str, maps: tuple[str, str] = ("fc1", "fc2")) -> list[Pair]:
    """A dense MLP; `maps` are the foreign names of its two linear maps."""
    return linear(f"{theirs}.{maps[0]}", f"{ours}.fc1") + linear(f"{theirs}.{maps[1]}", f"{ours}.fc2")


def dense_block(
    index: int, config: ViTConfig, scales: tuple[str, ...], maps: tuple[str, str] = ("fc1", "fc2")
) -> list[Pair]:
    """A dense block; `scales` are the foreign names of its layer scales, `maps` those of its MLP's linear maps."""
    at = f"blocks.{index}"
    pairs = norm(f"{at}.norm1", f"{at}.norm1") + norm(f"{at}.norm2", f"{at}.norm2")
    pairs += linear(f"{at}.attn.qkv", f"{at}.attention.qkv", bias=config.qkv_bias)
    pairs += linear(f"{at}.attn.proj", f"{at}.attention.proj")
    pairs += mlp(f"{at}.mlp", f"{at}.mlp", maps)
    if config.layer_scale is not None:
        pairs += [same(f"{at}.{scale}", f"{at}.scale{i}.scale") for i, scale in enumerate(scales, 1)]
    return pairs


def isotypic_norm(theirs: str, ours: str, irreps: Iterable[str]) -> list[Pair]:
    """A layer norm between fields."""
    return [*isotypic_scale(f"{theirs}.scaling", ours, irreps), same(f"{theirs}.scaling.beta", f"{ours}.bias")]


def isotypic_scale(theirs: str, ours: str, irreps: Iterable[str]) -> list[Pair]:
    """One factor per channel of each irrep."""
    return [same(f"{theirs}.alpha_{irrep}", f"{ours}.{irrep}") for irrep in irreps]


def isotypic_block(
    index: int, config: ViTConfig, irreps: tuple[str, ...], stem: str, scales: tuple[str, str]
) -> list[Pair]:
    """An isotypic block; `stem` is how the format calls a linear map of one irrep, the trivial irrep comes first."""
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


def read(
    table: Table, state: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], what: str
) -> dict[str, np.ndarray]:
    """Foreign tensors to logical ones in float32; `shapes` are those of the model's logical tensors.

    Raises:
      ValueError: one message with everything that is missing, unexpected, misshapen, or not the constant it should be.
    """
    expected = {pair.theirs: _foreign_shape(pair, shapes) for pair in table.pairs}
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
            f"{p.theirs} ({state[p.theirs].dtype})"
            for p in table.pairs
            if p.theirs in fits and not jnp.issubdtype(state[p.theirs].dtype, jnp.floating)
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
        result |= zip(pair.ours, pair.read(state[pair.theirs].astype(np.float32)), strict=True)
    return result


def write(table: Table, tensors: Mapping[str, np.ndarray], what: str) -> dict[str, np.ndarray]:
    """Logical tensors to foreign ones, constants included.

    Raises:
      ValueError: the format has no place for a tensor of the model.
    """
    known = {name for pair in table.pairs for name in pair.ours}
    if wrong := sorted(known ^ tensors.keys()):
        raise ValueError(f"{what}: the format has no such model; no counterpart for {', '.join(wrong)}.")
    state = {pair.theirs: pair.write(*(np.asarray(tensors[name]) for name in pair.ours)) for pair in table.pairs}
    return state | {constant.name: constant.value for constant in table.constants}


def brief(names: Iterable[str]) -> str:
    """Names in one line, runs of numbers at the end drawn together: "cls_token.1-4"."""
    stems: dict[str, list[str]] = {}
    for name in names:
        stem, number = re.fullmatch(r"(.*?)(?:\.(\d+))?", name).groups()
        stems.setdefault(stem, []).extend([number] if number else [])
    runs = {stem: f".{n[0]}-{n[-1]}" if len(n) > 1 else "".join(f".{i}" for i in n) for stem, n in stems.items()}
    return ", ".join(stem + run for stem, run in runs.items())


def _foreign_shape(pair: Pair, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    return pair.write(*(np.broadcast_to(np.float32(0), shapes[name]) for name in pair.ours)).shape
