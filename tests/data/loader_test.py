import gc
import hashlib
import itertools
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from equivit.data import loader
from equivit.data.order import TrainOrder


def digest(batch):
    """A hash of all that is in a batch."""
    return hashlib.sha256(b"".join(batch[name].tobytes() for name in sorted(batch))).hexdigest()


def first(batches, count):
    try:
        return list(itertools.islice(batches, count))
    finally:
        batches.close()


@pytest.fixture
def random_section(section):
    """Everything random is on, and epochs are short: 8 batches of 32."""
    return lambda **changes: section(augment="everything", train_examples=300, repeats=3, **changes)


def train(config, *, seed=0, **options):
    return loader.train(config, batch_size=32, seed=seed, **options)


@pytest.mark.slow
def test_the_stream_is_the_same_for_any_workers_processes_and_start(random_section):
    pipeline = train(random_section())
    assert pipeline.steps_per_epoch == 8
    expected = first(pipeline.batches(), 12)  # into the second epoch
    digests = [digest(batch) for batch in expected]
    assert len(set(digests)) == 12
    with_workers = first(train(random_section(), workers=2).batches(), 12)
    assert [digest(batch) for batch in with_workers] == digests
    assert type(with_workers[0]["image"]) is np.ndarray  # and not a view of the workers' memory
    assert [digest(batch) for batch in first(pipeline.batches(start=7), 5)] == digests[7:]
    halves = [train(random_section(), process_index=i, process_count=2) for i in range(2)]
    streams = [first(half.batches(start=3), 3) for half in halves]
    for batch, parts in zip(expected[3:], zip(*streams, strict=True), strict=False):
        joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
        assert digest(joined) == digest(batch)


def test_a_resumed_run_may_have_a_new_order_of_the_images(section):
    same, new = (train(section(train_examples=100, resume=order)) for order in ("same_order", "new_order"))
    digests = [[digest(batch) for batch in first(each.batches(start), 4)] for each in (same, new) for start in (0, 2)]
    (fresh, resumed), (new_fresh, new_resumed) = digests[:2], digests[2:]
    assert resumed[:2] == fresh[2:] and new_fresh == fresh
    assert not set(new_resumed) & {*fresh, *resumed}
    assert new_resumed == [digest(batch) for batch in first(new.batches(2), 4)]
    assert not set(new_resumed) & {digest(batch) for batch in first(new.batches(3), 4)}

    order = new.order.reshuffled(5)
    epoch = np.concatenate([order.rows(batch).examples for batch in range(5, 5 + order.steps_per_epoch)])
    assert len(set(epoch)) == len(epoch) and order.rows(5).epoch == 0


def test_another_seed_gives_another_stream(random_section):
    batches = [first(train(random_section(), seed=seed).batches(), 1)[0] for seed in (0, 1)]
    assert digest(batches[0]) != digest(batches[1])


def test_training_batches_keep_the_contract(section):
    pipeline = loader.train(section(image_size=(12, 20), channels=3), batch_size=16, seed=0)
    batch = first(pipeline.batches(), 1)[0]
    assert {name: (value.dtype.name, value.shape) for name, value in batch.items()} == {
        "image": ("uint8", (16, 12, 20, 3)),
        "label": ("int32", (16,)),
    }
    assert (pipeline.num_examples, pipeline.num_classes, pipeline.classes[3]) == (1437, 10, "3")


def test_an_epoch_sees_every_example_once_in_a_new_order():
    order = TrainOrder(num_examples=100, batch_size=25, repeats=1, seed=0)
    epochs = [[order.rows(4 * epoch + step) for step in range(4)] for epoch in range(2)]
    seen = [np.concatenate([rows.examples for rows in epoch]) for epoch in epochs]
    assert [sorted(examples) for examples in seen] == [list(range(100))] * 2
    assert not np.array_equal(*seen)
    assert [rows.epoch for epoch in epochs for rows in epoch] == [0] * 4 + [1] * 4
    assert np.concatenate([rows.positions for rows in epochs[1]]).tolist() == list(range(100))


