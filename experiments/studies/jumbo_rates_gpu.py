"""The arms of `jumbo_rates.py` on a GPU: all learning rates and seeds of an arm train as one program.

    python -m experiments studies.jumbo_rates_gpu --source=npz:/data/cifar10.npz  # at most 12 minutes (--minutes)
    python -m experiments studies.jumbo_rates_gpu --source=npz:/data/cifar10.npz --quick --output=/tmp/gpu.json

CIFAR-10 in patches of 4 pixels, six blocks, layer scales that start at 1, mirrored and shifted images.  A table has a
width and a number of classes: ten, or 512 clusters (`jumbo_rates.clustered`).  All its arms train for --seconds: steps
are timed first, and the length of the runs follows.  Runs train on four fifths of the training images; an arm's rate
is the one with the best mean accuracy on the rest, and is reported with its accuracy on the test images.

The JSON has an entry for each card, with a cell for each arm of a table; it is written after each cell, and the next
start goes on with the others.
"""

import functools
import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import files, logical
from equivit.layers import stack
from equivit.layers.rngs import Keys
from equivit.objectives.objective import classification
from equivit.precision import cast
from equivit.training import build, freezing, optimizers
from equivit.training import config as configs
from equivit.training.state import State, begin, make_step
from experiments import findings, flags, machine, timing
from experiments.studies import held_out, jumbo_rates, several_seeds
from experiments.studies.jumbo_rates import ARMS, HEADS

# Widths and numbers of classes, most decisive first.
TABLES = ((96, 10), (96, 512), (48, 10), (192, 10), (48, 512), (192, 512))
TEN = 10
BATCH, CHUNK, EVALUATED = 128, 50, 250  # images of a step, steps of a call, images evaluated together
WARMUP = 0.05  # of the steps
PAD = 4  # pixels that an image is shifted by, at most
MODEL = ["model.depth=6", "precision=mixed", f"batch_size={BATCH}"]
COLUMNS = dict(arm="arm", steps="steps", step="ms a step", rate="rate", top1="test, %", loss="training loss", note="")


class Run(NamedTuple):
    """The parameters of a run, scalars; for all runs of an arm, arrays [R]."""

    lr: jax.Array  # at the end of the warm-up
    seed: jax.Array  # uint32


class Batches(NamedTuple):
    """Rows of the images, and how each image changes; int32 arrays [steps, B]."""

    rows: np.ndarray
    down: np.ndarray  # pixels, 0 to 2 PAD
    right: np.ndarray
    mirrored: np.ndarray  # 0 or 1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    if not (machine.on_gpu() or options.quick):
        raise ValueError("studies.jumbo_rates_gpu needs a GPU, and this machine has none; --quick tries the script.")
    budget, entries = timing.Budget(options.minutes), findings.read_json(options.output)
    known = entries.setdefault(options.entry or jax.local_devices()[0].device_kind, {})
    for width, classes in [(min(HEADS), TEN)] if options.quick else TABLES:
        for arm in ARMS:
            name = f"{width}, {classes}, {arm}"
            if name in known or not budget.allows(name):
                continue
            with budget.trying(name):
                known[name] = cell(options, width, classes, arm) | dict(commit=machine.commit())
                files.write_text(options.output, json.dumps(entries, indent=1) + "\n")
        rows = [row for row in known.values() if (row["width"], row["classes"]) == (width, classes)]
        print(f"width {width}, {classes} classes\n{findings.table([cells(row) for row in rows], COLUMNS)}", flush=True)
    for name, error in budget.failed.items():
        print(f"failed: {name}: {error.splitlines()[0]}")
    return int(bool(budget.failed))


