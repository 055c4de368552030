"""Claims, tables and the JSON file of a script."""

import json
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


def test_a_kept_result_is_computed_again_for_other_settings(tmp_path):
    computed = []

    def square(number):
        computed.append(number)
        return [number**2]

    for number in (2, 2, 3, 3):
        found = findings.cached(tmp_path / "square.json", lambda n=number: square(n), dict(sides=(number,)))
        assert found == [number**2]
    assert computed == [2, 3]
    for earlier in ([4], dict(settings=dict(sides=[2]), scores=[4])):  # files of earlier versions
        (tmp_path / "square.json").write_text(json.dumps(earlier))
        assert findings.cached(tmp_path / "square.json", lambda: square(2), dict(sides=(2,))) == [4]
    assert computed == [2, 3, 2, 2]


class TestEntry:
    """A script that squares numbers."""

    @pytest.fixture(autouse=True)
    def script(self, tmp_path, monkeypatch):
        self.options = SimpleNamespace(output=tmp_path / "squares.json", entry="main")
        self.commit, self.device = "a", "one"
        monkeypatch.setattr(machine, "commit", lambda: self.commit)
        monkeypatch.setattr(machine, "device", lambda: dict(name=self.device))

    def begin(self, *numbers, runs=3):
        entry = findings.Entry(self.options, dict(runs=runs), Budget(1))
        entry.keep(("number",), [(number,) for number in numbers])
        return entry

    def square(self, *numbers):
        entry = self.begin(*numbers)
        entry.measured(lambda number: dict(number=number, square=number**2), dict(square="square"))
        return entry.finish([])

    def written(self):
        return {row["number"]: row["commit"] for row in json.loads(self.options.output.read_text())["main"]["rows"]}

    def test_rows_that_a_run_does_not_measure_stay_with_their_commits(self):
        for self.commit, numbers in (("a", (1, 2, 3)), ("b", (2,)), ("c", (4,))):
            assert self.square(*numbers) == 0
        assert list(self.written().items()) == [(1, "a"), (2, "b"), (3, "a"), (4, "c")]

    def test_rows_without_a_commit_have_that_of_their_entry(self):
        findings.write(self.options, dict(rows=[dict(number=1, square=1)]))
        self.commit = "b"
        self.square(2)
        assert self.written() == {1: "a", 2: "b"}

    def test_an_interrupted_run_keeps_what_it_measured(self):
        entry = self.begin(1, 2)

        def measure(number):
            if number == 2:
                raise KeyboardInterrupt
            return dict(number=number)

        with pytest.raises(KeyboardInterrupt):
            entry.measured(measure, dict(number="number"))
        assert self.written() == {1: "a"} and "claims" not in findings.read(self.options)["main"]

    def test_other_settings_are_refused(self):
        self.square(1)
        with pytest.raises(ValueError, match=r"entry main was measured with runs=3, and this run has 5; name another"):
            self.begin(1, runs=5)

    def test_another_machine_replaces_all_rows_or_none(self):
        self.square(1, 2)
        self.device = "two"
        with pytest.raises(ValueError, match=r"has rows of one that this run does not measure, such as number 2;"):
            self.begin(1)
        assert self.begin(1, 2, 3).finish([]) == 0  # nothing fitted into its time
        assert findings.read(self.options)["main"]["device"]["name"] == "one" and list(self.written()) == [1, 2]
        self.square(1, 2, 3)
        assert findings.read(self.options)["main"]["device"]["name"] == "two" and list(self.written()) == [1, 2, 3]

    def test_other_versions_are_as_another_machine(self, monkeypatch):
        self.square(1, 2)
        monkeypatch.setattr(machine, "versions", lambda: dict(jax="0.0"))
        with pytest.raises(ValueError, match=rf"has rows of .*jax {jax.__version__}.* such as number 1;"):
            self.begin(2)


def test_an_entry_leaves_the_others_as_they_are(tmp_path):
    for entry in ("main", "h100", "main"):
        options = SimpleNamespace(output=tmp_path / "speed.json", entry=entry)
        findings.write(options, dict(rows=[entry]))
        assert findings.read(options)[entry]["rows"] == [entry]
    assert list(findings.read(options)) == ["main", "h100"]
    assert findings.picture(options).name == "speed.png"
    options.entry = "h100"
    assert findings.picture(options).name == "speed_h100.png"
