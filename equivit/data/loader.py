"""Batches: the t-th global batch depends only on the seed and t, for any number of workers and processes.

    pipeline = loader.train(config.data, batch_size=256, seed=0)
    for batch in pipeline.batches(start=step):  # endless
        ...  # batch["image"] uint8 [B, H, W, C], batch["label"] int32 [B]

The position in the stream is t, so a checkpoint needs nothing else.  Grain runs threads of this process, or worker
processes with `workers=` (`data.workers` in the commands).  An objective can have a separate transform (`batches.py`):
`loader.train(..., transform=MultiCrop)`.
"""

import copy
import dataclasses
import gc
import itertools
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Any

import absl.flags
import grain
import jax
import ml_collections
import numpy as np
from absl import logging

from equivit import errors
from equivit.data import corruptions, reading, sources, transforms
from equivit.data.batches import Batch, MakeTransform, Share, Transform, collate, finish, padded
from equivit.data.order import TrainOrder, permutation

Shapes = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pipeline:
    """Batches of a split; workers receive a copy.  `unreadable` holds the images replaced so far, and why."""

    source: sources.Source
    channels: int
    max_pixels: int
    share: Share
    workers: int = 0
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def num_examples(self) -> int:
        """Number of examples in the split."""
        return len(self.source)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return tuple(self.source.classes)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.source.classes)

    def shapes(self) -> Shapes:
        """The shapes and dtypes of a global batch, taken from the first example."""
        blank = dataclasses.replace(self, share=Share(self.share.batch_size)).blank()
        return {name: jax.ShapeDtypeStruct(value.shape, value.dtype) for name, value in blank.items()}

    def make(self, batch: int) -> dict[str, Any]:
        """This process's rows of a global batch, and the "unreadable" images among them, with reasons."""
        raise NotImplementedError

    def blank(self) -> Batch:
        """This process's rows of a batch of padding, with the shapes of the first example."""
        raise NotImplementedError

    def read(self, position: int) -> reading.Reading:
        """An example of the split, or the next readable one."""
        return reading.read(self.source, position, self.channels, self.max_pixels)

    def check_labelled(self, name: str, void: tuple[int, ...]) -> None:
        """ValueError unless a pixel of the split `name` has a class with `data.void`; usually the first map has one."""
        for position in range(len(self.source)):
            if (np.asarray(self.read(position).example["map"]) >= 0).any():
                return
        raise ValueError(
            f"config.data: no pixel of the split {name!r} has a class, with data.void={void}, so that there is nothing "
            "to learn or to compare; correct data.void, or the maps."
        )

    def _stream(self, start: int, stop: int) -> Generator[Batch, None, None]:
        """Yield the batches start, ..., stop - 1, prefetched by threads or worker processes."""
        if not 0 <= start <= stop:
            raise ValueError(f"start={start} must be in 0..{stop}.")
        return self._run(start, stop)

    def _run(self, start: int, stop: int) -> Generator[Batch, None, None]:
        if start == stop:
            return
        workers = min(self.workers, stop - start)
        if not absl.flags.FLAGS.is_parsed():
            absl.flags.FLAGS.mark_as_parsed()  # Grain's workers need parsed flags, even without an absl app
        grain.config.update("py_traceback_filtering", "off")  # otherwise it adds lines to error messages
        # Prefetch few batches: they are large.  PIL releases the GIL, so threads help without workers.
        ahead = grain.ReadOptions(num_threads=1 if workers else 2, prefetch_buffer_size=1 if workers else 2)
        dataset = grain.MapDataset.range(start, stop).map(self.make).to_iter_dataset(ahead)
        batches = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers), _bind_to_parent))
        try:
            for batch in itertools.chain([_first(batches)], batches):
                self._note(batch.pop("unreadable"))
                # Copy: workers return shared memory, which JAX must not hold after this loop.
                yield {name: np.array(value) for name, value in batch.items()} if workers else batch
        finally:
            batches.close()
            if workers:
                del batches
                gc.collect()  # Grain leaves the last batches in cycles, and Python reports their memory at its exit

    def _note(self, unreadable: list[tuple[str, str]]) -> None:
        """Count unreadable images here, not in the workers, so that each is reported once."""
        for where, reason in unreadable:
            if where not in self.unreadable:
                self.unreadable[where] = reason
                logging.warning(
                    "Unreadable image %d, replaced by the next: %s: %s", len(self.unreadable), where, reason
                )


