"""Accuracy of linear classifiers on frozen features (--config.evaluation.linear_probe.KEY=VALUE)."""

import dataclasses
import hashlib
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from equivit import archives, errors, files
from equivit.data import config as data_config
from equivit.data import loader, sources
from equivit.data.devices import on_devices, scattered
from equivit.data.order import TrainOrder, permutation
from equivit.evaluation import frozen, linear_probe
from equivit.evaluation.frozen import Images
from equivit.evaluation.linear_probe import Probe
from equivit.evaluation.protocol import Line, Run, percent
from equivit.models import saved
from equivit.symmetry.groups import OCTIC
from equivit.trained_on import TrainedOn

CHUNK = 1024  # images per chunk of logits
KEEP_EVERY = 500  # steps
Batch = tuple[Any, Any, Any]


def check(config: ConfigDict) -> None:
    """ValueError for heads with the same name, or a batch that the devices do not divide."""
    frozen.check(config)
    options, devices = config.evaluation.linear_probe, jax.device_count()
    _heads(config, num_classes=1)
    if options.batch_size % devices:
        raise ValueError(
            f"config.evaluation.linear_probe.batch_size={options.batch_size} must be divisible by the {devices} "
            f"devices; {errors.multiples(options.batch_size, devices)}."
        )


def opens(run: Run) -> None:
    """As `frozen.opens`; also ValueError for a batch larger than the training set."""
    options, number = run.config.evaluation.linear_probe, frozen.opens(run, least=2).examples
    if options.batch_size > (most := len(_parts(number, options.held_out)[0])):
        raise ValueError(
            f"config.evaluation.linear_probe.batch_size={options.batch_size} must be at most {most}, the number of "
            "training images that are not held out."
        )


def run(run: Run) -> dict[str, Any]:
    """Train the heads of `config.evaluation.linear_probe` (`evaluation/linear_probe.py`) and choose one.

    The head is chosen on `held_out` training images, at most a tenth of the split, which are not trained on.  The paper
    chooses on the test images.

    Returns "head" with its "top1" and `frozen.accuracies`; "held_out", its accuracy on these images; "best_head" and
    "best", for the choice on the test images; "examples"; "classifier", the directory of the model saved with this
    head, or None.
    """
    train, test = frozen.images(run, run.data.split)["e"], frozen.images(run, run.data.eval_split, OCTIC.elements)
    rows, left_out = _parts(len(train.labels), run.config.evaluation.linear_probe.held_out)
    pipeline = run.open()
    heads = _heads(run.config, num_classes=pipeline.num_classes)
    probe = _fitted(run, train, rows, heads)
    held_out = _right(probe, Images(*(part[left_out] for part in train)))
    on_test, labels = _right(probe, test["e"]), test["e"].labels
    head, best = int(held_out.argmax()), int(on_test.argmax())  # the first on ties
    predicted = {g: _predicted(probe, found)[head] for g, found in test.items()}
    data = TrainedOn(pipeline.classes, len(rows), data_config.preparation(run.data))
    return {
        "classifier": _saved(run, probe, head, data),
        "head": heads.names[head],
        "top1": float(on_test[head]),
        "held_out": float(held_out[head]),
        "best_head": heads.names[best],
        "best": float(on_test[best]),
        "examples": len(labels),
        **frozen.accuracies(predicted, labels),
    }


def lines(result: dict[str, Any]) -> list[Line]:
    """Both choices, and the orientations."""
    headline = f"{percent(result['top1'])} ({result['examples']} images; head {result['head']}, chosen on held-out "
    return [
        ("linear probe", f"{headline}training images, {percent(result['held_out'])} there)"),
        ("... chosen on the test images", f"{percent(result['best'])} (head {result['best_head']})"),
        *frozen.lines(result),
        *([("... as a classifier", result["classifier"])] if result["classifier"] else []),
    ]


