"""`python -m equivit.symmetry`: its report, its exit status, and mistakes."""

import json

import numpy as np
import pytest
from PIL import Image

from equivit.guarantees import examine, proof, report
from equivit.guarantees.motions import Shift, Turn
from equivit.models import saved
from equivit.symmetry import __main__ as symmetry
from equivit.trained_on import TrainedOn
from tests.guarantees.proof_test import small

IMAGES = {"image_size": (8, 8), "mean": (0.5,), "std": (0.5,)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """An invariant model, and images beside it, one of them damaged."""
    found = tmp_path_factory.mktemp("symmetry")
    saved.save(found / "model", small("I8", image_size=(8, 8)), TrainedOn((), 1, IMAGES))
    random = np.random.default_rng(0)
    (found / "photos").mkdir()
    for k in range(3):
        Image.fromarray(random.integers(0, 256, (9, 12), np.uint8)).save(found / "photos" / f"{k}.png")
    (found / "photos" / "bad.png").write_bytes(b"no image")
    return found


def test_a_report_and_an_exit_status(place, capsys):
    arguments = [f"--input={place / 'model'}", f"--images={place / 'photos'}", f"--output={place / 'out'}"]
    assert symmetry.main([*arguments, "--assert=octic,shift"]) == 1
    out, err = capsys.readouterr()
    assert (
        out.splitlines()[0].startswith("octic  holds; largest deviation ")
        and "turns    the same class in 100.0%" in out
    )
    assert "bad.png is left out: it is not an image file" in err
    last = err.splitlines()[-1]
    assert last.startswith("error: shift: shift (") and last.endswith(
        "at the embedding in float64; the bound is 1e-10."
    )
    found = json.loads((place / "out" / "symmetry.json").read_text())
    assert found["symmetries"]["octic"] == {"holds": "yes", "broken": None}
    assert found["symmetries"]["shift"]["broken"]["stage"] == "the embedding"
    assert [proof["precision"] for proof in found["proofs"]] == ["float64", "float32"]
    assert len(found["proofs"][0]["deviations"]) == 16 and found["measured"]["images"] == 3
    assert found["measured"]["groups"]["mirrors"]["changed"] == 0 and len(found["measured"]["angles"]) == 25
    page = (place / "out" / "report.md").read_text()
    assert "| octic | yes |" in page and "| block 0 | octic field |" in page
    for picture in ("deviations.png", "features.png", "angles.png"):
        with Image.open(place / "out" / picture) as image:
            assert f"({picture})" in page and image.width > 300


def test_a_symmetry_that_holds_exits_with_zero(place, capsys):
    assert symmetry.main([f"--input={place / 'model'}", "--assert=octic,flip"]) == 0
    assert "flip   holds" in capsys.readouterr().out


def test_an_infinite_deviation_is_null_and_the_report_of_a_run_is_kept(tmp_path):
    """Python would write Infinity, which is not JSON."""
    stages, motions = (proof.Stage("the embedding"), proof.Stage("the output")), (Turn("m"), Shift((1, 0)))
    found = proof.Proof("float64", (8, 12), stages, motions, np.full((2, 2), np.inf), np.zeros((2, 2)))
    (tmp_path / "report.json").write_text("of a run")
    report.write(tmp_path, report.Report("model", (found,), None, None, True))
    text = (tmp_path / "symmetry.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["symmetries"]["shift"]["broken"]["deviation"] is None
    assert (tmp_path / "report.json").read_text() == "of a run"


def test_half_of_a_group_is_not_the_group(place, monkeypatch, capsys):
    """A model that takes no images with swapped sides."""
    monkeypatch.setattr(examine, "takes_turned", lambda model, size: False)
    assert symmetry.main([f"--input={place / 'model'}", "--assert=octic"]) == 1
    out, err = capsys.readouterr()
    assert out.startswith("octic  holds without quarter turns") and "error: octic: the model takes no images of" in err


def test_mistakes_are_one_line(place, tmp_path, capsys):
    with pytest.raises(SystemExit):
        symmetry.main([f"--input={place / 'model'}", "--assert=octik"])
    assert "'octik' is not one of octic, flip, shift; the nearest is 'octic'" in capsys.readouterr().err
    assert symmetry.main([f"--input={place / 'model'}", "--image_size=8,9"]) == 1
    assert "error: --image_size 8x9: the width 9 is not divisible" in capsys.readouterr().err
    assert symmetry.main([f"--input={place / 'model'}", f"--images={place / 'model'}"]) == 1
    assert "there is no image in this folder" in capsys.readouterr().err
