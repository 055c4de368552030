"""The reader of traces: kernels and copies of GPUs, counted for one call."""

import types

import pytest

from experiments import device_profile


def named(name, **parts):
    return types.SimpleNamespace(name=name, **parts)


@pytest.fixture
def profile():
    """Two streams of a GPU, beside the host and a line of modules."""
    events = [named("loop_add_fusion_12", duration_ns=3000.0), named("loop_add_fusion_3_1", duration_ns=1000.0)]
    lines = [named("Stream #1(Compute)", events=events), named("XLA Modules", events=[named("jit", duration_ns=9e9)])]
    other = [named("Stream #2(MemcpyD2D)", events=[named("memcpy32_post", duration_ns=500.0)])]
    host = named("/host:CPU", lines=[named("Stream of thoughts", events=events)])
    return named("", planes=[host, named("/device:GPU:0", lines=lines), named("/device:GPU:1", lines=other)])


def test_events_are_those_of_streams_on_gpus(profile):
    assert [name for name, _ in device_profile.gpu_events(profile)] == [
        "loop_add_fusion_12",
        "loop_add_fusion_3_1",
        "memcpy32_post",
    ]


def test_kernels_are_counted_for_a_call(profile, tmp_path, monkeypatch):
    """Three calls are traced, and a third of the times is a call's."""
    calls = []

    class Trace:
        def __init__(self, place):
            self.place = place

        def __enter__(self):
            (device_profile.pathlib.Path(self.place) / "plugins").mkdir()

        def __exit__(self, *error):
            (device_profile.pathlib.Path(self.place) / "plugins" / "host.xplane.pb").touch()

    monkeypatch.setattr(device_profile.jax.profiler, "trace", Trace)
    monkeypatch.setattr(device_profile.jax.profiler.ProfileData, "from_file", lambda path: profile)
    found = device_profile.kernels(lambda: calls.append("call"))
    assert len(calls) == device_profile.CALLS == 3
    assert found["kernels"] == [["loop_add_fusion", 2 / 3, pytest.approx(4 / 3)], ["memcpy32_post", 1 / 3, 0.5 / 3]]
    assert found["launches"] == pytest.approx(1) and found["kernel_us"] == pytest.approx(1.5)
