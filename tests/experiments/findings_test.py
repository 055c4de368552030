"""Claims, tables and the JSON file of a script."""

from types import SimpleNamespace

import jax
import pytest

from experiments import findings, machine
from experiments.findings import Claim
from experiments.timing import Budget


@pytest.mark.parametrize(
    ("bounds", "holds"),
    [
        (dict(at_least=2.0), True),
        (dict(at_least=2.1), False),
        (dict(at_most=2.0), True),
        (dict(at_most=1.9), False),
        (dict(at_least=1.0, at_most=3.0), True),
        (dict(at_least=3.0, judged=False), None),
    ],
)
def test_claims(bounds, holds):
    assert Claim("ratio", 2.0, **bounds).holds is holds
    assert Claim("ratio", None, **bounds).holds is None


def test_tables_leave_missing_cells_empty():
    rows = [dict(a=1.234, b="x"), dict(a=None), dict(a=12345.6, b=1)]
    assert findings.table(rows, dict(a="ours", b="")).splitlines() == [" ours   ", " 1.23  x", "    -  -", "12346  1"]


def test_results_carry_machine_versions_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)  # no repository
    monkeypatch.setenv("EQUIVIT_COMMIT", "abc")
    options = SimpleNamespace(output=tmp_path / "new/results.json", entry="main")
    assert findings.finish(options, dict(rows=[1]), [Claim("ratio", 2.0, at_least=2.0)]) == 0
    written = findings.read(options)["main"]
    assert written["rows"] == [1] and written["commit"] == "abc" and written["versions"]["jax"] == jax.__version__
    assert written["device"]["kind"] == "cpu" and written["device"]["name"]
    assert written["claims"][0]["holds"] and written["left_out"] == [] and written["failed"] == {}
    assert findings.finish(options, {}, [Claim("ratio", 2.0, at_least=2.1)]) == 1
    assert findings.finish(options, {}, [Claim("ratio", 2.0, at_least=2.1, judged=False)]) == 0
    broken = Budget(1)
    broken.failed["kernel"] = "RuntimeError: no"
    assert findings.finish(options, {}, [], broken) == 1


def test_the_same_results_keep_the_commit_that_made_them(tmp_path, monkeypatch):
    options = SimpleNamespace(output=tmp_path / "study.json", entry="main")
    for commit, value, expected in (("a", 1.0, "a"), ("b", 1.0, "a"), ("c", 2.0, "c")):
        monkeypatch.setattr(machine, "commit", lambda commit=commit: commit)
        findings.write(options, dict(rows=((1, value),), rates={3: value}))
        assert findings.read(options)["main"]["commit"] == expected


def test_an_entry_leaves_the_others_as_they_are(tmp_path):
    for entry in ("main", "h100", "main"):
        options = SimpleNamespace(output=tmp_path / "speed.json", entry=entry)
        findings.write(options, dict(rows=[entry]))
        assert findings.read(options)[entry]["rows"] == [entry]
    assert list(findings.read(options)) == ["main", "h100"]
    assert findings.picture(options).name == "speed.png"
    options.entry = "h100"
    assert findings.picture(options).name == "speed_h100.png"