def _first(batches: Iterator[Any]) -> Any:
    """The first batch, which starts the workers; signals are blocked, and the workers inherit this.

    Ctrl-C reaches all processes of a terminal.  If it killed a worker before `_bind_to_parent`, this process would wait
    for it forever.
    """
    multiprocessing.resource_tracker.ensure_running()  # otherwise it starts with the workers and unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return next(batches)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _bind_to_parent(worker: int, workers: int) -> None:
    """Tie the lifetime of a worker to the training process.

    Not shorter: on a signal to the process group, the run saves and stops, and needs batches until then.  Not longer:
    if the parent is killed, a worker would wait forever and keep its memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def watch() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainPipeline(_Pipeline):
    """Training batches.  `unreadable` holds the images replaced so far, and why."""

    order: TrainOrder
    transform: Transform
    resume: str = "same_order"

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.order.steps_per_epoch

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """This process's rows of the global batches start, start + 1, ..., endlessly.

        With `resume="new_order"`, a start after 0 begins an epoch in a new order.

        Shapes: image uint8 [B, H, W, C], label int32 [B], with B = batch_size / process_count.  Other entries come from
        the source and the transform: map int32 [B, H, W], several crops [B, G, H, W, C].
        """
        reshuffled = start and self.resume == "new_order"
        pipeline = dataclasses.replace(self, order=self.order.reshuffled(start)) if reshuffled else self
        return pipeline._stream(start, sys.maxsize)

    def make(self, batch: int) -> dict[str, Any]:
        epoch, examples, positions = self.order.rows(batch)
        own, made, unreadable = self.share.rows, [], {}
        places = zip(examples[own].tolist(), positions[own].tolist(), strict=True)
        for index, copies in itertools.groupby(places, key=lambda place: place[0]):
            example, missed = self.read(index)  # once for all copies
            unreadable |= missed
            made += [self.transform(example, self.order.generator(epoch, position)) for _, position in copies]
        finished = finish(self.transform, collate(made), self.order.batch_generator(batch), self.share)
        return {**finished, "unreadable": list(unreadable.items())}

    def blank(self) -> Batch:
        rng = np.random.default_rng(0)
        row = self.transform(self.read(0).example, rng)
        return finish(self.transform, padded(collate([row]), 0, self.share.batch_size), rng, self.share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationPipeline(_Pipeline):
    """Batches that contain every example of a split once.  `unreadable` holds the images replaced so far, and why.

    `order` is the order of the examples; None: as in the source.
    """

    transform: transforms.Evaluation
    corruption: corruptions.Corruption | None = None
    order: np.ndarray | None = None

    @property
    def num_batches(self) -> int:
        """Number of global batches; the last one is padded."""
        return -(-self.num_examples // self.share.batch_size)

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """This process's rows of the global batches start, ..., num_batches - 1.

        Shapes: image uint8 [B, H, W, C], label int32 [B], weight float32 [B], index int64 [B], with
        B = batch_size / process_count.  `index` is the position in the split.  `weight` is 1, except 0 for padding
        (index -1) and for an unreadable image, whose row holds the next readable one.  If examples may have several
        labels, label is bool [B, classes], and weight is also 0 for an example without labels.  Other entries of the
        source, such as map int32 [B, H, W], are 0 in padding.  With `eval_crop="whole"`, sizes differ between batches
        and between image and map; one batch cannot mix sizes, so batch_size is 1.
        """
        return self._stream(start, self.num_batches)

    def make(self, batch: int) -> dict[str, Any]:
        index, made, unreadable = self._positions(batch), [], {}
        for position in index[index >= 0].tolist():
            row, missed = self._row(position)
            made.append(row)
            unreadable |= missed
        rows = padded(collate(made), len(made), len(index)) if made else self.blank()
        return {**rows, "index": index, "unreadable": list(unreadable.items())}

    def blank(self) -> Batch:
        rows = padded(collate([self._row(0).example]), 0, self.share.size)
        return {**rows, "index": np.full(self.share.size, -1)}

    def _row(self, position: int) -> reading.Reading:
        """The transformed example at a position of the split, with its weight."""
        example, missed = self.read(position)
        row = self.transform(example)
        if self.corruption is not None:
            row["image"] = self.corruption(row["image"], position)
        row["weight"] = float(not missed and row.get("label") != ())  # the replacement counts at its own position
        if sources.has_label_sets(self.source):
            row["label"] = np.isin(np.arange(len(self.source.classes)), row["label"])
        return reading.Reading(row, missed)

    def _positions(self, batch: int) -> np.ndarray:
        """Each row's position in the split; -1 for padding, which comes last."""
        place = batch * self.share.batch_size + np.arange(self.share.batch_size)[self.share.rows]
        real = place < len(self.source)
        index = np.full(len(place), -1)
        index[real] = place[real] if self.order is None else self.order[place[real]]
        return index


