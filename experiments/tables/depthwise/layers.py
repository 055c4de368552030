"""The replacements of attention: counts of Tables 1, A.3 and A.4 of depthwise attention.

    python -m experiments tables.depthwise.layers  # counted on shapes, some seconds on a CPU

Operations (two for a multiply-add), parameters, and the memory of Table 1, beside the paper's.  Memory is of
activations read and written: with a = n d and s = H n n values of four bytes, attention has 2 s + 3 a, DW 3 a, the
dense convolutions 2 a, and Ens+DW 2 n d / H.  In Table A.4, with values of two bytes, flash attention has 5 a, and the
paper's figure of Ens+DW also counts the input.  Table 1 counts parameters as trained, A.3 as deployed; A.3 is about 256
tokens, and its columns "Params" and "FLOPS" are exchanged.  Claims: every figure is the paper's to its last digit.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from equivit import costs
from equivit.layers.grid import Layout
from experiments import findings, flags
from experiments.findings import Claim
from experiments.tables import papers
from experiments.tables.depthwise import calls

# Tables 1 and A.4 (float16) at 576 tokens, width 1024, 16 heads; Table A.3 at 256 tokens.  GFLOP, M parameters and MiB
# are text, as their digits count; the memory 0.288 is KiB / 1000.
PAPER = papers.rows(__file__, "paper_layers.csv", words=("kind", "dtype", "gflop", "parameters", "memory"))
COLUMNS = dict(kind="kind", heads="heads", tokens="tokens", dtype="dtype", gflop="GFLOP", paper_gflop="paper")
COLUMNS |= dict(parameters="M parameters", paper_parameters="paper", memory="MiB", paper_memory="paper")


def main(arguments=None) -> int:
    options = flags.parser(__doc__, __file__).parse_args(arguments)
    counts = [count(paper) for paper in PAPER]
    print(findings.table(counts, COLUMNS))
    return findings.finish(options, dict(counts=counts), [claim for row in counts for claim in claims_of(row)])


def count(paper: dict[str, Any]) -> dict[str, Any]:
    """A row of a table, of heads of 64 channels, beside the paper's figures."""
    kind, heads, tokens, dtype = (paper[key] for key in ("kind", "heads", "tokens", "dtype"))
    width, layout = 64 * heads, Layout((math.isqrt(tokens),) * 2)
    module = functools.partial(calls.module, width, heads, None if kind == "attention" else kind)
    trained, deployed = (jax.eval_shape(functools.partial(module, folded=folded)) for folded in (False, True))
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    gflop = costs.count(lambda module, x: module(x, layout), deployed, x).double_macs / 1e9
    parameters = sum(leaf.size for leaf in jax.tree.leaves(trained if tokens == 576 else deployed)) / 1e6
    row = dict(kind=kind, heads=heads, tokens=tokens, dtype=dtype, gflop=gflop, parameters=parameters)
    row |= {f"paper_{key}": paper[key] for key in ("gflop", "parameters", "memory") if paper[key]}
    return row | (dict(memory=memory(kind, width, heads, tokens, dtype)) if tokens == 576 else {})


def memory(kind: str, width: int, heads: int, tokens: int, dtype: str) -> float:
    """MiB of activations by the rules of Tables 1 (float32) and A.4 (float16)."""
    a, s, half = tokens * width, heads * tokens * tokens, dtype == "float16"
    values = {"attention": 5 * a if half else 2 * s + 3 * a, "conv": 2 * a, "dw": 3 * a, "spvit": 2 * a}
    values["ens_dw"] = 2 * a // heads + (a if half else 0)
    return jnp.dtype(dtype).itemsize * values[kind] / 2**20


def claims_of(row: dict[str, Any]) -> list[Claim]:
    """Each figure is the paper's, to its last digit."""
    claims = []
    for what in ("gflop", "parameters", "memory"):
        if (paper := row.get(f"paper_{what}")) is None:
            continue
        kib = (row["kind"], row["dtype"], what) == ("ens_dw", "float32", "memory")
        ours = row[what] * (1.024 if kib else 1)  # printed as KiB / 1000
        off = 1.001 * 10.0 ** -len(paper.partition(".")[2])  # a unit of the last digit: some are cut, not rounded
        text = f"{row['kind']}, {row['heads']} heads, {row['tokens']} tokens, {row['dtype']}: {what}"
        claims.append(Claim(text, ours, at_least=float(paper) - off, at_most=float(paper) + off))
    return claims
