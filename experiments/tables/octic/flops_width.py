"""FLOPs and arithmetic intensity of an octic block against its width: Figure 4a and Section 3.3 of octic ViTs.

    python -m experiments tables.octic.flops_width  # counted on shapes, some seconds on a CPU

Left: operations of a plain block over those of an octic one, in matrix products only and in all, on 196 tokens (the
paper does not give the number, and its figure cannot be read to digits).  Right: multiply-adds, twice, per byte of the
linear map D -> 4D of one image, by the paper's formulas, and for the two kinds of products of an octic layer.

Claims: the ratio of products is (12 D + 2 N) / (12 D 3/16 + 2 N) at every width; both ratios grow with the width; for
ViT-L, H and 22B the ratio of all operations is that of Table 1 within 1 % (the table is of whole models); octic layers
get the higher intensity at about 3200 (within 1 %), and the paper's formulas agree with the real products.
"""

import itertools
import pathlib

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from scipy import optimize

from equivit import costs
from equivit.models import zoo
from equivit.symmetry import fields
from experiments import findings, flags
from experiments.findings import Claim

TOKENS = 196
WIDTHS = (128, 192, 256, 384, 512, 768, 1024, 1280, 1664, 2048, 3072, 4096, 6144, 8192)
# Width, tokens, and the ratio of Table 1: the models whose MLP is four times as wide.
TABLE_1 = {"ViT-L": (1024, 196, 4.58), "ViT-H": (1280, 256, 4.58), "ViT-22B": (6144, 196, 5.18)}
BYTES = 2  # of a number, P in the paper
PAPER_CROSSOVER = 3200


COLUMNS = dict(width="D", matmul="products", total="all", standard="standard, flop/B", octic="octic", E="E")
COLUMNS |= dict(lines="1-D irreps")


def main(arguments=None) -> int:
    options = flags.parser(__doc__, __file__).parse_args(arguments)
    rows = [dict(width=width, **ratios(width, TOKENS), **intensities(width)) for width in WIDTHS]
    print(findings.table(rows, COLUMNS))
    named = {name: ratios(width, tokens)["total"] for name, (width, tokens, _) in TABLE_1.items()}
    for name, value in named.items():
        print(f"a block of {name}: {value:.2f}, the paper's model {TABLE_1[name][2]:.2f}")
    crossings = crossovers()
    print(f"octic above standard intensity from D = {crossings['octic']:.0f} (paper: about {PAPER_CROSSOVER}),")
    print(f"its product for E from D = {crossings['E']:.0f}, those for the 1-D irreps never")
    results = dict(tokens=TOKENS, bytes=BYTES, rows=rows, blocks=named, crossovers=crossings)
    status = findings.finish(options, results, claims_of(rows, named, crossings))
    draw(rows, crossings, findings.picture(options))
    return status


def ratios(width: int, tokens: int) -> dict[str, float]:
    """Plain over octic operations of one block: "matmul" in matrix products, "total" in all."""
    plain, octic = block_costs("vit", "plain", width, tokens), block_costs("octic_vit", "D8", width, tokens)
    products = [counted["linear"].macs + counted["attention"].macs for counted in (plain, octic)]
    return dict(matmul=products[0] / products[1], total=plain.fvcore / octic.fvcore)


