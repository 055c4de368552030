"""The rate of views: both sides make the same views, and the script runs from end to end."""

import json

import numpy as np

from experiments.benchmarks import crops_rate


def test_pillow_alone_makes_the_views_of_the_pipeline_but_for_the_blur():
    pipeline, plans = crops_rate.pipeline(2, device=False)
    made, pillow, compared = pipeline.make(0), crops_rate.alone(pipeline.source, plans), 0
    order = pipeline.order.rows(0).examples.tolist()
    for row, index in enumerate(order):
        ours = [*made["global_crops"][row], *made["local_crops"][row]]
        for view, first, second in zip(plans[index], ours, pillow[index], strict=True):
            if not view.changes.sigma:
                assert np.array_equal(first, second)
                compared += 1
            assert np.abs(first.astype(int) - second).mean() < 3  # the blurs differ by some levels
    assert 4 <= compared < 20


def test_the_script_writes_both_ratios(tmp_path):
    output = tmp_path / "rate.json"
    status = crops_rate.main(["--images=1", "--runs=1", "--warmup=1", f"--output={output}"])
    written = json.loads(output.read_text())["main"]
    assert [row["name"] for row in written["rows"]] == ["crops and colours", "crops"]
    assert all(row["ratio"] == row["pipeline"] / row["pillow"] for row in written["rows"])
    assert status == int(any(claim["holds"] is False for claim in written["claims"]))