@pytest.mark.parametrize(("batch_size", "repeats", "distinct"), [(96, 3, 32), (64, 3, 22), (64, 2, 32), (10, 1, 10)])
def test_copies_of_an_example_lie_in_one_batch(batch_size, repeats, distinct):
    order = TrainOrder(num_examples=1000, batch_size=batch_size, repeats=repeats, seed=0)
    batches = [order.rows(step).examples for step in range(order.steps_per_epoch)]
    for examples in batches:
        values, counts = np.unique(examples, return_counts=True)
        assert len(examples) == batch_size and len(values) == distinct and counts.max() == repeats
        assert (counts == repeats).sum() >= distinct - 1  # only the last may have fewer copies
    assert len(np.unique(np.concatenate(batches))) == distinct * len(batches)  # no example in two batches


@pytest.mark.parametrize(
    ("examples", "repeats", "steps"), [(1_281_167, 3, 625), (1_281_167, 1, 625), (255, 3, 0), (300, 3, 0)]
)
def test_epochs_are_as_long_as_with_the_official_sampler(examples, repeats, steps):
    if not steps:
        with pytest.raises(ValueError, match=f"batch_size=2048 must not exceed the {min(examples, 256)} samples"):
            TrainOrder(examples, 2048, repeats, 0)
    else:
        assert TrainOrder(examples, 2048, repeats, 0).steps_per_epoch == steps


def test_copies_of_an_example_are_augmented_differently(section):
    pipeline = loader.train(section(repeats=3, augment={"crop": "pad"}), batch_size=30, seed=0)
    images = first(pipeline.batches(), 1)[0]["image"].reshape(10, 3, -1)
    assert sum(len({copy.tobytes() for copy in copies}) == 3 for copies in images) >= 9


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_sees_every_example_once_and_pads_the_last_batch(section, workers):
    pipeline = loader.evaluate(section(), batch_size=100, workers=workers)
    batches = list(pipeline.batches())
    assert pipeline.num_examples == 360 and pipeline.num_batches == len(batches) == 4
    assert {name: (value.dtype.name, value.shape) for name, value in batches[-1].items()} == {
        "image": ("uint8", (100, 8, 8, 1)),
        "label": ("int32", (100,)),
        "weight": ("float32", (100,)),
        "index": ("int64", (100,)),
    }
    index = np.concatenate([batch["index"] for batch in batches])
    weight = np.concatenate([batch["weight"] for batch in batches])
    assert index.tolist() == [*range(360), *[-1] * 40] and weight.tolist() == [1.0] * 360 + [0.0] * 40
    assert [digest(batch) for batch in pipeline.batches(start=2)] == [digest(batch) for batch in batches[2:]]
    assert list(pipeline.batches(start=4)) == []
    # Memory shared with workers is free again.
    assert not any(type(found).__name__ == "SharedMemoryArray" for found in gc.get_objects())


def test_processes_share_out_the_evaluation(section):
    whole = list(loader.evaluate(section(), batch_size=100).batches())
    options = {"batch_size": 100, "process_count": 2}
    halves = [list(loader.evaluate(section(), process_index=i, **options).batches()) for i in range(2)]
    for batch, *parts in zip(whole, *halves, strict=True):
        assert digest(batch) == digest({name: np.concatenate([part[name] for part in parts]) for name in batch})


