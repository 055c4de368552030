"""The time of the depthwise module, on something tiny."""

from experiments.benchmarks import depthwise_module
from tests.experiments.scripts import ONCE, run


def test_times_are_written(tmp_path):
    """Without torch its column is empty, and nothing about it is judged."""
    options = ["--peer=none", *ONCE, "--widths=64", "--tokens=9", "--kernels=3"]
    _, found = run(depthwise_module, tmp_path, *options)
    (row,) = found["rows"]
    assert row["forward"] > 0 and row["gradients"] > 0 and row["forward_over_torch"] is None
    assert [claim["holds"] for claim in found["claims"]] == [None]
