"""The scripts about the speed of replaced attention, each from end to end on something tiny."""

import functools
import importlib.util
import json
import os

import pytest

from experiments.tables.depthwise import fp16, onnx_calls, speed, speed_number

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax2onnx", "onnxruntime")),
    reason="make install-export installs jax2onnx and onnxruntime",
)
ONCE = ["--runs=1", "--warmup=1"]
TINY = dict(width=32, num_heads=16, depth=2, patch_size=14)


@pytest.fixture
def tiny(monkeypatch):
    """Backbones of two blocks; nobody takes real-time priority, at which nothing else would run."""
    real = onnx_calls.backbone_call
    call = lambda *args, **options: real(*args, **TINY | {**options, "depth": 2})  # noqa: E731
    monkeypatch.setattr(onnx_calls, "backbone_call", call)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("real-time priority"))


@needs_onnx
def test_modules_and_backbones(tiny, tmp_path, monkeypatch):
    small = functools.partial(speed._modules, grid=(2, 3), heads=2)
    monkeypatch.setattr(speed, "modules", lambda options: small(options, paper={None: (3.2,), "dw": (1.0,)}))
    monkeypatch.setattr(speed, "small_modules", lambda options: small(options, paper={None: (2.0, 8.0)}))
    monkeypatch.setattr(speed, "TABLE_2", {(None, 0): (161.4, None), ("dw", 1): (133.6, 0.16)})
    output = tmp_path / "speed.json"
    speed.main([*ONCE, "--pixels=28", "--backbone_runs=1", f"--output={output}"])
    found = json.loads(output.read_text())["main"]
    attention, dw = found["modules"]
    assert dw["ratio"] == pytest.approx(dw["ms"] / attention["ms"]) and dw["theirs"] == 1 / 3.2
    assert found["small_modules"][0]["desktop"] == 8.0 and not found["failed"]
    before, after = found["backbones"]
    assert after["saved"] == pytest.approx(100 * (1 - after["ms"] / before["ms"]))
    assert after["theirs"] == pytest.approx(17.2, abs=0.05)  # the paper's own percentage
    assert [claim["at_most"] for claim in found["claims"]] == [0.35, 0.05, None]


@needs_onnx
def test_number_of_blocks(tiny, tmp_path):
    output = tmp_path / "number.json"
    speed_number.main([*ONCE, "--pixels=28", "--depth=2", f"--output={output}"])
    rows = json.loads(output.read_text())["main"]["rows"]
    assert [(row["way"], row["blocks"], row["heads"]) for row in rows] == [
        ("none", 0, 0),
        ("DW, blockwise", 12, 192),
        ("Ens+DW, blockwise", 12, 192),
        ("DW, scattered", 12, 192),
    ]
    assert output.with_suffix(".png").is_file()


def test_every_way_replaces_as_many_heads():
    for (way, number), replaced in speed_number.variants(6).items():
        heads = sum(len(one[3]) if len(one) > 3 else 16 for one in replaced)
        assert heads == pytest.approx(16 * number, abs=3), way  # heads are whole


def test_memory_by_rule_is_the_papers(tmp_path):
    """Printed with three digits; its 0.288 MB are 288 KiB."""
    for (kind, dtype), (_, paper) in fp16.PAPER.items():
        ours = fp16.activations(kind, dtype) / 2**20
        assert ours == pytest.approx(0.28125 if paper == 0.288 else paper, abs=0.051), (kind, dtype)
    assert fp16.main([f"--output={tmp_path / 'fp16.json'}"]) == 0
