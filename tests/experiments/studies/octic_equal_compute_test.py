"""Plain and octic models at equal compute: the choice of widths, the table, and the whole script on something tiny."""

import json
import pathlib

import jax
import numpy as np
import pytest

from equivit.evaluation import summary
from equivit.models import zoo
from equivit.training import config as configs
from experiments.compiled_models import Compiled
from experiments.studies import differences, held_out, several_seeds
from experiments.studies import octic_equal_compute as script

UNTIMED = Compiled(start=lambda: lambda: None, memory=None)


def options(*more):
    return script._options(["--cifar10=npz:made_up.npz", *more])


def test_heads_have_16_to_64_channels_and_suit_the_group():
    assert [script.heads_of(width) for width in (8, 16, 64, 80, 96, 128)] == [None, 1, 2, 2, 3, 4]
    assert script.legal(80, 110) == [80, 96]  # 11 and 13 times 8 have heads of 8 channels or of 88 and 104
    for width in script.legal(0, 256):
        zoo.configuration("octic_vit_ti16", family="D8", width=width, num_heads=script.heads_of(width))
        assert width % (8 * script.heads_of(width)) == 0


@pytest.mark.parametrize("budget", [1.0, 700.0, 4096.0, 6000.0, 6500.0, 1e6])
def test_the_nearest_width_is_found_in_few_measurements(budget):
    asked, widths = [], script.legal(16, 512)

    def cost(width):
        asked.append(width)
        return width**2 / budget

    expected = min(widths, key=lambda width: abs(np.log(width**2 / budget)))
    assert script.nearest(widths, cost) == expected
    assert len(asked) == len(set(asked)) <= np.log2(len(widths)) + 2


def test_multiply_adds_are_equal_and_step_times_as_near_as_can_be(monkeypatch):
    """At the script's own size: each width is the best legal one, and its multiply-adds within 5 % of the plain's."""
    monkeypatch.setattr(script.compiled_models, "training_step", lambda config: UNTIMED)
    monkeypatch.setattr(script, "step_ratio", lambda name, model, plain, options: model.width / 70)
    given = options("--families=D8")
    plain, equal, timed = script.chosen("cifar10", given)
    assert plain == ("plain", 64, None) and timed == ("D8", 72, "step time")
    macs = [script._counts("cifar10", model, given)["macs"] for model in (plain, equal)]
    assert 0.95 < macs[1] / macs[0] < 1.05


def test_the_estimate_counts_shared_runs_once():
    entries = [
        dict(model=["plain", 64, None], compile_seconds=5.0, step_seconds=0.02),
        dict(model=["D8", 96, "step time"], compile_seconds=10.0, step_seconds=0.03),
        dict(model=["D8", 96, "multiply-adds"], compile_seconds=10.0, step_seconds=0.03),
    ]
    assert script.estimate(entries, options(), 1000) == pytest.approx(6 * (10 + 20 + 20 + 30))
    assert script.estimate(entries, options("--rates=1e-3"), 1000) == pytest.approx(3 * 80)


def test_how_much_of_the_fall_comes_late():
    assert held_out.late_fall([2.0, *[1.0] * 17, 0.5, 0.5]) == pytest.approx(0.5 / 1.5)  # the means of two and of two
    assert held_out.late_fall([2.0, 1.0, 1.0]) == 0
    assert held_out.late_fall([2.0, 1.0]) is None and held_out.late_fall([1.0, 1.0, 1.0]) is None


def test_the_best_rate_is_of_those_that_did_not_diverge():
    assert held_out.best({1e-3: 0.5, 3e-3: 0.6, 9e-3: None}) == 3e-3
    assert held_out.best({1e-3: 0.6, 3e-3: 0.6}) == 1e-3
    with pytest.raises(ValueError, match=r"--rates=0.003,0.009: every run diverged; give smaller ones"):
        held_out.best({3e-3: None, 9e-3: None})


ENTRY = dict(model=["D8", 96, "step time"], macs=2.5e6, macs_ratio=0.8, step_seconds=0.021, time_ratio=1.05)


def test_a_rate_is_chosen_on_held_out_images_and_used_on_all(monkeypatch):
    runs = []

    def trained(config, workdir):
        runs.append((config.data.split, config.data.eval_split, config.schedule.lr, config.seed, workdir))
        if config.data.split == "train" and config.seed == 2:
            return None  # diverged
        orientation = dict(upright=0.6 + config.seed / 10, accuracy_mean=0.5, consistency=0.4)
        figures = {f"eval/orientation/{name}": value for name, value in orientation.items()}
        return figures | {"eval/accuracy/top1": config.schedule.lr, "losses": [2.0, 1.0, 1.0]}

    monkeypatch.setattr(held_out, "trained", trained)
    path = pathlib.Path("runs/cifar10/images.npz")
    row = script._row("cifar10", script.Model(*ENTRY["model"]), ENTRY, path, options())
    assert [run[:4] for run in runs[:3]] == [("fit", "held_out", rate, 0) for rate in (1e-3, 3e-3, 9e-3)]
    assert [run[:4] for run in runs[3:]] == [("train", "test", 9e-3, seed) for seed in (0, 1, 2)]
    assert len({run[4] for run in runs}) == 6
    assert row["rate"] == 9e-3 and row["diverged"] == 1 and row["upright"] == [0.6, 0.7]
    assert script.cells(row, [1e-3, 3e-3, 9e-3]) == dict(
        data="cifar10", model="D8, equal step time", width=96, rate="0.009", upright="65.0 ± 7.1", eight="50.0 ± 0.0",
        constant="40.0 ± 0.0", macs="2.50 M (-20.0 %)", time="21.0 ms (+5.0 %)", flat="0.0",
        notes="1 diverged; rate at the edge",
    )  # fmt: skip


