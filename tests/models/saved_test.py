"""A saved model is the old one, the new one, or refused, wherever a save is interrupted; it knows its data."""

import contextlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from equivit import logical, testing
from equivit.models import inference, saved, zoo
from equivit.trained_on import TrainedOn

MOBILENET = dict(stages=("conv 3 s2 8", "conv 1 24"), stem_width=6, head_width=10, num_classes=3, image_size=(16, 16))


def model(seed, **options):
    small = dict(width=16, depth=1, num_heads=2, image_size=(16, 16), num_classes=3)
    return testing.randomise(zoo.abstract("vit_ti16", **small, **options), jax.random.key(seed))


def content(found):
    return found.config, {name: float(np.asarray(array).sum()) for name, array in logical.take(found).items()}


@pytest.fixture(scope="module")
def models():
    """Models of two configurations that fit the same parameters, and what they were trained on."""
    return {
        "old": (model(1), TrainedOn(("a", "b", "c"), 5)),
        "weights": (model(2), TrainedOn(("a", "b", "c"), 5)),
        "names": (model(2), TrainedOn(("c", "a", "b"), 5)),
        "configuration": (model(2, norm_eps=1e-3), TrainedOn()),
    }


@pytest.mark.parametrize("new", ["weights", "names", "configuration"])
@pytest.mark.parametrize("at", range(6))
def test_an_interrupted_save_leaves_no_third_model(models, tmp_path, monkeypatch, new, at):
    """The interruption comes before the `at`-th file takes its place."""
    place, moves = tmp_path / "model", []
    saved.save(place, *models["old"])
    for method in ("replace", "rename"):
        move = getattr(pathlib.Path, method)

        def interrupted(self, target, move=move):
            moves.append(target)
            if len(moves) > at:
                raise KeyboardInterrupt
            return move(self, target)

        monkeypatch.setattr(pathlib.Path, method, interrupted)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **options: None)  # as where the process is killed
    with contextlib.suppress(KeyboardInterrupt):
        saved.save(place, *models[new])
    monkeypatch.undo()
    try:
        found = content(saved.load(place)), saved.trained_on(place)
    except ValueError as error:
        assert "were not saved together" in str(error) and "\n" not in str(error) and 0 < at < 6
    else:
        assert found in [(content(model), data) for model, data in (models["old"], models[new])]
    saved.save(place, *models[new])
    assert (content(saved.load(place)), saved.trained_on(place)) == (content(models[new][0]), models[new][1])


@pytest.mark.parametrize("taken", ["parameters.safetensors", "model.json"])
def test_files_of_two_models_are_refused(models, tmp_path, taken):
    for name in ("old", "configuration"):
        saved.save(tmp_path / name, *models[name])
    shutil.copy(tmp_path / "old" / taken, tmp_path / "configuration")
    with pytest.raises(ValueError, match=f"{tmp_path}/configuration: model.json and .* were not saved together"):
        saved.load(tmp_path / "configuration")


def test_models_of_earlier_versions_are_read(models, tmp_path):
    """They have neither a digest nor the data; and the layout of the JSON text does not matter."""
    saved.save(tmp_path, *models["old"])
    path = tmp_path / "model.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps(described))
    assert content(saved.load(tmp_path)) == content(models["old"][0])
    del described["trained_on"]
    path.write_text(json.dumps(described))
    with pytest.raises(ValueError, match="were not saved together"):
        saved.load(tmp_path)
    tensors = jax.device_get(logical.to_logical(models["old"][0]))
    saved.safetensors_files.write(tmp_path / "parameters.safetensors", tensors)
    assert content(saved.load(tmp_path)) == content(models["old"][0])
    assert saved.trained_on(tmp_path) == TrainedOn()


@pytest.mark.parametrize("change", ["fold", "deployed", "head"])
def test_a_model_that_could_not_be_loaded_does_not_replace_one(models, tmp_path, change):
    saved.save(str(tmp_path), *models["old"])
    if change == "fold":
        abstract = zoo.abstract("mobilenetv4_conv_small", **MOBILENET)
        other = inference.fold(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract))
    elif change == "deployed":
        other = inference.deployed(model(1), (16, 16))
    else:
        other = model(1)
        other.head = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="not saved, since the parameters do not fit .*; missing, unexpected or missh"):
        saved.save(tmp_path, other)
    assert saved.is_saved(str(tmp_path)) and content(saved.load(str(tmp_path))) == content(models["old"][0])


@pytest.mark.parametrize("damaged", ["[]", '{"classes": "ab"}', '{"classes": [1]}', '{"examples": "5"}', "3"])
def test_damaged_names_are_named_with_the_file(models, tmp_path, damaged):
    saved.save(tmp_path, *models["old"])
    path = tmp_path / "model.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "trained_on": json.loads(damaged)}))
    with pytest.raises(ValueError, match=f"{path}: is damaged, or of another version"):
        saved.trained_on(tmp_path)


@pytest.mark.parametrize("change", [dict(num_heads=3), dict(num_heads=0), dict(width="16"), dict(patch_size=[0, 0])])
def test_a_configuration_that_no_model_has_is_one_line_that_names_the_file(models, tmp_path, change):
    saved.save(tmp_path / "model", *models["old"])
    path = tmp_path / "model" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"{path}: is damaged, or of another version") as error:
        saved.load(tmp_path / "model")
    assert "\n" not in str(error.value)
