"""The depthwise module that replaces attention, on a CPU beside torch's.

    python -m experiments benchmarks.depthwise_module  # about ten minutes
    python -m experiments benchmarks.depthwise_module --peer=none  # without torch

Two linear maps and a k x k depthwise convolution, float32, one image, medians, the variants in turn within each round;
torch, if it is importable, in a process of its own, channels last, with as many threads (`--threads`).  Both results
are compared before anything is timed.  Timed are the forward pass; the two linear maps alone, which depend on matrix
products only; and forward with the gradients of x and all parameters.

Claim: at k = 3 the forward pass takes at most 1.1 times torch's time.  Exits 1 when it fails.
"""

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical, testing
from experiments import findings, flags, timing
from experiments.benchmarks import processes
from experiments.findings import Claim
from experiments.tables.depthwise import layers

WIDTHS, TOKENS, KERNELS = (384, 768, 1024), (196, 576), (3, 5, 7, 13)
TIMED = {"forward": "forward", "maps": "maps alone", "gradients": "and backward"}
LIMIT, TOLERANCE = 1.1, 1e-4  # of torch's time; of the largest entry
COLUMNS = dict(kernel="k", width="width", tokens="tokens")
for what, title in TIMED.items():
    COLUMNS |= {what: title, f"torch_{what}": "torch", f"{what}_over_torch": "ours/torch"}


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows = timing.Budget(options.minutes), []
    for kernel, width, tokens in sizes(options):
        name = f"k={kernel} width {width}, {tokens} tokens"
        if budget.allows(name):
            with budget.trying(name):
                rows.append(measure(width, tokens, kernel, options))
                print(findings.table(rows[-1:], COLUMNS), flush=True)
    print(f"\nmilliseconds, ours and torch's, {options.threads or 'all'} threads")
    print(findings.table(rows, COLUMNS))
    claims = [claim_of(row) for row in rows if row["kernel"] == 3]
    return findings.finish(options, dict(runs=options.runs, rows=rows), claims, budget)


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__, runs=21, warmup=3, minutes=10)
    there = "torch" if importlib.util.find_spec("torch") else "none"
    options.add_argument("--peer", choices=("torch", "none"), default=there)
    options.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch (%(default)s)")
    for flag, known in (("--widths", WIDTHS), ("--tokens", TOKENS), ("--kernels", KERNELS)):
        options.add_argument(flag, type=flags.each_at_least(1), default=known, help="with commas between (%(default)s)")
    return options.parse_args(arguments)


def sizes(options) -> list[tuple[int, int, int]]:
    """(k, width, tokens) in the order of timing: claimed sizes first."""
    return [(k, width, tokens) for k in options.kernels for width in options.widths for tokens in options.tokens]


def measure(width: int, tokens: int, kernel: int, options) -> dict[str, Any]:
    """Median milliseconds of each variant.

    Raises RuntimeError when ours and torch's results differ by more than float32 explains.
    """
    grid, heads = (math.isqrt(tokens),) * 2, max(1, width // 64)
    module = testing.randomise(layers.module("dw", width, heads, kernel_size=kernel), jax.random.key(0))
    x = np.asarray(jax.random.normal(jax.random.key(1), (1, tokens, width)))
    variants = {}
    with contextlib.ExitStack() as stack:
        for what in TIMED:
            result, variants[what] = ours(module, x, grid, what)
            if options.peer == "torch":
                peer = stack.enter_context(theirs(module, x, grid, what, options.threads))
                expected, variants[f"torch_{what}"] = peer
                error = np.abs(result - expected).max() / np.abs(expected).max()
                if not error < TOLERANCE:
                    raise RuntimeError(f"width {width}, k={kernel}: ours and torch's differ by {error:.1e}.")
        seconds = timing.medians(timing.in_turn(variants, warmup=options.warmup, runs=options.runs))
    ratios = {f"{what}_over_torch": timing.ratio(seconds[what], seconds.get(f"torch_{what}")) for what in TIMED}
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    return dict(kernel=kernel, width=width, tokens=tokens, **milliseconds, **ratios)


def ours(module: nnx.Module, x: np.ndarray, grid: tuple[int, int], what: str) -> tuple[np.ndarray, Callable]:
    """The result before gradients of one of TIMED, and a call that returns its seconds."""

    def forward(arrays, x):
        whole = logical.put(module, arrays)
        return whole.proj(whole.value(x)) if what == "maps" else whole(x, grid)

    def total(arrays, x):
        return forward(arrays, x).sum()

    arguments = (logical.take(module), jnp.asarray(x))
    compiled = jax.jit(jax.grad(total, (0, 1)) if what == "gradients" else forward).lower(*arguments).compile()
    return np.asarray(jax.jit(forward)(*arguments)), timing.second_of_two(lambda: compiled(*arguments))


def theirs(module: nnx.Module, x: np.ndarray, grid: tuple[int, int], what: str, threads: int):
    """The same of torch, in a process of its own."""
    from experiments.benchmarks.torch_peers import depthwise as peer

    tensors = {name: np.asarray(array) for name, array in logical.to_logical(module).items()}
    return processes.started(f"torch, {what}", peer.make, tensors, x, grid, what, threads)


def claim_of(row: dict[str, Any]) -> Claim:
    text = f"k=3, width {row['width']}, {row['tokens']} tokens: our forward time over torch's"
    return Claim(text, row["forward_over_torch"], at_most=LIMIT)
