"""The cells of `gpu.py`, most important first, and how each is measured."""

import functools
import itertools
import json
import math
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from equivit import testing
from equivit.configs import octic_h
from equivit.kernels import using
from equivit.models import zoo
from equivit.precision import cast
from equivit.symmetry import fields
from experiments import compiled_models, device_profile, machine, timing
from experiments.benchmarks import kernel_speed
from experiments.benchmarks.field_shapes import REALISTIC
from experiments.tables.adaptive.speed import VARIANTS

BATCH, DEPTH, IMAGES = 64, 8, 128  # images and blocks of a stack, images of adaptive models
SIZES = {"ViT-H/14": "h14", "ViT-L/16": "l16"}
FAMILIES = {"D8": ("octic_vit", dict(family="D8")), "plain": ("vit", {})}
FORMS = {"unrolled": True, "scan": False}
TASKS = ("gradient", "forward")
ADAPTIVE = ("swin_t", "swinv2_t", "cvt_13", "mvitv2_t")
CHOICES = {"ordinary": "ordinary", "adaptive": "output", "by input": "input"}  # keys of VARIANTS
PEERS = {"plain": "PyTorch, plain", "timm": "timm, plain", "official": "official, octic"}
PEER = pathlib.Path(__file__).with_name("torch_peers") / "gpu_blocks.py"
# Sizes of --quick.
TINY_BLOCKS = dict(width=64, num_heads=2, image_size=(16, 16), patch_size=8, mlp_dim=64)
TINY_STAGES = dict(image_size=(32, 32), patch_size=4, depths=(1, 1), num_heads=(1, 2))
TINY = {
    "swin_t": TINY_STAGES | dict(width=16, window_size=(4, 4)),
    "swinv2_t": TINY_STAGES | dict(width=16, window_size=(4, 4)),
    "cvt_13": dict(image_size=(32, 32), widths=(8, 16, 32), depths=(1, 1, 1), num_heads=(1, 1, 2)),
    "mvitv2_t": TINY_STAGES | dict(width=16),
}


class Cell(NamedTuple):
    """One measurement; `measure` takes the options of `gpu.py`, and returns "milliseconds" or "rows"."""

    name: str
    measure: Callable[[Any], dict[str, Any]]


def cells(options) -> list[Cell]:
    """All cells, in the order of their importance."""
    huge, large = SIZES
    first = [*blocks([huge], ("mixed",), ("unrolled",)), *hopper([huge]), *peers(options, [huge])]
    first += [*adaptive(ADAPTIVE[:1]), *blocks([large], ("mixed",), ("unrolled",)), *hopper([large])]
    scans = [*blocks(SIZES, ("mixed",), ("scan",)), *blocks(SIZES, ("bfloat16",), FORMS)]
    rematerialised = blocks(SIZES, ("mixed", "bfloat16"), FORMS, ("dots", "full"))
    rest = [*kernels(), *steps(), *peers(options, [large]), *adaptive(ADAPTIVE[1:])]
    return [*first, *scans, *rest, *rematerialised]


def blocks(
    sizes: Iterable[str], precisions: Iterable[str], forms: Iterable[str], policies: Iterable[str] = ("none",)
) -> Iterator[Cell]:
    """Stacks of blocks of both families, and both tasks; policies other than "none" for gradients."""
    products = itertools.product(sizes, precisions, forms, FAMILIES, TASKS, policies)
    for size, precision, form, family, task, remat in products:
        if task == "forward" and remat != "none":
            continue
        name = ", ".join([size, family, precision, form, task, *([f"remat {remat}"] if remat != "none" else [])])
        yield Cell(name, functools.partial(_block, size, precision, family, task, form, remat))


def hopper(sizes: Iterable[str]) -> Iterator[Cell]:
    """Octic blocks under `kernels.using("gpu")`: their times, and how far their results are from "auto"."""
    for size, task in itertools.product(sizes, TASKS):
        yield Cell(f"{size}, D8, mixed, unrolled, kernels, {task}", functools.partial(_hopper, size, task))


def peers(options, sizes: Iterable[str]) -> Iterator[Cell]:
    """Stacks of the peers' blocks, in bfloat16 by autocast, under torch.compile."""
    for kind, size, task in itertools.product(PEERS, sizes, TASKS):
        if options.dry or options.peer and (kind != "official" or options.official):
            yield Cell(f"{size}, {PEERS[kind]}, {task}", functools.partial(_peer, size, kind, task))


def kernels() -> Iterator[Cell]:
    """Each kernel of an octic block that "auto" takes beside its reference; `hopper_tiles.py` tries tiles of others."""
    for shape, operation in itertools.product(("ViT-H", "ViT-L"), kernel_speed.OPERATIONS):
        yield Cell(f"kernel, {operation}, {shape}", functools.partial(_kernel, shape, operation))


def adaptive(names: Iterable[str]) -> Iterator[Cell]:
    """Hierarchical models in float32: ordinary, adaptive, and adaptive by the input."""
    for name, task, variant in itertools.product(names, ("forward", "gradient"), CHOICES):
        yield Cell(f"{name}, {variant}, {task}", functools.partial(_adaptive, name, task, variant))


def steps() -> Iterator[Cell]:
    """Training steps of configs/octic_h.py, of 64 images."""
    for family, form in itertools.product(("H8", "D8", "I8", "plain"), FORMS):
        yield Cell(f"octic_h:{family}, {form}, training step", functools.partial(_step, family, form))


def _block(size, precision, family, task, form, remat, options) -> dict[str, Any]:
    """Milliseconds of a block, and the temporary bytes of the stack."""
    function, arguments, depth = _stack(size, precision, family, task, form, remat, options)
    found = _timed(function, arguments, options)
    return found | dict(milliseconds=found["milliseconds"] / depth)


