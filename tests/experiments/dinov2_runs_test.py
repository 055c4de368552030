"""The collectors of DINOv2 runs, on planted results: nothing is trained here."""

import json

import jax
import numpy as np
import pytest

from equivit.models import saved, zoo
from equivit.training import config as configs
from experiments import (
    benchmark,
    octic_dinov2_features,
    octic_dinov2_hematology,
    octic_dinov2_progress,
    octic_dinov2_small_images,
    octic_dinov2_table3,
    trained_runs,
)


def plant(place, mode, file="dinov2", **changes):
    """A finished run of a config."""
    config = configs.load(f"{benchmark.ROOT}/configs/{file}.py:{mode}").unlock()
    config.model.in_channels = 3
    for key, value in changes.items():
        config.model[key] = value
    place.mkdir(parents=True)
    (place / "config.json").write_text(configs.to_json(config))
    (place / "report.json").write_text(json.dumps({"step": 1}))


@pytest.mark.parametrize("mode", octic_dinov2_table3.PAPER)
def test_runs_are_known_by_their_models(tmp_path, mode):
    plant(tmp_path / "run", mode)
    if mode == "L,D8":  # an I8 whose blocks are all octic is the same model
        plant(tmp_path / "other", "L,I8", equivariant_blocks=24)
    assert {octic_dinov2_table3.cell_of(run) for run in trained_runs.read(tmp_path)} == {mode}


def table3(tmp_path, monkeypatch, capsys, gap):
    """The table with one run whose figures are the paper's plus a gap; its exit status and output."""
    plant(tmp_path / "run", "L,H8")
    paper = octic_dinov2_table3.PAPER["L,H8"]
    for name, (_, _, figures) in octic_dinov2_table3.SETS.items():
        values = {f"{of}/{key}": (v + gap) / 100 for (of, key), v in zip(figures, getattr(paper, name), strict=True)}
        (tmp_path / f"run/table3_{name}.json").write_text(json.dumps(dict(step=1, results=values)))
    monkeypatch.setattr(octic_dinov2_table3, "operations", lambda name: octic_dinov2_table3.PAPER[name].macs)
    status = octic_dinov2_table3.main([str(tmp_path), "--output", str(tmp_path / "t.json")])
    return status, capsys.readouterr().out


@pytest.mark.parametrize(("gap", "status"), [(0.0, 0), (-0.2, 0), (-0.4, 1), (2.0, 0)])
def test_table3_judges_figures(tmp_path, monkeypatch, capsys, gap, status):
    found, text = table3(tmp_path, monkeypatch, capsys, gap)
    assert found == status and ("FAILS" in text) == bool(status) and f"{81.3 + gap:.2f}" in text


def test_progress_of_teachers_by_step(tmp_path, capsys):
    run = tmp_path / "run"
    plant(run, "quicktest")
    with pytest.raises(FileNotFoundError, match="has kept no teacher; train with"):
        octic_dinov2_progress.progress(run)
    small = dict(width=16, depth=1, num_heads=2, image_size=(32, 32))
    model = jax.jit(lambda: zoo.create("dinov2_vit_s16", **small))()
    for step in (10, 2):
        saved.save(run / f"teachers/{step}", model)
        (run / f"teachers/{step}/progress.json").write_text(json.dumps({"linear_probe": step / 20, "knn": 0.3}))
    assert octic_dinov2_progress.main([str(run), "--output", str(tmp_path / "progress.json")]) == 0
    assert (tmp_path / "progress.png").stat().st_size > 1000
    text = capsys.readouterr().out
    assert text.index("10.00") < text.index("50.00")
    assert octic_dinov2_progress.main([str(tmp_path / "nothing")]) == 1


def test_a_probe_of_a_teacher_goes_on_where_it_was_cut_off(tmp_path, monkeypatch):
    """Which it does if it has a directory to keep its state in."""
    figures = {"linear_probe": {"top1": 0.5}, "knn": {"top1": 0.25}}
    seen = []
    monkeypatch.setattr(octic_dinov2_progress.saved, "load", lambda place: None)
    monkeypatch.setattr(octic_dinov2_progress.runner, "check", lambda *given: None)
    monkeypatch.setattr(
        octic_dinov2_progress.runner, "evaluate", lambda *_, directory=None: seen.append(directory) or figures
    )
    plant(tmp_path / "run", "quicktest")
    place = tmp_path / "run/teachers/2"
    place.mkdir(parents=True)
    assert octic_dinov2_progress.evaluated(place, tmp_path / "run") == {"linear_probe": 0.5, "knn": 0.25}
    assert seen == [place]


def cells(turned):
    scores = dict.fromkeys(octic_dinov2_hematology.SCORES, 0.5)
    return {name: scores | {"turned": {"consistency": turned}} for name in octic_dinov2_hematology.CLASSIFIERS}


@pytest.mark.parametrize(("turned", "status"), [(1.0, 0), (0.9, 1)])
def test_hematology_asks_an_invariant_model_to_be_so(tmp_path, capsys, turned, status):
    for family, same in (("plain", 0.4), ("I8", turned)):
        plant(tmp_path / family, family, file="dinobloom")
        (tmp_path / f"{family}/hematology.json").write_text(json.dumps(cells(same)))
    arguments = [str(tmp_path), "--output", str(tmp_path / "t.json")]
    assert octic_dinov2_hematology.main(arguments) == status
    assert "paper, I8" in capsys.readouterr().out


def figures(start, end, entropy=0.9):
    row = {f"start {name}": [start, start + 0.01] for name in octic_dinov2_small_images.FIGURES}
    row |= {name: [end, end + 0.01] for name in octic_dinov2_small_images.FIGURES}
    return row | {key: [entropy] * 2 for key in ("classes/rows", "classes/mean", "patches/rows", "patches/mean")}


@pytest.mark.parametrize(
    ("row", "failing"),
    [
        (figures(0.5, 0.6), []),
        (figures(0.5, 0.53), ["linear_probe"]),
        (figures(0.5, 0.5), ["linear_probe", "knn"]),
        (figures(0.5, 0.6, entropy=0.9999), ["entropy"]),
    ],
)
def test_small_runs_must_learn_and_not_collapse(row, failing, capsys):
    claims = octic_dinov2_small_images.report("blood_cells", {"I8": row}, 0.5)
    assert [claim.text for claim in claims if claim.holds is False] == [
        claim.text for claim in claims if any(word in claim.text for word in failing)
    ]
    assert "not resolved" in capsys.readouterr().out or failing != ["linear_probe", "knn"]


def test_neighbours_by_pixels():
    config = configs.load(
        f"{benchmark.ROOT}/configs/dinov2.py:small,plain",
        ["data.source=digits", "data.channels=1", "data.mean=(0.3,)", "data.std=(0.3,)", "data.image_size=(8,8)"],
    )
    assert octic_dinov2_small_images.by_pixels(config) > 0.9


def test_colours_have_one_basis_and_turn_with_the_features():
    tokens = np.random.default_rng(0).normal(size=(3, 4, 5, 7)) * [9, 5, 3, 1, 1, 1, 1]
    colours, share = octic_dinov2_features.principal_colours(np.stack([tokens, tokens[:, ::-1]]))
    assert colours.shape == (2, 3, 4, 5, 3) and colours.min() >= 0 and colours.max() <= 1 and 0.8 < share < 1
    np.testing.assert_array_equal(colours[1], colours[0][:, ::-1])
