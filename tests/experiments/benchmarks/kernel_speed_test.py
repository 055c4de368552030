"""The benchmark of kernels: cases by hand, and from end to end on something tiny."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit.kernels.octic_linear_gelu import octic_linear_gelu
from experiments.benchmarks import kernel_speed
from experiments.benchmarks.field_shapes import Shape
from tests.experiments.scripts import ONCE, run

SHAPE = Shape("tiny", (2,), 3, 16, 24)


class TestKernels:
    def test_end_to_end(self, tmp_path):
        names = ("d8_gelu gradient", "octic_linear_gelu")
        options = [f"--operation={name}" for name in names]
        status, written = run(kernel_speed, tmp_path, "--quick", "--type=float32", *options, *ONCE)
        rows = {(row["operation"], row["variant"]): row for row in written["rows"]}
        assert status == 0 and set(rows) == {(name, variant) for name in names for variant in ("xla", "eight")}
        for (_, variant), row in rows.items():
            assert row["bandwidth"] > 0 and row["arithmetic"] > 0
            assert variant == "eight" or (row["over_xla"] == 1 and row["error"] == 0)

    @pytest.mark.parametrize("name", kernel_speed.OPERATIONS)
    def test_eight_arrays_give_the_same(self, name):
        operation = kernel_speed.OPERATIONS[name]
        arguments = kernel_speed.random_arguments(operation, SHAPE, "float32", 0)
        ours = operation.eight(*kernel_speed.eight_arrays(operation, arguments))
        expected = operation.call("xla")(*arguments)
        if name.endswith("and gradient"):
            ours, ((d_lines, d_two), d_weights) = ours
            expected, (d_field, d_weights_expected) = expected
            pairs = [
                (jnp.stack(d_lines), d_field[0]),
                (d_two, d_field[1]),
                *zip(d_weights, d_weights_expected, strict=True),
            ]
        else:
            pairs = []
        pairs += list(zip(ours, kernel_speed.to_eight(*expected), strict=True))
        for a, b in pairs:
            np.testing.assert_allclose(a, b, atol=2e-5)  # sums of 48 terms; the GELU within 5e-7

    def test_every_call_is_in_the_program(self):
        """None is removed, merged or moved out: as many products as calls."""
        seen, compile_ = [], jax.stages.Lowered.compile
        options = kernel_speed._options([])
        sets = [tuple(jax.random.normal(jax.random.key(2 * i + j), (64, 64)) for j in (0, 1)) for i in range(4)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", lambda self: seen.append(compile_(self)) or seen[-1])
            call = kernel_speed.repeated(jnp.matmul, sets, options)
        assert seen[0].as_text().count("dot(") == 4 or seen[0].as_text().count("custom-call(") == 4
        for result, (a, b) in zip(call(), sets, strict=True):
            np.testing.assert_allclose(result, a @ b, rtol=1e-5)

    def test_bytes_and_operations(self):
        values = 8 * 2 * 3 * 24  # of the hidden field
        weights = 4 * 16 * 24 + 32 * 48 + 24
        gelu, linear = kernel_speed.OPERATIONS["d8_gelu"], kernel_speed.OPERATIONS["octic_linear_gelu"]
        assert kernel_speed.bytes_moved(gelu, SHAPE, "bfloat16") == 2 * 2 * values
        assert kernel_speed.bytes_moved(linear, SHAPE, "float32") == 4 * (8 * 2 * 3 * 16 + weights + values)
        assert kernel_speed.operations(gelu, SHAPE) == 14 * values  # two transforms of three additions, a GELU at 8
        macs = 6 * (4 * 16 * 24 + 2 * 32 * 48)
        bias = 6 * 4 * 24 * 2  # as a broadcast product and sum
        assert kernel_speed.operations(linear, SHAPE) == pytest.approx(2 * macs + bias + 14 * values, rel=0.01)

    def test_share_of_the_copy(self):
        moved = 2 * kernel_speed.COPY_BYTES
        assert kernel_speed.share_of_copy(moved, seconds=2.0, copy_seconds=1.0) == 0.5

    def test_targets(self):
        row = dict(operation="d8_gelu", shape="ViT-H", type="bfloat16", variant="gpu", error=3e-3, bandwidth=0.8)
        error, share = kernel_speed.claims_of([{**row, "field_bytes": 2**27}], judged=True)
        assert error.holds and share.holds is False
        (error,) = kernel_speed.claims_of([{**row, "field_bytes": 2**20, "error": math.nan}], judged=True)
        assert error.holds is False  # NaN never passes


def test_an_implementation_without_a_kernel_is_left_out(monkeypatch):
    class Gpu:
        platform = "gpu"

    operation = kernel_speed.OPERATIONS["octic_linear_gelu"]
    odd = kernel_speed.random_arguments(operation, Shape("odd", (2,), 3, 5, 7), "float32", 0)
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    assert kernel_speed.variants(operation, odd) == ["xla", "eight", "auto"]
    with pytest.raises(ValueError):
        octic_linear_gelu(*odd[0], *odd[1], implementation="gpu")
