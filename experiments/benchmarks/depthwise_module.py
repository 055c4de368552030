"""The depthwise module that replaces attention, on a CPU beside torch's.

    python -m experiments benchmarks.depthwise_module  # about ten minutes
    python -m experiments benchmarks.depthwise_module --peer=none  # without torch

Two linear maps and a k x k depthwise convolution, float32, one image; torch, if it is importable, in a process of its
own, channels last, with as many threads (`--threads`).  Both results are compared before anything is timed: the forward
pass; the two linear maps alone; and forward with the gradients of x and all parameters.  Claim: at k = 3 the forward
pass takes at most 1.1 times torch's time.
"""

import functools
import importlib.util
import itertools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical, testing
from equivit.layers import dense
from equivit.layers.depthwise import replace_attention
from experiments import compiled_models, findings, flags, timing
from experiments.benchmarks import processes
from experiments.findings import Claim

WIDTHS, TOKENS, KERNELS = (384, 768, 1024), (196, 576), (3, 5, 7, 13)
TIMED = {"forward": "forward", "maps": "maps alone", "gradients": "and backward"}
LIMIT, TOLERANCE = 1.1, 1e-4  # of torch's time; of the largest entry
COLUMNS = dict(kernel="k", width="width", tokens="tokens")
for what, title in TIMED.items():
    COLUMNS |= {what: title, f"torch_{what}": "torch", f"{what}_over_torch": "ours/torch"}


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=21, warmup=3, minutes=10)
    there = "torch" if importlib.util.find_spec("torch") else "none"
    parser.add_argument("--peer", choices=("torch", "none"), default=there)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of torch (%(default)s)")
    for flag, known in (("--widths", WIDTHS), ("--tokens", TOKENS), ("--kernels", KERNELS)):
        parser.add_argument(flag, type=flags.each_at_least(1), default=known, help="with commas between (%(default)s)")
    options = parser.parse_args(arguments)
    settings = {key: getattr(options, key) for key in ("runs", "peer", "threads")}
    entry = findings.Entry(options, settings, timing.Budget(options.minutes))
    sizes = itertools.product(options.kernels, options.widths, options.tokens)  # claimed ones first
    entry.keep(("kernel", "width", "tokens"), sizes)
    rows = entry.measured(functools.partial(measure, options=options), COLUMNS)
    print(f"\nmilliseconds, ours and torch's, {options.threads or 'all'} threads")
    print(findings.table(rows, COLUMNS))
    text = "k=3, width {width}, {tokens} tokens: our forward time over torch's"
    claimed = [row for row in rows if row["kernel"] == 3]
    claims = [Claim(text.format(**row), row["forward_over_torch"], at_most=LIMIT) for row in claimed]
    return entry.finish(claims)


def measure(kernel: int, width: int, tokens: int, options) -> dict:
    """Median milliseconds of each of TIMED, ours and torch's, and their ratios."""
    grid, heads = (math.isqrt(tokens),) * 2, max(1, width // 64)
    attention = dense.Attention(width, heads, rngs=nnx.Rngs(0))
    module = testing.randomise(replace_attention(attention, "dw", kernel_size=kernel), jax.random.key(0))
    x = np.asarray(jax.random.normal(jax.random.key(1), (1, tokens, width)))
    pairs = {what: pair(module, x, grid, what, options) for what in TIMED}
    times = processes.beside_torch(pairs, TOLERANCE, options)
    return dict(kernel=kernel, width=width, tokens=tokens, **times)


def pair(module: nnx.Module, x: np.ndarray, grid: tuple[int, int], what: str, options) -> tuple:
    """One of TIMED for `processes.beside_torch`; results are before gradients."""

    def forward(arrays, x):
        whole = logical.put(module, arrays)
        return whole.proj(whole.value(x)) if what == "maps" else whole(x, grid)

    def total(arrays, x):
        return forward(arrays, x).sum()

    theirs = None
    if options.peer == "torch":
        tensors = {name: np.asarray(array) for name, array in logical.to_logical(module).items()}
        theirs = (processes.torch_peer("depthwise").make, tensors, x, grid, what, options.threads)
    arguments = (logical.take(module), jnp.asarray(x))
    call = compiled_models.call(jax.grad(total, (0, 1)) if what == "gradients" else forward, *arguments)
    return np.asarray(jax.jit(forward)(*arguments)), call, theirs
