"""One transformer block on a CPU, dense and octic, beside the same mathematics in plain torch under `torch.compile`.

    python experiments/octic_block_cpu.py                     # about five minutes
    python experiments/octic_block_cpu.py --peer=none         # without torch

The peer needs torch, which is no requirement of equivit (`torch_blocks.py` says how to install it).

Forward passes, one block of ViT-S, L and H, every parameter random, after a warm-up, medians, the variants in turn
within each round.  The peer runs in a process of its own, with a pause between turns: in one process the threads of one
library that spin while they wait for work slow the other down, by up to 1.7 times.  Ours and torch's results are
compared before anything is timed.  Not in the paper.

Claims, in float32: octic at most the peer's time, dense at most 1.3 times it.  Exits 1 when one fails.
"""

import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical, models, testing
from equivit.layers.stack import Stack
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from experiments import benchmark
from experiments.benchmark import Claim

# By width: heads, tokens, batch.
SIZES = {384: (6, 196, 8), 1024: (16, 196, 8), 1280: (16, 256, 4)}
KINDS = {"dense": ("vit_ti16", "plain"), "octic": ("octic_vit_ti16", "D8")}
LIMITS = {"octic": 1.0, "dense": 1.3}  # times torch's time, in float32
PAUSE = 0.03  # seconds between turns: by then the threads of the library that ran sleep
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}  # of the largest entry: ours and torch's are the same function


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows = benchmark.Budget(options.minutes), []
    for width in map(int, options.widths):
        for dtype in options.types:
            if budget.allows(f"{width} {dtype}"):
                rows.append(measure(width, dtype, options))
                print(benchmark.table(rows[-1:], COLUMNS), flush=True)
    print(f"\nmilliseconds, ours and torch's, on {benchmark.device()['threads']} threads")
    print(benchmark.table(rows, COLUMNS))
    claims = [claim for row in rows for claim in claims_of(row)]
    return benchmark.finish(options.output, dict(runs=options.runs, rows=rows), claims, budget)


COLUMNS = dict(
    width="width",
    tokens="tokens",
    batch="batch",
    type="type",
    dense="dense",
    torch_dense="torch",
    dense_over_torch="ours/torch",
    octic="octic",
    torch_octic="torch",
    octic_over_torch="ours/torch",
    gain="dense/octic",
)


def _options(arguments):
    options = benchmark.timing_parser(__doc__, output="octic_block_cpu.json", runs=20, warmup=3, minutes=15)
    widths, types = [str(width) for width in SIZES], list(TOLERANCES)
    options.add_argument("--widths", type=benchmark.one_of(widths), default=widths)
    options.add_argument("--types", type=benchmark.one_of(types), default=types)
    options.add_argument("--peer", choices=("torch", "none"), default="torch")
    return options.parse_args(arguments)


def measure(width: int, dtype: str, options) -> dict:
    """Median milliseconds of each variant.

    Raises RuntimeError when ours and torch's results differ by more than the type explains.
    """
    heads, tokens, batch = SIZES[width]
    x, variants = np.asarray(jax.random.normal(jax.random.key(1), (batch, tokens, width))), {}
    for kind in KINDS:
        block = make_block(kind, width, heads)
        variants[kind], result = ours(kind, block, x, dtype)
        if options.peer == "torch":
            variants[f"torch_{kind}"], expected = theirs(kind, block, x, dtype)
            error = np.abs(result - expected).max() / np.abs(expected).max()
            if not error < TOLERANCES[dtype]:
                raise RuntimeError(f"{kind}, width {width}, {dtype}: ours and torch's differ by {error:.1e}.")
    seconds = benchmark.medians(in_turn(variants, options.warmup, options.runs))
    ratios = {f"{kind}_over_torch": benchmark.ratio(seconds[kind], seconds.get(f"torch_{kind}")) for kind in KINDS}
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    gain = seconds["dense"] / seconds["octic"]
    return dict(width=width, tokens=tokens, batch=batch, type=dtype, **milliseconds, **ratios, gain=gain)


def in_turn(variants: dict[str, Callable[[], float]], warmup: int, runs: int) -> dict[str, list[float]]:
    """Seconds of each timed call of each variant; a variant says itself how long it took."""
    seconds = {name: [] for name in variants}
    for turn in range(warmup + runs):
        for name in list(variants)[:: -1 if turn % 2 else 1]:
            time.sleep(PAUSE)
            took = variants[name]()
            if turn >= warmup:
                seconds[name].append(took)
    return seconds


def make_block(kind: str, width: int, heads: int) -> nnx.Module:
    """A block of the zoo, every parameter random, biases and scales included."""
    name, family = KINDS[kind]
    options = dict(width=width, num_heads=heads, depth=1, image_size=(32, 32), num_classes=None)
    return testing.randomise(models.create(name, family=family, **options).blocks[0], jax.random.key(0))


def ours(kind: str, block: nnx.Module, x: np.ndarray, dtype: str) -> tuple[Callable[[], float], np.ndarray]:
    """A call that runs the compiled block and returns its seconds, and the block's result as a dense array.

    A call runs the block twice and times the second: the first one wakes threads and fills caches.
    """
    block, x = jax.tree.map(lambda a: a.astype(dtype), block), jnp.asarray(x, dtype)
    x = fields.from_dense(x, OCTIC) if kind == "octic" else x
    blocks = Stack.from_blocks([block])
    compiled = jax.jit(lambda blocks, x: blocks(x)[0]).lower(blocks, x).compile()

    def call():
        jax.block_until_ready(compiled(blocks, x))
        start = time.perf_counter()
        jax.block_until_ready(compiled(blocks, x))
        return time.perf_counter() - start

    y = compiled(blocks, x)
    y = fields.to_dense(y) if kind == "octic" else y
    return call, np.asarray(y, np.float32)


def theirs(kind: str, block: nnx.Module, x: np.ndarray, dtype: str) -> tuple[Callable[[], float], np.ndarray]:
    """The same of torch, in a process that ends with this one."""
    from experiments import torch_blocks

    tensors = {name: np.asarray(array) for name, array in logical.to_logical(block).items()}
    arguments = (kind, tensors, block.attention.num_heads, x, dtype)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process
    process(target=torch_blocks.serve, args=(there, *arguments), daemon=True).start()
    there.close()  # so that the end of the process is noticed here

    def call():
        here.send("run")
        return here.recv()

    return call, here.recv()


def claims_of(row: dict) -> list[Claim]:
    """Only float32 is claimed: XLA:CPU makes less of a processor's bfloat16 units."""
    if row["type"] != "float32":
        return []
    text = "at width {width}: our time over torch's"
    return [
        Claim(f"{kind} {text.format(**row)}", row[f"{kind}_over_torch"], at_most=most) for kind, most in LIMITS.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
