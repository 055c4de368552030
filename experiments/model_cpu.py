"""Whole ViTs on a CPU, forward passes and training steps, beside timm's plain ViT under `torch.compile`.

    python experiments/model_cpu.py --peer=torch-venv/bin/python                     # three quarters of an hour
    python experiments/model_cpu.py --peer=... --sizes=ti --types=float32            # eight minutes
    python experiments/model_cpu.py                                                  # without timm

The peer is a Python that has torch and timm (`torch_timm.py` says how to make one); equivit needs neither.

Batches of 8 images of 224 px on 2 threads: after a warm-up, medians, the models in turn within each round, each in a
process of its own, as one trains it (timm's by `conv_models_cpu.py`).  No model has layer scale, as timm's has none,
and plain has as many parameters as timm's.  A training step is cross-entropy, gradient and AdamW; ours also normalises
the images and keeps the loss and the norm of the gradient.  Our blocks are written out one after the other, as torch's
are (`unroll=True`), and in a forward pass their parameters lie apart (`Stack.apart`), which on a CPU is the fastest.
Parameters are float32; with "bfloat16" products are in bfloat16, ours with precision "mixed", torch's by autocast.  The
load of the machine before each row is noted: others' work falsifies the figures.  Not in the
papers.

Claims.  In float32, plain takes at most as long as timm's; D8's training step at most 0.6 of timm's time (Ti) and 0.45
(S, B), its forward pass at most half (S, B).  In bfloat16, plain and D8 take at most as long as timm's, on a processor
with units for it.  Exits 1 when one fails.
"""

import contextlib
import multiprocessing
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax

from equivit.precision import cast
from equivit.training import config as configs
from experiments import benchmark, programs
from experiments.benchmark import Claim
from experiments.conv_models_cpu import Peer
from experiments.octic_block_cpu import in_turn

SIZES = {"ti": "vit_tiny_patch16_224", "s": "vit_small_patch16_224", "b": "vit_base_patch16_224"}  # timm's names
MODELS = {
    "plain": ("vit", dict(class_position=True)),
    "H8": ("octic_vit", dict(family="H8")),
    "I8": ("octic_vit", dict(family="I8")),
    "D8": ("octic_vit", dict(family="D8")),
    "Jumbo": ("jumbo_vit", {}),
    "registers": ("register_vit", {}),
}
TASKS = ("forward", "training")
TYPES = {"float32": "float32", "bfloat16": "mixed"}  # and our precision
TIMM = "timm"
THREADS = 2
FIELDS = dict(num_classes=1000, layer_scale=None, unroll=True)
# Of timm's time, by task, type, size and model.
LIMITS = {(task, dtype, size, "plain"): 1.0 for task in TASKS for dtype in TYPES for size in SIZES}
LIMITS |= {("training", "float32", size, "D8"): limit for size, limit in dict(ti=0.6, s=0.45, b=0.45).items()}
LIMITS |= {("forward", "float32", size, "D8"): 0.5 for size in ("s", "b")}
LIMITS |= {(task, "bfloat16", size, "D8"): 1.0 for task in TASKS for size in SIZES}


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows = benchmark.Budget(options.minutes), []
    columns = dict(size="", task="", type="", load="load", timm="timm") | {name: name for name in options.models}
    columns |= {f"{name}_over_timm": f"{name}/timm" for name in options.models}
    for size in options.sizes:
        for dtype in options.types:
            for task in options.tasks:
                title = f"{size}, {task}, {dtype}"
                if budget.allows(title):
                    with budget.trying(title):
                        rows.append(measure(size, task, dtype, options))
                        print(benchmark.table(rows[-1:], columns), flush=True)
    print(f"\nmilliseconds for {options.batch} images of {options.image_size} px, on {THREADS} threads")
    print(benchmark.table(rows, columns))
    facts = dict(batch=options.batch, image_size=options.image_size, runs=options.runs, threads=THREADS)
    return benchmark.finish(options.output, dict(**facts, rows=rows), claims_of(rows), budget)


def _options(arguments):
    options = benchmark.timing_parser(__doc__, output="model_cpu.json", runs=9, warmup=2, minutes=60)
    options.add_argument("--peer", help="a Python with torch and timm; without it nothing is compared")
    for flag, known in {"--sizes": SIZES, "--models": MODELS, "--tasks": TASKS, "--types": TYPES}.items():
        options.add_argument(flag, type=benchmark.one_of(list(known)), default=list(known), help="(all)")
    options.add_argument("--batch", type=int, default=8, help="images (%(default)s)")
    options.add_argument("--image_size", type=int, default=224, help="height and width (%(default)s)")
    return options.parse_args(arguments)


