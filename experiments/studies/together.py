"""Runs of one config trained together on a GPU: `jax.vmap` over learning rates and seeds, images in its memory.

Small runs leave a GPU idle; twelve of them together do not.  A study is tables of arms, each with its config.  All arms
train for --seconds: steps are timed first, and the length of the runs follows.  Runs train on four fifths of the
training images (`held_out.prepare`).  An arm's rate is the one with the best mean accuracy on the rest, and its figures
on the test images are reported at that rate.  A seed draws the initial weights, and the order, shifts and mirrors of
the images, which are the same for all rates and arms.

The JSON has an entry for each GPU, with a cell for each arm of a table and the settings of its runs.  It is written
after each cell.  The next run skips the cells that were measured with its settings.  --quick writes an entry of its
own.
"""

import itertools
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivit import files, logical
from equivit.layers import stack
from equivit.layers.rngs import Keys
from equivit.precision import cast
from equivit.training import build, freezing, optimizers
from equivit.training.state import State, begin, make_step
from experiments import findings, flags, machine, timing
from experiments.studies import several_seeds

CHUNK, EVALUATED = 50, 250  # steps of a call, images evaluated together
TIMED = 3  # chunks, after the first
WARMUP = 0.05  # of the steps
PAD = 8  # the part of an image's side that it is shifted by, at most
SPLITS = ("fit", "held_out", "test")
COLUMNS = dict(arm="arm", steps="steps", step="ms a step", rate="rate", top1="test, %", loss="training loss")

Images = Mapping[str, tuple[np.ndarray, np.ndarray]]  # images [N, H, W, C] and labels [N] by split
Figures = Callable[[Callable[[np.ndarray], np.ndarray], np.ndarray, np.ndarray], dict[str, np.ndarray]]


class Arm(NamedTuple):
    """A row of a table: its config, and the file of `held_out.prepare` with its images."""

    name: str
    config: Any
    images: pathlib.Path


class Run(NamedTuple):
    """The parameters of a run, scalars; for all runs of an arm, arrays [R]."""

    lr: jax.Array  # at the end of the warm-up
    seed: jax.Array  # uint32


class Batches(NamedTuple):
    """Rows of the images, and how each image changes; int32 arrays [steps, B]."""

    rows: np.ndarray
    down: np.ndarray  # pixels, 0 to twice the padding
    right: np.ndarray
    mirrored: np.ndarray  # 0 or 1


def parser(description: str, script: str, *, seconds: float, rates: Sequence[float]):
    """`flags.parser` with the flags of such a study."""
    options = flags.parser(description, script)
    note = "of training an arm (%(default)s)"
    options.add_argument("--seconds", type=flags.at_least(1, float), default=seconds, help=note)
    options.add_argument("--rates", default=list(rates), type=flags.each_at_least(0, float))
    options.add_argument("--seeds", default=[0, 1, 2], type=flags.each_at_least(0))
    note = "start nothing that would not finish within this time (%(default)s)"
    options.add_argument("--minutes", type=flags.at_least(0, float), default=12, help=note)
    options.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    options.add_argument("--quick", action="store_true", help="a few steps of the first arm, on any machine")
    options.add_argument("--workdir", type=pathlib.Path, default=pathlib.Path("runs") / pathlib.Path(script).stem)
    options.set_defaults(entry=None)
    return options


def study(options, tables: Mapping[str, Callable[[], list[Arm]]], figures: Figures | None = None) -> int:
    """Measure the arms of all tables that the card has not yet, in order; the exit status.

    Args:
      options: of `parser`.
      tables: the arms of each table, made when it begins.
      figures: function(predict, images, labels) that gives further figures of all runs, arrays [R], on test images;
        `predict` maps images to classes [R, N].

    Raises:
      ValueError: the machine has no GPU.
    """
    if not (machine.on_gpu() or options.quick):
        raise ValueError("this study needs a GPU, and this machine has none; --quick tries the script.")
    budget, entries = timing.Budget(options.minutes), findings.read_json(options.output)
    entry = options.entry or jax.local_devices()[0].device_kind
    known = entries.setdefault(f"{entry}, quick" if options.quick else entry, {})
    for table, arms in itertools.islice(tables.items(), 1 if options.quick else None):
        rows = []
        for arm in itertools.islice(arms(), 1 if options.quick else None):
            name, asked = f"{table}, {arm.name}", settings(options, arm)
            if known.get(name, {}).get("settings") != asked and budget.allows(name):
                with budget.trying(name):
                    found = cell(options, arm, figures) | dict(commit=machine.commit(), jax=jax.__version__)
                    known[name] = dict(table=table, arm=arm.name, settings=asked) | found
                    files.write_text(options.output, json.dumps(entries, indent=1) + "\n")
            if known.get(name, {}).get("settings") == asked:
                rows.append(shown(known[name]))
        print(f"{table}\n{findings.table(rows, COLUMNS)}", flush=True)
    for name, error in budget.failed.items():
        print(f"failed: {name}: {error.splitlines()[0]}")
    return int(bool(budget.failed))


