"""Small Jumbo models on images, and pictures of a run."""

import json

import pytest

from experiments.studies import jumbo_small_images
from experiments.tables.jumbo import global_tokens


def test_small_images_and_the_pictures_of_a_run(tmp_path):
    tiny = ["epochs=None", "steps=1", "data.source=synthetic", "data.train_examples=64", "data.eval_examples=8"]
    tiny += ["schedule.warmup_epochs=None", "batch_size=8", "model.depth=2"]
    options = ["--seeds=0", "--widths=64", "--models=jumbo", f"--workdir={tmp_path}", f"--output={tmp_path}/o.json"]
    assert jumbo_small_images.main([*options, *(f"--override={text}" for text in tiny)]) == 0
    found = json.loads((tmp_path / "o.json").read_text())["main"]
    assert list(found["rows"]) == ["jumbo 64"] and (found["overrides"], found["source"]) == (tiny, None)
    model = json.loads((tmp_path / "jumbo_64/seed_0/config.json").read_text())["model"]
    assert (model["width"], model["patch_size"], model["layer_scale"]) == (64, 8, 0.1)  # what the docstring says
    output = tmp_path / "new/tokens.json"
    assert global_tokens.main([str(tmp_path / "jumbo_64/seed_0"), f"--output={output}"]) == 0
    (row,) = json.loads(output.read_text())["main"]["rows"]
    assert row["run"] == "jumbo_64/seed_0" and row["median"] > 0
    assert {path.name for path in output.parent.glob("*.png")} == {"tokens_attention.png", "tokens_norms.png"}


def test_gains_are_of_the_same_width():
    rows = {f"{model} {width}": {jumbo_small_images.ACCURACY: {"values": [value, value + 0.02]}}
            for model, width, value in (("plain", 64, 0.3), ("jumbo", 64, 0.4), ("jumbo", 96, 0.5))}  # fmt: skip
    (pair, gain), *others = jumbo_small_images.gains_of(rows).items()
    assert pair == "jumbo - plain, 64" and gain["gap"] == pytest.approx(0.1) and not others
