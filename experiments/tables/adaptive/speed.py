"""The costs of shift-equivariance: Tables 3, 4 and A1 of shift-equivariant ViTs, adaptive over ordinary models.

    python -m experiments tables.adaptive.speed --entry=gpu  # a GPU: batches of 128
    python -m experiments tables.adaptive.speed --batch=8 --runs=41 --warmup=2 --minutes=25  # a CPU
    python -m experiments tables.adaptive.speed --quick --output=/tmp/quick.json  # tiny models on any machine; a trial

Forward passes of the T sizes in float32 with the same random weights, in turn in one run: ordinary, adaptive with
`select="output"` (the paper's choice of phases) and with "input".  The ordinary model is the published one, padded with
zeros; it is also timed with circular padding.  Images are noise, which has no ties.

Multiply-adds are counted on shapes.  Memory is temporary memory of the compiled program, forward, and for the gradient
of a loss (of at most 64 images, as in Table A1).  The paper's figures are of an RTX 5000, its memory the most that
PyTorch's allocator held.  Modules (Table 4) are the strided embedding, the choice of its phase alone, and the anchor,
which the paper does not have; merging; the choice of windows; relative positions of MViTv2's first block.

Claims, as BOUNDS has them: multiply-adds, temporary memory and, on a CPU, time over the ordinary model's.  On a GPU the
time with "output" is at most the paper's.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from equivit import logical
from equivit.configs import recipes
from equivit.layers.batch_stats import recording
from equivit.models import zoo
from equivit.models.mvit.position import CircularPosition, DecomposedPosition
from equivit.models.swin.merge import PatchMerging
from equivit.models.swin.window import spread
from equivit.precision import PRECISIONS, cast
from equivit.symmetry import shifts
from experiments import compiled_models, findings, machine, timing
from experiments.compiled_models import Compiled, compiled
from experiments.findings import Claim
from experiments.tables import measuring, papers

VARIANTS = {"ordinary": {}, "output": dict(adaptive=True), "input": dict(adaptive=True, select="input")}
CIRCULAR = {"circular": dict(padding="circular")}  # of families with convolutions that pad
BOUNDS = {
    "swin_t": dict(output=1.10, input=1.05, macs=1.08, gradient=1.05),
    "swinv2_t": dict(output=1.10, input=1.05, macs=1.08, gradient=1.05),
    "cvt_13": dict(output=1.12, input=1.05, macs=1.12, gradient=1.08),
    "mvitv2_t": dict(output=1.20, input=1.08, macs=1.12, gradient=1.16),
}
FORWARD_MEMORY = 1.15
# Images per second (Table 3), MiB allocated in training ("gradient") and inference (Table A1).
PAPER = {row["model"]: row for row in papers.rows(__file__, "paper_speed.csv", words=("model",))}
# Milliseconds, ordinary and adaptive (Table 4), for batches of 128.
PAPER_MODULES = {row["module"]: row for row in papers.rows(__file__, "paper_modules.csv", words=("module",))}
GRADIENT_BATCH = 64
COLUMNS = dict(model="", ordinary_ms="ordinary, ms", output_ms="adaptive", input_ms="by input", output="ratio")
COLUMNS |= dict(input="by input", paper="paper", circular="ordinary, circular", macs="macs", macs_input="by input")
COLUMNS |= dict(forward="memory", forward_paper="paper", gradient="gradient", gradient_paper="paper")
MODULE_COLUMNS = dict(module="module", ordinary_ms="ordinary, ms", adaptive_ms="adaptive", choice_ms="choice alone")
MODULE_COLUMNS |= dict(choice_input_ms="by input", anchor_ms="anchor", ordinary_paper="paper")
MODULE_COLUMNS |= dict(adaptive_paper="adaptive")


def main(arguments=None) -> int:
    parser = measuring.parser(__doc__, __file__, models=list(BOUNDS), precisions=PRECISIONS, batch=128)
    options = parser.parse_args(arguments)
    budget, builds = timing.Budget(options.minutes), modules(options)
    entry = findings.Entry(options, measuring.settings(options), budget)
    entry.keep(("model",), [(name,) for name in options.models])
    entry.keep(("module",), [(name,) for name in builds], "modules")
    rows = {name: dict(model=name, **paper_columns(name), **arithmetic(name, options)) for name in options.models}
    for what, measure in (("forward", forward), ("gradient", gradient)):
        for name in options.models:
            if (found := measuring.attempt(budget, f"{name}, {what}", measure, name, options)) is not None:
                rows[name] |= found
                entry.add([rows[name]])
    timed = entry.measured(lambda name: module_row(name, builds[name], options), MODULE_COLUMNS, "modules")
    note = measuring.note(options, "ratios are adaptive over ordinary")
    print(f"batches of {options.batch}, {options.precision}{note}")
    print(findings.table(entry.rows(), COLUMNS))
    print(findings.table(timed, MODULE_COLUMNS))
    return entry.finish(claims_of(entry.rows(), judged=not options.quick))


def paper_columns(name: str) -> dict[str, float]:
    """The paper's ratios, adaptive over ordinary, of times and of memory."""
    row = PAPER[name]
    memory = {f"{what}_paper": row[f"{what}_adaptive"] / row[f"{what}_ordinary"] for what in ("forward", "gradient")}
    return dict(paper=row["ordinary"] / row["adaptive"], **memory)


