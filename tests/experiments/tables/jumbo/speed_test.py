"""The scripts about Jumbo: what they compute by hand-worked cases, and each from end to end on something tiny."""

import json

import pytest

from equivit.configs import jumbo_in1k
from experiments import machine
from experiments.tables.jumbo import costs, figures, paper_numbers, speed
from experiments.tables.jumbo.speed import Variant


def test_counts_stand_beside_the_papers():
    small = next(cost for cost in paper_numbers.COSTS if cost["label"] == "ViT-S, Jumbo")
    row = costs.row(small)
    assert abs(row["parameters"] - 88.33) < 0.005 and abs(row["gflops"] - 4.57) < 0.01
    assert all(claim.holds for claim in costs.claims_of([row], [costs.layer(384, 196)]))
    wrong = costs.row(small | dict(options={**small["options"], "jumbo": 5}))
    assert not any(claim.holds for claim in costs.claims_of([wrong], [costs.layer(384, 196)])[:2])


TINY = dict(image_size=(32, 32), depth=1, width=32, num_heads=1)


def test_speed_runs_from_end_to_end_and_calls_add_up(tmp_path, monkeypatch, capsys):
    registers = Variant("7", "nano,registers", "register_vit_nano16", TINY, 128, paper_speed=107.0)
    jumbo = Variant("8", "nano", "jumbo_vit_nano16", TINY, 128, paper_speed=103.1)
    twelve = jumbo._replace(table="12", words="nano,j=6")
    wrong = jumbo._replace(table="9", words="nano,j=7", name="no_vit")
    monkeypatch.setattr(speed, "variants", lambda: [registers, jumbo, twelve, wrong])
    options = ["--batch=1", "--runs=1", "--warmup=1", f"--output={tmp_path / 'speed.json'}"]
    assert speed.main([*options, "--tables=7,8"]) == 0
    first, second = json.loads((tmp_path / "speed.json").read_text())["main"]["rows"]
    assert (first["words"], first["paper_speed"], second["folded"]) == ("nano,registers", 107000, False)
    assert second["mib"] > first["mib"] and first["commit"] and "Table 7: registers, 128 px" in capsys.readouterr().out
    assert (tmp_path / "speed.png").is_file()
    assert speed.main([*options, "--tables=9,12"]) == 1  # one of them cannot be built; the others stay
    written = json.loads((tmp_path / "speed.json").read_text())["main"]
    assert [row["table"] for row in written["rows"]] == ["7", "8", "12"] and written["rows"][:2] == [first, second]
    assert list(written["failed"]) == ["nano,j=7, 128 px"]
    with pytest.raises(ValueError, match="entry main was measured with batch=1"):
        speed.main([*options, "--batch=2"])


def test_every_row_of_the_tables_is_timed():
    found = speed.variants()
    counts = {table: len([v for v in found if v.table == table and not v.folded]) for table in speed.TITLES}
    expected = {"1": 4, "4": 5, "5": 7, "6": 16, "7": 6, "8": 4, "9": 3, "10": 3, "11": 2, "12": 32, "BiXT": 2}
    assert counts == expected and len({tuple(getattr(v, field) for field in speed.KEY) for v in found}) == len(found)
    assert {v.words for v in found if v.folded} == set(jumbo_in1k.BASELINES) - {"bixt_ti_p16"}
    eight = next(v for v in found if v.words == "tiny,registers,r=8")
    assert (eight.options["registers"], eight.options["image_size"], eight.paper_speed) == (8, (128, 128), 65.7)
    twelve = [v for v in found if (v.table, v.words) == ("12", "small,j=2,multiplier=2")]
    assert [(v.options["jumbo"], v.options["jumbo_multiplier"], v.paper_speed) for v in twelve] == [
        (2, 2, 27.2), (2, 2, 8.7)
    ]  # fmt: skip


def test_claims_hold_for_the_papers_own_speeds(monkeypatch):
    monkeypatch.setattr(machine, "on_gpu", lambda: True)
    rows = [
        dict(table=v.table, words=v.words, pixels=v.pixels, speed=1000 * v.paper_speed)
        for v in speed.variants()
        if v.paper_speed
    ]
    claims = speed.claims_of(rows)
    assert len(claims) == 7 and all(claim.holds for claim in claims)
    for row in rows:
        row["speed"] *= 10 if row["words"] == "efficientvit_b1" else 0.5 if row["words"] == "ViT-B, Jumbo" else 1
    assert [claim.holds for claim in speed.claims_of(rows)] == [True, True, False, True, True, False, False]


def test_figures_tell_our_runs_from_the_papers_accuracy():
    rows = [
        dict(table="6", words="nano", pixels=224, speed=10.0),
        dict(table="12", words="tiny", pixels=224, speed=1.0),
    ]
    rows += [dict(table="6", words="shvit_s1", pixels=224, speed=speed) for speed in (3.0, 5.0, 4.0)]
    rows += [dict(table="5", words="ViT-B, Jumbo", pixels=224, speed=2.0)]
    points = figures.points(rows, {("nano", 224): 73.0}, 224, "in1k")
    assert points["ViT+Jumbo"] == [(10.0, 73.0, True)] and points["SHViT"] == [(5.0, 67.9, False)]
    assert figures.points(rows, {}, 224, "in21k")["ViT+Jumbo"] == [(2.0, 46.95, False)]
    papers = figures.points(figures.papers(), {}, 128, "in1k")
    assert [len(found) for found in papers.values()] == [4, 3, 3, 3, 2, 0]
    assert papers["ViT+Jumbo"][1] == (103100, 68.4, False)
