"""The tables of shift-equivariant ViTs, on made-up runs, and what is evaluated for them."""

import json

import jax
import numpy as np
import pytest

from equivit import testing
from equivit.evaluation.consistency import FRACTIONS
from equivit.models import zoo
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import machine
from experiments.tables import finished_runs
from experiments.tables.adaptive import accuracy, further_evaluations
from experiments.tables.adaptive.accuracy import ENTRIES, Cell
from tests.experiments import scripts

CELLS = list(dict.fromkeys(accuracy.cell_in(entry) for entry in ENTRIES))
DEFAULT, ADAPTIVE = (Cell("cifar10", "circular", "swin_t", variant) for variant in ("default", "adaptive"))


def make(place, cell, top1, consistency, **changes):
    """A run directory as `equivit.train` leaves it."""
    parts = accuracy.PARTS.get(cell.variant)
    changes |= {} if parts is None else {"model.adaptive": parts}
    changes |= {"init": "elsewhere"} if cell.variant.startswith("adapted") else {}
    config = configs.load(
        str(machine.ROOT / accuracy.recipe(cell)), [f"{key}={value}" for key, value in changes.items()]
    )
    with config.unlocked():
        config.model = {"num_classes": 1000, "in_channels": 3, **config.model}
    place.mkdir(parents=True)
    (place / "config.json").write_text(configs.to_json(config))
    shifts = {"circular": "circular_full", "standard": "zeros_42"}[cell.shifts]
    report = {"step": 10, "eval/accuracy/top1": top1, f"eval/shift/{shifts}": consistency}
    if cell.data == "ade20k":
        shifts = shifts.replace("42", "64")
        report = {"step": 10, "eval/segmentation/miou": top1, f"eval/segmentation_shift/{shifts}": consistency}
    (place / "report.json").write_text(json.dumps(report))


def script(runs, *arguments):
    """Exit status, and the rows that have runs."""
    output = runs / "out.json"
    status = scripts.status(accuracy, [str(runs), f"--output={output}", *arguments])
    rows = json.loads(output.read_text())["main"]["rows"] if output.is_file() else []
    return status, [row for row in rows if row["seeds"]]


def test_the_papers_numbers_stand_in_their_cells():
    found = {tuple(entry.values())[:7]: tuple(entry.values())[7:] for entry in ENTRIES}
    assert len(found) == len(ENTRIES) == 119
    swin, cvt = ("cifar10", "circular", "swin_t"), ("cifar10", "circular", "cvt_13")
    assert found["1", "cifar100", "standard", "cvt_13", "adaptive", "", "full"] == (73.04, 0.23, 86.96, 0.55)
    assert found["2", "imagenet", "standard", "mvitv2_t", "default", "", "full"] == (82.21, None, 93.88, None)
    assert found["5", "ade20k", "standard", "swinv2_t", "adaptive", "", "full"] == (46.11, None, 93.59, None)
    assert found["6", *swin, "no window", "", "full"] == (93.24, 0.15, 95.62, 0.54)
    assert found["A9", *swin, "da", "erased 56", "full"] == (90.42, None, 93.01, None)
    assert found["A10", *swin, "default", "flipped", "full"] == (50.41, None, 82.24, None)
    assert found["A11", *cvt, "default", "ranges", "half"] == (None, None, 87.42, 0.16)
    assert found["A12", *cvt, "default", "adapted", "full"][0] == 57.4
    assert found["A12", *cvt, "adapted=20", "", "full"][0] == 92.35


def test_the_recipe_of_a_cell_trains_it(tmp_path):
    known = [cell for cell in CELLS if cell.variant in ("default", "da") or "adaptive" in zoo.types_of(cell.model)]
    assert len(known) > 30
    for k, cell in enumerate(known):
        make(tmp_path / str(k), cell, 0.5, 0.5)
        run = finished_runs._read(tmp_path / str(k))
        assert accuracy.cell_of(run) == cell and accuracy.departures(cell, run) == []