def train(
    config: ml_collections.ConfigDict,
    *,
    batch_size: int,
    seed: int,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
    entries: tuple[str, ...] = (),
    transform: MakeTransform = transforms.Train,
) -> TrainPipeline:
    """The training pipeline of a `data` section, for one of `process_count` processes.

    Args:
      config: the `data` section.
      batch_size: rows of a global batch, over all processes.
      seed: seed of the order and the augmentation.
      process_index: index of this process.
      process_count: number of processes; each gets an equal slice of every batch.
      workers: number of processes that make the batches; 0: threads of this process.  Each worker imports the main
        script, which must guard its work with `if __name__ == "__main__":`.  Batches do not depend on the number.
      entries: required entries of examples, such as "label".
      transform: makes the transform (`batches.py`) from the `data` section and the number of channels.

    Raises:
      ValueError: an invalid value in the config, a batch larger than the data set, examples without `entries`, or label
        maps without any class.
      FileNotFoundError: the data are missing.
    """
    opened = _open(config, config.split, workers)
    source, channels = opened["source"], opened["channels"]
    found = reading.read(source, 0, channels, config.max_pixels).example if entries else {}
    if missing := [name for name in entries if name not in found]:
        raise ValueError(
            f"config.data.source={config.source!r}: its examples have {', '.join(found)} but no {', '.join(missing)}, "
            "which the objective needs; use another source or another objective."
        )
    if "map" in entries and (policy := config.augment.rand_augment) is not None:
        raise ValueError(f"config.data.augment.rand_augment={policy!r}: label maps cannot follow it; set it to None.")
    if sources.has_label_sets(source):
        raise ValueError(f"config.data.source={config.source!r}: examples with sets of labels are for evaluation only.")
    pipeline = TrainPipeline(
        **opened,
        share=Share(batch_size, process_index, process_count),
        order=TrainOrder(len(source), batch_size, config.repeats, seed),
        transform=transform(config, channels),
        resume=config.resume,
    )
    if "map" in entries:
        pipeline.check_labelled(config.split, tuple(config.void))
    return pipeline


def evaluate(
    config: ml_collections.ConfigDict,
    *,
    batch_size: int,
    split: str | None = None,
    seed: int = 0,
    shuffle: bool = False,
    process_index: int = 0,
    process_count: int = 1,
    workers: int = 0,
) -> EvaluationPipeline:
    """The evaluation pipeline of a `data` section; `split` is `config.eval_split` unless given.  See `train`.

    Args:
      seed: seed of the corruptions, of `config.eval_split` alone, and of the shuffled order.
      shuffle: whether to shuffle the examples; their content does not depend on it.
    """
    chosen = config.eval_split if split is None else split
    opened = _open(config, chosen, workers)
    return EvaluationPipeline(
        **opened,
        share=Share(batch_size, process_index, process_count),
        transform=transforms.Evaluation(config),
        corruption=corruptions.create(config, seed) if chosen == config.eval_split else None,
        order=permutation(seed, 0, len(opened["source"])) if shuffle else None,
    )


def complete(config: ml_collections.ConfigDict, pipeline: TrainPipeline) -> ml_collections.ConfigDict:
    """The config of a run with its `model` section completed from the data.

    Raises:
      ValueError: the section contradicts the data; `num_classes=None`, for a model without a head, does not.
    """
    config = copy.deepcopy(config).unlock()
    known = dict(image_size=config.data.image_size, num_classes=pipeline.num_classes, in_channels=pipeline.channels)
    config.model = {**known, **config.model}
    for key, things in (("num_classes", "classes"), ("in_channels", "channels")):
        value, right = config.model[key], known[key]
        if value != right and (key, value) != ("num_classes", None):
            raise ValueError(
                f"config.model.{key}={errors.shown(value)}: the data ({config.data.source}) have {right} {things}; set "
                f"it to {right}, or use other data."
            )
    return config.lock()


def shapes(
    config: ml_collections.ConfigDict,
    batch_size: int,
    *,
    channels: int,
    training: bool = True,
    entries: tuple[str, ...] = ("image", "label"),
    transform: MakeTransform = transforms.Train,
) -> Shapes:
    """The shapes of `train(...).shapes()` or `evaluate(...).shapes()` without the data, to lower a step.

    Args:
      config: the `data` section.
      batch_size: rows of a global batch.
      channels: channels of the images: 1 (grey) or 3 (RGB).
      training: True for training batches, False for evaluation batches.
      entries: the entries of the source's examples: "image", "label", "map".
      transform: as in `train`.
    """
    for name in entries:
        errors.one_of("entries", name, ("image", "label", "map"))
    black = np.zeros((*config.image_size, channels), np.uint8)
    example = {"image": black, "label": 0, "map": black[..., 0]}
    source: Any = [{name: example[name] for name in entries}]
    fields = dict(source=source, channels=channels, max_pixels=config.max_pixels, share=Share(batch_size))
    if not training:
        return EvaluationPipeline(**fields, transform=transforms.Evaluation(config)).shapes()
    order = TrainOrder(batch_size, batch_size, repeats=1, seed=0)
    return TrainPipeline(**fields, order=order, transform=transform(config, channels)).shapes()


def _open(config: ml_collections.ConfigDict, split: str, workers: int) -> dict[str, Any]:
    """The source and how it is read, as fields of a pipeline."""
    if workers < 0:
        raise ValueError(f"{workers=} must not be negative; 0 reads in threads of this process.")
    source = sources.open_source(config, split)
    channels = source.channels if config.channels is None else config.channels
    if channels not in reading.MODES:
        raise ValueError(f"config.data.channels={channels} must be 1 (grey) or 3 (RGB); None uses the source's number.")
    return dict(source=source, channels=channels, max_pixels=config.max_pixels, workers=workers)
