"""One transformer block on a CPU, dense and octic, beside the same mathematics in plain torch under `torch.compile`.

    python -m experiments benchmarks.block_cpu  # about five minutes
    python -m experiments benchmarks.block_cpu --peer=none  # without torch

Forward passes of one block of ViT-S, L and H, every parameter random, in turn; torch runs in a process of its own
(an error says how to install it).  Ours and torch's results are compared before anything is timed.
Claims, in float32: octic takes at most the peer's time, dense at most 1.3 times it.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from equivit import logical, models, testing
from equivit.layers.stack import Stack
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from experiments import compiled_models, findings, flags, machine, timing
from experiments.benchmarks import processes
from experiments.findings import Claim

# By width: heads, tokens, batch.
SIZES = {384: (6, 196, 8), 1024: (16, 196, 8), 1280: (16, 256, 4)}
KINDS = {"dense": ("vit_ti16", "plain"), "octic": ("octic_vit_ti16", "D8")}
LIMITS = {"octic": 1.0, "dense": 1.3}  # times torch's time, in float32
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}  # of the largest entry: ours and torch's are the same function
COLUMNS = dict(width="width", tokens="tokens", batch="batch", type="type", dense="dense", torch_dense="torch")
COLUMNS |= dict(dense_over_torch="ours/torch", octic="octic", torch_octic="torch", octic_over_torch="ours/torch")
COLUMNS |= dict(gain="dense/octic")


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=20, warmup=3, minutes=15)
    for flag, known in (("--widths", [str(width) for width in SIZES]), ("--types", list(TOLERANCES))):
        parser.add_argument(flag, type=flags.one_of(known), default=known)
    parser.add_argument("--peer", choices=("torch", "none"), default="torch")
    options = parser.parse_args(arguments)
    entry = findings.Entry(options, dict(runs=options.runs, peer=options.peer), timing.Budget(options.minutes))
    entry.keep(("width", "type"), itertools.product(map(int, options.widths), options.types))
    rows = entry.measured(functools.partial(measure, options=options), COLUMNS)
    print(f"\nmilliseconds, ours and torch's, on {machine.device()['threads']} threads")
    print(findings.table(rows, COLUMNS))
    claims = [claim for row in rows for claim in claims_of(row)]
    return entry.finish(claims)


def measure(width: int, dtype: str, options) -> dict:
    """Median milliseconds of each kind of block, ours and torch's, and their ratios."""
    heads, tokens, batch = SIZES[width]
    x = np.asarray(jax.random.normal(jax.random.key(1), (batch, tokens, width)))
    pairs = {kind: pair(kind, width, heads, x, dtype, options.peer) for kind in KINDS}
    times = processes.beside_torch(pairs, TOLERANCES[dtype], options)
    return dict(width=width, tokens=tokens, batch=batch, type=dtype, **times, gain=times["dense"] / times["octic"])


def pair(kind: str, width: int, heads: int, x: np.ndarray, dtype: str, peer: str) -> tuple:
    """A block of the zoo with every parameter random, for `processes.beside_torch`; results are dense arrays."""
    name, family = KINDS[kind]
    options = dict(width=width, num_heads=heads, depth=1, image_size=(32, 32), num_classes=None)
    block = testing.randomise(models.create(name, family=family, **options).blocks[0], jax.random.key(0))
    theirs = None
    if peer == "torch":
        tensors = {name: np.asarray(array) for name, array in logical.to_logical(block).items()}
        theirs = (processes.torch_peer("block").make, kind, tensors, heads, x, dtype)
    stack, x = Stack.from_blocks([jax.tree.map(lambda a: a.astype(dtype), block)]), jnp.asarray(x, dtype)
    x = fields.from_dense(x, OCTIC) if kind == "octic" else x
    call = compiled_models.call(lambda stack, x: stack(x)[0], stack, x)
    y = fields.to_dense(call()) if kind == "octic" else call()
    return np.asarray(y, np.float32), call, theirs


def claims_of(row: dict) -> list[Claim]:
    """Only float32 is claimed: XLA:CPU makes little use of a processor's bfloat16 units."""
    limits = LIMITS if row["type"] == "float32" else {}
    text = f"at width {row['width']}: our time over torch's"
    return [Claim(f"{kind} {text}", row[f"{kind}_over_torch"], at_most=most) for kind, most in limits.items()]
