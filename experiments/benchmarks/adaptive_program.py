"""The compiler's program for an H200 of adaptive and of ordinary models: kernels, bytes, a floor of the time.

    JAX_PLATFORMS=cpu python -m experiments benchmarks.adaptive_program  # about half an hour, without a GPU

It needs JAX's CUDA plugin (docs/accelerators.md).  Batches of 128 images of the published size, float32.  Gradients are
taken with respect to the parameters, in training mode.  `equivit.targets` defines the floor.
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import logical
from equivit.layers.batch_stats import recording
from equivit.models import zoo
from experiments import findings, flags
from experiments.benchmarks.gpu_program import TARGET, compile_for_h200, figures

MODELS = {"Swin-T": "swin_t", "SwinV2-T": "swinv2_t", "CvT-13": "cvt_13", "MViTv2-T": "mvitv2_t"}
FORMS = {"ordinary": {}, "adaptive": dict(adaptive=True), "by input": dict(adaptive=True, select="input")}
BATCH = 128
COLUMNS = dict(model="", what="", form="form", kernels="kernels", megabytes="MB", floor_ms="floor, ms", ratio="ratio")


def main(arguments=None) -> int:
    options = flags.parser(__doc__, __file__)
    options.add_argument(
        "--models", type=flags.one_of(tuple(MODELS)), default=list(MODELS), help="such as Swin-T,CvT-13"
    )
    return flags.run(_run, options.parse_args(arguments))


def _run(options) -> int:
    rows, floors = [], {}
    for model in options.models:
        for what in ("forward", "gradient"):
            for form in FORMS:
                found = figures(compile_for_h200(*whole(model, what, form)), 1)
                floors[form] = found.pop("floor_us") / 1e3
                ratio = floors[form] / floors["ordinary"]
                rows.append(dict(model=model, what=what, form=form, **found, floor_ms=floors[form], ratio=ratio))
                print(findings.table(rows[-1:], COLUMNS), flush=True)
    print(findings.table(rows, COLUMNS))
    return findings.finish(options, dict(batch=BATCH, card=TARGET.card.name, rows=rows), [])


def whole(model: str, what: str, form: str, batch: int = BATCH) -> tuple[Callable, tuple]:
    """The forward pass or the gradient of a model as a function of its variables and images, and its arguments."""
    name = MODELS[model]
    config, abstract = zoo.configuration(name, **FORMS[form]), zoo.abstract(name, **FORMS[form])
    graph, parameters, others = nnx.split(abstract, nnx.Param, ...)
    images = jax.ShapeDtypeStruct((batch, *config.image_size, 3), jnp.float32)

    def forward(parameters, others, images):
        return nnx.merge(graph, parameters, others)(images)

    def loss(parameters, others, images):
        module = nnx.merge(graph, parameters, others, copy=True)  # so that it may record statistics
        return jnp.square(module(images, train=True)).mean(), logical.take_state(module)

    function = forward if what == "forward" else recording()(jax.grad(loss, has_aux=True))
    return function, (parameters, others, images)


if __name__ == "__main__":
    sys.exit(main())
