"""The SAR demonstration: what it prints of figures made by hand."""

import argparse
import json

import pytest

from experiments.studies import jumbo_sar


@pytest.mark.parametrize(("adapted", "status"), [(0.5, 0), (0.2, 1)])
def test_the_table_and_the_exit_status(adapted, status, tmp_path, capsys):
    names = ("contrast", "pixelate")
    result = [{"unadapted_top1": 0.4, "top1": adapted, "kept": 0.25}]
    runs = {kind: dict.fromkeys(("clean", *names), result) for kind in jumbo_sar.MODELS}
    options = argparse.Namespace(
        lr=0.001, epochs=20, seeds=[0], override=[], output=tmp_path / "sar.json", entry="main"
    )
    assert jumbo_sar.show(runs, names, options) == status
    output = capsys.readouterr().out
    rows = {line[:22].strip(): line[22:].split() for line in output.splitlines()}
    assert rows[""] == ["clean", "Contr.", "Pixel", "Avg."]
    assert rows["ours Jumbo+SAR"] == [f"{100 * adapted:.1f}"] * 4
    assert rows["paper Jumbo"] == ["49.4", "47.5", "48.5"]  # of these two; 48.45
    assert "one seed resolves nothing" in output and "25 % of the images" in output
    written = json.loads((tmp_path / "sar.json").read_text())["main"]
    assert written["runs"]["Jumbo"]["contrast"] == result
    assert written["gains"]["Jumbo+SAR - Jumbo"] == dict(gap=pytest.approx(adapted - 0.4), standard_error=None, p=None)
