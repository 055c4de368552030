"""The tables of Jumbo's accuracies, on made-up runs, and the test sets beside ImageNet's own."""

import json

import jax
import numpy as np
import pytest

from equivit import testing
from equivit.configs import jumbo_in1k
from equivit.models import zoo
from equivit.training import checkpoints
from equivit.training import config as configs
from experiments import machine
from experiments.tables import finished_runs
from experiments.tables.jumbo import accuracy, paper_numbers, test_sets
from experiments.tables.jumbo.accuracy import Cell
from experiments.tables.jumbo.paper_numbers import FIGURES, ROWS
from tests.experiments import scripts

CELLS = list(dict.fromkeys(cell for entry in ROWS for cell in accuracy.cells_of(entry)))


def make(place, cell, top1=None, top5=0.9, sets=None, **changes):
    """A run directory as `equivit.train` leaves it; without figures, of a run that has not ended."""
    config = configs.load(
        str(machine.ROOT / accuracy.recipe(cell)), [f"{key}={value}" for key, value in changes.items()]
    )
    with config.unlocked():
        config.model = {"num_classes": 1000, "in_channels": 3, **config.model}
    place.mkdir(parents=True)
    (place / "config.json").write_text(configs.to_json(config))
    if top1 is not None:
        report = {"step": 10, "eval/accuracy/top1": top1, "eval/accuracy/top5": top5}
        (place / "report.json").write_text(json.dumps(report))
    if sets is not None:
        (place / test_sets.FILE).write_text(json.dumps({"step": 10, test_sets.KEY: sets}))
    return place


def script(runs, *arguments):
    """Exit status, and the JSON."""
    output = runs / "out.json"
    status = scripts.status(accuracy, [str(runs), f"--output={output}", *arguments])
    return status, json.loads(output.read_text())["main"] if output.is_file() else None


def test_the_papers_numbers_stand_in_their_cells():
    found = {(r["table"], r["words"], r["pixels"], r["rate"]): [r[key] for key in FIGURES] for r in ROWS}
    assert len(found) == len(ROWS) == 15 + 8 + 8 + 6 + 6 + 4 + 16 + 3
    assert found["6", "tiny,registers", 224, ""][8:] == [83.7, 95.6]
    assert found["7", "small,registers,r=8", 128, "3e-3"][6:8] == [33.3, 48.6]
    assert found["10", "shvit_s2", 128, "1e-3"][:2] == [66.7, 87.0]
    twelve = [77.3, 93.6, 83.7, 96.0, 64.9, 85.8, 32.1, 47.8, None, None]
    assert found["12", "small,j=4,multiplier=1", 128, ""] == twelve
    assert all(None not in one for key, one in found.items() if key[0] not in ("12", "BiXT"))
    pairs = [pair for one in found.values() for pair in zip(one[::2], one[1::2], strict=True)]
    assert all(top1 < top5 for top1, top5 in pairs if top1 is not None)
    assert (paper_numbers.best("nano", 128), paper_numbers.best("bixt_ti_p16", 128)) == (68.4, None)
    speeds = paper_numbers.speeds()
    assert (speeds["12", "tiny", 224], speeds["8", "tiny", 128], speeds["10", "shvit_s2", 128]) == (19.9, 57.3, 76.1)
    assert {table for table, *_ in speeds} == set(map(str, range(6, 13)))
    assert len([cost for cost in paper_numbers.COSTS if cost["table"] == "5"]) == 7