def settings(options, arm: Arm) -> dict[str, Any]:
    """The settings that decide on the figures of an arm, beside the script."""
    found = dict(seconds=options.seconds, rates=options.rates, seeds=options.seeds, overrides=options.override)
    return found | dict(source=pathlib.PurePath(arm.config.data.source).name)


def cell(options, arm: Arm, figures: Figures | None) -> dict[str, Any]:
    """The figures of an arm: "held_out" and "test" accuracies [rates][seeds]; at the best rate, the others."""
    data, program = images(arm), Program(arm.config)
    rates, seeds = options.rates, options.seeds
    lrs, numbers = zip(*itertools.product(rates, seeds), strict=True)
    runs, chunk = Run(jnp.float32(lrs), jnp.uint32(numbers)), 2 if options.quick else CHUNK
    seconds = program.step_seconds(runs, data["fit"], chunk)
    chunks = 2 if options.quick else max(1, round(options.seconds / seconds / chunk))

    begun = time.perf_counter()
    state, losses = program.train(runs, data["fit"], chunks, chunk)
    took = time.perf_counter() - begun

    def predict(images):
        return program.predict(state, images)

    def by_rate(values):
        return np.asarray(values).reshape(len(rates), len(seeds))

    found = {split: by_rate((predict(data[split][0]) == data[split][1]).mean(1)) for split in SPLITS[1:]}
    best = int(found["held_out"].mean(1).argmax())
    more = {} if figures is None else figures(predict, *data["test"])
    curve = losses.reshape(chunks, len(rates), len(seeds))[:, best]
    about = dict(steps=chunks * chunk, step_seconds=seconds, seconds=took, rates=rates, seeds=seeds, rate=rates[best])
    about |= dict(top1=found["test"][best].tolist(), loss=curve[-1].tolist())
    about |= dict(curve=curve.mean(1)[:: max(1, chunks // 20)].tolist())
    about |= {name: by_rate(values)[best].tolist() for name, values in more.items()}
    return about | {split: values.tolist() for split, values in found.items()}


class Program:
    """All runs of a config, as compiled functions.  Images of another size are resized to the config's."""

    def __init__(self, config):
        self._config, self._objective = config, build.make_objective(config)
        self._module = logical.abstract(jax.eval_shape(lambda: build.make_model(config, Keys(0))))
        self._init = jax.jit(jax.vmap(self._begin))
        self._chunk = jax.jit(jax.vmap(self._steps, in_axes=(0, 0, None, None, None, 0)), donate_argnums=1)
        self._predict = jax.jit(jax.vmap(self._classes, in_axes=(0, None)))

    def step_seconds(self, runs: Run, fit: tuple, chunk: int) -> float:
        """The median time of a step of all runs, over chunks after the first."""
        state, times = self._init(runs), []
        for batches in itertools.islice(self._orders(runs, fit, chunk), 1 + TIMED):
            begun = time.perf_counter()
            state, losses = self._chunk(runs, state, jnp.int32(10**6), *fit, batches)
            jax.block_until_ready(losses)
            times.append((time.perf_counter() - begun) / chunk)
        return statistics.median(times[1:])

    def train(self, runs: Run, fit: tuple, chunks: int, chunk: int) -> tuple[State, np.ndarray]:
        """The states of all runs after `chunks` of `chunk` steps, and their mean losses [chunks, R]."""
        state, losses = self._init(runs), []
        for batches in itertools.islice(self._orders(runs, fit, chunk), chunks):
            state, loss = self._chunk(runs, state, jnp.int32(chunks * chunk), *fit, batches)
            losses.append(loss)
        return state, np.stack(losses)

    def predict(self, state: State, images: np.ndarray) -> np.ndarray:
        """The classes of images, by all runs: [R, N]."""
        size = min(EVALUATED, len(images))
        padded = jnp.pad(images, ((0, -len(images) % size), *((0, 0),) * 3))
        classes = self._predict(state, padded.reshape(-1, size, *images.shape[1:]))
        return np.asarray(classes).reshape(len(classes), -1)[:, : len(images)]

    def _orders(self, runs, fit, chunk):
        """The batches of all runs, arrays [R, steps, B], without end."""
        size = (len(fit[1]), fit[0].shape[1] // PAD, self._config.batch_size, chunk)
        for each in zip(*(orders(*size, seed) for seed in runs.seed.tolist()), strict=True):
            yield jax.tree.map(lambda *arrays: np.stack(arrays), *each)

    def _begin(self, run):
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

    def _steps(self, run, state, total, images, labels, batches):
        """The state after the steps of `batches`, and the mean loss."""
        length = dict(total=total, per_epoch=1)
        step = make_step(self._objective, self._module, self._optimizer(run, total), seed=run.seed, **length)

        def take(state, batch):
            image = self._resized(shifted(images[batch.rows], batch))
            with stack.unrolled(True):
                state, metrics = step(state, {}, dict(image=image, label=labels[batch.rows]), None)
            return state, metrics["loss"]

        state, losses = jax.lax.scan(take, state, batches)
        return state, losses.mean()

    def _classes(self, state, batches):
        model = cast(logical.put(self._module, state.arrays), self._config.precision)

        def of_batch(images):
            batch = dict(image=self._resized(images), label=jnp.zeros(len(images), jnp.int32))
            return model(self._objective.prepare(self._module, batch, jax.random.key(0))["image"]).argmax(-1)

        return jax.lax.map(of_batch, batches)

    def _resized(self, images):
        size = tuple(self._config.model.image_size)
        if images.shape[1:3] == size:
            return images
        return jax.image.resize(images.astype(jnp.float32), (len(images), *size, images.shape[-1]), "linear")


def shifted(images: jax.Array, batch: Batches) -> jax.Array:
    """Images [B, H, W, C], moved within H // PAD pixels of black and mirrored, by the batch's arrays [B]."""
    pad = images.shape[1] // PAD
    padded = jnp.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))

    def one(image, down, right, mirrored):
        image = jax.lax.dynamic_slice(image, (down, right, 0), images.shape[1:])
        return jnp.where(mirrored, image[:, ::-1], image)

    return jax.vmap(one)(padded, batch.down, batch.right, batch.mirrored)


def orders(examples: int, pad: int, batch: int, chunk: int, seed: int) -> Iterator[Batches]:
    """Batches for `chunk` steps, without end: epoch by epoch in random order, the same for every arm."""
    rng, size, rows = np.random.default_rng(seed), chunk * batch, np.empty(0, np.int32)
    while True:
        while len(rows) < size:
            rows = np.concatenate([rows, rng.permutation(examples).astype(np.int32)])
        moves = rng.integers(0, 2 * pad + 1, (2, chunk, batch), np.int32)
        yield Batches(rows[:size].reshape(chunk, batch), *moves, rng.integers(0, 2, (chunk, batch), np.int32))
        rows = rows[size:]


def images(arm: Arm) -> Images:
    """The images of an arm, those for training in the memory of the device."""
    with np.load(arm.images) as file:
        found = {split: (file[f"{split}_image"], file[f"{split}_label"]) for split in SPLITS}
    return found | {"fit": jax.device_put(found["fit"])}


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as text."""
    edge = " (edge)" if row["rate"] in (min(row["rates"]), max(row["rates"])) else ""
    text = dict(rate=f"{row['rate']:g}{edge}", top1=several_seeds.spread(row["top1"]))
    return {**row, **text, "step": 1e3 * row["step_seconds"], "loss": statistics.fmean(row["loss"])}