def _saved(run: Run, probe: Probe, head: int, data: TrainedOn) -> str | None:
    """Save the model with a head, by its index, and return the directory; None if nothing can be saved."""
    if run.directory is None:
        return None
    of = probe.heads.inputs[head // len(probe.heads.base_rates)]
    model = frozen.classifier(run.model, *probe.head(head), **of._asdict())
    if model is None:
        return None
    if jax.process_index() == 0:
        saved.save(run.directory / "linear_probe", model, data)
    return str(run.directory / "linear_probe")


def _heads(config: ConfigDict, num_classes: int) -> linear_probe.Heads:
    options = config.evaluation.linear_probe
    names = ("base_rates", "batch_size", "steps", "blocks", "averages")
    return linear_probe.Heads(num_classes, **{name: options[name] for name in names})


def _parts(number: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and the held-out rows; they depend only on the arguments."""
    rows = permutation(0, 0, number)
    count = max(1, min(held_out, number // 10))
    return np.sort(rows[count:]), np.sort(rows[:count])


def _fitted(run: Run, train: Images, rows: np.ndarray, heads: linear_probe.Heads) -> Probe:
    """The heads, trained on these rows."""
    key = jax.random.key(run.config.seed)
    if not run.config.evaluation.linear_probe.augment:
        return linear_probe.fit(_unchanged(train, rows, heads, run.config.seed), heads, key=key)
    if run.directory is None:
        return linear_probe.fit(_augmented(run, train.index[rows], heads, 0), heads, key=key)
    unfinished = Unfinished(run.directory, _identity(run, train))
    state = unfinished.read()
    batches = _augmented(run, train.index[rows], heads, 0 if state is None else int(state["step"]))
    probe = linear_probe.fit(batches, heads, key=key, state=state, watch=unfinished.keep)
    unfinished.remove()
    return probe


def _identity(run: Run, train: Images) -> str:
    """A digest of all that determines the result: the settings, and features of some images for model and data."""
    settings = (run.data.to_json(), run.config.evaluation.linear_probe.to_json(), run.config.seed, run.precision)
    return hashlib.sha256(repr(settings).encode() + train.tokens[:16].tobytes()).hexdigest()[:12]


class Unfinished:
    """A file with the state of the heads, from which an interrupted probe resumes; a digest is in its name."""

    def __init__(self, directory: pathlib.Path, identity: str):
        self.path = directory / f"linear_probe_{identity}.npz"

    def read(self) -> linear_probe.State | None:
        """Read the last stored state, or None; ValueError for a damaged file."""
        if not self.path.is_file():
            return None
        with archives.Npz(self.path) as file:
            return {name: file[name] for name in file.keys}

    def keep(self, step: int, state: linear_probe.State) -> None:
        """Write the state every `KEEP_EVERY` steps; all processes must call it."""
        if step % KEEP_EVERY:
            return
        whole = multihost_utils.process_allgather(dict(state), tiled=True)
        if jax.process_index() == 0:
            with files.replacing(self.path) as unfinished:
                np.savez(unfinished, **whole)

    def remove(self) -> None:
        """Remove the file."""
        if jax.process_index() == 0:
            self.path.unlink(missing_ok=True)


def _unchanged(train: Images, rows: np.ndarray, heads: linear_probe.Heads, seed: int) -> Iterator[Batch]:
    """Yield batches of the stored features, in a new order each epoch."""
    order = TrainOrder(len(rows), heads.batch_size, 1, seed)
    axes = jax.sharding.get_mesh().axis_names
    for step in range(heads.steps):
        tokens, average, labels, _ = (part[rows[order.rows(step).examples]] for part in train)
        tokens = scattered(np.moveaxis(tokens, 1, 0), PartitionSpec(None, axes))
        yield tokens, scattered(average[:, None], PartitionSpec(axes)), scattered(labels, PartitionSpec(axes))


def _augmented(run: Run, index: np.ndarray, heads: linear_probe.Heads, start: int) -> Iterator[Batch]:
    """Yield batches of features of random crops and flips, from number `start` on."""
    data = run.data.copy_and_resolve_references().unlock()
    data.update(augment=dataclasses.asdict(data_config.AugmentConfig()), train_image_size=None)
    share: dict[str, Any] = dict(process_index=jax.process_index(), process_count=jax.process_count())
    options: dict[str, Any] = dict(seed=run.config.seed, workers=data.workers, entries=("label",))
    pipeline = loader.train(data, batch_size=heads.batch_size, **options, **share)
    source, order = sources.Subset(pipeline.source, index), TrainOrder(len(index), heads.batch_size, 1, run.config.seed)
    endless, left = dataclasses.replace(pipeline, source=source, order=order).batches(start), heads.steps - start
    batches, extract = itertools.islice(endless, left), frozen.extractor(run)
    for batch in batches if run.track is None else run.track(batches, left, run.stream):
        on_mesh = on_devices({name: batch[name] for name in ("image", "label")})
        tokens, average = extract(jnp.asarray(on_mesh["image"]))
        yield tokens.swapaxes(0, 1), average[:, None], on_mesh["label"]


def _predicted(probe: Probe, images: Images) -> np.ndarray:
    """The classes by each head, int [heads, N]."""
    found = []
    for start in range(0, len(images.labels), CHUNK):
        tokens, average, *_ = (part[start : start + CHUNK] for part in images)
        found.append(np.asarray(probe.logits(np.moveaxis(tokens, 1, 0), average[:, None])).argmax(-1))
    return np.concatenate(found, axis=1)


def _right(probe: Probe, images: Images) -> np.ndarray:
    """The accuracy of each head."""
    return (_predicted(probe, images) == images.labels).mean(1)


PROTOCOL = frozen.protocol(
    run=run,
    lines=lines,
    check=check,
    opens=opens,
    curve="top1",
    blocks=lambda config: max(config.evaluation.linear_probe.blocks),
)
