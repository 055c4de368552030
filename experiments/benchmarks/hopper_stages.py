"""Where the time of the Hopper kernels of products goes: each kernel whole, and with one of its stages left out.

    python -m experiments benchmarks.hopper_stages  # on a Hopper GPU; at most 4 minutes (--minutes)

A kernel of `hopper/rows.py` loads rows and weights, multiplies, and applies an epilogue; two warpgroups take turns.
Without a stage the results are wrong, and only the time counts: the stage that saves most when it is missing bounds the
kernel.  "least" is the larger of the kernel's bytes at a copy's bandwidth and its products at the matrix rate, both of
an H200 (`equivit/targets/cards.py`).  No claims.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from equivit.kernels import dispatch
from equivit.kernels.hopper import gelu, heads
from equivit.targets.cards import H200
from experiments import findings, flags, timing
from experiments.benchmarks import hopper_tiles, kernel_speed
from experiments.benchmarks.field_shapes import REALISTIC
from experiments.benchmarks.hopper_tiles import Case

MODELS = ("ViT-H", "ViT-L")
KERNELS = (gelu.NAME, heads.NAME)


def nothing(*arguments, **options) -> None:
    """In place of a stage."""


PRODUCTS = [(plgpu, "wgmma", nothing), (plgpu, "wgmma_wait", nothing)]
EPILOGUES = [(gelu, "_store", nothing), (heads, "_store", nothing)]
# What each variant replaces.
VARIANTS = {
    "whole": [],
    "no GELU": [(gelu, "octic_gelu", lambda components: components)],
    "no epilogue": EPILOGUES,
    "no products": PRODUCTS,
    "loads alone": [*EPILOGUES, *PRODUCTS],
}
COLUMNS = dict(key="kernel and sizes", least="least, us") | {name: f"{name}, us" for name in VARIANTS}


def main(arguments=None) -> int:
    options = flags.timing_parser(__doc__, __file__, runs=30, warmup=5, minutes=4).parse_args(arguments)
    options.times = kernel_speed.TIMES
    if jax.local_devices()[0].platform != "gpu" or not dispatch.hopper():
        raise ValueError("hopper_stages: there is no Hopper GPU on this machine; run it where there is one.")
    entry = findings.Entry(options, dict(runs=options.runs), timing.Budget(options.minutes))
    by_key = {case.key: case for case in cases()}
    entry.keep(("key",), [(key,) for key in by_key])
    rows = entry.measured(lambda key: row(by_key[key], options), COLUMNS)
    print(findings.table(rows, COLUMNS))
    return entry.finish([])


def row(case: Case, options) -> dict[str, Any]:
    """The times of a kernel."""
    return dict(key=case.key, least=least(case), **microseconds(case, options))


def cases() -> Iterator[Case]:
    """The kernels of `hopper/rows.py` at each model's size."""
    shapes = {shape.name: shape for shape in REALISTIC}
    for model in MODELS:
        yield from (case for case in hopper_tiles.cases(shapes[model]) if case.key.startswith(KERNELS))


def microseconds(case: Case, options) -> dict[str, float]:
    """The time of each variant, in turn."""
    sets = [(hopper_tiles.arguments(case, seed),) for seed in range(options.times[0])]
    calls = {}
    for name, replaced in VARIANTS.items():
        with without(replaced):
            calls[name] = kernel_speed.repeated(
                functools.partial(hopper_tiles.call, case, case.tiles[0]), sets, options
            )
    return {name: 1e6 * seconds for name, seconds in kernel_speed.seconds_of(calls, options).items()}


@contextlib.contextmanager
def without(replaced: list) -> Iterator[None]:
    """A context in which kernels are traced with (module, name, value) replaced; nothing traced before is used."""
    jax.clear_caches()
    with contextlib.ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        yield
    jax.clear_caches()


def least(case: Case) -> float:
    """Microseconds by bytes and by products."""
    sizes = case.shapes
    (_, m, before), after = sizes["lines"], sizes["w_lines"][-1]
    moved = 2 * (8 * m * (before + after) + math.prod(sizes["w_lines"]) + math.prod(sizes["w_planes"]))
    return 1e6 * max(moved / H200.bandwidth, 2 * m * 12 * before * after / H200.products["bf16"])