@pytest.mark.parametrize("baselines", [False, True])
def test_the_recipe_of_a_cell_trains_it(tmp_path, baselines):
    begun = {rate: make(tmp_path / rate, Cell("nano", 128, rate)) for rate in paper_numbers.RATES.values()} | {
        "": "gone"
    }
    for k, cell in enumerate(cell for cell in CELLS if (cell.words in jumbo_in1k.BASELINES) is baselines):
        changes = {"init": begun[cell.rate]} if cell.pixels == 224 else {}
        run = finished_runs._read(make(tmp_path / str(k), cell, **changes))
        assert accuracy.cell_of(run) == cell
        assert finished_runs.departures(run, accuracy.recipe(cell), free=accuracy.FREE) == []
    for k, changes in enumerate([{"schedule.lr": 2e-3}, {"model.image_size": "(160,160)"}, {"model.num_classes": 10}]):
        other = make(tmp_path / f"other{k}", Cell("nano", 128, "3e-3"), **changes)
        assert accuracy.cell_of(finished_runs._read(other)) is None


def test_both_rates_the_better_one_and_what_went_on_from_it(tmp_path, capsys):
    high = make(tmp_path / "a", Cell("nano", 128, "3e-3"), 0.675)
    low = make(tmp_path / "b", Cell("nano", 128, "1e-3"), 0.682)
    make(tmp_path / "c", Cell("nano", 224, ""), 0.738, init=high)
    make(tmp_path / "d", Cell("nano", 224, ""), 0.741, init=low)
    make(tmp_path / "begun", Cell("pico", 128, "1e-3"))
    status, written = script(tmp_path)
    assert status == 0
    there = [(row["table"], row["rate"], row["val_1"]) for row in written["rows"] if row["seeds"]]
    assert there == [("6", "1e-3", pytest.approx(74.1)), ("8", "3e-3", pytest.approx(67.5)), ("8", "1e-3", 68.2)]
    best = {(row["label"], row["pixels"]): row for row in written["best"]}
    assert best["nano", 128]["gap"] == pytest.approx(-0.2) and best["nano", 128]["rate"] == "1e-3"
    assert best["nano", 224]["top1"] == pytest.approx(74.1) and best["pico", 128]["rates"] == 0
    lines = capsys.readouterr().out.splitlines()
    low = [line.split() for line in lines if line.split()[:2] == ["nano", "1e-3"]]
    assert (
        low[0][2] == "1"
        and low[1][2:9] == ["*", "1", "68.2", "(68.4)", "90.0", "(87.9)", "-"]
        and "3 of 66 rows have runs." in lines
    )
    assert sum(line.endswith("AILS") for line in lines) == 0


@pytest.mark.parametrize(
    ("jumbo", "registers", "changes", "status"),
    [
        (0.733, 0.688, {}, 0),
        (0.729, 0.680, {}, 1),  # 0.6 below the better rate of the paper, 0.4 below this one
        (0.700, 0.688, {"epochs": 3}, 0),  # not the recipe
        (0.735, 0.740, {}, 1),  # registers are better
    ],
)
def test_what_fails(tmp_path, jumbo, registers, changes, status, capsys):
    make(tmp_path / "a", Cell("tiny", 128, "3e-3"), jumbo, **changes)
    make(tmp_path / "b", Cell("tiny,registers", 128, "3e-3"), registers)
    assert script(tmp_path, "--tables=7,8")[0] == status
    out = capsys.readouterr().out
    assert ("FAILS" in out) is bool(status) and ("other values of epochs" in out) is bool(changes)


def test_the_gain_must_grow_as_the_width_falls(tmp_path):
    best = [dict(label=name, pixels=224, top1=top1, other_values=[])
            for name, top1 in [("nano", 74), ("nano,registers", 61), ("tiny", 78), ("tiny,registers", 64)]]  # fmt: skip
    claims = accuracy.claims_of([], best)
    assert [(claim.ours, claim.holds) for claim in claims] == [(13, True), (14, True), (-1, False)]
    best[0]["other_values"] = ["epochs"]
    assert [claim.holds for claim in accuracy.claims_of([], best)] == [None, True, None]