def test_gains_are_over_plain_on_the_same_data_and_only_of_whole_rows():
    def row(data, model, rule, values, diverged=0):
        return dict(data=data, model=model, rule=rule, upright=values, eight=values, diverged=diverged)

    rows = [row("a", "plain", None, [0.3, 0.32]), row("b", "plain", None, [0.9, 0.92])]
    rows += [row("a", "H8", "step time", [0.4, 0.42]), row("a", "D8", "step time", [0.4], diverged=1)]
    expected = differences.difference([0.4, 0.42], [0.3, 0.32])
    names = ("upright", "eight orientations")
    assert script.gains_of(rows) == {f"a, {name}: H8, minus plain": expected for name in names}
    # A loss that still falls is said so.
    late = dict(**ENTRY, data="a", width=96, rate=3e-3, diverged=0, late_fall=[0.01, 0.03], upright=[], eight=[])
    assert script.cells(late | {"model": "D8", "constant": []}, [1e-3, 3e-3, 9e-3])["notes"] == "loss not flat"


def test_impossible_options_are_refused(capsys):
    for arguments, message in (
        ([], "nothing to train on; give --blood_cells=npz:<file> or --cifar10=npz:<file> or --pat"),
        (["--cifar10=npz:x", "--width=104"], "--width=104 is no multiple of 8 with heads of 16 to 64 channels"),
    ):
        with pytest.raises(SystemExit):
            script.main(arguments)
        assert message in capsys.readouterr().err


def test_from_end_to_end_and_again(tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(0)
    splits = {
        f"{split}_image": rng.integers(0, 256, (n, 40, 40, 3), np.uint8) for split, n in (("train", 24), ("test", 8))
    }
    labels = {f"{split}_label": np.arange(n) % 10 for split, n in (("train", 24), ("test", 8))}
    np.savez(tmp_path / "made_up.npz", **splits, **labels, classes=np.array(list("0123456789")))
    one = jax.make_mesh((1, 1), ("data", "fsdp"), (jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:1])
    monkeypatch.setattr(held_out.loop.sharding, "create_mesh", lambda section: one)  # programs for one compile faster
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    monkeypatch.setattr(summary, "conclude", lambda *run, **more: "")  # no pictures of the runs
    monkeypatch.setattr(script.compiled_models, "training_step", lambda config: UNTIMED)
    monkeypatch.setattr(script, "step_ratio", lambda name, model, plain, options: model.width / 34)
    counts = dict(parameters=1, fvcore=1)
    monkeypatch.setattr(script, "_counts", lambda name, model, options: dict(counts, macs=model.width**2))
    tiny = ["data.train_examples=20", "data.eval_examples=8", "batch_size=4", "model.depth=1"]
    arguments = [f"--cifar10=npz:{tmp_path}/made_up.npz", "--families=D8", "--width=16", "--steps=3", "--rates=1e-3"]
    arguments += ["--seeds=0", f"--workdir={tmp_path}/runs", f"--output={tmp_path}/new/o.json"]
    arguments += [f"--override={text}" for text in tiny]

    assert script.main([*arguments, "--plan"]) == 0
    assert "about 0 minutes" in capsys.readouterr().out and not (tmp_path / "runs").exists()

    assert script.main(arguments) == 0
    first = json.loads((tmp_path / "new/o.json").read_text())["main"]
    assert [row["model"] for row in first["rows"]] == ["plain", "D8, equal multiply-adds", "D8, equal step time"]
    assert {"device", "versions", "commit", "steps", "overrides", "gains"} <= set(first)
    assert all(len(row["upright"]) == 1 and row["constant"] == [1.0] for row in first["rows"][1:])  # D8 is invariant
    assert (tmp_path / "new/o.png").stat().st_size > 0
    with np.load(tmp_path / "runs/cifar10/images.npz") as file:
        assert file["train_image"].shape == (20, 32, 32, 3) and file["held_out_image"].shape == (4, 32, 32, 3)
        parts = np.concatenate([file["fit_image"], file["held_out_image"]])
        assert sorted(map(bytes, parts)) == sorted(map(bytes, file["train_image"]))
    configuration = configs.from_json(next((tmp_path / "runs/cifar10/plain_16").glob("*/config.json")))
    assert (configuration.data.split, configuration.data.eval_split, configuration.data.train_examples) == (
        "train",
        "test",
        None,
    )

    monkeypatch.setattr(several_seeds.train, "train", None)  # finished runs are not run again
    monkeypatch.setattr(script, "draw", lambda rows, path: None)
    monkeypatch.setattr(script, "chosen", None)  # and what was measured stays
    assert script.main(arguments) == 0
    assert json.loads((tmp_path / "new/o.json").read_text())["main"]["rows"] == first["rows"]
    with pytest.raises(ValueError, match="were begun with steps=3; give the same again, or another --workdir"):
        script.main([*arguments, "--steps=4"])
