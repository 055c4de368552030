"""Whole ViTs on a CPU, forward passes and training steps, beside timm's plain ViT under `torch.compile`.

    python -m experiments benchmarks.model_cpu --peer=torch-venv/bin/python  # three quarters of an hour
    python -m experiments benchmarks.model_cpu --peer=... --sizes=ti --types=float32  # eight minutes
    python -m experiments benchmarks.model_cpu  # without timm

The peer is a Python that has torch and timm (`torch_peers/timm_models.py` says how to make one).  Batches of 8 images
of 224 px on 2 threads, in turn, each model in a process of its own.  No model has layer scale, as timm's has none, and
plain has as many parameters as timm's.  A training step is cross-entropy, gradient and AdamW; ours also normalises the
images and computes the norm of the gradient.  Our blocks are unrolled, and in a forward pass their parameters lie
apart.  With "bfloat16" products are in bfloat16: ours with precision "mixed", torch's by autocast.  The JSON has the
load of the machine before each row.  Claims, of timm's time: plain at most 1; D8 at most 1 in bfloat16, and in float32
0.6 (Ti) and 0.45 (S, B) for a training step and 0.5 (S, B) for a forward pass.
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable

import jax

from equivit.precision import cast
from equivit.training import config as configs
from experiments import compiled_models, findings, flags, timing
from experiments.benchmarks import processes
from experiments.findings import Claim

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
THREADS = 2
FIELDS = dict(num_classes=1000, layer_scale=None, unroll=True)
# Of timm's time, by task, type, size and model.
LIMITS = {(task, dtype, size, "plain"): 1.0 for task in TASKS for dtype in TYPES for size in SIZES}
LIMITS |= {("training", "float32", size, "D8"): limit for size, limit in dict(ti=0.6, s=0.45, b=0.45).items()}
LIMITS |= {("forward", "float32", size, "D8"): 0.5 for size in ("s", "b")}
LIMITS |= {(task, "bfloat16", size, "D8"): 1.0 for task in TASKS for size in SIZES}


def main(arguments=None) -> int:
    options = _options(arguments)
    settings = {key: getattr(options, key) for key in ("batch", "image_size", "runs", "models")}
    settings |= dict(threads=THREADS, peer=options.peer is not None)
    entry = findings.Entry(options, settings, timing.Budget(options.minutes))
    each = itertools.product(options.sizes, options.types, options.tasks)
    entry.keep(("size", "task", "type"), [(size, task, dtype) for size, dtype, task in each])
    columns = dict(size="", task="", type="", load="load", timm="timm") | {name: name for name in options.models}
    columns |= {f"{name}_over_timm": f"{name}/timm" for name in options.models}
    rows = entry.measured(functools.partial(measure, options=options), columns)
    print(f"\nmilliseconds for {options.batch} images of {options.image_size} px, on {THREADS} threads")
    print(findings.table(rows, columns))
    return entry.finish(claims_of(rows))


def _options(arguments):
    options = flags.timing_parser(__doc__, __file__, runs=9, warmup=2, minutes=60)
    options.add_argument("--peer", help="a Python with torch and timm; without it nothing is compared")
    for flag, known in {"--sizes": SIZES, "--models": MODELS, "--tasks": TASKS, "--types": TYPES}.items():
        options.add_argument(flag, type=flags.one_of(list(known)), default=list(known), help="(all)")
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
            make = {"forward": forward, "training": training_step}[task]
            process = processes.started(name, make, name, TYPES[dtype], options.batch, fields)
            _, variants[model] = stack.enter_context(process)
            parameters[model] = compiled_models.parameters(name, **fields)
        if options.peer:
            shape = (options.batch, options.image_size, options.image_size, 3)
            question = dict(model=SIZES[size], shape=shape, task=task, type=dtype)
            peer = stack.enter_context(contextlib.closing(processes.Peer(options.peer, "timm_models.py", question)))
            variants["timm"] = peer.variant("contiguous", THREADS, parameters.get("plain"))
        times = processes.milliseconds(variants, options)
    ratios = {f"{name}_over_timm": timing.ratio(times[name], times.get("timm")) for name in options.models}
    return dict(size=size, task=task, type=dtype, load=load, **times, **ratios)


def forward(name: str, precision: str, batch: int, fields: dict) -> tuple[None, Callable]:
    """The call of a compiled forward pass, every parameter random, and each block's in arrays of its own."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as equivit.train does
    model = compiled_models.random_model(name, **fields)
    model.blocks = model.blocks.unstacked()
    images = jax.random.normal(jax.random.key(1), (batch, *fields["image_size"], 3))
    return None, compiled_models.call(lambda model, x: cast(model, precision)(x), model, images)


def training_step(name: str, precision: str, batch: int, fields: dict) -> tuple[None, Callable]:
    """The call of a compiled training step; each call begins where the last one ended."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as equivit.train does
    config = configs.get_base()
    with config.unlocked():
        config.epochs, config.batch_size, config.precision = 1, batch, precision
        config.model.update(name=name, **fields)
        config.data.image_size = fields["image_size"]
        config.objective.loss = "cross_entropy"
        config.optimizer.update(name="adamw", weight_decay=0.05)
        config.schedule.lr = 1e-3
    return None, compiled_models.training_step(config).start()


def claims_of(rows: list[dict]) -> list[Claim]:
    claims = []
    for row in rows:
        for (task, dtype, size, name), limit in LIMITS.items():
            if (task, dtype, size) == (row["task"], row["type"], row["size"]) and name in row:
                text = f"{name} {size}, {task}, {dtype}: our time over timm's"
                claims.append(Claim(text, row[f"{name}_over_timm"], at_most=limit))
    return claims
