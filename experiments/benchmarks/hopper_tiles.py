"""The fastest tiles of the Hopper kernels of octic branches, by trying all that fit on the card of this machine.

    python -m experiments benchmarks.hopper_tiles  # on a Hopper GPU; at most 10 minutes (--minutes)

Writes `kernels/hopper/tiles.json`, which the kernels read from then on, with the card's name.  What this card has
measured is kept, and not measured again; only a run over all models replaces the tiles of another card.  A time is of
a kernel alone, at the batch size of the paper's benchmark.  A claim fails if a tile's result differs from the first
one's.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from equivit.kernels import dispatch
from equivit.kernels.hopper import best, gelu, heads, residual
from equivit.kernels.hopper.vectors import OF_FIELD, Vectors
from experiments import findings, flags, timing
from experiments.benchmarks import kernel_speed
from experiments.benchmarks.field_shapes import REALISTIC, Shape
from experiments.findings import Claim

MODELS = ("ViT-H", "ViT-L", "ViT-B")  # most important first
HEADS = {96: 12, 128: 16, 160: 16}  # by channels per component
STREAM = "float32"
DIFFERENCE = 1e-2  # of the largest value: two roundings to bfloat16
COLUMNS = dict(key="kernel and sizes", tile="tile", microseconds="us", difference="difference")


class Case(NamedTuple):
    """A kernel at one size, with the tiles to try."""

    key: str
    shapes: dict[str, tuple[int, ...]]
    types: dict[str, str]
    call: Callable
    tiles: list[tuple[int, ...]]


def main(arguments=None) -> int:
    options = flags.timing_parser(__doc__, __file__)
    options.add_argument("--model", action="append", choices=MODELS, help="may be repeated")
    options.set_defaults(output=best.PATH)
    options = options.parse_args(arguments)
    options.times = kernel_speed.TIMES
    if jax.local_devices()[0].platform != "gpu" or not dispatch.hopper():
        raise ValueError("hopper_tiles: there is no Hopper GPU on this machine; run it where there is one.")
    shapes, budget = {shape.name: shape for shape in REALISTIC}, timing.Budget(options.minutes)
    each = list(itertools.chain(*(cases(shapes[model]) for model in options.model or MODELS)))
    entry = findings.Entry(options, {}, budget)
    entry.keep(("key",), [(case.key,) for case in each])
    known = {row["key"] for row in entry.rows()}
    for case in each:
        if case.key not in known and budget.allows(case.key):
            found = measure(case, options, budget)
            entry.add(found, tiles=fastest(entry.rows() + found))
            print(case.key, flush=True)
    rows = entry.rows()
    print(findings.table(rows, COLUMNS))
    claims = [Claim(f"{row['key']}, {row['tile']}", row["difference"], at_most=DIFFERENCE) for row in rows]
    return entry.finish(claims, tiles=fastest(rows))


def cases(shape: Shape) -> Iterator[Case]:
    """The kernels of both branches of a model."""
    m, c, f = shape.batch[0] * shape.tokens, shape.channels, shape.hidden
    stream, field = dict(x_lines=(4, m, c), x_planes=(2, m, 2 * c)), dict(lines=(4, m, c), planes=(2, m, 2 * c))
    number = HEADS[c]

    def weights(before, after):
        return dict(w_lines=(4, before, after), w_planes=(2 * before, 2 * after))

    def case(key, shapes, vectors, call, tiles):
        shapes, wide = shapes | dict(vectors=vectors), {"x_lines", "x_planes", "vectors"}
        return Case(key, shapes, {name: STREAM if name in wide else "bfloat16" for name in shapes}, call, tiles)

    def bias(rows, after):
        return jax.eval_shape(rows, jax.ShapeDtypeStruct((after,), "float32")).shape

    of_gelu = bias(gelu.of_bias, f)
    yield case(best.key(gelu.NAME, c), field | weights(c, f), of_gelu, gelu.forward, gelu.rings(c))
    attention = functools.partial(heads.forward, heads=number)
    rings, of_heads = heads.rings(c, c // number), bias(functools.partial(heads.of_bias, c=c // number), 3 * c)
    yield case(best.key(heads.NAME, c, c // number), field | weights(c, 3 * c), of_heads, attention, rings)
    for width in (c, f):
        shapes = stream | dict(h_lines=(4, m, width), h_planes=(2, m, 2 * width)) | weights(width, c)
        tiles = residual.tiles(width, c, STREAM)
        yield case(best.key(residual.NAME, width, c, STREAM), shapes, (OF_FIELD, c), residual.forward, tiles)


def measure(case: Case, options, budget) -> list[dict]:
    """A row for each tile."""
    calls, differences, first = {}, {}, None
    sets = [arguments(case, seed) for seed in range(options.times[0])]
    for tile in case.tiles:
        with budget.trying(f"{case.key}, {tuple(tile)}"):
            run = jax.jit(functools.partial(call, case, tile))
            result = run(sets[0])
            first = result if first is None else first
            differences[tile] = difference(result, first)
            calls[tile] = kernel_speed.repeated(run, [(one,) for one in sets], options)
    seconds = kernel_speed.seconds_of(calls, options) if calls else {}
    return [
        dict(key=case.key, tile=list(tile), microseconds=1e6 * t, difference=differences[tile])
        for tile, t in seconds.items()
    ]


def call(case: Case, tile: tuple[int, ...], arguments: dict[str, jax.Array]):
    """The kernel of a case with one of its tiles."""
    option = "tile" if isinstance(tile, residual.Tile) else "ring"
    return case.call(**arguments | {"vectors": Vectors(arguments["vectors"]), option: tile})


def arguments(case: Case, seed: int) -> dict[str, jax.Array]:
    """Random arguments whose results are near 1."""
    keys = jax.random.split(jax.random.key(seed), len(case.shapes))

    def draw(name, key):
        scale = case.shapes[name][-2] ** -0.5 if name.startswith("w_") else 1
        return scale * jax.random.normal(key, case.shapes[name], case.types[name])

    return {name: draw(name, key) for name, key in zip(case.shapes, keys, strict=True)}


def difference(result, expected) -> float:
    """The largest difference, as a share of the largest value."""
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def fastest(rows: list[dict]) -> dict[str, list[int]]:
    """The fastest tile of each kernel and size."""
    found = {}
    for row in sorted(rows, key=lambda row: row["microseconds"]):
        found.setdefault(row["key"], row["tile"])
    return found
