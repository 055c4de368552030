"""Accuracy of linear classifiers on frozen features (--config.evaluation.linear_probe.KEY=VALUE)."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from ml_collections import ConfigDict

from equivit import errors
from equivit.data import loader, section, sources
from equivit.data.order import TrainOrder, permutation
from equivit.evaluation import frozen, linear_probe
from equivit.evaluation.frozen import Images
from equivit.evaluation.linear_probe import Probe
from equivit.evaluation.predictions import on_devices, scattered
from equivit.evaluation.protocol import Line, Protocol, Run, percent
from equivit.symmetry.groups import OCTIC

CHUNK = 1024  # images whose logits of all heads are held at once
Batch = tuple[Any, Any, Any]


def check(config: ConfigDict) -> None:
    """ValueError for heads that have one name, or a batch that the devices do not divide."""
    frozen.check(config)
    options, devices = config.evaluation.linear_probe, jax.device_count()
    _heads(config, num_classes=1)
    if options.batch_size % devices:
        raise ValueError(
            f"config.evaluation.linear_probe.batch_size={options.batch_size} must be divisible by the {devices} "
            f"devices; {errors.multiples(options.batch_size, devices)}."
        )


def run(run: Run) -> dict[str, Any]:
    """Train the heads of `config.evaluation.linear_probe` (`evaluation/linear_probe.py`) and choose one.

    `held_out` images of the training split, at most a tenth of it, are not trained on; the head with the best accuracy
    on them is the headline.  The paper chooses on the test images themselves.

    Returns "head" and its "top1", and `frozen.accuracies` of it; "held_out", its accuracy on these; "best_head" and
    "best", of the choice on the test images; "examples".
    """
    train, test = frozen.images(run, run.data.split)["e"], frozen.images(run, run.data.eval_split, OCTIC.elements)
    kept, left_out = _parts(len(train.labels), run.config.evaluation.linear_probe.held_out)
    classes = 1 + int(max(train.labels.max(), test["e"].labels.max()))
    heads = _heads(run.config, num_classes=classes)
    augment = run.config.evaluation.linear_probe.augment
    batches = _augmented(run, kept, heads) if augment else _unchanged(train, kept, heads, run.config.seed)
    probe = linear_probe.fit(batches, **dataclasses.asdict(heads), key=jax.random.key(run.config.seed))
    held_out = _right(probe, Images(*(part[left_out] for part in train)))
    on_test, labels = _right(probe, test["e"]), test["e"].labels
    chosen, best = linear_probe.best(held_out), linear_probe.best(on_test)
    predicted = {g: _predicted(probe, found)[chosen] for g, found in test.items()}
    return {
        "head": probe.names[chosen],
        "top1": float(on_test[chosen]),
        "held_out": float(held_out[chosen]),
        "best_head": probe.names[best],
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
    ]


def _heads(config: ConfigDict, num_classes: int) -> linear_probe.Heads:
    options = config.evaluation.linear_probe
    names = ("base_rates", "batch_size", "steps", "blocks", "averages")
    return linear_probe.Heads(num_classes, **{name: options[name] for name in names})


def _parts(number: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and those to choose by, which depend on nothing else."""
    rows = permutation(0, 0, number)
    count = max(1, min(held_out, number // 10))
    return np.sort(rows[count:]), np.sort(rows[:count])


def _unchanged(train: Images, kept: np.ndarray, heads: linear_probe.Heads, seed: int) -> Iterator[Batch]:
    """Batches of the features that were read, in a new order each epoch."""
    order = TrainOrder(len(kept), heads.batch_size, 1, seed)
    axes = jax.sharding.get_mesh().axis_names
    for step in range(heads.steps):
        tokens, average, labels = (part[kept[order.rows(step).examples]] for part in train)
        tokens = scattered(np.moveaxis(tokens, 1, 0), PartitionSpec(None, axes))
        yield tokens, scattered(average[:, None], PartitionSpec(axes)), scattered(labels, PartitionSpec(axes))


def _augmented(run: Run, kept: np.ndarray, heads: linear_probe.Heads) -> Iterator[Batch]:
    """Batches of random crops and mirror images, each seen by the model."""
    data = run.data.copy_and_resolve_references().unlock()
    data.update(augment=section.DEFAULTS["augment"], train_image_size=None)
    share: dict[str, Any] = dict(process_index=jax.process_index(), process_count=jax.process_count())
    pipeline = loader.train(data, batch_size=heads.batch_size, seed=run.config.seed, entries=("label",), **share)
    source, order = sources.Subset(pipeline.source, kept), TrainOrder(len(kept), heads.batch_size, 1, run.config.seed)
    batches = dataclasses.replace(pipeline, source=source, order=order).batches()
    extract = frozen.extractor(run)
    for step, batch in enumerate(batches if run.track is None else run.track(batches, heads.steps, run.stream)):
        if step == heads.steps:
            return
        placed = on_devices({name: batch[name] for name in ("image", "label")})
        tokens, average = extract(jnp.asarray(placed["image"]))
        yield tokens.swapaxes(0, 1), average[:, None], placed["label"]


def _predicted(probe: Probe, images: Images) -> np.ndarray:
    """The classes by each head, int [heads, N]."""
    found = []
    for start in range(0, len(images.labels), CHUNK):
        tokens, average, _ = (part[start : start + CHUNK] for part in images)
        found.append(np.asarray(probe.logits(np.moveaxis(tokens, 1, 0), average[:, None])).argmax(-1))
    return np.concatenate(found, axis=1)


def _right(probe: Probe, images: Images) -> np.ndarray:
    """The accuracy of each head."""
    return (_predicted(probe, images) == images.labels).mean(1)


PROTOCOL = Protocol(
    needs=frozenset({"features"}),
    run=run,
    lines=lines,
    check=check,
    inputs=frozen.inputs,
    curve="top1",
    blocks=lambda config: max(config.evaluation.linear_probe.blocks),
)
