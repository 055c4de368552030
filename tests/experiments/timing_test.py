"""Timing in turn and the budget of minutes, by hand-worked cases."""

import pytest

from experiments import timing
from experiments.timing import Budget


class Calls:
    """Variants that note when they are called."""

    def __init__(self, *names):
        self.log = []
        self.variants = {name: lambda name=name: self.log.append(name) for name in names}


def test_variants_take_turns_and_the_order_turns_round():
    calls = Calls("a", "b")
    seconds = timing.interleaved(calls.variants, warmup=1, runs=2)
    assert calls.log == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    assert min(min(times) for times in seconds.values()) >= 0


def test_variants_that_return_their_seconds_take_turns():
    log = []
    variants = {name: lambda name=name: log.append(name) or 0.5 for name in "ab"}
    assert timing.in_turn(variants, warmup=1, runs=2) == {"a": [0.5, 0.5], "b": [0.5, 0.5]}
    assert log == ["a", "b", "b", "a", "a", "b"]


def test_medians_and_ratios():
    assert timing.medians({"a": [3.0, 1.0, 9.0], "b": [1.0, 2.0]}) == {"a": 3.0, "b": 1.5}
    assert timing.ratio(3.0, 2.0) == 1.5
    assert timing.ratio(None, 2.0) is None and timing.ratio(2.0, None) is None


def test_nothing_begins_that_would_not_fit_were_it_as_long_as_the_longest():
    now = [0.0]
    budget = Budget(1, clock=lambda: now[0])
    for at, name in ((0, "first"), (25, "second"), (35, "third")):
        now[0] = at
        assert budget.allows(name)
    now[0] = 36  # 36 + 25 is more than a minute
    assert not budget.allows("fourth") and not budget.allows("fifth")
    assert budget.left_out == ["fourth: no time left", "fifth: no time left"]


def test_an_error_of_one_variant_is_kept_and_others_go_on(capsys):
    budget = Budget(1)
    with budget.trying("kernel"):
        raise RuntimeError("no such instruction")
    assert budget.failed == {"kernel": "RuntimeError: no such instruction"}
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), budget.trying("kernel"):
        raise KeyboardInterrupt
