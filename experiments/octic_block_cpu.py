"""One transformer block on a CPU, dense and octic, beside the same mathematics in plain torch under `torch.compile`.

    python experiments/octic_block_cpu.py
    python experiments/octic_block_cpu.py --peer=false        # without torch

The peer needs torch, which is no requirement of equivit (`torch_blocks.py` says how to install it).

Forward passes of random data, after a warm-up, the variants in turn within each round, medians.  Claims, in float32:
octic at most the peer's time, dense at most 1.3 times it.  Exits 1 when one fails.
"""

import os

# Threads of one library that spin while they wait would slow the other one down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import functools
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx

from equivit import models, testing
from equivit.layers import parameters
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

# Width: heads, tokens, batch.  ViT-S, L and H.
SIZES = {384: (6, 196, 8), 1024: (16, 196, 8), 1280: (16, 256, 4)}
LIMITS = {"octic": 1.0, "dense": 1.3}
TOLERANCES = {"float32": 1e-4, "bfloat16": 1e-1}  # of outputs near 1: the two compute the same thing

flags.DEFINE_bool("peer", True, "Also time the same block in torch.")
flags.DEFINE_integer("rounds", 20, "Timed rounds; each runs every variant once.", lower_bound=1)
flags.DEFINE_multi_enum("type", ["float32", "bfloat16"], ["float32", "bfloat16"], "Types to time.")
flags.DEFINE_multi_enum("width", [str(w) for w in SIZES], [str(w) for w in SIZES], "Widths to time.")
flags.DEFINE_string("output", str(ROOT / "experiments/results/octic_block_cpu.json"), "Where the JSON goes.")


def main(_) -> int:
    flag, rows = flags.FLAGS, []
    for width in map(int, flag.width):
        for dtype in flag.type:
            rows.append(measure(width, dtype, flag.peer, flag.rounds))
            print(line(rows[-1]), flush=True)
    missed = [claim for row in rows for claim in misses(row)]
    facts = dict(machine=processor(), threads=os.cpu_count(), jax=jax.__version__, commit=commit(), rounds=flag.rounds)
    if flag.peer:
        facts["torch"] = __import__("torch").__version__
    pathlib.Path(flag.output).write_text(json.dumps(dict(**facts, rows=rows, missed=missed), indent=1) + "\n")
    print(f"{facts['machine']}, {facts['threads']} threads; written to {flag.output}")
    for claim in missed:
        print("missed:", claim)
    return int(bool(missed))


def measure(width: int, dtype: str, peer: bool, rounds: int) -> dict:
    """Median milliseconds of each variant."""
    heads, tokens, batch = SIZES[width]
    x = np.asarray(jax.random.normal(jax.random.key(1), (batch, tokens, width)))
    variants, outputs = {}, {}
    for kind in ("dense", "octic"):
        block = make_block(kind, width, heads)
        variants[f"{kind}"], outputs[kind] = ours(kind, block, x, dtype)
        if peer:
            variants[f"torch {kind}"], expected = theirs(kind, block, x, dtype)
            error = float(np.abs(outputs[kind] - expected).max())
            if not error < TOLERANCES[dtype] * np.abs(expected).max():
                raise SystemExit(f"{kind} {width} {dtype}: ours and torch's differ by {error}; nothing to compare.")
    seconds = {name: [] for name in variants}
    for _ in range(rounds):
        for name, call in variants.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    milliseconds = {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()}
    return dict(width=width, tokens=tokens, batch=batch, type=dtype, milliseconds=milliseconds)


def make_block(kind: str, width: int, heads: int) -> nnx.Module:
    """A block of the zoo, every parameter random, biases and scales included."""
    name, family = ("octic_vit_ti16", "D8") if kind == "octic" else ("vit_ti16", "plain")
    options = dict(width=width, num_heads=heads, depth=1, image_size=(32, 32), num_classes=None)
    return testing.randomise(models.create(name, family=family, **options).blocks[0], jax.random.key(0))


def ours(kind: str, block: nnx.Module, x: np.ndarray, dtype: str):
    """The compiled block as a function of nothing, and its output as a dense array."""
    block = jax.tree.map(lambda a: a.astype(dtype), block)
    x = jnp.asarray(x, dtype)
    x = fields.from_dense(x, OCTIC) if kind == "octic" else x
    compiled = jax.jit(lambda block, x: block(x)).lower(block, x).compile()
    y = compiled(block, x)
    y = fields.to_dense(y) if kind == "octic" else y
    return lambda: jax.block_until_ready(compiled(block, x)), np.asarray(y, np.float32)


def theirs(kind: str, block: nnx.Module, x: np.ndarray, dtype: str):
    """The same of torch."""
    import torch

    from experiments import torch_blocks

    cast = getattr(torch, dtype)
    tensors = {k: torch.tensor(np.asarray(v)).to(cast) for k, v in parameters.to_logical(block).items()}
    # As a linear layer of torch stores its matrix, [out, in].
    tensors = {k: v.T.contiguous().T if v.ndim == 2 else v for k, v in tensors.items()}
    x = torch.tensor(x).to(cast)
    x = torch_blocks.split(x) if kind == "octic" else x
    forward = {"octic": torch_blocks.octic_block, "dense": torch_blocks.dense_block}[kind]
    torch._dynamo.config.recompile_limit = 64  # one per size and type; beyond the limit nothing is compiled
    compiled = torch.compile(functools.partial(forward, tensors, block.attention.num_heads), dynamic=False)

    def call():
        with torch.inference_mode():
            return compiled(x)

    y = torch_blocks.join(call()) if kind == "octic" else call()
    return call, y.float().numpy()


def line(row: dict) -> str:
    """One row, ours over torch's in brackets."""
    times = row["milliseconds"]
    cells = [
        f"{kind} {times[kind]:8.2f} ms"
        + (f"  torch {times[f'torch {kind}']:8.2f} ({ratio(row, kind):.2f}x)" if f"torch {kind}" in times else "")
        for kind in ("dense", "octic")
    ]
    return f"D={row['width']:<5}N={row['tokens']} B={row['batch']} {row['type']:9} " + "   ".join(cells)


def ratio(row: dict, kind: str) -> float:
    """Our time over torch's."""
    return row["milliseconds"][kind] / row["milliseconds"][f"torch {kind}"]


def misses(row: dict) -> list[str]:
    """The claims that a row does not bear out."""
    if row["type"] != "float32" or "torch octic" not in row["milliseconds"]:
        return []
    return [
        f"{kind} at D={row['width']}: {ratio(row, kind):.2f} times torch's time, at most {limit} claimed"
        for kind, limit in LIMITS.items()
        if ratio(row, kind) > limit
    ]


def processor() -> str:
    """The name of the processor."""
    path = pathlib.Path("/proc/cpuinfo")
    names = [row.split(":")[1].strip() for row in path.read_text().splitlines() if row.startswith("model name")]
    return names[0] if names else platform.processor()


def commit() -> str:
    """The commit that is checked out."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    app.run(main)
