"""Tables and ranks of the time series, by hand-worked cases and from end to end on made-up results."""

import json
import re

import pytest

from experiments.tables.jumbo import timeseries as script
from tests.experiments import scripts


def result(name, model, best, mean, channels=1):
    return dict(data=name, model=model, patches=8, channels=channels, best=dict(test=best), test_mean=mean) | dict(
        runs=[{}] * 12, epochs=3, seconds=60.0, device="a test", recipe=dict(batch_size=256, seed=0)
    )


def write(folder, results):
    for r in results:
        (folder / f"{r['data']}-{r['model']}-8.json").write_text(json.dumps(r))


@pytest.mark.parametrize(
    "values,expected",
    [((3, 2, 1), (1, 2, 3)), ((1, 2, 3), (3, 2, 1)), ((5, 5, 1), (1.5, 1.5, 3)), ((2, 2, 2), (2, 2, 2))],
)
def test_ranks_of_equals_are_shared(values, expected):
    assert script.ranks(values) == expected


def test_means_that_rounding_alone_tells_apart_are_equals():
    means = (0.9833333492279053, 0.9833332896232605, 0.9958333373069763)
    results = [result("Waves", m, 1.0, mean) for m, mean in zip(script.MODELS, means, strict=True)]
    assert script.mean_ranks(script.accuracies(results)["univariate", "mean", 8]) == (2.5, 2.5, 1)


def test_the_papers_tables_fit_together():
    claims = script.claims_of(script.paper())
    assert len(claims) == 8 and all(claim.holds for claim in claims)
    swapped = script.paper()
    for name, three in swapped["univariate", "best", 8].items():
        swapped["univariate", "best", 8][name] = three[::-1]
    assert not all(claim.holds for claim in script.claims_of(swapped))


def test_from_end_to_end(tmp_path, capsys):
    crop, waves = (0.8, 0.82, 0.84), (0.9, 0.7, 0.9)
    results = [result("Crop", m, b, b - 0.1) for m, b in zip(script.MODELS, crop, strict=True)]
    results += [result("Waves", m, b, b - 0.2, channels=3) for m, b in zip(script.MODELS, waves, strict=True)]
    results.append(result("Half", "patchtst", 0.5, 0.4))  # a set without the other two models has no ranks
    write(tmp_path, results)
    assert scripts.status(script, [str(tmp_path), f"--output={tmp_path / 'out' / 'a.json'}"]) == 0
    written = json.loads((tmp_path / "out" / "a.json").read_text())["main"]
    everything = {r["kind"]: tuple(r[m] for m in script.MODELS) for r in written["ranks"] if r["group"] == "all"}
    assert everything == {"best": (2.25, 2.5, 1.25), "mean": (2.25, 2.5, 1.25)}
    text = capsys.readouterr().out
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["Crop", "8", "best", "80.0 (80.9)", "82.0 (81.2)", "84.0 (82.0)"] in rows
    assert ["Half", "8", "best", "50.0", "-", "-"] in rows
    assert ["InsectSound", "8", "mean", "(76.7)", "(76.0)", "(78.7)"] in rows
    assert "Cells are empty where there are no data or no result: Sleep, InsectSound, " in text


def test_results_of_two_recipes_are_refused(tmp_path, capsys):
    other = result("Crop", "patchtst", 0.5, 0.4) | dict(recipe=dict(batch_size=1, seed=0))
    write(tmp_path, [result("Crop", "patchtst_jumbo", 0.5, 0.4), other])
    with pytest.raises(ValueError, match="results of several recipes"):
        script.read(tmp_path)
    assert scripts.status(script, [str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/nowhere: there are no results of equivit.sweep in it.\n"
