"""The costs of shift-equivariance, on something tiny."""

import argparse
import json

import jax
import pytest

from experiments import compiled_models, machine
from experiments.tables.adaptive import speed
from tests.experiments import scripts

TINY = dict(image_size=(32, 32), widths=(8, 16, 32), depths=(1, 1, 1), num_heads=(1, 1, 2), num_classes=10)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(speed, "sizes", lambda name, options: TINY)


def test_gradient_of_a_model_with_batch_statistics_is_traced(monkeypatch):
    def traced(apply, model, images):
        jax.eval_shape(apply, model, images)
        return compiled_models.Compiled(None, machine.Memory(0, 0, 2**20))

    monkeypatch.setattr(speed, "compiled", traced)
    options = argparse.Namespace(batch=2, precision="float32", quick=True)
    assert speed.gradient("cvt_13", options)["gradient"] == 1.0


def test_speed(tmp_path, monkeypatch):
    """On one tiny family, whose modules are not timed; claims are of the right models."""
    output = tmp_path / "out.json"
    modules = speed.modules
    monkeypatch.setattr(speed, "modules", lambda options: dict.fromkeys(modules(options), dict))
    monkeypatch.setattr(speed, "gradient", lambda name, options: dict(gradient=1.0))
    options = ["--quick", "--models=cvt_13", "--batch=2", "--runs=1", "--warmup=1"]
    assert scripts.status(speed, [f"--output={output}", *options]) == 0
    written = json.loads(output.read_text())["main"]
    (row,) = written["rows"]
    assert row["output"] == pytest.approx(row["output_ms"] / row["ordinary_ms"]) and row["macs"] > row["macs_input"]
    assert row["forward"] == pytest.approx(row["forward_output_mib"] / row["forward_ordinary_mib"])
    assert row["paper"] == pytest.approx(535.5 / 492.12) and written["failed"] == {}
    assert [module["module"] for module in written["modules"]] == ["cvt_13, embedding"]
    figures = dict(output=1.11, input=1.0, paper=1.09, macs=1.07, forward=1.2, gradient=1.0)
    claims = speed.claims_of([dict(figures, model=name) for name in ("cvt_13", "swin_t")], judged=True)
    assert [claim.holds for claim in claims] == [True, True, True, False, True, False, True, True, False, True]