def test_test_sets_stand_in_their_columns(tmp_path, capsys):
    sets = {name: dict(top1=0.1 * k, top5=0.1 * k + 0.05, examples=8) for k, name in enumerate(("real", "v2", "r"), 1)}
    sets["r"]["present"] = dict(top1=0.45)
    make(tmp_path / "a", Cell("tiny", 128, "3e-3"), 0.733, sets=sets)
    (row,) = (row for row in script(tmp_path, "--tables=8")[1]["rows"] if row["seeds"])
    assert [row[f"{name}_1"] for name in ("real", "v2", "r", "r_present")] == pytest.approx([10, 20, 30, 45])
    assert row["v2_5"] == pytest.approx(25) and "hr_1" not in row and row["hr_1_paper"] == 82.7
    line = next(line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == ["tiny", "3e-3"])
    assert line.split()[-5:] == ["-", "(82.7)", "-", "(94.6)", "45.00"]


def test_commands_for_what_is_missing(tmp_path, capsys):
    assert script(tmp_path, "--tables=8", "--missing")[0] == 0
    assert ":tiny,lr=3e-3 --workdir" in capsys.readouterr().out
    make(tmp_path / "a", Cell("tiny", 128, "3e-3"), 0.733)
    assert script(tmp_path, "--tables=6,7,8,9", "--missing")[0] == 0
    out = capsys.readouterr().out
    assert ":tiny,lr=1e-3 --workdir" in out and ":tiny,lr=3e-3 --workdir" not in out
    assert f":tiny,registers,r=8,lr=3e-3 --workdir={tmp_path}/tiny_registers_r8_128_3e-3" in out
    assert "r=8,lr=1e-3" not in out and out.count("mobilenetv4_conv_small,lr=") == 2
    assert ":tiny,224 --workdir" in out and "--config.init=BETTER_RUN_OF_tiny_AT_128_PX" in out
    make(tmp_path / "b", Cell("tiny", 128, "1e-3"), 0.735)
    assert script(tmp_path, "--tables=6,8", "--missing")[0] == 0
    assert f":tiny,224 --workdir={tmp_path}/tiny_224 --config.init={tmp_path}/b\n" in capsys.readouterr().out


def test_a_run_is_evaluated_on_what_is_there_and_once(tmp_path, monkeypatch):
    small = dict(width=8, depth=1, num_heads=1, patch_size=4, image_size=(8, 8), in_channels=1, num_classes=10)
    model = testing.randomise(zoo.abstract("vit_ti16", **small), jax.random.key(0))
    model.head.bias.set_value(np.zeros(10, np.float32))  # no class wins everywhere
    config = configs.get_base()
    config.update(batch_size=8)
    config.data.update(source="digits", image_size=(8, 8), channels=1, mean=(0.3,), std=(0.3,))
    loads = []
    monkeypatch.setattr(checkpoints, "load_run", lambda run: loads.append(run) or (config, model, 7))
    places = {"v2": ("folder:/nowhere", "test"), "r": ("digits", "test"), "hr": (None, "all")}
    why = test_sets.evaluate(tmp_path, places)
    assert set(why) == {"v2", "hr"} and "nowhere" in why["v2"] and why["hr"] == "no source is given"
    (found,) = test_sets.read(tmp_path).values()
    assert found["examples"] == 360 and found["present"]["top1"] == found["top1"] < found["top5"] < 1  # all ten classes
    assert test_sets.evaluate(tmp_path, {"r": places["r"]}) == {} and loads == [tmp_path]


def test_places_are_read_from_the_command_line(capsys):
    assert test_sets.parse_place("hr=folder:/data/hr") == ("hr", ("folder:/data/hr", "all"))
    assert test_sets.parse_place("v2=folder:/data/v2,all") == ("v2", ("folder:/data/v2", "all"))
    with pytest.raises(SystemExit):
        scripts.status(accuracy, ["runs", "--set=imagenet-c=folder:/data"])
    assert "must be NAME=SOURCE or NAME=SOURCE,SPLIT, NAME one of real, v2, r, hr" in capsys.readouterr().err
