"""The script of the replacements' counts and times, on something tiny."""

import json

from experiments import depthwise_layers


def test_counts_are_the_papers_and_times_are_written(tmp_path, capsys):
    """Without torch its column is empty, and nothing about it is judged; the counts of both tables hold."""
    output = tmp_path / "out.json"
    options = ["--peer=none", "--runs=1", "--warmup=1", "--widths=64", "--tokens=9", "--kernels=3"]
    assert depthwise_layers.main([*options, f"--output={output}"]) == 0
    found, printed = json.loads(output.read_text()), capsys.readouterr().out
    (row,) = found["rows"]
    assert row["forward"] > 0 and row["gradients"] > 0 and row["forward_over_torch"] is None
    holds = [claim["holds"] for claim in found["claims"]]
    assert holds.count(True) == 3 * 5 + 2 * 6 and holds.count(None) == 1 and "12.08" in printed


def test_what_differs_from_the_paper_fails():
    row = depthwise_layers.count("dw", 12, 256, ("0.61", "1.189"))
    assert [claim.holds for claim in depthwise_layers.count_claims(row)] == [True, True]
    for wrong in (dict(gflop=0.595), dict(parameters=1.1875), dict(paper_gflop="0.63")):
        assert False in [claim.holds for claim in depthwise_layers.count_claims(row | wrong)], wrong
