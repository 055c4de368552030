"""The collectors of DINOv2 runs, on planted results: nothing is trained here."""

import json

import jax
import pytest

from equivit import testing
from equivit.evaluation import runner
from equivit.models import saved, zoo
from equivit.training import config as configs
from experiments import machine
from experiments.tables import finished_runs
from experiments.tables.octic import dinov2_progress, frozen_features, hematology
from tests.experiments import scripts


def plant(place, mode, file="dinov2", **changes):
    """A finished run of a config."""
    config = configs.load(f"{machine.ROOT}/configs/{file}.py:{mode}").unlock()
    config.model.in_channels = 3
    for key, value in changes.items():
        config.model[key] = value
    place.mkdir(parents=True)
    (place / "config.json").write_text(configs.to_json(config))
    (place / "report.json").write_text(json.dumps({"step": 1}))


@pytest.mark.parametrize("mode", frozen_features.PAPER)
def test_runs_are_known_by_their_models(tmp_path, mode):
    plant(tmp_path / "run", mode)
    if mode == "L,D8":  # an I8 whose blocks are all octic is the same model
        plant(tmp_path / "other", "L,I8", equivariant_blocks=24)
    assert {frozen_features.cell_of(run) for run in finished_runs.read(tmp_path)} == {mode}


def table3(tmp_path, monkeypatch, capsys, gap):
    """The table with one run whose figures are the paper's plus a gap; its exit status and output."""
    plant(tmp_path / "run", "L,H8")
    paper = frozen_features.PAPER["L,H8"]
    for name, (_, _, figures) in frozen_features.SETS.items():
        values = {figure: (paper[f"{name}_{kind}"] + gap) / 100 for kind, figure in figures.items()}
        (tmp_path / f"run/table3_{name}.json").write_text(json.dumps(dict(step=1, results=values)))
    monkeypatch.setattr(frozen_features, "operations", lambda name: frozen_features.PAPER[name]["macs"])
    status = scripts.status(frozen_features, [str(tmp_path), "--output", str(tmp_path / "t.json")])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(("gap", "status"), [(0.0, 0), (-0.2, 0), (-0.4, 1), (2.0, 0)])
def test_table3_judges_figures(tmp_path, monkeypatch, capsys, gap, status):
    found, text = table3(tmp_path, monkeypatch, capsys, gap)
    assert found == status and ("FAILS" in text) == bool(status) and f"{81.3 + gap:.2f}" in text


def test_converted_models_are_rows_too(tmp_path, monkeypatch, capsys):
    """A saved model beside the runs, but not the teachers that a run keeps."""
    plant(tmp_path / "run", "L,I8")
    for place, name in (("converted", "octic_dinov2_vit_l16"), ("run/teachers/2", "dinov2_vit_l16")):
        described = saved._described(zoo.configuration(name, image_size=(224, 224)))
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "model.json").write_text(json.dumps(described))
    found = frozen_features.found_in(tmp_path)
    assert {(run.place.name, frozen_features.cell_of(run)) for run in found} == {("run", "L,I8"), ("converted", "L,H8")}
    assert not finished_runs.departures(found[-1], "configs/dinov2.py:L,H8", free=("init",))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is neither a run nor a converted model of this table in it"):
        frozen_features.found_in(tmp_path / "empty")


def test_progress_of_teachers_by_step(tmp_path, capsys):
    run = tmp_path / "run"
    plant(run, "quicktest")
    with pytest.raises(FileNotFoundError, match="has kept no teacher; train with"):
        dinov2_progress.progress(run)
    small = dict(width=16, depth=1, num_heads=2, image_size=(32, 32))
    model = testing.randomise(zoo.abstract("dinov2_vit_s16", **small), jax.random.key(0))
    for step in (10, 2):
        saved.save(run / f"teachers/{step}", model)
        (run / f"teachers/{step}/progress.json").write_text(json.dumps({"linear_probe": step / 20, "knn": 0.3}))
    assert scripts.status(dinov2_progress, [str(run), "--output", str(tmp_path / "progress.json")]) == 0
    assert (tmp_path / "progress.png").stat().st_size > 1000
    text = capsys.readouterr().out
    assert text.index("10.00") < text.index("50.00")
    assert scripts.status(dinov2_progress, [str(tmp_path / "nothing")]) == 1