@pytest.fixture
def damaged(tmp_path):
    """Twelve images of grey level 10 i, of which 0, 3, 4 and 11 cannot be read."""
    for split, (i, name) in itertools.product(("train", "test"), enumerate("aabbccaabbcc")):
        path = tmp_path / split / name / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (10 * i,) * 3).save(path)
        if i == 0:
            path.write_bytes(b"")
        elif i == 11:
            path.write_bytes(b"not an image")
        elif i in (3, 4):
            path.write_bytes(path.read_bytes()[:-30])  # truncated
    return f"folder:{tmp_path}"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_image_is_replaced_by_the_next_and_counted_once(section, damaged, workers, caplog):
    config = section(source=damaged, channels=1)
    pipeline = loader.train(config, batch_size=12, seed=0, workers=workers)
    with caplog.at_level("WARNING", logger="absl"):
        batches = first(pipeline.batches(), 3)
    # in the order of the source: a 00 01 06 07, b 02 03 08 09, c 04 05 10 11
    replaced = {0: 1, 3: 8, 4: 5, 11: 1}
    for batch in batches:
        levels = batch["image"][:, 0, 0, 0].tolist()
        assert sorted(levels) == sorted(10 * replaced.get(i, i) for i in range(12))
        assert batch["label"].tolist() == ["abc".index("aabbccaabbcc"[level // 10]) for level in levels]
    assert sorted(path[-6:] for path in pipeline.unreadable) == ["00.png", "03.png", "04.png", "11.png"]
    assert len(caplog.records) == 4 and "Unreadable image 4" in caplog.text


def test_evaluation_gives_no_weight_to_the_replacement_of_an_unreadable_image(section, damaged):
    pipeline = loader.evaluate(section(source=damaged), batch_size=12)
    (batch,) = pipeline.batches()
    assert batch["weight"].tolist() == [0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 1, 0]
    assert len(pipeline.unreadable) == 4


def test_a_data_set_without_a_readable_image_is_an_error(section, tmp_path):
    (tmp_path / "train" / "a").mkdir(parents=True)
    for i in range(3):
        (tmp_path / "train" / "a" / f"{i}.jpg").write_bytes(b"broken")
    pipeline = loader.train(section(source=f"folder:{tmp_path}", channels=1), batch_size=2, seed=0)
    with pytest.raises(OSError, match="3 images in a row cannot be read, starting with .*jpg"):
        next(pipeline.batches())


SIGNALLED = """
import os, signal, ml_collections
from multiprocessing.context import SpawnProcess
from equivit.data import loader

def start_and_interrupt(process, start=SpawnProcess.start):
    start(process)
    os.killpg(0, signal.SIGINT)  # before the worker has done anything

signal.signal(signal.SIGINT, lambda *_: None)
SpawnProcess.start = start_and_interrupt
config = ml_collections.ConfigDict({section!r})
batches = loader.train(config, batch_size=8, seed=0, workers=2).batches()
for _ in range(2):  # one from each worker, so that both have started
    next(batches)
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: print("asked to end", flush=True))
    os.killpg(0, number)
for _ in range(20):  # more than were made in advance
    next(batches)
print("still going", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_workers_outlive_signals_but_not_their_parent(section):
    command = [sys.executable, "-c", SIGNALLED.format(section=section().to_dict())]
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, start_new_session=True)
    output, _ = process.communicate(timeout=3600)  # the pipe closes only when the last worker has gone
    assert output.decode().split("\n") == ["asked to end", "asked to end", "still going", ""]
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 9, "process_count": 4}, "batch_size=9 must be positive and divisible .* nearest are 8 and 12"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2000}, "batch_size=2000 must not exceed the 1437 samples"),
        ({"batch_size": 8, "process_index": 2, "process_count": 2}, r"process_index=2 must be in 0\.\.1"),
        ({"batch_size": 8, "seed": -1}, "seed=-1 must not be negative"),
    ],
)
def test_impossible_arguments_are_refused(section, options, message):
    with pytest.raises(ValueError, match=message):
        loader.train(section(), **{"seed": 0, **options})


def test_impossible_positions_and_sections_are_refused(section):
    with pytest.raises(ValueError, match=r"start=9 must be in 0\.\.8"):
        loader.evaluate(section(), batch_size=50).batches(start=9)
    with pytest.raises(ValueError, match="workers=-1 must not be negative"):
        loader.train(section(), batch_size=8, seed=0, workers=-1)
    with pytest.raises(ValueError, match="channels=4 must be 1 .grey. or 3 .RGB."):
        loader.train(section(channels=4), batch_size=8, seed=0)
    with pytest.raises(ValueError, match="repeats=0 must be at least 1"):
        loader.train(section(repeats=0), batch_size=8, seed=0)
