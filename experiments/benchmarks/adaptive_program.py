"""Programs for an H200 of adaptive and of ordinary models, by the compiler: kernels, bytes, a floor of the time.

    JAX_PLATFORMS=cpu python -m experiments benchmarks.adaptive_program  # about half an hour, without a GPU

It needs JAX's CUDA plugin (docs/accelerators.md).  Batches of 128 images of the published size, float32.  Gradients are
taken with respect to the parameters, in training mode.  `equivit.targets` defines the floor.
"""

import itertools
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
    options = options.parse_args(arguments)
    entry = findings.Entry(options, dict(batch=BATCH, card=TARGET.card.name))
    each = list(itertools.product(options.models, ("forward", "gradient")))
    entry.keep(("model", "what"), each)
    for model, what in each:
        entry.add(found := measure(model, what))
        print(findings.table(found, COLUMNS), flush=True)
    print(findings.table(entry.rows(), COLUMNS))
    return entry.finish([])


def measure(model: str, what: str) -> list[dict]:
    """A row for each form, and the ratio of its floor to the ordinary model's."""
    rows = []
    for form in FORMS:
        found = figures(compile_for_h200(*whole(model, what, form)), 1)
        found["floor_ms"] = found.pop("floor_us") / 1e3
        rows.append(dict(model=model, what=what, form=form, **found))
    return [{**row, "ratio": row["floor_ms"] / rows[0]["floor_ms"]} for row in rows]


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
