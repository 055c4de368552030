"""The script about the speed of replaced attention, from end to end on something tiny, and its cells."""

import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.tables.depthwise import calls, speed

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax2onnx", "onnxruntime")),
    reason="make install-export installs jax2onnx and onnxruntime",
)
ONCE = ["--runs=1", "--warmup=1"]
TINY = dict(width=32, num_heads=16, depth=2, patch_size=14)


@pytest.fixture
def tiny(monkeypatch):
    """Small modules, and backbones of one block.  A test with real-time priority would stop all others."""
    of_module, of_backbone = calls.of_module, calls.of_backbone

    def backbone(name, size, replaced=(), *, onnx, **fields):
        first = tuple(one for one in replaced if one[0] == 0)
        return of_backbone("dinov2_vit_l14", (28, 28), first, onnx=onnx, **TINY | dict(depth=1))

    monkeypatch.setattr(calls, "of_module", lambda grid, width, heads, kind, **o: of_module((2, 3), 32, 2, kind, **o))
    monkeypatch.setattr(calls, "of_backbone", backbone)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: pytest.fail("real-time priority"))


def run(tmp_path, *arguments):
    output = tmp_path / "speed.json"
    speed.main([*ONCE, f"--output={output}", *arguments])
    return json.loads(output.read_text())


@needs_onnx
def test_each_row_is_beside_attention_and_the_paper(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(speed.MODULES, ("table_1", (576, 16)), {None: 3.2, "dw": 1.26})
    monkeypatch.setattr(speed, "STACK", 2)
    found = run(tmp_path, "--only=table_1,figures")["main"]
    attention, dw, stack, *numbers = found["rows"]
    assert (attention["name"], attention["ratio"], dw["name"]) == ("MhSA", 1, "DW") and not found["failed"]
    assert dw["saved"] == pytest.approx(100 * (1 - dw["ratio"])) and dw["paper_ratio"] == 1.26 / 3.2
    assert found["form"] == "released" and "onnxruntime" in found
    assert (stack["name"], stack["number"]) == ("MhSA", 0)
    assert [(row["name"], row["number"]) for row in numbers] == [
        ("DW, blockwise", 12),
        ("Ens+DW, blockwise", 12),
        ("DW, scattered", 12),
    ]
    assert (tmp_path / "speed.png").is_file()
    assert [claim["at_most"] for claim in found["claims"]] == [0.35, None, None]
    monkeypatch.setattr(speed, "opened", lambda *_: pytest.fail("measured already"))
    assert run(tmp_path, "--only=table_1,figures", "--resume")["main"]["rows"] == found["rows"]


def test_cells_of_a_gpu_stay_empty_on_a_cpu(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "opened", lambda *_: pytest.fail("a CPU in a table of GPUs"))
    assert speed.main(["--runtime=jax", f"--output={tmp_path / 'speed.json'}"]) == 0
    assert "Nothing was measured" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_gpu_is_measured_at_every_precision_and_batch(tiny, tmp_path, monkeypatch):
    """By a stand-in for a GPU; only some cells, and the others in a later run."""
    monkeypatch.setattr(speed.machine, "on_gpu", lambda: True)
    monkeypatch.setitem(speed.MODULES, ("table_1", (576, 16)), {None: 3.2, "ens_dw": 0.215})
    found = run(tmp_path, "--runtime=jax", "--only=table_1", "--repeats=2")["jax"]["rows"]
    assert {(row["precision"], row["batch"]) for row in found} == {
        (precision, batch) for precision in ("float32", "tf32", "bfloat16") for batch in (1, 32)
    }
    assert len(found) == 12 and all(row["ms"] > 0 for row in found)
    both = run(tmp_path, "--runtime=jax", "--only=table_a4", "--repeats=2")["jax"]["rows"]
    assert both[:12] == found  # parts that are not wanted stay
    assert [(row["precision"], row["paper"]) for row in both[12:]] == [
        ("float32", 3.2),
        ("float32", 0.215),
        ("float16", 1.14),
        ("float16", 0.271),
    ]
    monkeypatch.setattr(speed, "opened", lambda *_: pytest.fail("measured already"))
    assert run(tmp_path, "--runtime=jax", "--only=table_1,table_a4", "--repeats=2", "--resume")["jax"]["rows"] == both


@pytest.mark.parametrize("kind", [None, "conv", "spvit"])
def test_both_runtimes_time_the_same_function(kind):
    """A loop applies it to its own output; a backbone is called again with images that depend on its output."""
    forms = [calls.of_module((2, 3), 32, 2, kind, onnx=onnx) for onnx in (True, False)]
    x = jax.random.normal(jax.random.key(0), (1, 6, 32))
    onnx, in_jax = (form.function(form.module, x) for form in forms)
    np.testing.assert_allclose(onnx, in_jax, atol=1e-6)
    twice = forms[1].function(forms[1].module, in_jax)
    np.testing.assert_allclose(calls.in_jax(forms[1], "float32", 1, 2)(), twice, atol=1e-5)
    replaced = ((1, kind),) if kind else ()
    both = [calls.of_backbone("dinov2_vit_l14", (28, 42), replaced, onnx=onnx, **TINY) for onnx in (True, False)]
    images = jnp.ones((1, 28, 42, 3))
    np.testing.assert_allclose(*(each.function(each.module, images) for each in both), atol=1e-5)
    assert calls.in_jax(both[1], "bfloat16", 2, 2)().dtype == "bfloat16"


def test_all_rows_of_the_paper_have_a_cell():
    cells = speed.variants("onnx", speed.PARTS)
    number = {part: sum(cell.part == part for cell in cells) for part in speed.PARTS}
    assert number == dict(table_1=5, table_a3=6, table_a4=0, table_2=10, table_4=8, figures=13)
    assert all(cell.part == "figures" or variant.paper for cell, variant in cells.items())
    assert cells["table_4", "clip_l14", "DW", 12, "float32", 1].paper == 128.38
    attention, dw = (cells["table_2", "dinov2_l14", *which, "float32", 1] for which in (("MhSA", 0), ("DW", 12)))
    assert 100 * (1 - dw.paper / attention.paper) == pytest.approx(17.2, abs=0.05)  # the paper's own percentage
    assert all((variant.desktop is not None) == (cell.part == "table_a3") for cell, variant in cells.items())
    claims = speed.claims_of([speed.empty(*one) for one in cells.items()])
    assert [claim.at_most for claim in claims] == [0.35, 0.05, *[None] * (len(claims) - 2)]
    assert len(speed.variants("jax", speed.PARTS)) == 6 * (5 + 6 + 10 + 8 + 13) + 2 * 3


def test_every_way_replaces_as_many_heads():
    for (way, number), replaced in speed.ways(6).items():
        heads = sum(len(one[3]) if len(one) > 3 else 16 for one in replaced)
        assert heads == pytest.approx(16 * number, abs=3), way  # heads are whole