def test_seeds_become_means_beside_the_papers_and_the_rest_is_empty(tmp_path, capsys):
    for seed, (top1, consistency) in enumerate([(0.90, 0.82), (0.91, 0.84)]):
        make(tmp_path / f"a/{seed}", DEFAULT, top1, consistency, seed=seed, **{"data.workers": seed})
    make(tmp_path / "b", ADAPTIVE, 0.93, 1.0)
    status, rows = script(tmp_path)
    assert status == 0
    assert [row["table"] for row in rows] == ["1", "1", "6", "6", "A9", "A9", "A10", "A10"]
    default, adaptive = rows[:2]
    assert default["top1"] == pytest.approx(90.5) and default["top1_spread"] == pytest.approx(0.5**0.5)
    assert default["top1_paper"] == 90.15 and default["consistency_paper_spread"] == 0.61
    assert default["consistency_values"] == pytest.approx([82, 84]) and adaptive["consistency"] == 100
    assert adaptive["seeds"] == 1 and adaptive["top1_spread"] is None
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "cifar10, circular, swin_t, default " in line)
    assert line.split()[-9:] == ["2", "90.50", "0.71", "90.15", "0.18", "83.00", "1.41", "83.30", "0.61"]
    empty = next(line for line in out.splitlines() if "imagenet, standard, cvt_13, adaptive" in line)
    assert empty.split()[-9:] == ["0", "-", "-", "81.48", "-", "-", "-", "93.41", "-"]
    assert "8 of 119 rows have runs" in out and "points above the default model: 2.5, claimed at least 0" in out


@pytest.mark.parametrize(
    ("default", "adaptive", "changes", "status"),
    [
        ((0.90, 0.8), (0.90, 1.0), {}, 0),
        ((0.90, 0.8), (0.90, 0.9999), {}, 1),  # one image changes
        ((0.90, 0.8), (0.899, 1.0), {}, 1),  # worse than the default model
        ((0.90, 0.8), (0.80, 1.0), {"schedule.lr": 1.0}, 0),  # but not by the recipe
        ((0.90, 0.8), (0.80, 0.99), {"schedule.lr": 1.0}, 1),  # consistency holds whatever the recipe
    ],
)
def test_what_fails(tmp_path, default, adaptive, changes, status, capsys):
    make(tmp_path / "a", DEFAULT, *default)
    make(tmp_path / "b", ADAPTIVE, *adaptive, **changes)
    assert script(tmp_path, "--tables=1,6")[0] == status
    out = capsys.readouterr().out
    assert ("FAILS" in out) is bool(status) and ("other values of schedule.lr" in out) is bool(changes)


def test_table_5_is_of_label_maps(tmp_path):
    for k, (variant, miou, mascc) in enumerate([("default", 0.42, 0.8), ("adaptive", 0.43, 1.0)]):
        make(tmp_path / str(k), Cell("ade20k", "circular", "swin_t", variant), miou, mascc)
    make(tmp_path / "standard", Cell("ade20k", "standard", "swinv2_t", "adaptive"), 0.46, 0.93, init="elsewhere")
    status, rows = script(tmp_path, "--tables=5")
    assert status == 0 and [row["top1"] for row in rows] == pytest.approx([42, 43, 46])
    assert rows[2]["consistency"] == pytest.approx(93) and all(row["other_values"] == [] for row in rows)


def test_a_model_may_be_as_far_behind_as_in_the_paper():
    cells = [Cell("imagenet", "standard", "cvt_13", variant) for variant in ("default", "adaptive")]
    entries = [entry for cell in cells for entry in ENTRIES if accuracy.cell_in(entry) == cell]
    rows = [accuracy.row(entry, [], []) for entry in entries]
    assert accuracy.claims_of(rows) == []
    for behind, holds in ((0.1, True), (0.12, False)):
        for row, top1 in zip(rows, (81.0, 81.0 - behind), strict=True):
            row |= dict(seeds=1, top1=top1, consistency=92.0, consistency_values=[92.0])
        top1, consistency = accuracy.claims_of(rows)
        assert top1.holds is holds and top1.at_least == -0.11 and consistency.at_least == 0


