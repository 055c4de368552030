"""Parameters and FLOPs of Jumbo's Tables 1, 4 and 5, and the cost of a layer by its parts (Figure 3).

    python experiments/jumbo_costs.py         # counted on shapes, a minute on a CPU

FLOPs are multiply-adds of linear maps, and norms, for one image of 224 px, without the products of attention: what the
tables' column turns out to count.  Table 1 has those of ViT-B and of ViT-B with Jumbo the wrong way round; here they
stand with the model that they belong to.

Claims: every number agrees with the paper's within half a unit of its last digit; Jumbo's own MLP is at most an eighth
of a layer of ViT-Small (J = 6, 196 patches).  Exits 1 when one fails.
"""

import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

from equivit import costs
from equivit.models import zoo
from experiments import benchmark
from experiments.benchmark import Claim

IN21K = dict(num_classes=10450)
# Table, model, name of the zoo, options, and the paper's parameters in millions and GFLOPs.
ROWS = [
    ("1", "ViT-B", "vit_b16", {}, 86.6, 16.9),
    ("1", "ViT-B, Jumbo", "jumbo_vit_b16", {}, 130.7, 16.5),
    ("1", "ViT-L", "vit_l16", {}, 304.4, 59.7),
    ("1", "ViT-L, Jumbo", "jumbo_vit_l16", {}, 382.2, 59.9),
    ("4", "ViT-S, Jumbo", "jumbo_vit_s16", IN21K, 88.3, 4.6),
    ("4", "an MLP per layer", "jumbo_vit_s16", dict(IN21K, jumbo_mlp="per_layer"), 555.6, 4.6),
    ("4", "no Jumbo MLP", "jumbo_vit_s16", dict(IN21K, jumbo_mlp="none"), 45.8, 4.4),
    ("4", "LoRA, rank 8", "jumbo_vit_s16", dict(IN21K, jumbo_mlp="lora"), 88.8, 4.6),
    ("4", "J = 10", "jumbo_vit_s16", dict(IN21K, jumbo=10), 179.9, 5.5),
    ("5", "ViT-B, Jumbo", "jumbo_vit_b16", IN21K, 152.5, 16.5),
    ("5", "ViT-B, Registers", "register_vit_b16", IN21K, 93.9, 18.2),
    ("5", "Registers, width 1024", "register_vit_b16", dict(IN21K, width=1024, num_heads=16), 162.9, 32.4),
    ("5", "ViT-S, Registers", "register_vit_s16", IN21K, 25.7, 4.6),
    ("5", "alternative 1", "register_vit_s16", dict(IN21K, register_mlp="class_and_registers"), 39.9, 4.6),
    ("5", "alternative 2", "register_vit_s16", dict(IN21K, register_mlp="registers"), 39.9, 4.6),
]
COLUMNS = dict(
    table="table",
    model="model",
    parameters="M parameters",
    paper_parameters="paper",
    gflops="GFLOPs",
    paper_gflops="paper",
)
HALF_A_DIGIT = 0.05 + 1e-9
PATCHES, WIDTHS = (64, 196, 256, 576), (96, 128, 192, 384, 768)


def main(arguments=None) -> int:
    options = benchmark.parser(__doc__, output="jumbo_costs.json").parse_args(arguments)
    rows = [row(*given) for given in ROWS]
    print(benchmark.table(rows, COLUMNS))
    layers = [layer(width, patches) for width in WIDTHS for patches in PATCHES]
    status = benchmark.finish(options.output, dict(rows=rows, layers=layers), claims_of(rows, layers))
    draw(layers, options.output.with_suffix(".png"))
    return status


def row(table, model, name, options, parameters, gflops) -> dict:
    abstract = zoo.abstract(name, **options)
    counted = costs.count(lambda m, x: m(x), abstract, jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32))
    return dict(
        table=table,
        model=model,
        parameters=sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract)) / 1e6,
        paper_parameters=parameters,
        gflops=counted.linear_and_norms / 1e9,
        paper_gflops=gflops,
    )


def layer(width: int, patches: int, jumbo: int = 6) -> dict:
    """Multiply-adds of the linear maps of one layer: of the patches, and of a Jumbo token, shared MLP and all."""
    attention, mlp = 4 * width**2, 8 * width**2
    return dict(
        width=width,
        patches=patches,
        patch_macs=patches * (attention + mlp),
        jumbo_attention_macs=jumbo * attention,
        jumbo_mlp_macs=8 * (jumbo * width) ** 2,
    )


def claims_of(rows, layers) -> list[Claim]:
    claims = []
    for key, unit in (("parameters", "M parameters"), ("gflops", "GFLOPs")):
        off = max(abs(r[key] - r[f"paper_{key}"]) for r in rows)
        claims.append(Claim(f"{unit}, largest difference from the paper's", off, at_most=HALF_A_DIGIT))
    small = next(r for r in layers if (r["width"], r["patches"]) == (384, 196))
    share = small["jumbo_mlp_macs"] / sum(small[key] for key in small if key.endswith("macs"))
    return [*claims, Claim("Jumbo's own MLP, share of a layer of ViT-Small", share, at_most=1 / 8)]


def draw(layers, path):
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, width in zip(figure.subplots(1, len(WIDTHS), sharex=True), WIDTHS, strict=True):
        bottom = [0.0] * len(PATCHES)
        for key, label in (
            ("patch_macs", "patches"),
            ("jumbo_attention_macs", "Jumbo, maps of attention"),
            ("jumbo_mlp_macs", "Jumbo, its MLP"),
        ):
            heights = [r[key] / 1e6 for r in layers if r["width"] == width]
            axes.bar(list(map(str, PATCHES)), heights, bottom=bottom, label=label)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set(title=f"width {width}", xlabel="patches")
    figure.axes[0].set_ylabel("million multiply-adds, one layer")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    sys.exit(main())
