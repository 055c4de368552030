"""The scripts about compiled programs, without the compiler: runs add up."""

import json

import pytest

from experiments.benchmarks import adaptive_program, gpu_program
from tests.experiments.scripts import status

FIGURES = dict(kernels=1.0, megabytes=1.0, temporary_mib=1.0)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The rows of the JSON after a run of a script."""
    monkeypatch.setattr(gpu_program, "row", lambda variant, depth, top: variant._asdict() | FIGURES)
    floors = iter(range(1, 100))
    monkeypatch.setattr(adaptive_program, "whole", lambda *one: one)
    monkeypatch.setattr(adaptive_program, "compile_for_h200", lambda *one: None)
    monkeypatch.setattr(adaptive_program, "figures", lambda *_: dict(FIGURES, floor_us=1e3 * next(floors)))

    def run(script, *arguments):
        assert status(script, [f"--output={tmp_path / 'found.json'}", *arguments]) == 0
        return json.loads((tmp_path / "found.json").read_text())["main"]["rows"]

    return run


def test_stacks_of_other_variants_stay(rows):
    first = rows(gpu_program, "--only=plain ViT-H,forward")
    assert [(row["model"], row["what"], row["blocks"]) for row in first] == [
        ("plain ViT-H", "forward", "scan"),
        ("plain ViT-H", "forward", "unrolled"),
    ]
    both = rows(gpu_program, "--only=ViT-L,forward")
    assert both[:2] == first and {row["model"] for row in both[2:]} == {"D8(ViT-L)"} and both[2]["commit"]


def test_stacks_of_another_depth_need_another_entry(rows, tmp_path, capsys):
    rows(gpu_program, "--only=plain ViT-H,forward")
    assert status(gpu_program, [f"--output={tmp_path / 'found.json'}", "--depth=32"]) == 1
    assert "entry main was measured with depth=4, and this run has 32; name another" in capsys.readouterr().err


def test_adaptive_models_are_beside_ordinary_ones_and_others_stay(rows):
    rows(adaptive_program, "--models=Swin-T")
    both = rows(adaptive_program, "--models=CvT-13")
    assert [(row["model"], row["what"]) for row in both[::3]] == [
        (model, what) for model in ("Swin-T", "CvT-13") for what in ("forward", "gradient")
    ]
    assert [(row["form"], row["floor_ms"], row["ratio"]) for row in both[3:6]] == [
        ("ordinary", 4.0, 1.0),
        ("adaptive", 5.0, 1.25),
        ("by input", 6.0, 1.5),
    ]