def sizes(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Fields of a model's configuration that differ from the zoo's."""
    return dict(recipes.HIERARCHICAL[name]["small"], image_size=(32, 32), num_classes=10) if options.quick else {}


# ---- Models


def arithmetic(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Multiply-adds of one image over the ordinary model's, counted on shapes."""
    models = {variant: zoo.abstract(name, **sizes(name, options), **fields) for variant, fields in VARIANTS.items()}
    macs = {variant: measuring.counted(model).macs for variant, model in models.items()}
    return dict(macs=macs["output"] / macs["ordinary"], macs_input=macs["input"] / macs["ordinary"])


def forward(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Times of a forward pass in turn, their ratios, and the ratio of temporary memory."""
    found = {}
    padded = "padding" in {field.name for field in dataclasses.fields(zoo.configuration(name))}
    for variant, fields in (VARIANTS | CIRCULAR if padded else VARIANTS).items():
        model = compiled_models.random_model(name, **sizes(name, options), **fields)
        images = noise(options.batch, *model.config.input_shape)
        found[variant] = compiled(lambda m, x: cast(m, options.precision)(x), model, images)
    seconds = measuring.seconds(found, options)
    return dict(
        **{f"{variant}_ms": 1e3 * value for variant, value in seconds.items()},
        **{f"{variant}_per_second": options.batch / value for variant, value in seconds.items()},
        **{variant: value / seconds["ordinary"] for variant, value in seconds.items() if variant != "ordinary"},
        **temporary("forward", found),
    )


def gradient(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Temporary memory of the gradient of a loss; nothing runs."""

    @recording()
    def loss(model, images):
        model = cast(model, options.precision)
        logits = model(images, train=True)
        value = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros(len(images), int)).mean()
        return value, logical.take_state(model)

    found = {}
    for variant in ("ordinary", "output"):
        model = zoo.abstract(name, **sizes(name, options), **VARIANTS[variant])
        shape = (min(options.batch, GRADIENT_BATCH), *model.config.input_shape)
        found[variant] = compiled(jax.grad(loss, has_aux=True), model, jax.ShapeDtypeStruct(shape, jnp.float32))
    return temporary("gradient", found)


def temporary(what: str, found: dict[str, Compiled]) -> dict[str, Any]:
    """MiB that programs need beside arguments and results, and adaptive over ordinary."""
    mib = {variant: program.memory and program.memory.temporary / 2**20 for variant, program in found.items()}
    each = {f"{what}_{variant}_mib": value for variant, value in mib.items()}
    return {what: timing.ratio(mib["output"], mib["ordinary"]), **each}


# ---- Modules


def modules(options: argparse.Namespace) -> dict[str, Callable[[], dict[str, Compiled]]]:
    """Functions that compile the variants of each module, by the names of their columns."""
    build = functools.partial
    found: dict[str, Callable] = {f"{name}, embedding": build(embedding, name, options) for name in options.models}
    if "swin_t" in options.models:
        swin = zoo.configuration("swin_t", **sizes("swin_t", options))
        side = swin.image_size[0] // swin.patch_size[0]
        for stage, width in enumerate(swin.widths[:-1]):
            found[f"merging, stage {stage + 2}"] = build(merging, width, side // 2**stage, options)
        found["windows, stage 1"] = build(windows, swin.width, side, swin.window(0), options)
    if "mvitv2_t" in options.models:
        mvit = zoo.configuration("mvitv2_t", **sizes("mvitv2_t", options))
        found["positions"] = build(positions, mvit.width, mvit.image_size[0] // 4, options)
    return found


def embedding(name: str, options: argparse.Namespace) -> dict[str, Compiled]:
    """The strided embedding of an ordinary model, and the choices of an adaptive one before it."""
    free = dict(adaptive=True, anchor=False, **sizes(name, options))
    model, by_input = (compiled_models.random_model(name, **free, select=select) for select in ("output", "input"))
    images = noise(options.batch, *model.config.input_shape)
    return dict(
        ordinary_ms=compiled(lambda m, x: m.patch_embed(x), model, images),
        choice_ms=compiled(_phase, model, images),
        choice_input_ms=compiled(_phase, by_input, images),
        anchor_ms=compiled(lambda m, x: shifts.canonical(x)[0], None, images),
    )


def _phase(model, images):
    """The phase of the patches alone: XLA removes the rest of the program."""
    return next(iter(model.selections(images).values())).index


def merging(width: int, size: int, options: argparse.Namespace) -> dict[str, Compiled]:
    """Patch merging of a map at the corner, and where the content decides."""
    merge, grid = PatchMerging(width, norm_first=True, eps=1e-5, rngs=nnx.Rngs(0)), (size, size)
    x = noise(options.batch, size * size, width)
    return dict(
        ordinary_ms=compiled(lambda m, x: m(x, grid)[0], merge, x),
        adaptive_ms=compiled(lambda m, x: m.adaptive(x, grid, "output")[0], merge, x),
    )


def windows(width: int, size: int, window: tuple[int, int], options: argparse.Namespace) -> dict[str, Compiled]:
    """The choice of windows of a map, which is rolled to where they begin."""

    def placed(_, x):
        scores, places = spread(x, window)
        return shifts.roll(x, -shifts.phases(shifts.strongest(scores).index, places))

    return dict(adaptive_ms=compiled(placed, None, noise(options.batch, size, size, width)))


def positions(channels: int, size: int, options: argparse.Namespace) -> dict[str, Compiled]:
    """The logits of positions in MViTv2's first block, whose keys have a stride of 4."""
    queries, keys = (size, size), (size // 4, size // 4)
    plane = DecomposedPosition(queries, channels, rngs=nnx.Rngs(0))
    torus = CircularPosition(queries, channels, stride=(1, 1), kv_stride=(4, 4), rngs=nnx.Rngs(0))
    q = noise(options.batch, 1, size * size, channels)
    ahead = -jax.random.randint(jax.random.key(2), (options.batch, 2), 0, 4)
    return dict(
        ordinary_ms=compiled(lambda m, q: m(q, queries, keys), plane, q),
        adaptive_ms=compiled(lambda m, q: m[0](q, queries, keys, m[1]), (torus, ahead), q),
    )


def noise(*shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), shape)


def module_row(name: str, build: Callable, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a module beside the paper's."""
    times = {column: 1e3 * value for column, value in measuring.seconds(build(), options).items()}
    return {**PAPER_MODULES.get(name, dict(module=name, ordinary_paper=None, adaptive_paper=None)), **times}


# ---- Claims


def claims_of(rows: list[dict], *, judged: bool) -> list[Claim]:
    claims, gpu = [], machine.on_gpu()
    for row in rows:
        name = row["model"]
        bounds, times = BOUNDS[name], f"{name}: time over the ordinary model's"
        if gpu:
            held = [(f"{times}, the paper's as bound", "output", row["paper"])]
        else:
            held = [(times, "output", bounds["output"]), (f"{times}, by input", "input", bounds["input"])]
        held += [(f"{name}: multiply-adds", "macs", bounds["macs"])]
        held += [(f"{name}: temporary memory, forward", "forward", FORWARD_MEMORY)]
        held += [(f"{name}: temporary memory, gradient", "gradient", bounds["gradient"])]
        claims += [Claim(text, row.get(key), at_most=bound, judged=judged) for text, key, bound in held]
    return claims
