"""The choice of blocks and heads: what is drawn and written, on a tiny model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from equivit.models import saved, zoo
from equivit.training.config import get_base
from experiments.tables.depthwise import selection as script
from tests.depthwise import attending
from tests.experiments import scripts


def test_choices_and_pictures(tmp_path, monkeypatch):
    """From a saved model; a run with gates is recognised by its model's replaced blocks."""
    model = attending.model(**attending.SMALL)
    gated = script.replacement.replace(model, {0: (1,), 2: (0,)})
    monkeypatch.setattr(script, "load_model", {"model": model, "dsp": gated}.get)
    data = get_base().data
    data.update(source="synthetic", image_size=(12, 20), workers=0)
    monkeypatch.setattr(
        script.checkpoints, "load_run", lambda place: SimpleNamespace(config=SimpleNamespace(data=data))
    )
    (tmp_path / "config.json").touch()
    options = [f"--data={tmp_path}", "--before=model", "--dsp=dsp", "--number=1", "--images=6", "--batch=4"]
    assert scripts.status(script, ["model", *options, f"--output={tmp_path / 'selection.json'}"]) == 0
    assert [len(x) for x in script.TrainingImages(data, 6, batch_size=4)] == [4, 2]
    written = json.loads((tmp_path / "selection.json").read_text())["main"]
    heads = np.array(written["sigma"]["after"]["heads"])
    np.testing.assert_allclose(heads.mean(1), written["sigma"]["before"]["blocks"], rtol=1e-6)
    assert written["chosen"]["Sigma after"] == written["chosen"]["Sigma before"] == [int(heads.mean(1).argmin())]
    lowest = [list(divmod(int(i), 2)) for i in sorted(heads.ravel().argsort()[:2])]
    assert written["chosen"]["Sigma of heads"] == lowest
    assert written["chosen"]["DSP dsp"] == [[0, 1], [2, 0]]
    for name in ("selection.png", "selection_maps.png", "selection_positions.png"):
        assert (tmp_path / name).stat().st_size > 10_000


def test_models_and_data_that_there_are_not_are_one_line(tmp_path, capsys):
    saved.save(tmp_path / "vit", attending.model(**attending.SMALL))
    conv = dict(widths=(8, 12), depths=(1, 1), partial_widths=(0, 5), qk_width=4, image_size=(32, 32))
    saved.save(tmp_path / "conv", zoo.create("shvit_s1", **conv))
    for options, message in (
        (["vit"], "vit: this is no run, so that it names no training images; give one with --data."),
        (["vit", "--data=no"], "--data=no: this is no run, so that it names no training images; give one with --data."),
        (["no"], "no' is neither a run nor a saved model, nor weights such as"),
        (["conv"], "patches_only: the model is a SHViT; it must be a ViT"),
    ):
        assert scripts.status(script, [str(tmp_path / options[0]), *options[1:]]) == 1
        assert message in (said := capsys.readouterr().err) and len(said.splitlines()) == 1


def test_similarities_ignore_what_all_positions_share():
    positions = np.random.default_rng(0).normal(size=(6, 8))
    found = script.similarities(positions, (2, 3))
    np.testing.assert_allclose(found, script.similarities(positions + 5, (2, 3)), atol=1e-12)
    one, other = positions[[0, 5]] - positions.mean(0)
    assert found[0, 0, 1, 2] == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
