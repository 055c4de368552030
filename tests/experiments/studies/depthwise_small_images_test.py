"""The small trainings of depthwise attention: what each row would train and begin with, and what is said of it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from equivit.models.model import check_input
from equivit.models.vit.replaced import Replaced
from equivit.training.config import get_base
from experiments.studies import depthwise_small_images as script
from experiments.studies import several_seeds
from tests.depthwise import attending
from tests.training import tiny

SIGMA, DAMAGE = [3.0, 1.0, 6.0, 2.0, 5.0, 4.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
GATES = (0, 2, 4)


def plant(path, scores, images):
    """A file of scores, as if they had been measured."""
    path.write_text(json.dumps(dict(settings=dict(images=images), result=scores)))


@pytest.fixture
def trained(monkeypatch):
    """Nothing is trained: figures are made up, what stage 1 knows is planted, and what would be trained is kept."""
    configurations = {}

    def made(config, place):
        place.mkdir(parents=True, exist_ok=True)
        for name, scores in dict(sigma=SIGMA, damage=DAMAGE).items():
            plant(place.parent / f"{name}.json", scores, images=1000)
        configurations[f"{place.parent.name}/{place.name}"] = config
        figure = 0.5 + 0.01 * config.seed - 0.1 * (place.name == "highest")
        return {f"eval/{name}": figure for name in ("accuracy/top1", "segmentation/miou")}

    def fit(model, where, batches, *, kind, form, start, rngs):
        return vit, dict.fromkeys(where, 0.5 if start == "least_squares" else 1.0)

    vit = attending.model(**attending.SMALL)
    config = SimpleNamespace(replaced=tuple(Replaced(block) for block in GATES))
    run = SimpleNamespace(model=SimpleNamespace(config=config), config=SimpleNamespace(data=None, mesh=get_base().mesh))
    monkeypatch.setattr(several_seeds, "trained", made)
    monkeypatch.setattr(script.checkpoints, "load_run", lambda place: run)
    monkeypatch.setattr(script.fit, "fit", fit)
    monkeypatch.setattr(script.runner, "evaluate", lambda model, config, name: name)
    monkeypatch.setattr(script.runner, "scalars", lambda name: {"accuracy/top1": 0.25, "segmentation/miou": 0.25})
    return configurations


def run(data, tmp_path, *arguments):
    """Exit status and the written results."""
    place = [f"--workdir={tmp_path / 'runs'}", f"--output={tmp_path / 'out.json'}"]
    status = script.main([f"--data={data}", *place, *arguments])
    return status, json.loads((tmp_path / "out.json").read_text())[data]


def test_every_row_is_a_run_of_its_own(tmp_path, trained, capsys):
    status, written = run("cifar10", tmp_path, "--seeds=0,1", "--source=npz:cifar10.npz")
    assert status == 0 and list(written["rows"]) == list(script.ROWS)
    assert len(trained) == 2 * (len(script.ROWS) + 2)
    runs = tmp_path / "runs/seed_1"
    random = written["chosen"]["seed 1"]["random"]
    lowest, stage1 = (0, 1, 3), str(runs / "stage_1")
    expected = {  # what is replaced, where it begins (None: in a start of its own), its share of the length
        "pretraining": ((), "None", 1),
        "stage_1": ((), str(runs / "pretraining"), 1),
        "attention": ((), stage1, 2),
        "lowest": (lowest, None, 2),
        "highest": ((2, 4, 5), None, 2),
        "random": (tuple(random), None, 2),
        "identity": (lowest, None, 2),
        "normal": (lowest, None, 2),
        "least_squares": (lowest, None, 2),
        "printed": (lowest, None, 2),
        "printed_least_squares": (lowest, None, 2),
        "damage": ((0, 1, 2), None, 2),
        "gates": ((), stage1, 2),
        "DSP-2S": (GATES, None, 2),
        "one-stage": (lowest, str(runs / "pretraining"), 1),
        "frozen": (lowest, None, 2),
        "ens_dw": (lowest, None, 2),
    }
    assert {f"seed_1/{name}" for name in expected} == {name for name in trained if name.startswith("seed_1")}
    epochs, batch = script.STUDIES["cifar10"].epochs, script.STUDIES["cifar10"].batch_size
    for name, (blocks, init, parts) in expected.items():
        config, kind = trained[f"seed_1/{name}"], name if name in ("ens_dw", "identity") else "dw"
        form = "printed" if name.startswith("printed") else "released"
        assert config.model.replaced == tuple((block, kind, 3, None, form) for block in blocks), name
        assert str(config.init) == (init or str(runs / "starts" / name)), name
        assert (config.epochs, config.batch_size) == (epochs / parts, batch // parts), name
        assert ("*" in config.optimizer.freeze) == (name == "frozen") and config.seed == 1
        assert config.model.class_token == (name == "pretraining")
    assert written["before"]["lowest"] == [0.25, 0.25] and written["before"]["attention"] == [0.5, 0.51]
    assert "stage 1" not in written["before"] and written["errors"]["normal"] == [1.0, 1.0]
    assert list(written["rows"]["lowest"]) == [0.5, 0.51]
    gates = trained["seed_0/gates"].objective
    assert (gates.name, gates.gates) == ("gated_supervised", 3)
    said = capsys.readouterr().out
    order = "after: lowest - highest: +10.00 points, standard error 0.00, p = 0: resolved; in the paper +4.49"
    assert f"{order}: the same order" in said
    assert "holds      squared error before stage 2, taps of least squares over normal ones: 0.5" in said
    assert "before stage 2: lowest - highest: +0.00 points" in said


def test_a_start_that_is_no_nearer_fails(tmp_path, trained, monkeypatch):
    model, rows = attending.model(**attending.SMALL), "--rows=least squares,normal"
    monkeypatch.setattr(script.fit, "fit", lambda _, where, *given, **keys: (model, dict.fromkeys(where, 0.5)))
    assert run("cifar10", tmp_path, "--seeds=0,1", rows)[0] == 1
    assert run("cifar10", tmp_path, "--seeds=0", rows)[0] == 0  # one seed judges nothing
    assert run("cifar10", tmp_path, "--seeds=0,1", "--rows=lowest")[0] == 0


def test_a_start_is_made_once(tmp_path, trained, monkeypatch):
    run("blood_cells", tmp_path, "--seeds=0", "--rows=lowest")
    monkeypatch.setattr(script.fit, "fit", lambda *_, **__: pytest.fail("made already"))
    assert run("blood_cells", tmp_path, "--seeds=0", "--rows=lowest")[0] == 0
    with pytest.raises(pytest.fail.Exception):
        run("blood_cells", tmp_path, "--seeds=0", "--rows=normal")


@pytest.mark.parametrize("data", ["blood_cells", "camvid"])
def test_other_sets(data, tmp_path, trained):
    """Models that the data fit; on CamVid stage 1 has another decoder than the pretraining."""
    status, written = run(data, tmp_path, "--seeds=0", "--source=npz:images.npz")
    assert status == 0 and list(written["rows"]) == list(script.STUDIES[data].rows)
    assert [claim["holds"] for claim in written["claims"]] == [None]  # of one seed
    assert len(trained) == len(script.STUDIES[data].rows) + 1
    for name, config in trained.items():
        with config.unlocked():
            config.model.update(num_classes=11, in_channels=3)
        model = tiny.exported_model(config).config
        check_input(model, name, tuple(config.data.image_size), 3)
    if data == "camvid":
        decoders = {name: config.objective.decoder for name, config in trained.items()}
        assert decoders.pop("seed_0/pretraining") == "linear" and set(decoders.values()) == {"convolutions"}


def test_scores_are_measured_once_on_the_images_of_stage_1(tmp_path, monkeypatch):
    data = get_base().data
    data.update(source="synthetic", image_size=(12, 20), workers=0)
    run = SimpleNamespace(model=SimpleNamespace(backbone="the ViT"), config=SimpleNamespace(data=data))
    monkeypatch.setattr(script.checkpoints, "load_run", lambda place: run)
    monkeypatch.setattr(script.Runs, "trained", lambda self, name, stage, texts=(), **keys: 0.0)
    measured = []

    def damage(model, batches):
        measured.append((model, [len(x) for x in batches]))
        return np.array(DAMAGE)

    monkeypatch.setattr(script.fit, "damage", damage)
    options = SimpleNamespace(workdir=tmp_path, images=60, seeds=[0], rows=["damage"])
    (tmp_path / "seed_0").mkdir()
    plant(tmp_path / "seed_0/sigma.json", SIGMA, images=60)
    runs = script.Runs(script.STUDIES["cifar10"], options, 0)
    for _ in range(2):
        assert runs.choices() == {"damage": [0, 1, 2], "sigma of all": SIGMA, "damage of all": DAMAGE}
    assert measured == [("the ViT", [50, 10])]
    options.images = 50  # what was measured on other images is measured again
    assert runs.scores("damage").tolist() == DAMAGE and measured[1:] == [("the ViT", [50])]


@pytest.mark.parametrize(
    ("gap", "p", "said"),
    [(0.03, 0.01, "the same order"), (-0.03, 0.01, "another order"), (0.01, 0.1, "not resolved"), (0.1, None, "not")],
)
def test_order(gap, p, said):
    assert f"in the paper +4.49: {said}" in script.order(dict(gap=gap, p=p, paper=4.49))