def _hopper(size, task, options) -> dict[str, Any]:
    """Time a block under `kernels.using("gpu")`, and compare its results with "auto" relative to the largest entry."""
    function, arguments, depth = _stack(size, "mixed", "D8", task, "unrolled", "none", options)

    def by_kernels(*arguments):
        with using("interpret" if options.quick else "gpu"):
            return function(*arguments)

    call, found = _compiled(by_kernels, arguments)
    pairs = zip(*(jax.tree.leaves(results) for results in (call(), jax.jit(function)(*arguments))), strict=True)
    deviations = [float(jnp.abs(a.astype(float) - b).max() / jnp.abs(b).max()) for a, b in pairs]
    found |= _profiled(call, options)
    return found | dict(milliseconds=found["milliseconds"] / depth, deviation=max(deviations))


def _stack(size, precision, family, task, form, remat, options):
    """A function of a stack of blocks, its arguments, and the number of blocks."""
    flavour, extra = FAMILIES[family]
    depth = 2 if options.quick else DEPTH
    extra = extra | (TINY_BLOCKS if options.quick else {})
    model = zoo.abstract(f"{flavour}_{SIZES[size]}", depth=depth, unroll=FORMS[form], remat=remat, **extra)
    config = model.config
    tokens = config.prefix + _patches(config)
    stream = jnp.bfloat16 if precision == "bfloat16" else jnp.float32
    x = jax.random.normal(jax.random.key(1), (_batch(options, BATCH), tokens, config.width), stream)
    x = x if config.group is None else fields.from_dense(x, config.group)
    graph, state = nnx.split(testing.randomise(model.blocks, jax.random.key(0)))

    def forward(state, x):
        return cast(nnx.merge(graph, state), precision)(x)[0]

    return (forward if task == "forward" else _gradient(forward)), (state, x), depth


def _adaptive(name, task, variant, options) -> dict[str, Any]:
    """Milliseconds of a batch."""
    extra = VARIANTS[CHOICES[variant]] | (TINY[name] if options.quick else {})
    model = compiled_models.random_model(name, **extra)
    x = jax.random.normal(jax.random.key(1), (_batch(options, IMAGES), *model.config.input_shape))
    graph, state = nnx.split(model)

    def forward(state, x):
        return nnx.merge(graph, state)(x)

    return _timed(forward if task == "forward" else _gradient(forward), (state, x), options)


def _step(family, form, options) -> dict[str, Any]:
    """Milliseconds of a training step."""
    config = octic_h.get_config(f"{family},quicktest" if options.quick else family)
    with config.unlocked():
        config.model.unroll = FORMS[form]
        config.model.update(num_classes=config.model.get("num_classes", 1000), in_channels=3)
        config.batch_size = config.batch_size if options.quick else BATCH
    call = compiled_models.training_step(config).start()
    return timing_of(call, options)


def _kernel(shape, operation, options) -> dict[str, Any]:
    """The rows of `kernel_speed` for an operation in bfloat16."""
    options.times = (1, 1) if options.quick else kernel_speed.TIMES
    field = kernel_speed.QUICK if options.quick else next(s for s in REALISTIC if s.name == shape)
    rate, budget = kernel_speed.product_rate("bfloat16", options), timing.Budget(0)
    rows = kernel_speed.measure(operation, field, "bfloat16", rate, options, budget)
    if budget.failed:
        raise RuntimeError("; ".join(f"{name}: {error}" for name, error in budget.failed.items()))
    return dict(rows=rows)


def _peer(size, kind, task, options) -> dict[str, Any]:
    """Milliseconds of a peer's block."""
    config = zoo.configuration(f"vit_{SIZES[size]}", **(TINY_BLOCKS if options.quick else {}))
    question = dict(kind=kind, task=task, width=config.width, heads=config.num_heads, tokens=1 + _patches(config))
    question |= dict(batch=_batch(options, BATCH), depth=2 if options.quick else DEPTH, size=size)
    question |= dict(runs=options.runs, warmup=options.warmup, official=options.official)
    done = subprocess.run([options.peer, str(PEER), json.dumps(question)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"--peer: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def _gradient(forward: Callable) -> Callable:
    """The gradients of the parameters and of the input."""

    def loss(state, x):
        return sum(jnp.square(a.astype(jnp.float32)).mean() for a in jax.tree.leaves(forward(state, x)))

    return jax.grad(loss, argnums=(0, 1))


def _timed(function: Callable, arguments: tuple, options) -> dict[str, Any]:
    """Milliseconds of a call, its kernels, seconds of its compilation, and temporary bytes of its program."""
    call, found = _compiled(function, arguments)
    return found | _profiled(call, options)


def _compiled(function: Callable, arguments: tuple) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The call of a function, the seconds of its compilation, and its temporary bytes."""
    begun = time.perf_counter()
    compiled = compiled_models.compiled(function, *arguments)
    seconds, memory = time.perf_counter() - begun, compiled.memory
    found = dict(compile_seconds=seconds, temporary_bytes=None if memory is None else memory.temporary)
    return compiled.start(), found


def _profiled(call: Callable[[], Any], options) -> dict[str, Any]:
    """Milliseconds of a call, and on a GPU its kernels."""
    return timing_of(call, options) | (device_profile.kernels(call) if machine.on_gpu() else {})


def timing_of(call: Callable[[], Any], options) -> dict[str, float]:
    """The median of a call."""
    return dict(milliseconds=timing.milliseconds({"call": call}, options)["call"])


def _patches(config) -> int:
    return math.prod(size // patch for size, patch in zip(config.image_size, config.patch_size, strict=True))


def _batch(options, number: int) -> int:
    return 2 if options.quick else number
