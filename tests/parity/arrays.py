"""Reading the reference arrays of the official codes, and comparing with them.

A file holds `param/<official name>`, `input/...` and what the official code made of them.  The files in tests/fixtures
always run; when the environment variable EQUIVIT_PARITY names a directory with all of them, those run too.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.pretrained import mapping
from equivit.symmetry import fields
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import FLIP

FIXTURES = pathlib.Path(__file__).parent.parent / "fixtures"
LINES = ("A1", "A2", "B1", "B2")
COMPONENTS = (*LINES, "E11", "E12", "E21", "E22")
# Relative to the largest entry of the array.  Both sides compute in float32, in different orders; the official formulas
# in float64 agree with these files to 2e-6.  The largest deviations are printed after each run.
TOLERANCE = 5e-6


def files(group: str, pattern: str = "*.npz", elsewhere: str | None = None) -> list[pathlib.Path]:
    """Files of `group` in the fixtures, then those in $EQUIVIT_PARITY that are not (in its folder `elsewhere`)."""
    found = {path.name: path for path in sorted((FIXTURES / group).glob(pattern))}
    if everything := os.environ.get("EQUIVIT_PARITY"):
        for path in sorted((pathlib.Path(everything) / (elsewhere or group)).glob(pattern)):
            found.setdefault(path.name, path)
    return list(found.values())


def blocks(group: str, *names: str) -> list:
    """Test parameters (file, name): blocks of a group's models, all, or else those in the fixtures."""

    def held(path):
        with np.load(path) as file:
            return [name for name in names if {f"output/{name}", f"output/{name}_0"} & set(file.files)]

    paths = files(group, "blocks.npz") or files(group, "blocks_short.npz")
    return [pytest.param(path, name, id=f"{path.stem}-{name}") for path in paths for name in held(path)]


def load(path: pathlib.Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


def state(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The official state dict."""
    return {key.removeprefix("param/"): value for key, value in data.items() if key.startswith("param/")}


def part(data: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """One of several modules of a file: its parameters `param/<name>.`, `input/<name>` and `output/<name>`."""
    found = {key.replace(f"{name}.", "", 1): value for key, value in data.items() if key.startswith(f"param/{name}.")}
    return found | {key: data[key] for key in (f"input/{name}", f"output/{name}")}


def field(data: dict[str, np.ndarray], prefix: str) -> Isotypic:
    """A field stored as A1, A2, B1, B2 and E, or as eight components, or as sym and asym."""
    if f"{prefix}sym" in data:
        return Isotypic(jnp.stack([data[f"{prefix}sym"], data[f"{prefix}asym"]]), None)
    if f"{prefix}E11" in data:
        return fields.from_components(jnp.stack([data[prefix + name] for name in COMPONENTS]))
    return Isotypic(
        jnp.stack([data[prefix + name] for name in LINES]), jnp.moveaxis(jnp.asarray(data[f"{prefix}E"]), -2, 0)
    )


def images(data: dict[str, np.ndarray], key: str = "input/image") -> jax.Array:
    """NCHW to NHWC."""
    return jnp.asarray(data[key].transpose(0, 2, 3, 1))


def below(pairs: list[mapping.Pair], theirs: str, ours: str) -> list[mapping.Pair]:
    """The pairs of a part of a model, with names relative to that part."""
    return [
        dataclasses.replace(
            pair,
            theirs=tuple(name.removeprefix(theirs) for name in pair.theirs),
            ours=tuple(name.removeprefix(ours) for name in pair.ours),
        )
        for pair in pairs
        if pair.theirs[0].startswith(theirs)
    ]


@jax.jit
def run(layer, x):
    """layer(x), compiled."""
    return layer(x)


def fill(make: Callable, data: dict[str, np.ndarray], pairs: list[mapping.Pair], kind: logical.Kind = nnx.Param):
    """The module that `make` builds with the official parameters; a bias that the file does not have is zero."""
    shapes = {name: t.shape for name, t in jax.eval_shape(lambda: logical.to_logical(make(), kind)).items()}
    there = {name: tensor for name, tensor in state(data).items() if "permutation" not in name}
    absent = [pair for pair in pairs if pair.theirs[0] not in there and pair.theirs[0].endswith(".bias")]
    pairs = [pair for pair in pairs if pair not in absent]
    tensors = mapping.read(mapping.Table(pairs), there, shapes, "parity")
    tensors |= {name: np.zeros(shapes[name]) for pair in absent for name in pair.ours if name in shapes}
    return logical.from_logical(jax.eval_shape(make), tensors, kind)


class Comparison:
    """Collects deviations from one file; every stored result must be compared."""

    def __init__(self, data: dict[str, np.ndarray]):
        self.data, self.left, self.largest = (
            data,
            {k for k in data if k.split("/")[0] in ("output", "inter", "grad")},
            0.0,
        )

    def array(self, key: str, ours, tolerance: float = TOLERANCE) -> None:
        """`ours` against the array stored as `key`; a looser tolerance needs a reason."""
        theirs, ours = self.data[key], np.asarray(ours)
        assert ours.shape == theirs.shape, f"{key}: shape {ours.shape}, expected {theirs.shape}"
        size = np.abs(theirs).max()
        deviation = float(np.abs(ours - theirs).max() / (size if size > 0 else 1))
        assert deviation <= tolerance, f"{key}: deviates by {deviation:.1e} of the largest entry"
        self.largest = max(self.largest, deviation)
        self.left.discard(key)

    def field(self, prefix: str, ours: Isotypic) -> None:
        """A field against the arrays stored under `prefix`."""
        if ours.group is FLIP:
            for name, part in zip(("sym", "asym"), ours.lines, strict=True):
                self.array(prefix + name, part)
        elif f"{prefix}E11" in self.data:
            for name, part in zip(COMPONENTS, fields.to_components(ours), strict=True):
                self.array(prefix + name, part)
        else:
            for name, part in zip(LINES, ours.lines, strict=True):
                self.array(prefix + name, part)
            self.array(f"{prefix}E", jnp.moveaxis(ours.planes, 0, -2))

    def finish(self, record_property, group: str) -> None:
        """Check that nothing was left out, and note the largest deviation for the summary of the run."""
        assert not self.left, f"not compared: {sorted(self.left)}"
        record_property("parity", (group, self.largest))