def block_costs(flavour: str, family: str, width: int, tokens: int) -> costs.Costs:
    """One image through one block with heads of 64 channels."""
    model = zoo.abstract(f"{flavour}_b16", family=family, width=width, num_heads=max(1, width // 64), depth=1)
    block = jax.eval_shape(lambda model: model.blocks[0], model)

    def apply(block, x):
        return block(x if model.config.group is None else fields.from_dense(x, model.config.group))

    return costs.count(apply, block, jax.ShapeDtypeStruct((1, tokens, width), jnp.float32))


def intensity(rows: float, contracted: float, columns: float, *, weights: float, macs: float) -> float:
    """Floating-point operations for each byte of a layer's input, weights and output (Section 3.3)."""
    return 2 * macs / (BYTES * (rows * contracted + weights + rows * columns))


def intensities(width: float, tokens: float = TOKENS) -> dict[str, float]:
    """Intensities of the linear map D -> F = 4D: the paper's two formulas, and the products of the octic layer.

    The octic layer multiplies [B, D/8] by [D/8, F/8] four times, and for E, whose two rows share one matrix, [2B, D/4]
    by [D/4, F/4] once.  Together they read B D values and D F / 8 weights, as the paper's formula has it.
    """
    b, d, f = tokens, width, 4 * width
    whole = b * d * f
    return dict(
        standard=intensity(b, d, f, weights=d * f, macs=whole),
        octic=intensity(b, d, f, weights=d * f / 8, macs=whole * 3 / 16),
        E=intensity(2 * b, d / 4, f / 4, weights=d * f / 16, macs=whole / 8),
        lines=intensity(b, d / 8, f / 8, weights=d * f / 64, macs=whole / 64),
    )


def crossovers() -> dict[str, float | None]:
    """The width above which each has a higher intensity than the standard layer, or None."""

    def excess(width, name):
        values = intensities(width)
        return values[name] - values["standard"]

    low, high, found = 64, 2**24, {}
    for name in ("octic", "E", "lines"):
        found[name] = optimize.brentq(excess, low, high, args=(name,)) if excess(high, name) > 0 else None
    return found


def claims_of(rows: list[dict], named: dict[str, float], crossings: dict) -> list[Claim]:
    formula = [(12 * r["width"] + 2 * TOKENS) / (12 * r["width"] * 3 / 16 + 2 * TOKENS) for r in rows]
    off = max(abs(row["matmul"] / expected - 1) for row, expected in zip(rows, formula, strict=True))
    steps = [b[key] - a[key] for key in ("matmul", "total") for a, b in itertools.pairwise(rows)]
    apart = [abs(named[name] / paper - 1) for name, (_, _, paper) in TABLE_1.items()]
    parts = max(abs(parts_intensity(r["width"]) / r["octic"] - 1) for r in rows)
    return [
        Claim("ratio of products, relative deviation from the formula", off, at_most=1e-12),
        Claim("ratios, the smallest growth from one width to the next", min(steps), at_least=0.0),
        Claim("ratio of all operations, relative deviation from Table 1", max(apart), at_most=0.01),
        Claim("crossover of intensities over 3200", crossings["octic"] / PAPER_CROSSOVER, at_least=0.99, at_most=1.01),
        Claim("octic intensity, relative deviation of its parts' from the formula", parts, at_most=1e-12),
    ]


def parts_intensity(width: float) -> float:
    """The octic layer's intensity from its five products: their operations over their bytes."""
    b, d, f = TOKENS, width, 4 * width
    parts = [(b, d / 8, f / 8)] * 4 + [(2 * b, d / 4, f / 4)]
    values = sum(rows * contracted + contracted * columns + rows * columns for rows, contracted, columns in parts)
    return 2 * sum(rows * contracted * columns for rows, contracted, columns in parts) / (BYTES * values)


def draw(rows: list[dict], crossings: dict, path: pathlib.Path):
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    widths = [row["width"] for row in rows]
    left.plot(widths, [row["matmul"] for row in rows], marker="o", markersize=3, label="matrix products")
    left.plot(widths, [row["total"] for row in rows], marker="o", markersize=3, label="all operations")
    left.axhline(16 / 3, color="black", linewidth=0.8, linestyle=":", label="16/3")
    for (name, (width, tokens, paper)), place in zip(TABLE_1.items(), ((-36, 6), (6, -10), (-24, -14)), strict=True):
        left.plot(width, paper, "kx")
        more = "" if tokens == TOKENS else f", {tokens} tokens"
        left.annotate(f"{name}{more}", (width, paper), place, textcoords="offset points", fontsize=8)
    left.plot([], [], "kx", linestyle="", label="Table 1, whole models")
    left.set(xlabel="embedding dimension", ylabel="plain over octic, one block of 196 tokens")
    labels = dict(standard="standard", octic="octic", E="octic, E", lines="octic, 1-D irreps")
    for name, label in labels.items():
        style = "-" if name in ("standard", "octic") else "--"
        right.plot(widths, [row[name] for row in rows], label=label, linestyle=style)
    right.axvline(crossings["octic"], color="black", linewidth=0.8, linestyle=":")
    right.set(xlabel="embedding dimension", ylabel="flop/byte, D to 4D, 196 tokens")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths[::2], list(map(str, widths[::2])), fontsize=8)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