def measure(size: str, task: str, dtype: str, options) -> dict:
    """Median milliseconds of each model, and their ratios to timm's.

    Raises RuntimeError when timm's has another number of parameters than plain, or a process ends.
    """
    load, variants, parameters = os.getloadavg()[0], {}, {}
    with contextlib.ExitStack() as stack:
        for model in options.models:
            prefix, fields = MODELS[model]
            name, fields = f"{prefix}_{size}16", FIELDS | fields | dict(image_size=(options.image_size,) * 2)
            process = in_a_process(task, name, TYPES[dtype], options.batch, fields)
            variants[model] = stack.enter_context(process)
            parameters[model] = programs.parameters(name, **fields)
        if options.peer:
            shape = (options.batch, options.image_size, options.image_size, 3)
            question = dict(model=SIZES[size], shape=shape, task=task, type=dtype)
            peer = stack.enter_context(contextlib.closing(Peer(options.peer, question)))
            variants[TIMM] = peer.variant("contiguous", parameters.get("plain"))
        seconds = benchmark.medians(in_turn(variants, options.warmup, options.runs))
    times = {name: 1e3 * value for name, value in seconds.items()}
    ratios = {f"{name}_over_timm": benchmark.ratio(times[name], times.get(TIMM)) for name in options.models}
    return dict(size=size, task=task, type=dtype, load=load, **times, **ratios)


@contextlib.contextmanager
def in_a_process(task: str, name: str, *arguments) -> Iterator[Callable[[], float]]:
    """A call that has a model run and returns the seconds; the arguments are those of `forward`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, task, name, *arguments), daemon=True)
    process.start()
    theirs.close()

    def answer(question: str = "") -> float:
        try:
            if question:
                ours.send(question)
            return ours.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"{name}: its process has ended; its error is above.") from None

    with ours:
        answer()  # it is compiled
        yield lambda: answer("run")
    process.join()


def _serve(questions: Connection, task: str, *arguments) -> None:
    """In the process: compile the model, then time a call for each question until there is no more."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as equivit.train does
    call = timed({"forward": forward, "training": training_step}[task](*arguments))
    questions.send("compiled")
    with contextlib.suppress(EOFError):
        while questions.recv():
            questions.send(call())


def forward(name: str, precision: str, batch: int, fields: dict) -> Callable:
    """The call of a compiled forward pass, every parameter random, and each block's in arrays of its own."""
    model = programs.random_model(name, **fields)
    model.blocks = model.blocks.apart()
    leaves, structure = jax.tree.flatten(model)  # a module is slow to flatten
    images = jax.random.normal(jax.random.key(1), (batch, *fields["image_size"], 3))
    arguments = jax.device_put(leaves), images
    function = jax.jit(lambda leaves, x: cast(jax.tree.unflatten(structure, leaves), precision)(x))
    compiled = function.lower(*arguments).compile()
    return lambda: compiled(*arguments)


def training_step(name: str, precision: str, batch: int, fields: dict) -> Callable:
    """The call of a compiled training step; each call begins where the last one ended."""
    config = configs.get_base()
    with config.unlocked():
        config.epochs, config.batch_size, config.precision = 1, batch, precision
        config.model.update(name=name, **fields)
        config.data.image_size = fields["image_size"]
        config.objective.loss = "cross_entropy"
        config.optimizer.update(name="adamw", weight_decay=0.05)
        config.schedule.lr = 1e-3
    return programs.training_step(config).start()


def timed(call: Callable) -> Callable[[], float]:
    """A call that runs it twice and returns the seconds of the second: the first one wakes threads and fills caches."""

    def run():
        jax.block_until_ready(call())
        start = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - start

    return run


def claims_of(rows: list[dict]) -> list[Claim]:
    """The claims about the models and rows that there are."""
    claims = []
    for row in rows:
        for (task, dtype, size, name), limit in LIMITS.items():
            if (task, dtype, size) == (row["task"], row["type"], row["size"]) and name in row:
                text = f"{name} {size}, {task}, {dtype}: our time over timm's"
                claims.append(Claim(text, row[f"{name}_over_timm"], at_most=limit))
    return claims


if __name__ == "__main__":
    if hasattr(os, "sched_setaffinity"):  # before JAX starts its threads; all processes inherit it
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    sys.exit(main())
