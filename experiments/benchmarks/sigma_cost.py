"""The cost of Sigma: a pass that measures the attention of all blocks, over plain forward passes of the same images.

    python -m experiments benchmarks.sigma_cost  # ViT-B/14, 224 px, batches of 8
    python -m experiments benchmarks.sigma_cost --quick --output=/tmp/quick.json  # a tiny model; tries the script

Both run in turn; the model has random weights and patch tokens alone.  The table also has the memory of the statistics,
two buffers a head, and the program's temporary memory.  Claim, on a CPU: at most 1.5 times the plain passes.
"""

import jax
import numpy as np

from equivit.data.devices import padded
from equivit.depthwise import selection
from equivit.models import zoo
from experiments import findings, flags, machine, timing
from experiments.findings import Claim

ALONE = dict(class_token=False, pool="mean", num_classes=None, mask_token=False, class_position=False)
QUICK = dict(width=32, depth=2, num_heads=2, image_size=(56, 56))
MOST = 1.5
COLUMNS = dict(plain_ms="plain, ms", sigma_ms="Sigma, ms", ratio="ratio")
COLUMNS |= dict(buffers_mb="buffers, MB", temporary_mb="temporary, MB")


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=10, warmup=2, minutes=None)
    parser.add_argument("--batch", type=int, default=8, help="images of a batch (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    size = QUICK["image_size"] if options.quick else (224, 224)
    entry = findings.Entry(options, dict(batch=options.batch, image_size=size))
    model = zoo.create("dinov2_vit_b14", **ALONE | dict(image_size=size) | (QUICK if options.quick else {}))
    row = cost(model, np.random.default_rng(0).normal(size=(options.batch, *size, 3)).astype(np.float32), options)
    print(findings.table([row], COLUMNS))
    judged = jax.default_backend() == "cpu" and not options.quick
    claims = [Claim("Sigma over plain forward passes", row["ratio"], at_most=MOST, judged=judged)]
    return entry.finish(claims, **row)


def cost(model, images: np.ndarray, options) -> dict[str, float]:
    """Milliseconds of both, and megabytes."""
    given = padded(images, len(images))
    held = [selection.moments(model, [images])]
    plain = jax.jit(lambda model, x: model.tokens(x))

    def measure():
        held.append(selection.step(model, held.pop(), **given))
        return held[0]

    variants = {"plain": lambda: plain(model, given["images"]), "sigma": measure}
    times = timing.milliseconds(variants, options)
    row = {f"{name}_ms": time for name, time in times.items()} | dict(ratio=times["sigma"] / times["plain"])
    row["buffers_mb"] = sum(leaf.nbytes for leaf in jax.tree.leaves(held[0])) / 1e6
    memory = machine.memory(selection.step.lower(model, held[0], **given).compile())
    return row | dict(temporary_mb=memory.temporary / 1e6 if memory else None)
