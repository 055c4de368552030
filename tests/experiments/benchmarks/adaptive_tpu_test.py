"""The estimates of whole models; libtpu is not needed."""

import importlib.util

import pytest

from experiments import __main__ as command
from experiments.benchmarks import adaptive_tpu as script
from experiments.benchmarks.tpu_assembly import Work


def test_a_row_is_the_estimate_of_a_forward_pass(monkeypatch, tmp_path):
    def compiled(function, arguments, folder):
        assert folder == tmp_path and arguments[-1].shape == (64, 224, 224, 3)
        assert function.eval_shape(*arguments).shape == (64, 1000)
        return 2.5, "", {"gather": Work(3000, 0, 0, False, False)}

    monkeypatch.setattr(script, "compiled", compiled)
    monkeypatch.setattr(script, "chip", lambda: None)
    row = script.row("Swin-T", "by input", tmp_path)
    assert (row["model"], row["form"], row["kcycles"], row["seconds"]) == ("Swin-T", "by input", 3.0, 2.5)
    assert row["unread"] == ["gather"]


def test_an_unknown_model_is_refused(capsys):
    with pytest.raises(SystemExit):
        script.main(["--models=Swin-B"])
    assert "'Swin-B' is not one of Swin-T, SwinV2-T, CvT-13, MViTv2-T" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["adaptive_tpu", "tpu_compile"])
def test_without_libtpu_the_error_is_one_line(name, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main([f"benchmarks.{name}", f"--output={tmp_path / 'found.json'}"]) == 1
    assert capsys.readouterr().err == (
        'error: libtpu is not installed, which compiles for TPUs; run: pip install "jax[tpu]"\n'
    )