def test_commands_for_what_is_missing(tmp_path, capsys):
    make(tmp_path / "a", DEFAULT, 0.9, 0.8)
    assert script(tmp_path, "--tables=6,A12", "--missing")[0] == 0
    out = capsys.readouterr().out
    assert (
        f":10,swin_t,adaptive --workdir={tmp_path}/cifar10_circular_swin_t_no_token --seeds=0,1,2,3,4 --config" in out
    )
    assert "--config.model.adaptive=token,window,position" in out and "--config.init=DEFAULT_RUN" in out
    assert "10,swin_t --workdir" not in out
    (tmp_path / "a/report.json").unlink()
    (tmp_path / "a/config.json").unlink()
    assert scripts.status(accuracy, [str(tmp_path)]) == 1 and "no run of equivit.train" in capsys.readouterr().err
    assert script(tmp_path, "--tables=6", "--missing") == (0, [])
    out = capsys.readouterr().out
    assert "0 of 5 rows have runs" in out and f"adaptive_cifar.py:10,swin_t --workdir={tmp_path}/" in out
    assert scripts.status(accuracy, [str(tmp_path / "none"), "--missing"]) == 1
    assert "none: there is no such directory" in capsys.readouterr().err


def test_erased_squares():
    """Squares have uniform sides, lie inside, have the given colour, and are the same for each image in every batch."""
    count, most = 4000, 3
    batch = dict(image=np.zeros((count, 5, 7, 2), np.uint8), index=np.arange(count))
    images = further_evaluations.erased(most, batch, np.array([9, 8], np.uint8))["image"]
    assert not batch["image"].any() and set(np.unique(images.reshape(-1, 2), axis=0)[:, 0]) == {0, 9}
    rows, columns = ((images[..., 0] > 0).any(axis) for axis in (2, 1))
    sides = rows.sum(1)
    np.testing.assert_array_equal(sides, columns.sum(1))
    np.testing.assert_array_equal((images[..., 1] > 0).sum((1, 2)), sides**2)
    rate = np.bincount(sides) / count
    assert len(rate) == most + 1 and np.abs(rate - 1 / 4).max() < 5 * (3 / 16 / count) ** 0.5
    assert rows[sides == 3].argmax(1).max() == 2 and columns[sides == 3].argmax(1).max() == 4
    part = {name: values[10:20] for name, values in batch.items()}
    np.testing.assert_array_equal(further_evaluations.erased(most, part, np.array([9, 8]))["image"], images[10:20])


def test_squares_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="erased 28: the squares do not fit in images of 28x20"):
        further_evaluations.erased(28, dict(image=np.zeros((1, 28, 20, 3), np.uint8), index=np.arange(1)), np.zeros(3))


def test_flipped_images():
    image = np.arange(12, dtype=np.uint8).reshape(1, 3, 4, 1)
    np.testing.assert_array_equal(further_evaluations.flipped(dict(image=image), None)["image"][0], image[0, ::-1])


def test_conditions_are_evaluated_once_and_kept(tmp_path, monkeypatch):
    small = dict(width=8, depths=(1,), num_heads=(2,), patch_size=2, window_size=2, image_size=(8, 8), in_channels=1)
    model = testing.randomise(zoo.abstract("swin_t", **small, num_classes=10), jax.random.key(0))
    for bias in (model.head.bias, model.norm.bias):  # no class wins everywhere
        bias.set_value(np.zeros(bias.shape, np.float32))
    config = configs.get_base()
    config.update(batch_size=8)
    config.data.update(source="digits", image_size=(8, 8), channels=1, mean=(0.3,), std=(0.3,), eval_examples=24)
    loads = []
    monkeypatch.setattr(checkpoints, "load_run", lambda run: loads.append(run) or (config, model, 7))
    names = ["ranges", "erased 28", "flipped", "adapted"]
    monkeypatch.setitem(further_evaluations.CONDITIONS, "erased 28", lambda batch, fill: batch)  # larger than a digit
    further_evaluations.evaluate(tmp_path, names)
    found = further_evaluations.read(tmp_path)
    assert list(found) == names and all(result["examples"] == 24 for result in found.values())
    upright, erased, flipped, adapted = (found[name] for name in names)
    assert {f"circular_{name}" for name in FRACTIONS} < set(upright) and "circular_half" not in flipped
    assert upright["circular_full"] == erased["circular_full"] < 1 == adapted["circular_full"] and flipped != erased
    further_evaluations.evaluate(tmp_path, names[:2])
    assert loads == [tmp_path] and json.loads((tmp_path / further_evaluations.FILE).read_text())["step"] == 7
    (tmp_path / further_evaluations.FILE).write_text("{")
    with pytest.raises(ValueError, match="cannot be read .* delete it and evaluate again"):
        further_evaluations.read(tmp_path)
