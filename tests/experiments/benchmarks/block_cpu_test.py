"""The benchmark of one block, from end to end on something tiny."""

import json

from experiments.benchmarks import block_cpu
from tests.experiments.scripts import ONCE


class TestBlockOnACpu:
    def test_end_to_end(self, tmp_path, monkeypatch):
        monkeypatch.setitem(block_cpu.SIZES, 384, (6, 9, 2))
        output = tmp_path / "out.json"
        options = [*ONCE, "--peer=none", "--widths=384", "--types=float32,bfloat16", f"--output={output}"]
        assert block_cpu.main(options) == 0  # without a peer nothing is judged
        results = json.loads(output.read_text())["main"]
        assert [row["type"] for row in results["rows"]] == ["float32", "bfloat16"]
        assert all(row["dense"] > 0 and row["octic"] > 0 for row in results["rows"])
        assert [claim["holds"] for claim in results["claims"]] == [None, None]

    def test_targets(self):
        row = dict(width=384, type="float32", octic_over_torch=1.01, dense_over_torch=1.29)
        assert [claim.holds for claim in block_cpu.claims_of(row)] == [False, True]
        assert not block_cpu.claims_of(row | dict(type="bfloat16"))
