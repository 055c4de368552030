r"""Global tokens of trained runs: their attention (Jumbo, A.6), and the norms of the patch tokens (Figure 5).

    python -m experiments tables.jumbo.global_tokens runs/jumbo_small_images/main/registers_96/seed_0 \
        runs/jumbo_small_images/main/jumbo_96/seed_0

Draws the last block's attention of each token before the patches (mean over heads) on some test images, and histograms
of the norms of the patch tokens after the last block.  The JSON has the share above three times the median.
"""

import itertools
import pathlib

import jax
import numpy as np
from matplotlib.figure import Figure

from equivit.data import loader
from equivit.data.pixels import normalize
from equivit.evaluation.attention_maps import attention_maps
from equivit.evaluation.patch_norms import outlier_share, patch_norms
from equivit.training import checkpoints
from experiments import findings, flags

SHOWN, ROWS = 3, 6  # images, and tokens before the patches
IMAGES = 256  # for the norms


def main(arguments=None) -> int:
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("runs", nargs="+", type=pathlib.Path, help="run directories")
    options = parser.parse_args(arguments)
    rows = [looked_at(run) for run in options.runs]
    table = [dict(run=row["run"], median=float(np.median(row["norms"])), outliers=row["outliers"]) for row in rows]
    print(findings.table(table, dict(run="run", median="median norm", outliers="share above 3 medians")))
    status = findings.finish(options, dict(images=IMAGES, rows=table), [])
    stem = options.output.with_suffix("")
    draw_attention(rows, stem.with_name(f"{stem.name}_attention.png"))
    draw_norms(rows, stem.with_name(f"{stem.name}_norms.png"))
    return status


def looked_at(run: pathlib.Path) -> dict:
    """Attention maps and patch norms of a run's model on the first images of its evaluation split."""
    config, model, _ = checkpoints.load_run(run)
    pixels = next(iter(loader.evaluate(config.data, batch_size=IMAGES).batches()))["image"]
    images = normalize(pixels, config.data.mean, config.data.std)
    maps = jax.jit(attention_maps)(model, images[:SHOWN]).mean(1)
    norms = jax.jit(patch_norms)(model, images).values
    name = "/".join(run.parts[-2:])
    return dict(run=name, pixels=pixels[:SHOWN], maps=maps, norms=norms, outliers=float(outlier_share(norms)))


def draw_attention(rows, path):
    figure = Figure(figsize=(1.2 * (ROWS + 1), 1.2 * SHOWN * len(rows)), layout="constrained")
    grid = figure.subplots(SHOWN * len(rows), ROWS + 1, squeeze=False)
    for line, (row, k) in zip(grid, itertools.product(rows, range(SHOWN)), strict=True):
        line[0].imshow(row["pixels"][k].squeeze(), cmap="gray")
        line[0].set_ylabel(row["run"] if k == 0 else "", fontsize=6)
        for axes, image in zip(line[1:], row["maps"][k], strict=False):
            axes.imshow(image, cmap="viridis")
        for axes in line[1 + row["maps"].shape[1] :]:
            axes.set_visible(False)
    for axes in figure.axes:
        axes.set(xticks=[], yticks=[])
    for k, axes in enumerate(grid[0][1:]):
        axes.set_title(f"token {k}", fontsize=7)
    figure.savefig(path, dpi=150)


def draw_norms(rows, path):
    figure = Figure(figsize=(3 * len(rows), 2.6), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        axes.hist(np.ravel(row["norms"]), bins=60, log=True)
        axes.axvline(3 * np.median(row["norms"]), color="black", linewidth=0.8, linestyle=":")
        axes.set_title(f"{row['run']}: {100 * row['outliers']:.2f} % above 3 medians", fontsize=7)
        axes.set_xlabel("norm of a patch token")
    figure.savefig(path, dpi=150)
