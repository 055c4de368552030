"""Batches: the t-th global batch is a function of the seed and t alone, for any number of workers and processes.

    pipeline = loader.train(config.data, batch_size=256, seed=0)
    for batch in pipeline.batches(start=step):  # endless
        ...  # batch["image"] uint8 [B, H, W, C], batch["label"] int32 [B]

A position in the stream is just t, so that is all a checkpoint has to hold.  Grain runs the workers.
"""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

import absl.flags
import grain
import ml_collections
import numpy as np
from absl import logging

from equivit.data import corruptions, reading, sources, transforms
from equivit.data.order import TrainOrder, permutation

Batch = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class _Share:
    """The rows of a global batch that belong to one process: an equal slice for each."""

    batch_size: int
    process_index: int
    process_count: int

    def __post_init__(self):
        if self.batch_size < 1 or self.batch_size % self.process_count:
            below = self.batch_size // self.process_count * self.process_count
            raise ValueError(
                f"batch_size={self.batch_size} must be positive and divisible by the {self.process_count} processes; "
                f"nearest are {', '.join(str(b) for b in (below, below + self.process_count) if b)}."
            )
        if not 0 <= self.process_index < self.process_count:
            raise ValueError(f"process_index={self.process_index} must lie in 0..{self.process_count - 1}.")

    @property
    def rows(self) -> slice:
        size = self.batch_size // self.process_count
        return slice(self.process_index * size, (self.process_index + 1) * size)


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    source: sources.Source
    channels: int
    share: _Share
    workers: int
    unreadable: dict[str, str] = dataclasses.field(default_factory=dict)  # what was replaced so far, and why

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

    def _stream(self, make: Callable[[int], dict[str, Any]], start: int, stop: int) -> Generator[Batch, None, None]:
        """Yields make(start), make(start + 1), ... up to stop, made ahead of time by threads or worker processes."""
        if not 0 <= start <= stop:
            raise ValueError(f"start={start} must lie in 0..{stop}.")
        return self._run(make, start, stop)

    def _run(self, make: Callable[[int], dict[str, Any]], start: int, stop: int) -> Generator[Batch, None, None]:
        if start == stop:
            return
        workers = min(self.workers, stop - start)
        if not absl.flags.FLAGS.is_parsed():
            absl.flags.FLAGS.mark_as_parsed()  # Grain's workers want the flags, also where no absl app runs
        # Few batches in advance: they are large.  PIL frees the interpreter lock, so threads help without workers.
        ahead = grain.ReadOptions(num_threads=1 if workers else 2, prefetch_buffer_size=1 if workers else 2)
        dataset = grain.MapDataset.range(start, stop).map(make).to_iter_dataset(ahead)
        batches = iter(dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers), _bind_to_parent))
        try:
            for batch in batches:
                self._note(batch.pop("unreadable"))
                # Copies, because workers hand over shared memory, which must not outlive this loop in JAX's hands.
                yield {name: np.array(value) for name, value in batch.items()} if workers else batch
        finally:
            batches.close()

    def _note(self, unreadable: list[tuple[str, str]]) -> None:
        """Counts unreadable images here, not in the workers, so that each is reported once."""
        for where, reason in unreadable:
            if where not in self.unreadable:
                self.unreadable[where] = reason
                logging.warning(
                    "Unreadable image %d, replaced by the next: %s: %s", len(self.unreadable), where, reason
                )


def _bind_to_parent(worker: int, workers: int) -> None:
    """Makes a worker live as long as the training process.

    Not shorter: a signal to the whole process group asks the run to save and end, and it needs its batches till then.
    Not longer: without its parent, when that is killed, a worker would wait for ever and hold its memory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def watch() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclasses.dataclass(frozen=True)
class _TrainBatch:
    """Makes this process's rows of one training batch; sent to the workers."""

    source: sources.Source
    channels: int
    share: _Share
    order: TrainOrder
    transform: transforms.Train

    def __call__(self, batch: int) -> dict[str, Any]:
        epoch, examples, positions = self.order.rows(batch)
        own, images, labels, unreadable = self.share.rows, [], [], {}
        rows = zip(examples[own].tolist(), positions[own].tolist(), strict=True)
        for example, copies in itertools.groupby(rows, key=lambda row: row[0]):
            image, label, missed = reading.read(self.source, example, self.channels)  # once for all its copies
            unreadable |= missed
            for _, position in copies:
                images.append(self.transform(image, self.order.generator(epoch, position)))
                labels.append(label)
        return {
            "image": np.stack(images),
            "label": np.array(labels, np.int32),
            "unreadable": list(unreadable.items()),
        }


