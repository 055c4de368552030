"""Programs for an H200 of stacks of ViT blocks, by the compiler: kernels, bytes, a floor of the time, memory.

    JAX_PLATFORMS=cpu python -m experiments benchmarks.gpu_program  # about 10 minutes, without a GPU
    JAX_PLATFORMS=cpu python -m experiments benchmarks.gpu_program --only=D8,gradient,unrolled --top=20 --entry=D8
    JAX_PLATFORMS=cpu python -m experiments benchmarks.gpu_program --only=ViT-H,unrolled,none --depth=32 --entry=deep

It needs JAX's CUDA plugin (docs/accelerators.md).  The batch has 64 images of 224 px.  Products are in bfloat16 and the
residual stream in float32; parameters are rounded as in a training step.  Figures are for one block of a stack of four,
or of `--depth`; memory and seconds to compile are for the whole stack.  Gradients are taken with respect to parameters
and input.  "kernels" traces under `kernels.using("gpu")`; some of these kernels have not run on a GPU.
`equivit.targets` defines the floor.
"""

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import kernels, targets
from equivit.layers import stack
from equivit.models import zoo
from equivit.precision import AtUse
from equivit.symmetry import fields
from experiments import findings, flags

MODELS = {
    "plain ViT-H": ("vit_h14", {}),
    "D8(ViT-H)": ("octic_vit_h14", dict(family="D8")),
    "D8(ViT-L)": ("octic_vit_l16", dict(family="D8")),
}
BATCH, TARGET = 64, targets.parse("h200x1")
COLUMNS = dict(model="", what="", blocks="blocks", remat="remat", chosen="chosen", kernels="kernels", megabytes="MB")
COLUMNS |= dict(floor_us="floor, us", temporary_mib="MiB", seconds="s to compile")


class Variant(NamedTuple):
    """A program: `blocks` is "scan" or "unrolled", `chosen` "auto" or "kernels"."""

    model: str
    what: str  # "forward" or "gradient"
    blocks: str
    remat: str
    chosen: str


def variants() -> list[Variant]:
    """All programs of the table."""
    loops = ("scan", "unrolled")
    forward = itertools.product(MODELS, ("forward",), loops, ("none",), ("auto", "kernels"))
    gradient = itertools.product(MODELS, ("gradient",), loops, ("none", "dots", "full"), ("auto",))
    both = [Variant(*way) for way in (*forward, *gradient) if way[-1] == "auto" or way[0].startswith("D8")]
    return both + [Variant(m, "gradient", "unrolled", "none", "kernels") for m in MODELS if m.startswith("D8")]


def main(arguments=None) -> int:
    options = flags.parser(__doc__, __file__)
    options.add_argument("--only", default="", help="words that a variant must have, separated by commas")
    options.add_argument("--depth", type=flags.at_least(1), default=4, help="blocks of a stack (%(default)s)")
    options.add_argument(
        "--top", type=flags.at_least(0), default=0, help="kernels to list by their floor (%(default)s)"
    )
    options = options.parse_args(arguments)
    chosen = chosen_by(options.only)
    entry = findings.Entry(options, dict(batch=BATCH, depth=options.depth, card=TARGET.card.name))
    entry.keep(Variant._fields, chosen)
    for variant in chosen:
        entry.add([found := row(variant, options.depth, options.top)])
        print(findings.table([found], COLUMNS), flush=True)
    print(findings.table(entry.rows(), COLUMNS))
    return entry.finish([])


def chosen_by(only: str) -> list[Variant]:
    """The variants with all words of --only; ValueError where there are none."""
    words = set(filter(None, only.split(",")))
    chosen = [v for v in variants() if all(any(word in field for field in v) for word in words)]
    if not chosen:
        known = dict.fromkeys(word for variant in variants() for word in variant)
        raise ValueError(f"--only={only}: no variant has all of these words; they have {', '.join(known)}.")
    return chosen


def row(variant: Variant, depth: int, top: int) -> dict:
    """The figures of a variant for one of `depth` blocks; prints its `top` kernels."""
    start, chosen = time.perf_counter(), "gpu" if variant.chosen == "kernels" else "auto"
    with kernels.using(chosen):
        compiled = compile_for_h200(*stack_of_blocks(variant, depth))
    seconds = time.perf_counter() - start
    return dict(**variant._asdict(), **figures(compiled, depth, top), seconds=seconds)


def figures(compiled: jax.stages.Compiled, number: int, top: int = 0) -> dict:
    """Kernels, megabytes and microseconds of a program, divided by `number`, and MiB of temporary memory."""
    found = targets.account(compiled.as_text() or "", TARGET)
    for kernel, times in sorted(found.kernels, key=lambda pair: -found.seconds(pair[0]) * pair[1])[:top]:
        us, each = 1e6 * found.seconds(kernel), times / number
        print(f"{us * each:8.1f} us  {each:5.2f} x {us:6.1f}  {kernel.bytes / 1e6:7.1f} MB  {kernel.label}")
    return dict(
        kernels=found.launches / number,
        megabytes=found.bytes / number / 1e6,
        floor_us=1e6 * found.floor / number,
        temporary_mib=targets.memory(compiled)["temporaries"] / 2**20,
    )


def compile_for_h200(function: Callable, arguments: tuple) -> jax.stages.Compiled:
    """The program of a function of abstract arguments for one card."""
    mesh = jax.sharding.Mesh(targets.devices(TARGET), ("data",))
    place = jax.NamedSharding(mesh, jax.P())
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), arguments)
    with targets.lowering_for(TARGET):
        return targets.compiled(jax.jit(function, out_shardings=place).lower(*placed))


def stack_of_blocks(variant: Variant, depth: int) -> tuple[Callable, tuple]:
    """A function of the blocks alone, without embedding and head, and its arguments."""
    name, options = MODELS[variant.model]
    config = zoo.configuration(name, **options)
    blocks = zoo.abstract(name, **options, depth=depth, remat=variant.remat, unroll=variant.blocks == "unrolled").blocks
    graph, state = nnx.split(blocks)
    grid = [side // patch for side, patch in zip(config.image_size, config.patch_size, strict=True)]
    x = jax.ShapeDtypeStruct((BATCH, config.prefix + grid[0] * grid[1], config.width), jnp.float32)
    x = x if config.group is None else jax.eval_shape(lambda x: fields.from_dense(x, config.group), x)

    def forward(state, x):
        return stack.used(nnx.merge(graph, state), AtUse("mixed"))(x)[0]

    def loss(state, x):
        return sum(jnp.square(leaf).mean() for leaf in jax.tree.leaves(forward(state, x)))

    return (forward if variant.what == "forward" else jax.grad(loss, argnums=(0, 1))), (state, x)
