"""The benchmark of compile time, from end to end on something tiny."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments.benchmarks import compile_time
from tests.experiments.scripts import run


class TestCompileTime:
    @pytest.fixture
    def compiling(self):
        """Without the cache of tests/conftest.py: what is compiled is timed."""
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX looks at the setting once
        yield
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()

    def test_end_to_end(self, tmp_path, monkeypatch, compiling):
        monkeypatch.setattr(compile_time, "FAMILIES", {"plain": "vit_ti16"})
        monkeypatch.setattr(compile_time, "REMAT", ("full",))
        _, written = run(compile_time, tmp_path, "--runs=1", "--warmup=0", "--depths", "3")
        (row,) = written["rows"]
        assert row["depth"] == 3 and row["rounds"] == 1 and min(row["lines"], row["instructions"]) > 100
        assert row["seconds"] == pytest.approx(row["trace_seconds"] + row["xla_seconds"])
        assert row["fastest"] == row["seconds"] == row["slowest"] and row["cpu_seconds"] > 0

    def test_targets(self):
        rows = [
            dict(family="plain", remat="none", depth=depth, cpu_seconds=seconds, lines=lines)
            for depth, seconds, lines in ((2, 10.0, 100), (24, 15.0, 100), (48, 25.0, 105))
        ]
        claims = compile_time.claims_of(rows, (2, 24, 48))
        assert claims[0].ours == 2.5 and claims[0].holds is False and claims[1].holds
        assert all(claim.holds is None for claim in claims[2:])
