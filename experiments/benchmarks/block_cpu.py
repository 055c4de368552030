"""One transformer block on a CPU, dense and octic, beside the same mathematics in plain torch under `torch.compile`.

    python -m experiments benchmarks.block_cpu  # about five minutes
    python -m experiments benchmarks.block_cpu --peer=none  # without torch

Forward passes of one block of ViT-S, L and H, every parameter random, in turn; torch runs in a process of its own
(`torch_peers/block.py` says how to install it).  Ours and torch's results are compared before anything is timed.
Claims, in float32: octic takes at most the peer's time, dense at most 1.3 times it.
"""

import contextlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical, models, testing
from equivit.layers.stack import Stack
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from experiments import findings, flags, machine, timing
from experiments.benchmarks import processes
from experiments.findings import Claim

# By width: heads, tokens, batch.
SIZES = {384: (6, 196, 8), 1024: (16, 196, 8), 1280: (16, 256, 4)}
KINDS = {"dense": ("vit_ti16", "plain"), "octic": ("octic_vit_ti16", "D8")}
LIMITS = {"octic": 1.0, "dense": 1.3}  # times torch's time, in float32
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}  # of the largest entry: ours and torch's are the same function


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows = timing.Budget(options.minutes), []
    for width in map(int, options.widths):
        for dtype in options.types:
            if budget.allows(f"{width} {dtype}"):
                rows.append(measure(width, dtype, options))
                print(findings.table(rows[-1:], COLUMNS), flush=True)
    print(f"\nmilliseconds, ours and torch's, on {machine.device()['threads']} threads")
    print(findings.table(rows, COLUMNS))
    claims = [claim for row in rows for claim in claims_of(row)]
    return findings.finish(options, dict(runs=options.runs, rows=rows), claims, budget)


COLUMNS = dict(width="width", tokens="tokens", batch="batch", type="type", dense="dense", torch_dense="torch")
COLUMNS |= dict(dense_over_torch="ours/torch", octic="octic", torch_octic="torch", octic_over_torch="ours/torch")
COLUMNS |= dict(gain="dense/octic")


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__, runs=20, warmup=3, minutes=15)
    widths, types = [str(width) for width in SIZES], list(TOLERANCES)
    options.add_argument("--widths", type=flags.one_of(widths), default=widths)
    options.add_argument("--types", type=flags.one_of(types), default=types)
    options.add_argument("--peer", choices=("torch", "none"), default="torch")
    return options.parse_args(arguments)


def measure(width: int, dtype: str, options) -> dict:
    """Median milliseconds of each variant.

    Raises RuntimeError when ours and torch's results differ by more than the type explains.
    """
    heads, tokens, batch = SIZES[width]
    x, variants = np.asarray(jax.random.normal(jax.random.key(1), (batch, tokens, width))), {}
    with contextlib.ExitStack() as stack:
        for kind in KINDS:
            block = make_block(kind, width, heads)
            result, variants[kind] = ours(kind, block, x, dtype)
            if options.peer == "torch":
                expected, variants[f"torch_{kind}"] = stack.enter_context(theirs(kind, block, x, dtype))
                error = np.abs(result - expected).max() / np.abs(expected).max()
                if not error < TOLERANCES[dtype]:
                    raise RuntimeError(f"{kind}, width {width}, {dtype}: ours and torch's differ by {error:.1e}.")
        seconds = timing.medians(timing.in_turn(variants, warmup=options.warmup, runs=options.runs))
    ratios = {f"{kind}_over_torch": timing.ratio(seconds[kind], seconds.get(f"torch_{kind}")) for kind in KINDS}
    milliseconds = {name: 1e3 * value for name, value in seconds.items()}
    gain = seconds["dense"] / seconds["octic"]
    return dict(width=width, tokens=tokens, batch=batch, type=dtype, **milliseconds, **ratios, gain=gain)


def make_block(kind: str, width: int, heads: int) -> nnx.Module:
    """A block of the zoo with every parameter random, biases and scales included."""
    name, family = KINDS[kind]
    options = dict(width=width, num_heads=heads, depth=1, image_size=(32, 32), num_classes=None)
    return testing.randomise(models.create(name, family=family, **options).blocks[0], jax.random.key(0))


def ours(kind: str, block: nnx.Module, x: np.ndarray, dtype: str) -> tuple[np.ndarray, Callable[[], float]]:
    """The block's result as a dense array, and a call that runs the compiled block and returns its seconds."""
    block, x = jax.tree.map(lambda a: a.astype(dtype), block), jnp.asarray(x, dtype)
    x = fields.from_dense(x, OCTIC) if kind == "octic" else x
    blocks = Stack.from_blocks([block])
    compiled = jax.jit(lambda blocks, x: blocks(x)[0]).lower(blocks, x).compile()
    y = compiled(blocks, x)
    y = fields.to_dense(y) if kind == "octic" else y
    return np.asarray(y, np.float32), timing.second_of_two(lambda: compiled(blocks, x))


def theirs(kind: str, block: nnx.Module, x: np.ndarray, dtype: str):
    """The same of torch, in a process of its own."""
    from experiments.benchmarks.torch_peers import block as peer

    tensors = {name: np.asarray(array) for name, array in logical.to_logical(block).items()}
    return processes.started(f"torch, {kind}", peer.make, kind, tensors, block.attention.num_heads, x, dtype)


def claims_of(row: dict) -> list[Claim]:
    """Only float32 is claimed: XLA:CPU makes little use of a processor's bfloat16 units."""
    if row["type"] != "float32":
        return []
    text = "at width {width}: our time over torch's"
    return [
        Claim(f"{kind} {text.format(**row)}", row[f"{kind}_over_torch"], at_most=most) for kind, most in LIMITS.items()
    ]