def test_a_probe_of_a_teacher_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    """Which it does if it has a directory to keep its state in."""
    figures = {"linear_probe": {"top1": 0.5}, "knn": {"top1": 0.25}}
    seen = []
    monkeypatch.setattr(dinov2_progress.saved, "load", lambda place: None)
    monkeypatch.setattr(runner, "check", lambda *given: None)
    monkeypatch.setattr(runner, "evaluate", lambda *_, directory=None: seen.append(directory) or figures)
    plant(tmp_path / "run", "quicktest")
    place = tmp_path / "run/teachers/2"
    place.mkdir(parents=True)
    assert dinov2_progress.evaluated(place, tmp_path / "run") == {"linear_probe": 0.5, "knn": 0.25}
    assert seen == [place]


def cells(turned):
    scores = dict.fromkeys(hematology.SCORES, 0.5)
    return {name: scores | {"turned": {"consistency": turned}} for name in hematology.CLASSIFIERS}


@pytest.mark.parametrize(("turned", "status"), [(1.0, 0), (0.9, 1)])
def test_hematology_asks_an_invariant_model_to_be_so(tmp_path, capsys, turned, status):
    for family, same in (("plain", 0.4), ("I8", turned)):
        plant(tmp_path / family, family, file="dinobloom")
        (tmp_path / f"{family}/hematology.json").write_text(json.dumps(cells(same)))
    arguments = [str(tmp_path), "--output", str(tmp_path / "t.json")]
    assert scripts.status(hematology, arguments) == status
    assert "paper, I8" in capsys.readouterr().out


def test_hematology_of_other_cells_is_refused(tmp_path, monkeypatch, capsys):
    plant(tmp_path / "run", "I8", file="dinobloom")
    arguments = [str(tmp_path), "--output", str(tmp_path / "t.json")]
    monkeypatch.setattr(hematology.loading, "load_model", lambda source: None)
    monkeypatch.setattr(finished_runs, "protocols", lambda *given: dict(hematology=cells(1.0)))
    assert scripts.status(hematology, [*arguments, "--source=csv:one.csv"]) == 0
    monkeypatch.setattr(finished_runs, "protocols", None)  # nothing is evaluated again
    assert (
        scripts.status(hematology, [*arguments, "--source=csv:one.csv"]) == scripts.status(hematology, arguments) == 0
    )
    assert json.loads((tmp_path / "t.json").read_text())["main"]["results"][f"{tmp_path}/run, after"] == cells(1.0)
    for more, before in (
        (["--source=csv:other.csv"], "source='csv:one.csv'"),
        (["--source=csv:one.csv", "--override=data.eval_examples=9"], "overrides=[]"),
    ):
        assert scripts.status(hematology, [*arguments, *more]) == 1
        assert f"hematology.json was evaluated with {before}; give the same again" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        hematology.main([*arguments, "--override=data.eval_examples=9"])


def test_table3_of_other_data_is_refused(tmp_path, monkeypatch, capsys):
    plant(tmp_path / "run", "L,H8")
    figures = {figure: 0.5 for _, _, figures in frozen_features.SETS.values() for figure in figures.values()}
    monkeypatch.setattr(frozen_features, "evaluated", lambda run, name, source: dict(step=1, results=figures))
    monkeypatch.setattr(frozen_features, "operations", lambda name: 1.0)
    arguments = [str(tmp_path), f"--output={tmp_path}/t.json", "--evaluate"]
    scripts.status(frozen_features, [*arguments, "--ade20k=pairs:one"])
    capsys.readouterr()
    assert scripts.status(frozen_features, [*arguments, "--ade20k=pairs:other"]) == 1
    assert "table3_ade20k.json was evaluated with source='pairs:one'; give the same again" in capsys.readouterr().err
