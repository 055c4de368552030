"""Pictures and texts of a run."""

import json

import numpy as np
import pytest
from flax import nnx
from PIL import Image

from equivit.evaluation import colours, figures, runner, summary
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training.config import get_base
from tests.evaluation.predictors import random_model

TINY = dict(width=64, patch_size=8)
ROWS = {
    "plain": ["all"],
    "H2": ["sym", "asym"],
    "H8": ["A1", "A2", "B1", "B2", "E, copy 1", "E, copy 2"],
}


def is_a_picture(path):
    with Image.open(path) as image:
        return image.format == "PNG" and len(set(image.convert("L").get_flattened_data())) > 10


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("family", list(ROWS))
def test_patch_filters_of_every_group(family, channels, tmp_path):
    kernels = figures.patch_kernels(random_model(family, in_channels=channels, **TINY))
    assert list(kernels) == ROWS[family]
    assert all(kernel.shape[:3] == (8, 8, channels) for kernel in kernels.values())
    figures.patch_filters(kernels, tmp_path / "filters.png")
    assert is_a_picture(tmp_path / "filters.png")


def test_components_have_the_symmetry_of_their_irrep():
    kernels = figures.patch_kernels(random_model("H8", **TINY))
    for irrep in OCTIC.lines:
        tiles, shares = figures.principal_components(kernels[irrep.name])
        assert 1 <= len(tiles) <= 16 and np.all(np.diff(shares) <= 0) and shares.sum() <= 1 + 1e-9
        for g in OCTIC.elements:
            # float32 kernels, components of length 1
            np.testing.assert_allclose(fields.act_on_image(g, tiles), irrep(g)[0, 0] * tiles, atol=1e-5)


def test_components_are_those_that_made_the_kernels():
    """Two known directions with deviations 3 and 1, about a mean that does not count."""
    draws = np.random.default_rng(0).normal(size=(2, 400))
    directions = np.eye(2, 12).reshape(2, 2, 3, 2)
    kernels = np.einsum("nc,nhwi->hwic", draws * np.array([[3], [1]]), directions) + 7
    tiles, shares = figures.principal_components(kernels)
    assert len(tiles) == 2
    np.testing.assert_allclose(tiles, directions, atol=0.1)  # 400 draws: correlated by about 1/20
    np.testing.assert_allclose(shares, [0.9, 0.1], atol=0.03)


def test_constant_kernels_give_one_blank_component():
    tiles, shares = figures.principal_components(np.zeros((4, 4, 1, 8)))
    assert len(tiles) == 1 and np.isfinite(tiles).all() and shares == [0]


def test_a_model_without_patches_has_no_filters(tmp_path):
    assert figures.patch_kernels(random_model("plain", **TINY).head) == {}
    write_metrics(tmp_path)
    text = summary.conclude(tmp_path, random_model("plain", **TINY).head, {}, get_base(), step=19)
    assert "patch filters" not in text and is_a_picture(tmp_path / "learning_curves.png")


def test_filters_of_an_encoder_are_found():
    """In a masked autoencoder and in any other model that holds a ViT."""

    class Holder(nnx.Module):
        def __init__(self, encoder):
            self.encoder = encoder

    encoder = random_model("H2", **TINY)
    found, expected = figures.patch_kernels(Holder(encoder)), figures.patch_kernels(encoder)
    assert list(found) == list(expected) == ROWS["H2"]
    assert all(np.array_equal(found[name], expected[name]) for name in found)


@pytest.fixture
def results():
    each = dict.fromkeys(OCTIC.elements, 0.5)
    return {
        "accuracy": {"top1": 0.75, "top5": 1.0, "examples": 8},
        "orientation": {
            "accuracy": each, "accuracy_mean": 0.5, "upright": 0.75, "rotated": 0.5, "delta": -0.25, "decided": 6,
            "consistency": 0.5, "identical": 6, "ties": [3, 5], "deviation": each, "equivariance_error": 2e-7,
            "field_error": 1e-7,
        },
    }  # fmt: skip


def write_metrics(workdir):
    rows = [{"step": s, "loss": 1 / s, "accuracy": 1 - 1 / s} for s in range(1, 20)]
    rows.append({"step": 19, "eval/accuracy/top1": 0.9, "eval/orientation/accuracy_mean": 0.4})
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_end_of_a_run(tmp_path, results):
    write_metrics(tmp_path)
    text = summary.conclude(tmp_path, random_model("H8", **TINY), results, get_base(), step=19)
    assert "75.0 % upright" in text and "50.0 % (-25.0 points" in text
    assert "6 of 6 images; 2 with a tie, by index: 3, 5" in text
    for name in ("metrics.jsonl", "report.json", "checkpoints", "learning_curves.png", "patch_filters.png"):
        assert str(tmp_path / name) in text
    assert is_a_picture(tmp_path / "learning_curves.png") and is_a_picture(tmp_path / "patch_filters.png")
    about = dict(weights="trained", data="digits, test", image_size="32x32", step="19")
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {**about, **results}


def test_the_results_of_an_extended_run_are_of_its_last_step(tmp_path, monkeypatch, results):
    monkeypatch.setattr(figures, "learning_curves", lambda *_: None)
    monkeypatch.setattr(summary, "draw", lambda *_: {})
    summary.conclude(tmp_path, None, results, get_base(), step=19)
    summary.conclude(tmp_path, None, {"accuracy": results["accuracy"]}, get_base(), step=38)
    new, old = (json.loads((tmp_path / name).read_text()) for name in ("evaluation.json", "evaluation.1.json"))
    assert new["step"] == "38" and "orientation" not in new and old["step"] == "19" and "orientation" in old


def test_figures_of_protocols_are_drawn_beside_those_of_training(tmp_path, monkeypatch):
    write_metrics(tmp_path)
    row = {"step": 19, "eval/reconstruction/loss": 0.5, "eval/mine/top1": 0.5, "eval/mine/top5": 0.7}
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")
    drawn = []
    monkeypatch.setattr(
        figures.Figure, "savefig", lambda figure, *_, **__: drawn.extend(axes.get_legend() for axes in figure.axes)
    )
    figures.learning_curves(tmp_path / "metrics.jsonl", tmp_path / "c.png", [*runner.curves(), "eval/mine/top1"])
    left, right = ([text.get_text() for text in legend.get_texts()] for legend in drawn)
    assert left == ["training", "test: reconstruction/loss"]
    assert right == ["training", "test: accuracy/top1", "test: orientation/accuracy_mean", "test: mine/top1"]


def test_a_run_without_evaluation_or_metrics_still_has_its_curves(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    figures.learning_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").is_file()


def test_colours_are_far_apart_and_stay():
    palette = colours.of_classes(300)
    np.testing.assert_array_equal(colours.of_classes(11), palette[:11])
    assert len(np.unique(palette, axis=0)) == 300
    gaps = np.linalg.norm(palette[:20, None] - palette[:20], axis=-1) + np.eye(20)
    assert gaps.min() > 0.15 and np.linalg.norm(palette[:20] - 0.5, axis=-1).min() > 0.15
