"""The words of an estimate."""

import dataclasses
from typing import NamedTuple

import pytest

from equivit import targets
from equivit.targets import reports
from tests.targets.programs import TRANSFERS


class Memory(NamedTuple):
    temp_size_in_bytes: int
    argument_size_in_bytes: int = 8 * 2**30
    output_size_in_bytes: int = 8 * 2**30
    alias_size_in_bytes: int = 8 * 2**30


@dataclasses.dataclass
class Compiled:
    """A compiled program of 8 GiB of state, donated, and some temporaries."""

    temporaries: int

    def as_text(self):
        return TRANSFERS.replace("GROUPS", "[1,8]<=[8]").replace("SIZE", "256")

    def memory_analysis(self):
        return Memory(self.temporaries)


@pytest.mark.parametrize(("gigabytes", "fits"), [(50, True), (60, False)])
def test_report(gigabytes, fits):
    found = targets.estimate(Compiled(gigabytes * 2**30), targets.parse("h100x8"), steps=None)
    parts = list(reports.report(found, {"data": 1, "fsdp": 8}, 1024))
    lines = [part for part in parts if isinstance(part, str)]
    assert lines[0].startswith("8 x NVIDIA H100 80GB HBM3, mesh data=1, fsdp=8: a training step of 1,024 images")
    assert any("this does not fit: JAX takes 75%" in line for line in lines) != fits
    memory, kernels, collectives = (part for part in parts if not isinstance(part, str))
    assert memory[1] == [("", "8.00", f"{gigabytes}.00", f"{gigabytes + 8}.00", "80.00")]
    assert kernels[1][0][1] == "1" and [row[:3] for row in collectives[1]][0] == ("all-gather", "1", "1")
    assert found["hours"] is None and not any("run" in line for line in lines)


def test_hours_follow_from_steps():
    found = targets.estimate(Compiled(0), targets.parse("h100x8"), steps=3_600_000)
    assert found["hours"] == pytest.approx(found["step_ms"]) and found["step_ms"][0] < found["step_ms"][1]
