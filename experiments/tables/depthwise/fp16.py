"""Attention and its replacements in float32 and float16 on a GPU: Table A.4.

    python -m experiments tables.depthwise.fp16

One module of width 1024 and 16 heads on 576 tokens, batch 1, random weights; in float16 attention is cuDNN's flash
attention, as FMhSAv2 is in the paper (Orin Nano, TensorRT).  float32 products are exact (no TF32).  A program calls the
module `--calls` times, so that its start does not count.  Memory is that of activations read and written, by rule:
attention 3 arrays of tokens x width and twice the weights of all heads, flash attention 5 arrays, DW 3, Ens+DW 2 of one
head's channels, to which the paper's figure in float16 adds the input.  Without a GPU the times stay empty.
"""

import functools

import jax
import jax.numpy as jnp

from experiments import findings, flags, machine, timing
from experiments.tables import measuring
from experiments.tables.depthwise import onnx_calls

GRID, WIDTH, HEADS = (24, 24), 1024, 16
# (kind, dtype): milliseconds and MB (Table A.4).
PAPER = {
    (None, "float32"): (3.2, 47.2),
    ("dw", "float32"): (1.26, 6.75),
    ("ens_dw", "float32"): (0.215, 0.288),
    (None, "float16"): (1.14, 5.62),
    ("dw", "float16"): (0.86, 3.38),
    ("ens_dw", "float16"): (0.271, 1.27),
}
COLUMNS = dict(module="module", dtype="dtype", ms="ms", paper="paper ms", mib="MiB by rule", paper_mb="paper MB")


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=100, warmup=10)
    parser.add_argument("--calls", type=int, default=20, help="of the module in one program (%(default)s)")
    options = parser.parse_args(arguments)
    budget, calls = timing.Budget(options.minutes), {}
    for kind, dtype in PAPER if machine.on_gpu() else ():
        name = f"{onnx_calls.NAMES[kind]} in {dtype}"
        if (call := measuring.attempt(budget, name, compiled, kind, dtype, options.calls)) is not None:
            calls[kind, dtype] = call
    seconds = timing.medians(timing.interleaved(calls, warmup=options.warmup, runs=options.runs))
    rows = []
    for (kind, dtype), (ms, size) in PAPER.items():
        ours = 1e3 * seconds[kind, dtype] / options.calls if (kind, dtype) in seconds else None
        row = dict(module=onnx_calls.NAMES[kind], dtype=dtype, ms=ours, paper=ms)
        rows.append(row | dict(mib=activations(kind, dtype) / 2**20, paper_mb=size))
    print(findings.table(rows, COLUMNS))
    return findings.finish(options, dict(rows=rows), [], budget)


def compiled(kind: str | None, dtype: str, calls: int):
    """A program that applies the deployed module to its own output a number of times."""
    module = onnx_calls.module(WIDTH, HEADS, kind, folded=True)
    module = jax.tree.map(lambda leaf: leaf.astype(dtype), module)

    @functools.partial(jax.jit, static_argnums=2)
    def run(module, x, calls):
        return jax.lax.fori_loop(0, calls, lambda _, x: module(x, GRID), x)

    x = jax.random.normal(jax.random.key(0), (1, GRID[0] * GRID[1], WIDTH), jnp.float32).astype(dtype)
    with jax.default_matmul_precision("highest"):
        program = run.lower(module, x, calls).compile()
    return lambda: program(module, x)


def activations(kind: str | None, dtype: str) -> float:
    """Bytes of activations read and written, by the rule above."""
    tokens, size = GRID[0] * GRID[1], jnp.dtype(dtype).itemsize
    whole, weights = tokens * WIDTH * size, HEADS * tokens**2 * size
    if kind == "dw":
        return 3 * whole
    if kind == "ens_dw":
        return 2 * whole / HEADS + (whole if dtype == "float16" else 0)
    return 5 * whole if dtype == "float16" else 3 * whole + 2 * weights
