"""The replacements of attention: counts of Tables 1 and A.3, and the time of the depthwise module beside torch's.

    python experiments/depthwise_layers.py                    # about ten minutes
    python experiments/depthwise_layers.py --peer=none        # without torch

Counts: operations (two for a multiply-add), parameters, and the memory of Table 1, beside the paper's.  Its figures are
the activations that are read and written: with a = n d and s = H n n values of four bytes, attention 2 s + 3 a, DW 3 a,
the dense convolutions 2 a, and Ens+DW 2 n d / H.  Table 1 counts parameters as trained, A.3 as deployed; A.3 is about
256 tokens, and its columns "Params" and "FLOPS" are exchanged.  Exits 1 when a figure differs in the last digit.

Times: two linear maps and a k x k depthwise convolution, float32, one image, medians, the variants in turn within each
round; torch, if it is importable, in a process of its own, channels last, with as many threads (`--threads`).  Its
result is compared with ours before anything is timed.  Forward; its two linear maps alone, which is what neither
library can do better than its matrix products; and forward with the gradients by x and all parameters.
Claim: at k = 3 forward at most 1.1 times torch's time; k = 5, 7 and 13, the maps and the gradients are stated.
"""

import functools
import importlib.util
import math
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import costs, logical, testing
from equivit.layers import dense, depthwise
from equivit.layers.grid import Layout
from experiments import benchmark
from experiments.benchmark import Claim
from experiments.octic_block_cpu import in_turn

# Table 1 at 576 tokens, width 1024, 16 heads: GFLOP, M parameters, memory in MiB.  Its 0.288 is KiB / 1000.
TABLE_1 = {
    "attention": ("6.19", "4.2", "47.2"),
    "conv": ("12.08", "2.1", "4.5"),
    "dw": ("2.43", "2.11", "6.75"),
    "spvit": ("0.75", "2.1", "4.5"),
    "ens_dw": ("0.15", "2.1", "0.288"),
}
# Table A.3 at 256 tokens, by heads of 64 channels: GFLOP, M parameters.
TABLE_A3 = {
    12: {"attention": ("1.41", "2.362"), "dw": ("0.61", "1.189"), "ens_dw": ("0.05", "0.10")},
    16: {"attention": ("2.42", "4.20"), "dw": ("1.08", "2.11"), "ens_dw": ("0.07", "0.13")},
}
WIDTHS, TOKENS, KERNELS = (384, 768, 1024), (196, 576), (3, 5, 7, 13)
TIMED = ("forward", "maps", "gradients")
LIMIT, TOLERANCE = 1.1, 1e-4  # of torch's time; of the largest entry


def main(arguments=None) -> int:
    options = _options(arguments)
    counted = [count(kind, 16, 576, paper) for kind, paper in TABLE_1.items()]
    counted += [count(kind, heads, 256, paper) for heads, rows in TABLE_A3.items() for kind, paper in rows.items()]
    print(benchmark.table(counted, COUNTS), flush=True)
    budget, rows = benchmark.Budget(options.minutes), []
    for kernel, width, tokens in sizes(options):
        name = f"k={kernel} width {width}, {tokens} tokens"
        if budget.allows(name):
            with budget.trying(name):
                rows.append(measure(width, tokens, kernel, options))
                print(benchmark.table(rows[-1:], COLUMNS), flush=True)
    print(f"\nmilliseconds, ours and torch's, {options.threads or 'all'} threads")
    print(benchmark.table(rows, COLUMNS))
    claims = [claim for row in counted for claim in count_claims(row)]
    claims += [time_claim(row) for row in rows if row["kernel"] == 3]
    return benchmark.finish(options.output, dict(runs=options.runs, counts=counted, rows=rows), claims, budget)


COUNTS = dict(
    kind="kind",
    heads="heads",
    tokens="tokens",
    gflop="GFLOP",
    paper_gflop="paper",
    parameters="M parameters",
    paper_parameters="paper",
    memory="MiB",
    paper_memory="paper",
)
COLUMNS = dict(
    kernel="k",
    width="width",
    tokens="tokens",
    forward="forward",
    torch_forward="torch",
    forward_over_torch="ours/torch",
    maps="maps alone",
    torch_maps="torch",
    maps_over_torch="ours/torch",
    gradients="and backward",
    torch_gradients="torch",
    gradients_over_torch="ours/torch",
)


def _options(arguments):
    options = benchmark.timing_parser(__doc__, output="depthwise_layers.json", runs=21, warmup=3, minutes=10)
    there = "torch" if importlib.util.find_spec("torch") else "none"
    options.add_argument("--peer", choices=("torch", "none"), default=there)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch (%(default)s)")
    for flag, known in (("--widths", WIDTHS), ("--tokens", TOKENS), ("--kernels", KERNELS)):
        options.add_argument(flag, type=_numbers, default=known, help="separated by commas (%(default)s)")
    return options.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def sizes(options) -> list[tuple[int, int, int]]:
    """(k, width, tokens) in the order of being timed: what is claimed first."""
    return [(k, width, tokens) for k in options.kernels for width in options.widths for tokens in options.tokens]


