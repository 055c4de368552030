"""Cost, speed and memory of octic ViTs: cases by hand, and each script from end to end on something tiny."""

from types import SimpleNamespace

import pytest

from experiments import compiled_models
from experiments.machine import Memory
from experiments.tables.octic import complexity, flops_width, scaling
from tests.experiments.scripts import ONCE, run


class TestScaling:
    def test_end_to_end(self, tmp_path):
        """Models that do not fit, so that a block of each is timed."""
        options = ("--quick", "--models=l", "--batch=2", "--memory_gib=1e-6", "--precision=bfloat16", *ONCE)
        status, written = run(scaling, tmp_path, *options)
        row = written["rows"]["l"]
        assert status == 0 and row["unit"] == "one block" and row["flops"] == pytest.approx(4.578, abs=1e-3)
        assert row["throughput"] == pytest.approx(row["plain_milliseconds"] / row["octic_milliseconds"])
        assert row["plain_per_second"] == pytest.approx(2e3 / row["plain_milliseconds"])
        assert row["memory"] == pytest.approx(row["plain_mib"] / row["octic_mib"]) and row["plain_mib"] > 0
        assert any("throughput ratio of a block" in claim["text"] for claim in written["claims"])
        with pytest.raises(ValueError, match="was measured with models=.*; name another one with --entry"):
            scaling.main([*options, "--models=h", f"--output={tmp_path / 'results.json'}"])

    def test_all_flops_are_the_papers(self):
        for key in scaling.MODELS:
            assert abs(scaling.flops(key) - scaling.PAPER[key]["flops"]) <= scaling.FLOPS_TOLERANCE

    def test_targets(self):
        row = dict(model="ViT-H", unit="model", flops=4.58, throughput=2.9, memory=2.5, octic_mib=1000.0)
        flops, throughput, memory = scaling.claims_of({"h": row}, judged=True)
        assert flops.holds and throughput.holds is False and throughput.at_least == 3.0
        assert memory.holds and memory.at_most == 1141  # the ratio is missed, the paper's MiB are not
        memory = scaling.claims_of({"h": {**row, "octic_mib": 1200.0}}, judged=True)[2]
        assert memory.holds is False
        memory = scaling.claims_of({"h": {**row, "memory": 2.9}}, judged=True)[2]
        assert memory.holds and memory.at_least == 2.88
        assert scaling.claims_of({"g": {**row, "memory": 4.0}}, judged=True)[-1].holds is False
        unmeasured = scaling.claims_of({"h": dict(model="ViT-H", flops=4.58)}, judged=True)
        assert [claim.holds for claim in unmeasured] == [True, None, None]


class TestComplexity:
    def test_end_to_end(self, tmp_path):
        options = ("--quick", "--models=l", "--families=D8", "--phases=forward", "--batch=2", *ONCE)
        status, written = run(complexity, tmp_path, *options)
        plain, octic = written["rows"]["l"]["plain"], written["rows"]["l"]["D8"]
        assert status == 0 and set(written["rows"]["l"]) == {"plain", "D8"}
        assert plain["forward_ratio"] == 1 and plain["forward_mib"] > octic["forward_mib"] > 0
        ratio = octic["forward_throughput"] / plain["forward_throughput"]
        assert octic["forward_ratio"] == pytest.approx(ratio)
        assert plain["flops"] == pytest.approx(61.8, abs=0.1) and octic["parameters"] == pytest.approx(39.85, abs=0.01)
        assert (tmp_path / "results.png").stat().st_size > 0

    def test_a_training_step(self):
        """The state goes from step to step; its memory is given back."""
        options = SimpleNamespace(quick=True, batch=2, precision="mixed")
        program = complexity.build("l", "plain", "train", "full", options)
        call = program.start()
        assert call()["good"] and call()["good"]
        state = 4 * compiled_models.parameters("vit_l16", **complexity.TINY)  # parameters, moments, averages
        assert program.memory.held == pytest.approx(4 * state, rel=0.1)
        assert program.memory.peak < program.memory.held + 4 * state  # the new state lies where the old one was

    def test_targets(self):
        rows = {"H8": dict(forward_ratio=1.4), "D8": dict(train_ratio=2.6), "timm": dict(forward_ratio=1.25)}
        h8, d8, peer = complexity.claims_of("h", rows, judged=True)
        assert h8.holds is False and d8.holds and peer.holds is False and peer.ours == 0.8
        (peer,) = complexity.claims_of("l", {}, judged=True)
        assert peer.holds is None

    def test_figures(self):
        program = compiled_models.Compiled(start=None, memory=Memory(held=0, peak=3 * 2**20))
        figures = complexity.figures("forward", 0.5, 0.25, program, batch=64)
        assert figures == dict(forward_throughput=256, forward_ratio=2, forward_mib=3)

    def test_the_papers_ratios(self):
        assert complexity.PAPER["h"]["D8"]["ratio_paper"] == pytest.approx(1.578, abs=1e-3)


class TestWidth:
    def test_end_to_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(flops_width, "WIDTHS", (256, 1024))
        status, written = run(flops_width, tmp_path)
        assert status == 0 and [row["width"] for row in written["rows"]] == [256, 1024]
        # 12 D^2 + 2 N D over 12 D^2 3/16 + 2 N D, with D = 1024 and N = 196
        assert written["rows"][1]["matmul"] == pytest.approx((12 * 1024 + 392) / (2304 + 392))
        assert (tmp_path / "results.png").stat().st_size > 0

    def test_intensity(self):
        # 2 * 2 * 3 * 5 operations; (2 * 3 + 15 + 2 * 5) values of two bytes
        assert flops_width.intensity(2, 3, 5, weights=15, macs=30) == pytest.approx(60 / 62)
        values = flops_width.intensities(8, tokens=1)  # F = 32: 8 in, 256 weights, 32 out
        assert values["standard"] == pytest.approx(256 / 296)
        assert values["octic"] == pytest.approx(48 / (8 + 32 + 32))
        assert values["E"] == pytest.approx(32 / (2 * 2 + 16 + 2 * 8))
        assert values["lines"] == pytest.approx(4 / (1 + 4 + 4))

    def test_crossover(self):
        # D F / 3 = 13/3 B (D + F) and D F / 2 = 3 B (D + F), with F = 4D
        crossings = flops_width.crossovers()
        assert crossings["octic"] == pytest.approx(16.25 * 196) and crossings["E"] == pytest.approx(7.5 * 196)
        assert crossings["lines"] is None
