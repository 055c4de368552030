"""The replacements of attention: counts of Tables 1 and A.3 of depthwise attention.

    python -m experiments tables.depthwise.layers  # counted on shapes, some seconds on a CPU

Operations (two for a multiply-add), parameters, and the memory of Table 1, beside the paper's.  Memory is of
activations read and written: with a = n d and s = H n n values of four bytes, attention has 2 s + 3 a, DW 3 a, the
dense convolutions 2 a, and Ens+DW 2 n d / H.  Table 1 counts parameters as trained, A.3 as deployed; A.3 is about 256
tokens, and its columns "Params" and "FLOPS" are exchanged.  Claims: every figure is the paper's to its last digit.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import costs
from equivit.layers import dense, depthwise
from equivit.layers.grid import Layout
from experiments import findings, flags
from experiments.findings import Claim

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
COLUMNS = dict(kind="kind", heads="heads", tokens="tokens", gflop="GFLOP", paper_gflop="paper")
COLUMNS |= dict(parameters="M parameters", paper_parameters="paper", memory="MiB", paper_memory="paper")


def main(arguments=None) -> int:
    options = flags.parser(__doc__, __file__).parse_args(arguments)
    counts = [count(kind, 16, 576, paper) for kind, paper in TABLE_1.items()]
    counts += [count(kind, heads, 256, paper) for heads, rows in TABLE_A3.items() for kind, paper in rows.items()]
    print(findings.table(counts, COLUMNS))
    return findings.finish(options, dict(counts=counts), [claim for row in counts for claim in claims_of(row)])


def count(kind: str, heads: int, tokens: int, paper: tuple[str, ...]) -> dict[str, Any]:
    """A row of Table 1 (576 tokens) or A.3 (256), of heads of 64 channels, beside the paper's figures."""
    width, layout = 64 * heads, Layout((math.isqrt(tokens),) * 2)
    trained, deployed = (jax.eval_shape(functools.partial(module, kind, width, heads, folded=f)) for f in (False, True))
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    gflop = costs.count(lambda module, x: module(x, layout), deployed, x).double_macs / 1e9
    counted = trained if tokens == 576 else deployed
    parameters = sum(leaf.size for leaf in jax.tree.leaves(counted)) / 1e6
    row = dict(kind=kind, heads=heads, tokens=tokens, gflop=gflop, parameters=parameters)
    row |= dict(zip(("paper_gflop", "paper_parameters", "paper_memory"), paper, strict=False))
    return row | (dict(memory=memory(kind, width, heads, tokens)) if tokens == 576 else {})


def module(kind: str, width: int, heads: int, *, folded: bool = False, kernel_size: int = 3) -> nnx.Module:
    """An attention, or its replacement of a kind."""
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


def claims_of(row: dict[str, Any]) -> list[Claim]:
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
