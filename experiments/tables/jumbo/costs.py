"""Parameters and FLOPs of Jumbo's Tables 1, 4 and 5, and the cost of a layer by its parts (Figure 3).

    python -m experiments tables.jumbo.costs  # counted on shapes, a minute on a CPU

FLOPs are multiply-adds of linear maps, and norms, for one image of 224 px, without the products of attention, as the
tables count them.  Claims: every number agrees with the paper's within half a unit of its last digit; Jumbo's own MLP
is at most an eighth of a layer of ViT-Small (J = 6, 196 patches).
"""

import math

import jax
from matplotlib.figure import Figure

from equivit.models import zoo
from experiments import findings, flags
from experiments.findings import Claim
from experiments.tables import measuring
from experiments.tables.jumbo import paper_numbers

COLUMNS = dict(table="table", model="model", parameters="M parameters", paper_parameters="paper", gflops="GFLOPs")
COLUMNS |= dict(paper_gflops="paper")
HALF_A_DIGIT = 0.05 + 1e-9
PARTS = dict(patch_macs="patches", jumbo_attention_macs="Jumbo, maps of attention", jumbo_mlp_macs="Jumbo, its MLP")
PATCHES, WIDTHS = (64, 196, 256, 576), (96, 128, 192, 384, 768)


def main(arguments=None) -> int:
    options = flags.parser(__doc__, __file__).parse_args(arguments)
    rows = [row(given) for given in paper_numbers.COSTS]
    print(findings.table(rows, COLUMNS))
    layers = [layer(width, patches) for width in WIDTHS for patches in PATCHES]
    status = findings.finish(options, dict(rows=rows, layers=layers), claims_of(rows, layers))
    draw(layers, findings.picture(options))
    return status


def row(paper: dict) -> dict:
    """Parameters and FLOPs of a model beside the paper's."""
    abstract = zoo.abstract(paper["name"], **paper["options"])
    parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract)) / 1e6
    found = dict(table=paper["table"], model=paper["label"], parameters=parameters)
    found |= dict(paper_parameters=paper["parameters"], gflops=measuring.counted(abstract).linear_and_norms / 1e9)
    return found | dict(paper_gflops=paper["gflops"])


def layer(width: int, patches: int, jumbo: int = 6) -> dict:
    """Multiply-adds of the linear maps of one layer: of the patches, and of a Jumbo token with the shared MLP."""
    attention, mlp = 4 * width**2, 8 * width**2
    token = dict(jumbo_attention_macs=jumbo * attention, jumbo_mlp_macs=8 * (jumbo * width) ** 2)
    return dict(width=width, patches=patches, patch_macs=patches * (attention + mlp), **token)


def claims_of(rows, layers) -> list[Claim]:
    claims = []
    for key, unit in (("parameters", "M parameters"), ("gflops", "GFLOPs")):
        off = max(abs(r[key] - r[f"paper_{key}"]) for r in rows)
        claims.append(Claim(f"{unit}, largest difference from the paper's", off, at_most=HALF_A_DIGIT))
    small = next(r for r in layers if (r["width"], r["patches"]) == (384, 196))
    share = small["jumbo_mlp_macs"] / sum(small[key] for key in PARTS)
    return [*claims, Claim("Jumbo's own MLP, share of a layer of ViT-Small", share, at_most=1 / 8)]


def draw(layers, path):
    figure = Figure(figsize=(10, 3), layout="constrained")
    for axes, width in zip(figure.subplots(1, len(WIDTHS), sharex=True), WIDTHS, strict=True):
        bottom = [0.0] * len(PATCHES)
        for key, label in PARTS.items():
            heights = [r[key] / 1e6 for r in layers if r["width"] == width]
            axes.bar(list(map(str, PATCHES)), heights, bottom=bottom, label=label)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        axes.set(title=f"width {width}", xlabel="patches")
    figure.axes[0].set_ylabel("million multiply-adds, one layer")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
