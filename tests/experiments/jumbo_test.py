"""The scripts about Jumbo: what they compute by hand-worked cases, and each from end to end on something tiny."""

import json

import jax.numpy as jnp
import pytest

from equivit.evaluation import patch_norms
from experiments import jumbo_costs, jumbo_global_tokens, jumbo_paper, jumbo_small_images, jumbo_speed, small_images


def test_counts_stand_beside_the_papers():
    small = next(cost for cost in jumbo_paper.COSTS if cost.label == "ViT-S, Jumbo")
    row = jumbo_costs.row(small)
    assert abs(row["parameters"] - 88.33) < 0.005 and abs(row["gflops"] - 4.57) < 0.01
    assert all(claim.holds for claim in jumbo_costs.claims_of([row], [jumbo_costs.layer(384, 196)]))
    wrong = jumbo_costs.row(small._replace(options={**small.options, "jumbo": 5}))
    assert not any(claim.holds for claim in jumbo_costs.claims_of([wrong], [jumbo_costs.layer(384, 196)])[:2])


def test_speed_runs_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(jumbo_speed, "WIDTHS", {128: "nano16"})
    monkeypatch.setattr(jumbo_speed, "RATIOS", {128: (0.94, 0.96)})
    options = ["--batch=1", "--runs=1", "--warmup=1", "--widths=128", f"--output={tmp_path / 'speed.json'}"]
    assert jumbo_speed.main(options) == 0
    (row,) = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert row["ratio"] == pytest.approx(row["jumbo"] / row["registers"]) and row["jumbo_mib"] > row["registers_mib"]
    assert (tmp_path / "speed.png").is_file()


def test_a_difference_is_resolved_beyond_two_standard_errors():
    assert small_images.difference([0.5, 0.7], [0.4, 0.6]) == pytest.approx((0.1, 0.02**0.5))
    assert small_images.verdict(*small_images.difference([0.5, 0.51], [0.4, 0.41])).endswith(": resolved")
    assert small_images.verdict(*small_images.difference([0.5, 0.7], [0.4, 0.6])).endswith(": not resolved")
    assert "one seed resolves nothing" in small_images.verdict(*small_images.difference([0.5], [0.4, 0.6]))


def test_outliers_are_what_stands_out():
    norms = jnp.array([1.0, 1.0, 1.1, 0.9, 2.9, 3.2])  # median 1.05
    assert float(patch_norms.outlier_share(norms)) == pytest.approx(1 / 6)


def test_small_images_and_the_pictures_of_a_run(tmp_path):
    tiny = ["epochs=None", "steps=1", "data.source=synthetic", "data.train_examples=64", "data.eval_examples=8"]
    tiny += ["schedule.warmup_epochs=None", "batch_size=8", "model.depth=2"]
    options = ["--seeds=0", "--widths=64", "--models=jumbo", f"--workdir={tmp_path}", f"--out={tmp_path}/o.json"]
    assert jumbo_small_images.main([*options, *(f"--override={text}" for text in tiny)]) == 0
    assert list(json.loads((tmp_path / "o.json").read_text())["rows"]) == ["jumbo 64"]
    model = json.loads((tmp_path / "jumbo_64/seed_0/config.json").read_text())["model"]
    assert (model["width"], model["patch_size"], model["layer_scale"]) == (64, 8, 0.1)  # what the docstring says
    output = tmp_path / "new/tokens.json"
    assert jumbo_global_tokens.main([str(tmp_path / "jumbo_64/seed_0"), f"--output={output}"]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert row["run"] == "jumbo_64/seed_0" and row["median"] > 0
    assert {path.name for path in output.parent.glob("*.png")} == {"tokens_attention.png", "tokens_norms.png"}


def test_gains_are_of_the_same_width():
    rows = {f"{model} {width}": {jumbo_small_images.ACCURACY: {"values": [value, value + 0.02]}}
            for model, width, value in (("plain", 64, 0.3), ("jumbo", 64, 0.4), ("jumbo", 96, 0.5))}  # fmt: skip
    assert jumbo_small_images.gains_of(rows) == {
        "jumbo - plain, 64": dict(gap=pytest.approx(0.1), standard_error=pytest.approx(0.02**0.5 / 10))
    }