def count(kind: str, heads: int, tokens: int, paper: tuple[str, ...]) -> dict[str, Any]:
    """A row of Table 1 (576 tokens) or A.3 (256), of heads of 64 channels, beside the paper's figures."""
    width, layout = 64 * heads, Layout((math.isqrt(tokens),) * 2)
    trained, deployed = (
        jax.eval_shape(functools.partial(_module, kind, width, heads, folded=f)) for f in (False, True)
    )
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    gflop = costs.count(lambda module, x: module(x, layout), deployed, x).double_macs / 1e9
    counted = trained if tokens == 576 else deployed
    parameters = sum(leaf.size for leaf in jax.tree.leaves(counted)) / 1e6
    row = dict(kind=kind, heads=heads, tokens=tokens, gflop=gflop, parameters=parameters)
    row |= dict(zip(("paper_gflop", "paper_parameters", "paper_memory"), paper, strict=False))
    return row | (dict(memory=memory(kind, width, heads, tokens)) if tokens == 576 else {})


def _module(kind: str, width: int, heads: int, *, folded: bool = False, kernel_size: int = 3) -> nnx.Module:
    attention = dense.Attention(width, heads, rngs=nnx.Rngs(0))
    if kind == "attention":
        return attention
    module = depthwise.replace_attention(attention, kind, kernel_size=kernel_size)
    return module.folded() if folded else module


def memory(kind: str, width: int, heads: int, tokens: int) -> float:
    """MiB of activations in float32 by the rule of Table 1."""
    a, s = tokens * width, heads * tokens * tokens
    values = {"attention": 2 * s + 3 * a, "conv": 2 * a, "dw": 3 * a, "spvit": 2 * a, "ens_dw": 2 * a // heads}[kind]
    return 4 * values / 2**20


def count_claims(row: dict[str, Any]) -> list[Claim]:
    """Each figure is the paper's, to its last digit."""
    claims = []
    for what in ("gflop", "parameters", "memory"):
        if (paper := row.get(f"paper_{what}")) is None:
            continue
        ours = row[what] * (1.024 if (row["kind"], what) == ("ens_dw", "memory") else 1)  # printed as KiB / 1000
        off = 1.001 * 10.0 ** -len(paper.partition(".")[2])  # a unit of the last digit: some are cut, not rounded
        text = f"{row['kind']}, {row['heads']} heads, {row['tokens']} tokens: {what}"
        claims.append(Claim(text, ours, at_least=float(paper) - off, at_most=float(paper) + off))
    return claims


def measure(width: int, tokens: int, kernel: int, options) -> dict[str, Any]:
    """Median milliseconds of each variant.

    Raises RuntimeError when ours and torch's results differ by more than float32 explains.
    """
    grid, heads = (math.isqrt(tokens),) * 2, max(1, width // 64)
    module = testing.randomise(_module("dw", width, heads, kernel_size=kernel), jax.random.key(0))
    x = np.asarray(jax.random.normal(jax.random.key(1), (1, tokens, width)))
    variants = {}
    for what in TIMED:
        variants[what], result = ours(module, x, grid, what)
        if options.peer == "torch":
            variants[f"torch_{what}"], expected = theirs(module, x, grid, what, options.threads)
            error = np.abs(result - expected).max() / np.abs(expected).max()
            if not error < TOLERANCE:
                raise RuntimeError(f"width {width}, k={kernel}: ours and torch's differ by {error:.1e}.")
    seconds = benchmark.medians(in_turn(variants, options.warmup, options.runs))
    ratios = {f"{what}_over_torch": benchmark.ratio(seconds[what], seconds.get(f"torch_{what}")) for what in TIMED}
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    return dict(kernel=kernel, width=width, tokens=tokens, **milliseconds, **ratios)


def ours(module: nnx.Module, x: np.ndarray, grid: tuple[int, int], what: str) -> tuple[Callable, np.ndarray]:
    """A call that returns the seconds of the second of two runs of one of TIMED, and its result before gradients."""

    def forward(arrays, x):
        whole = logical.put(module, arrays)
        return whole.proj(whole.value(x)) if what == "maps" else whole(x, grid)

    def total(arrays, x):
        return forward(arrays, x).sum()

    arguments = (logical.take(module), jnp.asarray(x))
    compiled = jax.jit(jax.grad(total, (0, 1)) if what == "gradients" else forward).lower(*arguments).compile()

    def call():
        jax.block_until_ready(compiled(*arguments))  # wakes threads and fills caches
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - start

    return call, np.asarray(jax.jit(forward)(*arguments))


def theirs(
    module: nnx.Module, x: np.ndarray, grid: tuple[int, int], what: str, threads: int
) -> tuple[Callable, np.ndarray]:
    """The same of torch, in a process that ends with this one."""
    from experiments import torch_depthwise

    tensors = {name: np.asarray(array) for name, array in logical.to_logical(module).items()}
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process
    process(target=torch_depthwise.serve, args=(there, tensors, x, grid, what, threads), daemon=True).start()
    there.close()  # so that the end of the process is noticed here

    def call():
        here.send("run")
        return here.recv()

    return call, here.recv()


def time_claim(row: dict[str, Any]) -> Claim:
    text = f"k=3, width {row['width']}, {row['tokens']} tokens: our forward time over torch's"
    return Claim(text, row["forward_over_torch"], at_most=LIMIT)


if __name__ == "__main__":
    sys.exit(main())
