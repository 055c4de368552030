"""The scripts that train and compare small adaptive models: what they would train, their tables, and their verdicts."""

import json

import numpy as np
import pytest

from equivit.models import zoo
from equivit.models.model import check_input
from experiments.studies import (
    adaptive_exactness,
    adaptive_p4m,
    adaptive_small_images,
    segmentation_camvid,
    several_seeds,
)
from tests.experiments import scripts
from tests.training import tiny


@pytest.fixture
def trained(monkeypatch):
    """Nothing is trained: the figures of a run are made from its directory; what would be trained is kept."""
    configurations = {}

    def made(config, place):
        name, seed = place.parent.name, config.seed
        configurations[f"{name}/{seed}"] = config
        exact = "adaptive" in name or "input" in name or "adapted" in name
        figures = {"accuracy/top1": 0.5 + 0.1 * exact + 0.01 * seed, "shift/zeros_6": 0.8}
        figures |= {"shift/circular_full": 1.0 if exact else 0.7, "orientation/upright": 0.6}
        figures |= {"orientation/accuracy_mean": 0.5, "orientation/consistency": 0.4, "segmentation/miou": 0.5}
        figures |= {"segmentation_shift/circular_full": 1.0 if exact else 0.7}
        figures |= {"segmentation_orientation/miou_mean": 0.3, "segmentation_orientation/same": 0.9}
        return {f"eval/{key}": value for key, value in figures.items()}

    monkeypatch.setattr(several_seeds, "trained", made)
    return configurations


def script(module, tmp_path, *arguments):
    """Exit status and the written results."""
    status = scripts.status(module, [f"--workdir={tmp_path / 'runs'}", f"--output={tmp_path / 'out.json'}", *arguments])
    return status, json.loads((tmp_path / "out.json").read_text())["main"]


class TestSmallImages:
    def test_every_row_is_a_run_of_its_own(self, tmp_path, trained, monkeypatch, capsys):
        known = dict(top1=0.3, circular_full=1.0)
        monkeypatch.setattr(adaptive_small_images.further_evaluations, "evaluate", lambda place, names: None)
        monkeypatch.setattr(adaptive_small_images.further_evaluations, "read", lambda place: dict(adapted=known))
        status, written = script(adaptive_small_images, tmp_path, "--seeds=0,1")
        rows, gains = written["rows"], written["gains"]
        assert status == 0 and set(rows) == set(adaptive_small_images.VARIANTS)
        assert rows["swin adaptive"]["top1"] == pytest.approx([0.6, 0.61]) and rows["swin"]["circular"] == [0.7, 0.7]
        assert rows["cvt adapted 0"] == dict(top1=[0.3, 0.3], circular=[1.0, 1.0], zeros=[])
        assert gains["swin adaptive - swin, top1"]["gap"] == pytest.approx(0.1)
        assert "cvt adapted 0 - cvt adaptive, zeros" not in gains
        assert "swin adaptive - swin, circular: +30.00 points" in capsys.readouterr().out
        parts = {}
        for name, config in trained.items():
            model = zoo.configuration(**config.model)
            assert model.image_size == tuple(config.data.image_size) == (32, 32) and config.schedule.lr == 2e-3
            parts[name] = model.parts
        assert parts["swin/0"] == () and parts["swin_adaptive/1"] == ("token", "window", "merge", "position")
        assert parts["swin_no_window/0"] == ("token", "merge", "position")
        assert trained["swin_da/0"].data.augment.circular_shift == 1.0
        tuned = trained["cvt_adapted_2/1"]
        assert tuned.init == str(tmp_path / "runs/cvt/seed_1") and tuned.epochs == 2 and parts["cvt_adapted_2/1"]
        assert trained["cvt/1"].model.padding == "circular" and trained["mvitv2_by_input/0"].model.select == "input"

    def test_a_changed_class_of_an_adaptive_model_is_an_error(self, tmp_path, trained, monkeypatch):
        figures = adaptive_small_images.figures
        one_less = lambda *arguments: figures(*arguments) | {"circular": 0.9999}  # noqa: E731
        monkeypatch.setattr(adaptive_small_images, "figures", one_less)
        assert script(adaptive_small_images, tmp_path, "--rows=swin adaptive", "--seeds=0")[0] == 1
        assert script(adaptive_small_images, tmp_path, "--rows=swin,swin no token", "--seeds=0")[0] == 0


