"""Runs of several seeds: what a finished run is taken for, where runs lie, their lengths, and their images."""

import json

import numpy as np
import pytest

from equivit.training import config as configs
from experiments.studies import held_out, several_seeds
from tests.experiments import scripts

RECIPE = "configs/quickstart.py:plain"
WIDER = "model.mlp_dim=128"  # an option that the config does not name


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The directory of an unfinished run with `WIDER`, completed from its data; what is trained after that."""
    config = configs.load(RECIPE, [WIDER]).unlock()
    config.model.update(in_channels=1, num_classes=10)
    (tmp_path / "config.json").write_text(configs.to_json(config))
    runs = []
    monkeypatch.setattr(several_seeds.train, "train", lambda config, workdir: runs.append(config) or {"top1": 0.5})
    return tmp_path, runs


class TestRecipes:
    def test_a_run_of_the_same_recipe_is_resumed_or_taken(self, begun):
        place, runs = begun
        assert several_seeds.trained(configs.load(RECIPE, [WIDER]), place) == {"top1": 0.5} and len(runs) == 1
        (place / "report.json").write_text(json.dumps({"top1": 0.6}))
        quiet = configs.load(RECIPE, [WIDER, "log.to=()"])
        assert several_seeds.trained(quiet, place) == {"top1": 0.6} and len(runs) == 1
        several_seeds.trained(configs.load(RECIPE, [WIDER, "evaluation.suite=accuracy"]), place)
        assert len(runs) == 2  # which evaluates the finished run again

    @pytest.mark.parametrize("ended", [False, True])
    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ([WIDER, "schedule.lr=1e-4"], "schedule.lr=0.002"),
            ([WIDER, "epochs=99", "schedule.warmup_epochs=1"], "epochs=24, schedule.warmup_epochs=3"),
            ([], "model.mlp_dim=128"),
            ([WIDER, "model.drop_path=0.1"], "the default of model.drop_path"),
        ],
    )
    def test_another_one_is_refused(self, begun, ended, changed, named):
        place, runs = begun
        if ended:
            (place / "report.json").write_text("{}")
        text = f"the run in {place} was begun with {named}; give the same again, or another --workdir"
        with pytest.raises(ValueError) as error:
            several_seeds.trained(configs.load(RECIPE, changed), place)
        assert text in str(error.value) and not runs

    def test_scores_at_the_start_are_of_the_model_and_the_data(self, tmp_path, monkeypatch):
        asked = []
        monkeypatch.setattr(
            several_seeds, "_scores_at_start", lambda config: asked.append(config) or {"knn": len(asked)}
        )

        def score(*texts):
            return several_seeds.at_start(configs.load(RECIPE, texts), tmp_path / "seed_0")["knn"]

        assert [score(), score("schedule.lr=1e-4"), score(WIDER), score(WIDER), score("seed=1")] == [1, 1, 2, 2, 3]


def parsed(*arguments, sets=None):
    return several_seeds.parse(several_seeds.parser("A study.", "studies/study.py"), arguments, sets)


def test_each_entry_has_its_own_runs():
    assert [str(parsed(*more).workdir) for more in ([], ["--entry=xavier"], ["--workdir=here"])] == [
        "runs/study/main",
        "runs/study/xavier",
        "here",
    ]
    assert str(parsed("--data=cells", sets=["cells"]).workdir) == "runs/study/cells"


def test_short_runs_have_half_of_their_epochs_as_warm_up(capsys):
    assert several_seeds.length_in_epochs(1) == ["epochs=1", "schedule.warmup_epochs=0.5"]
    assert several_seeds.length_in_epochs(5) == ["epochs=5", "schedule.warmup_epochs=1"]
    with pytest.raises(SystemExit):
        parsed("--epochs=0")
    assert "--epochs: 0 must be a whole number, at least 1" in capsys.readouterr().err


def test_images_of_another_source_or_other_labels_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    sizes = dict(train=10, test=2, side=8, classes=2)
    sources = [scripts.made_up_images(place, **sizes) for place in (tmp_path, tmp_path / "other")]

    def prepared(source, *texts, **settings):
        texts = [f"data.source={source}", "data.image_size=(8,8)", *held_out.WHOLE, *texts]
        return held_out.prepared(configs.load(RECIPE, texts).data, tmp_path / "runs/images.npz", **settings)

    path = prepared(sources[0], labels=None)
    before = path.stat().st_mtime_ns
    assert prepared(sources[0], "data.workers=2", labels=None) == path and path.stat().st_mtime_ns == before
    with pytest.raises(
        ValueError, match=r"were begun with data.source='npz:.*made_up.npz'; give the same again, or an"
    ):
        prepared(sources[1], labels=None)
    with pytest.raises(ValueError, match="were begun with labels=None"):
        prepared(sources[0], labels=5)
    path.unlink()
    prepared(sources[1], labels=None)
    with np.load(path) as file:
        assert len(file["held_out_label"]) == 2
