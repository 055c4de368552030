"""The tables and figures that are made from trained runs, on made-up ones."""

import json
import pathlib
from types import SimpleNamespace

import pytest

from equivit.training import config as configs
from experiments.tables import finished_runs
from experiments.tables.octic import invariants, number_of_blocks
from tests.experiments import scripts

RECIPE = str(pathlib.Path(__file__).parents[3] / "configs" / "octic_ablations.py")
INVARIANTS = {"linear": (79.0, 94.6), "power_spectrum": (79.6, 95.0)}


def make(place, mode, top1=None, top5=None, **changes):
    """A run directory as `equivit.train` leaves it; without figures, of a run that has not ended."""
    config = configs.load(f"{RECIPE}:{mode}", [f"{key.replace('__', '.')}={value}" for key, value in changes.items()])
    with config.unlocked():
        config.model.update(num_classes=1000, in_channels=3)
        config.data.source = "folder:imagenet"
    place.mkdir(parents=True)
    (place / "config.json").write_text(configs.to_json(config))
    if top1 is not None:
        figures = {"step": 10, "eval/accuracy/top1": top1 / 100, "eval/accuracy/top5": (top5 or top1) / 100}
        (place / "report.json").write_text(json.dumps(figures))
    return place


def script(module, runs, *arguments):
    """Exit status and the JSON of a script; None: it wrote none."""
    output = runs / "new" / "out.json"
    status = scripts.status(module, [str(runs), f"--output={output}", *arguments])
    return status, json.loads(output.read_text())["main"] if output.is_file() else None


def test_rows_of_other_tables_stay(tmp_path):
    options = SimpleNamespace(output=tmp_path / "out.json", entry="main", tables=["1", "2"])
    finished_runs.entry(options, [dict(table="1"), dict(table="2", top1=1.0), dict(table="2", top1=2.0)])
    options.tables = ["2"]
    found = finished_runs.entry(options, [dict(table="2", top1=3.0)])
    assert [(row["table"], row.get("top1")) for row in found.rows()] == [("1", None), ("2", 3.0)]
    assert json.loads(options.output.read_text())["main"]["rows"] == found.rows()


@pytest.fixture
def runs_of_invariants(tmp_path):
    for kind, accuracies in INVARIANTS.items():
        make(tmp_path / kind, f"D8,invariant={kind}", *accuracies, data__workers=3)
    return tmp_path


KINDS = f"--kinds={','.join(INVARIANTS)}"