@dataclasses.dataclass(frozen=True)
class _EvaluationBatch:
    """Makes this process's rows of one evaluation batch; sent to the workers."""

    source: sources.Source
    channels: int
    share: _Share
    transform: transforms.Evaluation
    corruption: corruptions.Corruption | None
    order: np.ndarray | None

    def __call__(self, batch: int) -> dict[str, Any]:
        index = self._examples(batch)
        size = (len(index), self.transform.height, self.transform.width, self.channels)
        image, weight, labels, unreadable = np.zeros(size, np.uint8), np.zeros(len(index), np.float32), [], {}
        for row, example in enumerate(index.tolist()):
            if example < 0:
                labels.append(())
                continue
            pixels, label, missed = reading.read(self.source, example, self.channels)
            pixels = self.transform(pixels)
            image[row] = pixels if self.corruption is None else self.corruption(pixels, example)
            labels.append(label)
            weight[row] = not missed and label != ()  # its replacement is counted in its own place
            unreadable |= missed
        return {
            "image": image,
            "label": self._label(labels),
            "weight": weight,
            "index": index,
            "unreadable": list(unreadable.items()),
        }

    def _examples(self, batch: int) -> np.ndarray:
        """The place in the split of each row's example, -1 for padding."""
        place = batch * self.share.batch_size + np.arange(self.share.batch_size)[self.share.rows]
        real = place < len(self.source)
        index = np.full(len(place), -1)
        index[real] = place[real] if self.order is None else self.order[place[real]]
        return index

    def _label(self, labels: list[int | tuple[int, ...]]) -> np.ndarray:
        if not sources.has_label_sets(self.source):
            return np.array([label or 0 for label in labels], np.int32)
        sets = np.zeros((len(labels), len(self.source.classes)), bool)
        for row, label in zip(sets, labels, strict=True):
            row[list(label)] = True
        return sets


@dataclasses.dataclass(frozen=True)
class TrainPipeline(_Pipeline):
    """Training batches.  `unreadable` holds what has been replaced so far, and why."""

    order: TrainOrder = dataclasses.field(kw_only=True)
    transform: transforms.Train = dataclasses.field(kw_only=True)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return self.order.steps_per_epoch

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """This process's rows of the global batches start, start + 1, ... without end.

        Shapes: image uint8 [B, H, W, C], label int32 [B], with B = batch_size / process_count.
        """
        make = _TrainBatch(self.source, self.channels, self.share, self.order, self.transform)
        return self._stream(make, start, sys.maxsize)


@dataclasses.dataclass(frozen=True)
class EvaluationPipeline(_Pipeline):
    """Batches that hold every example of a split once.  `unreadable` holds what has been replaced so far, and why.

    `order` says which example comes when; None: as the source has them.
    """

    transform: transforms.Evaluation = dataclasses.field(kw_only=True)
    corruption: corruptions.Corruption | None = dataclasses.field(kw_only=True)
    order: np.ndarray | None = dataclasses.field(kw_only=True)

    @property
    def num_batches(self) -> int:
        """Global batches, the last one padded."""
        return -(-self.num_examples // self.share.batch_size)

    def batches(self, start: int = 0) -> Generator[Batch, None, None]:
        """This process's rows of the global batches start, ..., num_batches - 1.

        Shapes: image uint8 [B, H, W, C], label int32 [B], weight float32 [B], index int64 [B], with
        B = batch_size / process_count.  `index` is the place in the split.  `weight` is 1, and 0 for padding (index -1)
        and for an unreadable image, in whose row the next readable one stands.  Where an example may have any number of
        labels, label is bool [B, classes], and weight also 0 where there is none.
        """
        make = _EvaluationBatch(self.source, self.channels, self.share, self.transform, self.corruption, self.order)
        return self._stream(make, start, self.num_batches)


def train(
    config: ml_collections.ConfigDict, *, batch_size: int, seed: int, process_index: int = 0, process_count: int = 1
) -> TrainPipeline:
    """The training pipeline of a `data` section, for one of `process_count` processes.

    Args:
      config: the `data` section.
      batch_size: rows of a global batch, over all processes.
      seed: decides the order and the augmentation.
      process_index: this process.
      process_count: all processes; each gets an equal slice of every batch.

    Raises:
      ValueError: for an impossible value in the config, or a batch larger than the data set.
      FileNotFoundError: if the data are not there.
    """
    source, channels = _open(config, config.split)
    if sources.has_label_sets(source):
        raise ValueError(f"config.data.source={config.source!r}: examples with sets of labels are for evaluation only.")
    return TrainPipeline(
        source,
        channels,
        _Share(batch_size, process_index, process_count),
        config.workers,
        order=TrainOrder(len(source), batch_size, config.repeats, seed),
        transform=transforms.Train(config, channels),
    )


def evaluate(
    config: ml_collections.ConfigDict,
    *,
    batch_size: int,
    split: str | None = None,
    seed: int = 0,
    shuffle: bool = False,
    process_index: int = 0,
    process_count: int = 1,
) -> EvaluationPipeline:
    """The evaluation pipeline of a `data` section; `split` is `config.eval_split` unless given.  See `train`.

    Args:
      seed: decides what corruptions draw, and the order of a shuffled split.
      shuffle: examples come in random order; what an example looks like does not depend on it.
    """
    source, channels = _open(config, config.eval_split if split is None else split)
    return EvaluationPipeline(
        source,
        channels,
        _Share(batch_size, process_index, process_count),
        config.workers,
        transform=transforms.Evaluation(config),
        corruption=corruptions.create(config, seed),
        order=permutation(seed, 0, len(source)) if shuffle else None,
    )


def _open(config: ml_collections.ConfigDict, split: str) -> tuple[sources.Source, int]:
    """The source, and the number of channels its images shall have."""
    if config.workers < 0:
        raise ValueError(f"config.data.workers={config.workers} must not be negative; 0 works in this process.")
    source = sources.open_source(config, split)
    channels = source.channels if config.channels is None else config.channels
    reading.check_channels(channels)
    return source, channels
