"""The benchmark of GPUs: every kind of cell at toy size on a CPU, and how runs go on."""

import json
import sys

import jax
import pytest

from equivit.configs import octic_h
from experiments.benchmarks import gpu, gpu_cells
from tests.experiments.scripts import ONCE, status

# One of each kind, and the forms that others do not have.
KINDS = (
    "ViT-H/14, D8, mixed, scan, gradient, remat dots",
    "ViT-L/16, plain, bfloat16, unrolled, forward",
    "ViT-L/16, D8, mixed, unrolled, kernels, forward",
    "ViT-H/14, PyTorch, plain, gradient",
    "kernel, d8_gelu gradient, ViT-H",
    "swin_t, by input, gradient",
    "cvt_13, adaptive, forward",
    "octic_h:D8, unrolled, training step",
)
PEER = "import json, sys; q = json.loads(sys.argv[1]); print(json.dumps(dict(milliseconds=q['tokens'], torch='0')))"


@pytest.fixture
def chosen(monkeypatch, tmp_path):
    """The cells of KINDS, with a stand-in for torch's script, and training steps of one block."""
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    monkeypatch.setattr(gpu_cells, "PEER", script)
    every, config_of = gpu_cells.cells, octic_h.get_config

    def shallow(mode):
        config = config_of(mode)
        with config.unlocked():
            config.model.depth = 1
        return config

    monkeypatch.setattr(octic_h, "get_config", shallow)
    monkeypatch.setattr(gpu_cells, "cells", lambda options: [c for c in every(options) if c.name in KINDS])


def test_every_kind_of_cell(chosen, tmp_path, capsys):
    output = tmp_path / "gpu.json"
    arguments = [f"--output={output}", "--quick", f"--peer={sys.executable}", *ONCE]
    assert status(gpu, arguments) == 0
    (found,) = json.loads(output.read_text()).values()
    assert set(found) == set(KINDS) and all(cell["commit"] for cell in found.values())
    assert found["ViT-H/14, PyTorch, plain, gradient"]["milliseconds"] == 1 + 2 * 2
    assert all(cell.get("milliseconds", 1) > 0 for cell in found.values())
    # Products of a stack of two blocks, rounded to bfloat16 at other places.
    assert 0 < found["ViT-L/16, D8, mixed, unrolled, kernels, forward"]["deviation"] < 0.01
    assert {row["variant"] for row in found["kernel, d8_gelu gradient, ViT-H"]["rows"]} == {"xla", "eight"}
    capsys.readouterr()
    assert status(gpu, [f"--output={output}", "--dry"]) == 0
    assert capsys.readouterr().out.count(" ms\n") == len(KINDS) - 1


class TestRuns:
    @pytest.fixture(autouse=True)
    def cells(self, monkeypatch):
        self.measured = []

        def measure(name, options):
            self.measured.append(name)
            if name == "broken":
                raise RuntimeError("out of memory")
            return dict(milliseconds=1.0)

        names = ("first", "broken", "last")
        made = [gpu_cells.Cell(name, lambda options, name=name: measure(name, options)) for name in names]
        monkeypatch.setattr(gpu_cells, "cells", lambda options: made)

    def run(self, output, *more):
        return status(gpu, [f"--output={output}", "--quick", *more])

    def test_a_run_goes_on_where_the_last_one_stopped(self, tmp_path):
        output = tmp_path / "gpu.json"
        assert self.run(output, "--minutes=0") == 0 and not self.measured and not output.exists()
        assert self.run(output) == 1 and self.measured == ["first", "broken", "last"]
        assert self.run(output) == 1 and self.measured[3:] == ["broken"]
        (found,) = json.loads(output.read_text()).values()
        assert set(found) == {"first", "last"}

    def test_cards_have_entries_of_their_own(self, tmp_path):
        output = tmp_path / "gpu.json"
        output.write_text(json.dumps({"another card": {"first": dict(milliseconds=2.0)}}))
        self.run(output)
        found = json.loads(output.read_text())
        assert set(found) == {"another card", f"{jax.local_devices()[0].device_kind}, quick"}
        assert found["another card"] == {"first": dict(milliseconds=2.0)} and "first" in self.measured

    def test_a_cell_of_other_settings_is_measured_again(self, tmp_path):
        output = tmp_path / "gpu.json"
        output.write_text(json.dumps({"card": {"first": dict(milliseconds=2.0)}}))  # from before settings were stored
        for runs in (20, 5, 5):
            self.run(output, "--entry=card", "--only=first", "--only=last", f"--runs={runs}")
        assert self.measured == ["last", "last"]
        found = json.loads(output.read_text())["card"]
        assert found["last"]["settings"] == dict(runs=5, warmup=3, quick=True)
        assert {"device", "versions", "commit"} < set(found["last"])


def test_it_needs_a_gpu(tmp_path, capsys):
    assert status(gpu, [f"--output={tmp_path / 'gpu.json'}"]) == 1
    assert capsys.readouterr().err == (
        "error: benchmarks.gpu needs a GPU, and this machine has none; --dry lists what it would measure.\n"
    )


def test_every_figure_of_the_json_is_of_a_cell():
    known = {cell.name for cell in gpu_cells.cells(gpu._options(["--dry"]))}
    for card in json.loads(gpu._options([]).output.read_text()).values():
        assert set(card) <= known