def test_table_4_beside_the_papers(runs_of_invariants, capsys):
    make(runs_of_invariants / "seeds/seed_1", "D8", 79.8, 95.2, seed=1)  # the power spectrum is D8's default
    make(runs_of_invariants / "other", "H8", 84.0, 97.0)
    (runs_of_invariants / "seeds/report.json").write_text("{}")  # what --seeds leaves beside its runs
    status, written = script(invariants, runs_of_invariants, KINDS)
    assert status == 0 and written["other_values"] == []
    linear, power = written["rows"]
    assert (linear["top1"], linear["top1_paper"]) == pytest.approx((79.0, 79.2)) and linear["seeds"] == 1
    assert power["top1_values"] == pytest.approx([79.6, 79.8]) and power["top1"] == pytest.approx(79.7)
    assert power["top1_spread"] == pytest.approx(0.02**0.5) and power["top5_difference"] == pytest.approx(0.2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("the paper's Table 4, D8(ViT-L/16) on ImageNet-1k.")
    assert lines[2].split() == ["linear", "1", "79.00", "-", "79.20", "-0.20", "94.60", "-", "94.70", "-0.10"]


def test_a_number_far_from_the_papers_fails_and_that_of_another_recipe_is_not_judged(tmp_path, capsys):
    make(tmp_path / "a", "D8,invariant=linear", 78.0, 94.7)
    assert script(invariants, tmp_path, "--kinds=linear")[0] == 1
    assert "FAILS" in capsys.readouterr().out
    make(tmp_path / "b/a", "D8,invariant=linear", 60.0, 80.0, epochs=2)
    status, written = script(invariants, tmp_path / "b", "--kinds=linear")
    assert status == 0 and written["other_values"] == ["epochs"]
    assert "configs/octic_ablations.py has other values of epochs" in capsys.readouterr().out


def test_missing_runs_are_one_clear_line(runs_of_invariants, capsys):
    make(runs_of_invariants / "begun", "D8,invariant=polynomial")
    assert script(invariants, runs_of_invariants) == (1, None)
    error = capsys.readouterr().err
    assert "no finished run of polynomial; triple_correlation; canonisation; max_filtering. It is" in error
    assert f":D8,invariant=polynomial --workdir={runs_of_invariants}/polynomial." in error and error.count("\n") == 1
    assert f"Not finished: {runs_of_invariants}/begun" in error
    assert script(number_of_blocks, runs_of_invariants, "--blocks=6") == (1, None)
    assert "no finished run of H8 6; I8 6. It is trained by: " in capsys.readouterr().err
    assert script(invariants, runs_of_invariants / "nowhere") == (1, None)
    assert "there is no run of equivit.train in it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "changes", "message"),
    [
        ("D8", dict(schedule__lr=1e-3), "are not of one recipe: they differ in schedule.lr; give"),
        ("D8", {}, "are both runs of power_spectrum with seed 0; leave one out"),
        ("D8", dict(seed=1), "again/report.json has no eval/accuracy/top5; was its protocol in"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(runs_of_invariants, mode, changes, message, capsys):
    again = make(runs_of_invariants / "again", mode, 79.0, 94.0, **changes)
    (again / "report.json").write_text('{"eval/accuracy/top1": 0.79}')
    assert script(invariants, runs_of_invariants, KINDS) == (1, None)
    assert message in capsys.readouterr().err


def test_what_is_no_run_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model": {}}')
    with pytest.raises(ValueError, match=f"{tmp_path}: not a run of this version of equivit: .*'objective'"):
        finished_runs.read(tmp_path)


def test_figure_4b(tmp_path, capsys):
    top1 = {("H8", 6): 84.4, ("H8", 12): 84.6, ("I8", 6): 83.5, ("I8", 12): 84.1}
    for (family, k), value in top1.items():
        make(tmp_path / f"{family}_{k}", family if k == 12 else f"{family},k={k}", value)  # 12 of 24 is the default
    status, written = script(number_of_blocks, tmp_path, "--blocks=12,6")
    assert status == 0
    assert {(r["family"], r["k"]): r["top1"] for r in written["rows"]} == pytest.approx(top1)
    assert [r["paper"] for r in written["rows"]] == [None, 84.5, None, 84.0]
    assert [claim["holds"] for claim in written["claims"]] == [True] * 3
    assert (tmp_path / "new/out.png").stat().st_size > 0
    assert "I8, points that k = 12 gains over k = 6: 0.6, claimed at least 0" in capsys.readouterr().out


def test_the_figure_shows_the_paper_as_the_papers(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(number_of_blocks.Figure, "savefig", lambda figure, path, dpi: drawn.append(figure))
    rows = [dict(family="I8", k=k, depth=24, top1=84.0, spread=0.1, paper=p) for k, p in ((6, None), (12, 84.0))]
    number_of_blocks.draw(rows, tmp_path)
    (axes,) = drawn[0].axes
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {
        "I8, ours",
        "I8, paper (Table 2)",
        "plain ViT-L/16, paper (Table 2)",
    }


@pytest.mark.parametrize("arguments", [["--blocks=six"], ["--families=D8"]])
def test_unknown_points_are_refused(arguments):
    with pytest.raises(SystemExit):
        scripts.status(number_of_blocks, ["nowhere", *arguments])
