"""Patterns of reaction and diffusion: the file that is written, and that no direction is preferred."""

import numpy as np
import pytest
from PIL import Image

from equivit.data import npz
from experiments.studies import patterns as script
from tests.experiments.scripts import status


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(script, "STEPS", 20)
    monkeypatch.setattr(script, "FIELDS", dict(train=2, test=1))


def test_the_file_has_every_class_in_both_splits_and_no_field_twice(small, tmp_path):
    for name in ("one", "again"):
        assert status(script, [f"--to={tmp_path}/{name}.npz"]) == 0
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "again.npz") as again:
        assert all(np.array_equal(one[key], again[key]) for key in one) and set(one) == set(again)
        for split, number in (("train", 2), ("test", 1)):
            assert one[f"{split}_image"].shape == (8 * 4 * number, 48, 48, 3)
            assert np.bincount(one[f"{split}_label"]).tolist() == [4 * number] * 8
    with Image.open(tmp_path / "one.png") as picture:
        assert picture.size == (8 * 100, 2 * 100)
    source = npz.Npz(str(tmp_path / "one.npz"), "test", void=())
    assert len(source) == 32 and source.classes[0] == "F=0.026, k=0.059"
    v = np.concatenate([list(script.fields(0, 5, split)) for split in script.FIELDS]).reshape(-1, 48 * 48)
    assert np.abs(np.corrcoef(v) - np.eye(len(v))).max() < 0.9  # images of one field twice would have 1


def test_the_equations_have_the_symmetry_of_the_square_and_of_the_torus():
    """Noise that is turned, mirrored or moved gives v that is so, to the rounding of sums in another order."""
    noise = np.random.default_rng(0).standard_normal((24, 24), np.float32)
    upright = np.asarray(script.grown(noise, 0.03, 0.06, 20))
    assert upright.std() > 0.01

    def check(move):
        np.testing.assert_allclose(script.grown(move(noise), 0.03, 0.06, 20), move(upright), atol=1e-6)

    for turns in range(4):
        check(lambda field, turns=turns: np.rot90(field, turns))
        check(lambda field, turns=turns: np.rot90(field[::-1], turns))
    check(lambda field: np.roll(field, (3, -5), (0, 1)))


def test_the_laplacian_of_a_wave_is_the_same_in_every_direction():
    """Waves (8, 6) and (10, 0) on a torus of 96 have the same length; by five points their factors differ by 1.6 %."""
    places = 2 * np.pi * np.arange(96) / 96
    factors = []
    for k, m in ((8, 6), (10, 0)):
        wave = np.cos(k * places[:, None] + m * places)
        factors.append(float(np.sum(wave * script.laplacian(wave)) / np.sum(wave * wave)))
    exact = -((2 * np.pi * 10 / 96) ** 2)
    assert abs(factors[0] - factors[1]) < 3e-4 * abs(exact) and abs(factors[0] - exact) < 0.04 * abs(exact)


def test_images_have_equal_means_and_contrasts():
    rng = np.random.default_rng(0)
    images = script.photographed(np.stack([rng.random((48, 48)), 5 + 3 * rng.random((48, 48))]), rng)
    assert images.dtype == np.uint8 and np.array_equal(images[..., 0], images[..., 2])
    np.testing.assert_allclose(images.mean((1, 2, 3)), script.MEAN, atol=2)  # of 2,304 pixels: 57 / 48, and clipping
    np.testing.assert_allclose(images.std((1, 2, 3)), np.hypot(script.CONTRAST, script.NOISE), rtol=0.05)


@pytest.mark.parametrize("name", ["patterns", "patterns.npy"])
def test_a_name_that_numpy_would_change_is_refused(tmp_path, name, capsys):
    with pytest.raises(SystemExit):
        script.main([f"--to={tmp_path / name}"])
    assert f"--to={tmp_path / name}: give a file whose name ends with .npz" in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_refused_before_anything_is_drawn(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(script, "examples", None)
    assert status(script, [f"--to={tmp_path}/file/patterns.npz"]) == 1
    assert "give a directory" in capsys.readouterr().err