class TestP4m:
    def test_rows(self, tmp_path, trained, monkeypatch):
        found = dict(constant=1.0, decided=399, identical=399)
        monkeypatch.setattr(adaptive_p4m, "copies", lambda place, images: dict(found))
        status, written = script(adaptive_p4m, tmp_path, "--seeds=0")
        assert status == 0 and set(written["rows"]) == {"plain", "D8", "adaptive", "p4m"}
        assert written["rows"]["p4m"]["constant"] == [1.0] and "p4m - plain, eight" in written["gains"]
        models = {name: zoo.configuration(**config.model) for name, config in trained.items()}
        assert models["p4m/0"].parts and models["p4m/0"].family == "D8" and not models["D8/0"].parts
        found["identical"] = 398
        assert script(adaptive_p4m, tmp_path, "--seeds=0")[0] == 1

    def test_copies_are_compared_where_they_are_decided(self):
        """A 'model' that reads one pixel: every copy that has another pixel there is of another class."""
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (3, 6, 6, 1), np.uint8)
        images[0], images[1], images[1, 0, 0] = 7, 9, 200  # flat; one odd pixel
        batch = dict(image=images, weight=np.array([1.0, 1.0, 0.0]))

        def predict(copy):
            seen = copy[:, 0, 0].astype(np.float32)
            return np.concatenate([seen, np.full_like(seen, 100.0)], axis=1)

        assert adaptive_p4m.compared(predict, [batch]) == dict(images=2, constant=0.5, decided=2, identical=1)
        batch["image"][0] = 100  # both logits are equal
        assert adaptive_p4m.compared(predict, [batch])["decided"] == 1

    def test_all_copies_are_there_once_for_each_orientation_and_shift(self):
        images = np.arange(9, dtype=np.uint8).reshape(1, 3, 3, 1)
        copies = list(adaptive_p4m.all_copies(images))
        assert len(copies) == 8 * adaptive_p4m.SHIFTS and (copies[0] == images).all()
        assert len({copy.tobytes() for copy in copies}) == 72  # 64 random offsets meet all nine, eight orientations


def test_camvid(tmp_path, trained):
    """Every row is a model of its own that the data fit."""
    status, written = script(segmentation_camvid, tmp_path, "--seeds=0", "--source=npz:camvid.npz")
    assert status == 0 and written["rows"]["adaptive"]["mascc"] == [1.0]
    assert written["gains"]["adaptive - swin, mascc"]["gap"] == pytest.approx(0.3)
    for name, config in trained.items():
        with config.unlocked():
            config.model.update(num_classes=11, in_channels=3)
        model = tiny.exported_model(config).config
        check_input(model, name, tuple(config.data.image_size), 3)
        assert model.equivariant == name.startswith("adaptive") and model.num_classes == 11
    assert {name: config.objective.decoder for name, config in trained.items()} == {
        "plain/0": "linear",
        "D8/0": "linear",
        "swin/0": "upernet",
        "adaptive/0": "upernet",
        "adaptive_unpool/0": "upernet",
    }
    assert trained["adaptive_unpool/0"].objective.upsampling == "unpool"


def test_exactness(tmp_path):
    """End to end on one family, and that a claim fails where a figure does."""
    output = tmp_path / "out.json"
    arguments = [f"--output={output}", "--models=Swin", "--images=1", "--shifts=2"]
    assert scripts.status(adaptive_exactness, arguments) == 0
    row = json.loads(output.read_text())["main"]["rows"]["Swin"]
    assert row["float32_equal"] == row["bfloat16_equal"] == 100 and row["float64"] < 1e-10 < 1e-3 < row["ordinary"]
    octic = row | dict(settled=0.0, float32=2e-5)
    bad = adaptive_exactness.claims_of({"Swin": row | {"bfloat16_equal": 99.9, "gap": 1e-12}, "D8 ViT": octic})
    assert [claim.holds for claim in bad] == [True, False, None, False, True]