def cell(options, width: int, classes: int, arm: str) -> dict[str, Any]:
    """The figures of an arm: "held_out" and "test" accuracies [rates][seeds]; at the best rate, losses too."""
    data, program = images(options, classes), Program(config_of(options, width, classes, arm))
    rates, seeds = options.rates, options.seeds
    lrs, numbers = zip(*itertools.product(rates, seeds), strict=True)
    runs, chunk = Run(jnp.float32(lrs), jnp.uint32(numbers)), 2 if options.quick else CHUNK
    seconds = step_seconds(program, runs, data, chunk)
    chunks = 2 if options.quick else max(1, round(options.seconds / seconds / chunk))

    begun = time.perf_counter()
    state, losses = program.train(runs, data, chunks, chunk)
    took = time.perf_counter() - begun
    found = {split: program.accuracy(state, *data[split]) for split in ("held_out", "test")}
    found = {split: np.asarray(values).reshape(len(rates), len(seeds)) for split, values in found.items()}
    best = int(found["held_out"].mean(1).argmax())
    curve = losses.reshape(chunks, len(rates), len(seeds))[:, best]
    about = dict(width=width, classes=classes, arm=arm, steps=chunks * chunk, step_seconds=seconds, seconds=took)
    about |= dict(rates=rates, seeds=seeds, rate=rates[best], top1=found["test"][best].tolist())
    about |= dict(loss=curve[-1].tolist(), curve=curve.mean(1)[:: max(1, chunks // 20)].tolist())
    return about | {split: values.tolist() for split, values in found.items()}


def step_seconds(program: "Program", runs: Run, data: Mapping, chunk: int) -> float:
    """The median time of a step of all runs, over chunks after the first."""
    state, times = program.init(runs), []
    for batches in itertools.islice(orders(len(data["fit"][1]), chunk), 4):
        begun = time.perf_counter()
        state, losses = program.chunk(runs, state, jnp.int32(10**6), *data["fit"], batches)
        jax.block_until_ready(losses)
        times.append((time.perf_counter() - begun) / chunk)
    return statistics.median(times[1:])


class Program:
    """The functions of all runs of a config, compiled: `init`, `chunk` and `accuracy`."""

    def __init__(self, config):
        self._config, self._objective = config, build.make_objective(config)
        self._module = logical.abstract(jax.eval_shape(lambda: build.make_model(config, Keys(0))))
        self.init = jax.jit(jax.vmap(self._init))
        self.chunk = jax.jit(jax.vmap(self._chunk, in_axes=(0, 0, None, None, None, None)), donate_argnums=1)
        self.accuracy = jax.jit(jax.vmap(self._accuracy, in_axes=(0, None, None)))

    def train(self, runs: Run, data: Mapping, chunks: int, chunk: int) -> tuple[State, np.ndarray]:
        """The states of all runs after `chunks` of `chunk` steps, and their mean losses [chunks, R]."""
        state, losses = self.init(runs), []
        for batches in itertools.islice(orders(len(data["fit"][1]), chunk), chunks):
            state, loss = self.chunk(runs, state, jnp.int32(chunks * chunk), *data["fit"], batches)
            losses.append(loss)
        return state, np.stack(losses)

    def _init(self, run):
        model = build.make_model(self._config, Keys(jax.random.key(run.seed)))
        return begin(self._objective, model, self._optimizer(run, 1))

    def _optimizer(self, run, total):
        """The config's optimiser; the rate rises linearly from 0 and falls to 0 as a cosine.

        `total`, the steps of the run, may be traced, so that one program is timed and then trains.
        """

        def rate(step):
            progress = step / total
            falling = jnp.cos(jnp.pi / 2 * jnp.clip((progress - WARMUP) / (1 - WARMUP), 0, 1)) ** 2
            return (run.lr * jnp.where(progress < WARMUP, progress / WARMUP, falling)).astype(jnp.float32)

        section, tables = self._config.optimizer, logical.tensors(self._module)
        trainable = jax.eval_shape(logical.take, self._module)
        rule = freezing.rule(self._objective, tables)
        return optimizers.create(section, rule, tables, trainable, rate, lambda step: section.weight_decay)

    def _chunk(self, run, state, total, images, labels, batches):
        """The state after the steps of `batches`, and the mean loss."""
        length = dict(total=total, per_epoch=1)
        step = make_step(self._objective, self._module, self._optimizer(run, total), seed=run.seed, **length)

        def take(state, batch):
            image = shifted(images[batch.rows], batch)
            with stack.unrolled(True):
                state, metrics = step(state, {}, dict(image=image, label=labels[batch.rows]), None)
            return state, metrics["loss"]

        state, losses = jax.lax.scan(take, state, batches)
        return state, losses.mean()

    def _accuracy(self, state, images, labels):
        model = cast(logical.put(self._module, state.arrays), self._config.precision)
        size = min(EVALUATED, len(labels))

        def of_batch(batch):
            prepared = self._objective.prepare(self._module, dict(image=batch[0], label=batch[1]), jax.random.key(0))
            return classification(model(prepared["image"]).astype(jnp.float32), batch[1]).metrics["accuracy"]

        batches = [a[: len(a) // size * size].reshape(-1, size, *a.shape[1:]) for a in (images, labels)]
        return jax.lax.map(of_batch, tuple(batches)).mean()


def shifted(images: jax.Array, batch: Batches) -> jax.Array:
    """Images [B, H, W, 3], moved within PAD pixels of black and mirrored, by the batch's arrays [B]."""
    padded = jnp.pad(images, ((0, 0), (PAD, PAD), (PAD, PAD), (0, 0)))

    def one(image, down, right, mirrored):
        image = jax.lax.dynamic_slice(image, (down, right, 0), images.shape[1:])
        return jnp.where(mirrored, image[:, ::-1], image)

    return jax.vmap(one)(padded, batch.down, batch.right, batch.mirrored)


def orders(examples: int, chunk: int) -> Iterator[Batches]:
    """Batches for `chunk` steps, without end: epoch by epoch in random order, the same for every arm."""
    rng, size, rows = np.random.default_rng(0), chunk * BATCH, np.empty(0, np.int32)
    while True:
        while len(rows) < size:
            rows = np.concatenate([rows, rng.permutation(examples).astype(np.int32)])
        moves = rng.integers(0, 2 * PAD + 1, (2, chunk, BATCH), np.int32)
        yield Batches(rows[:size].reshape(chunk, BATCH), *moves, rng.integers(0, 2, (chunk, BATCH), np.int32))
        rows = rows[size:]


def images(options, classes: int) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Images and labels of the splits "fit", "held_out" and "test"."""
    path = options.workdir / f"images_{classes}.npz"
    if not path.is_file():
        relabel = None if classes == TEN else functools.partial(jumbo_rates.clustered, number=classes)
        held_out.prepare(config_of(options, min(HEADS), classes, "Jumbo").data, path, relabel)
    with np.load(path) as file:
        names = {split: (f"{split}_image", f"{split}_label") for split in ("fit", "held_out", "test")}
        return {split: (jnp.asarray(file[image]), jnp.asarray(file[label])) for split, (image, label) in names.items()}


def cells(row: Mapping) -> dict[str, Any]:
    """A row as text."""
    edge = "rate at the edge" if row["rate"] in (min(row["rates"]), max(row["rates"])) else ""
    shown = dict(rate=f"{row['rate']:g}", top1=several_seeds.spread(row["top1"]), note=edge)
    return {**row, **shown, "step": 1e3 * row["step_seconds"], "loss": statistics.fmean(row["loss"])}


def config_of(options, width: int, classes: int, arm: str):
    """The config of an arm; its rate, seed and length are arguments of the program."""
    size = [f"model.width={width}", f"model.num_heads={HEADS[width]}", f"model.num_classes={classes}"]
    texts = [*jumbo_rates.SHARED, *held_out.WHOLE, *MODEL, *size, *several_seeds.source(options), *ARMS[arm]]
    return configs.load("configs/cifar.py:10,plain", [*texts, *options.override])


def _options(arguments):
    parser = flags.parser(__doc__, __file__)
    parser.add_argument("--source", required=True, help="CIFAR-10, such as npz:<file> with splits train and test")
    parser.add_argument("--seconds", type=flags.at_least(1, float), default=25, help="of training an arm (%(default)s)")
    parser.add_argument("--rates", default=[5e-4, 1.5e-3, 4.5e-3, 1.35e-2], type=flags.each_at_least(0, float))
    parser.add_argument("--seeds", default=[0, 1, 2], type=flags.each_at_least(0))
    note = "start nothing that would not finish within this time (%(default)s)"
    parser.add_argument("--minutes", type=flags.at_least(0, float), default=12, help=note)
    parser.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a few steps on any machine, to try the script")
    parser.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs/jumbo_rates_gpu"))
    parser.set_defaults(entry=None)
    return parser.parse_args(arguments)
