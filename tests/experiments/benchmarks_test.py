"""The benchmarks: what they compute by hand-worked cases, and each script from end to end on something tiny."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import (
    benchmark,
    compile_time,
    kernels_bench,
    octic_block_cpu,
    octic_complexity,
    octic_flops_width,
    octic_scaling,
    programs,
)
from experiments.benchmark import Budget, Claim, Memory
from kernels.octic_linear_gelu import octic_linear_gelu
from kernels.shapes import Shape

ONCE = ["--runs=1", "--warmup=1"]
SHAPE = Shape("tiny", (2,), 3, 16, 24)


class Calls:
    """Variants that note when they are called."""

    def __init__(self, *names):
        self.log = []
        self.variants = {name: lambda name=name: self.log.append(name) for name in names}


def test_variants_take_turns_and_the_order_turns_round():
    calls = Calls("a", "b")
    seconds = benchmark.interleaved(calls.variants, warmup=1, runs=2)
    assert calls.log == ["a", "b", "b", "a", "a", "b"]
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2}
    assert min(min(times) for times in seconds.values()) >= 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--runs=0", "argument --runs: 0 must be a whole number, at least 1"),
        ("--warmup=-1", "argument --warmup: -1 must be a whole number, at least 0"),
        ("--minutes=-2", "argument --minutes: -2 must be a number, at least 0"),
        ("--minutes=nan", "argument --minutes: nan must be a number, at least 0"),
        ("--runs=x", "argument --runs: x must be a whole number, at least 1"),
    ],
)
def test_numbers_that_no_timing_takes_are_told(option, message, capsys):
    with pytest.raises(SystemExit):
        benchmark.timing_parser("A benchmark.", output="x.json").parse_args([option])
    assert message in capsys.readouterr().err
    assert benchmark.timing_parser("A benchmark.", output="x.json").parse_args(["--minutes=0.5"]).minutes == 0.5


def test_a_script_says_in_one_line_what_is_wrong(capsys):
    def main(arguments):
        raise FileNotFoundError(f"there is\nno {arguments}.")

    assert benchmark.in_one_line(main)("file") == 1
    assert capsys.readouterr().err == "error: there is no file.\n"


def test_medians_and_ratios():
    assert benchmark.medians({"a": [3.0, 1.0, 9.0], "b": [1.0, 2.0]}) == {"a": 3.0, "b": 1.5}
    assert benchmark.ratio(3.0, 2.0) == 1.5
    assert benchmark.ratio(None, 2.0) is None and benchmark.ratio(2.0, None) is None


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


def test_memory_of_programs_in_turn():
    programs = [Memory(held=30, peak=50), Memory(held=20, peak=60), None]
    assert benchmark.fit(programs, 95)  # 30 + 20 held, and 40 more during the second: 90, of 95 a twentieth is free
    assert not benchmark.fit(programs, 94)
    assert benchmark.fit(programs, None)


def test_memory_is_that_of_arguments_results_and_temporaries():
    x = jax.ShapeDtypeStruct((1000,), jnp.float32)
    memory = benchmark.memory(jax.jit(lambda x, y: x + y).lower(x, x).compile())
    assert memory == Memory(held=8000, peak=12000)
    given = benchmark.memory(jax.jit(lambda x, y: x + y, donate_argnums=0).lower(x, x).compile())
    assert given == Memory(held=8000, peak=8000)


def test_tables_leave_missing_cells_empty():
    rows = [dict(a=1.234, b="x"), dict(a=None), dict(a=12345.6, b=1)]
    assert benchmark.table(rows, dict(a="ours", b="")).splitlines() == [" ours   ", " 1.23  x", "    -  -", "12346  1"]


def test_results_carry_machine_versions_and_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "ROOT", tmp_path)  # no repository
    monkeypatch.setenv("EQUIVIT_COMMIT", "abc")
    path = tmp_path / "new/results.json"
    assert benchmark.finish(path, dict(rows=[1]), [Claim("ratio", 2.0, at_least=2.0)]) == 0
    written = json.loads(path.read_text())
    assert written["rows"] == [1] and written["commit"] == "abc" and written["versions"]["jax"] == jax.__version__
    assert written["device"]["kind"] == "cpu" and written["device"]["name"]
    assert written["claims"][0]["holds"] and written["left_out"] == [] and written["failed"] == {}
    assert benchmark.finish(path, {}, [Claim("ratio", 2.0, at_least=2.1)]) == 1
    assert benchmark.finish(path, {}, [Claim("ratio", 2.0, at_least=2.1, judged=False)]) == 0
    broken = Budget(1)
    broken.failed["kernel"] = "RuntimeError: no"
    assert benchmark.finish(path, {}, [], broken) == 1


def run(script, tmp_path, *arguments):
    """The exit status and the JSON of a script that was run with these arguments."""
    output = tmp_path / "results.json"
    status = script.main([f"--output={output}", *arguments])
    written = json.loads(output.read_text())
    assert {"device", "versions", "commit", "rows", "claims", "left_out", "failed"} <= set(written)
    assert written["failed"] == {} and written["left_out"] == []
    return status, written


class TestScaling:
    def test_end_to_end(self, tmp_path):
        """Models that do not fit, so that a block of each is timed."""
        options = ("--quick", "--models=l", "--batch=2", "--memory_gib=1e-6", "--precision=bfloat16", *ONCE)
        status, written = run(octic_scaling, tmp_path, *options)
        row = written["rows"]["l"]
        assert status == 0 and row["unit"] == "one block" and row["flops"] == pytest.approx(4.578, abs=1e-3)
        assert row["throughput"] == pytest.approx(row["plain_milliseconds"] / row["octic_milliseconds"])
        assert row["plain_per_second"] == pytest.approx(2e3 / row["plain_milliseconds"])
        assert row["memory"] == pytest.approx(row["plain_mib"] / row["octic_mib"]) and row["plain_mib"] > 0
        assert any("throughput ratio of a block" in claim["text"] for claim in written["claims"])
        assert (tmp_path / "results.png").stat().st_size > 0

    def test_all_flops_are_the_papers(self):
        for key in octic_scaling.MODELS:
            assert abs(octic_scaling.flops(key) - octic_scaling.PAPER[key]["flops"]) <= octic_scaling.FLOPS_TOLERANCE

    def test_targets(self):
        row = dict(model="ViT-H", unit="model", flops=4.58, throughput=2.9, memory=2.5, octic_mib=1000.0)
        flops, throughput, memory = octic_scaling.claims_of({"h": row}, judged=True)
        assert flops.holds and throughput.holds is False and throughput.at_least == 3.0
        assert memory.holds and memory.at_most == 1141  # the ratio is missed, the paper's MiB are not
        memory = octic_scaling.claims_of({"h": {**row, "octic_mib": 1200.0}}, judged=True)[2]
        assert memory.holds is False
        memory = octic_scaling.claims_of({"h": {**row, "memory": 2.9}}, judged=True)[2]
        assert memory.holds and memory.at_least == 2.88
        assert octic_scaling.memory_claim(octic_scaling.PAPER["g"], {**row, "memory": 4.0}, judged=True).holds is False
        unmeasured = octic_scaling.claims_of({"h": dict(model="ViT-H", flops=4.58)}, judged=True)
        assert [claim.holds for claim in unmeasured] == [True, None, None]


class TestComplexity:
    def test_end_to_end(self, tmp_path):
        options = ("--quick", "--models=l", "--families=D8", "--phases=forward", "--batch=2", *ONCE)
        status, written = run(octic_complexity, tmp_path, *options)
        plain, octic = written["rows"]["l"]["plain"], written["rows"]["l"]["D8"]
        assert status == 0 and set(written["rows"]["l"]) == {"plain", "D8"}
        assert plain["forward_ratio"] == 1 and plain["forward_mib"] > octic["forward_mib"] > 0
        ratio = octic["forward_throughput"] / plain["forward_throughput"]
        assert octic["forward_ratio"] == pytest.approx(ratio)
        assert plain["flops"] == pytest.approx(61.8, abs=0.1) and octic["parameters"] == pytest.approx(39.85, abs=0.01)
        assert (tmp_path / "results.png").stat().st_size > 0

    def test_a_training_step(self):
        """The state goes from step to step; its memory is given back."""
        options = octic_complexity._options(["--quick", "--batch=2"])
        program = octic_complexity.build("l", "plain", "train", "full", options)
        call = program.start()
        assert call()["good"] and call()["good"]
        state = 4 * programs.parameters("vit_l16", **octic_complexity.TINY)  # parameters, moments, averages
        assert program.memory.held == pytest.approx(4 * state, rel=0.1)
        assert program.memory.peak < program.memory.held + 4 * state  # the new state lies where the old one was

    def test_targets(self):
        rows = {"H8": dict(forward_ratio=1.4), "D8": dict(train_ratio=2.6), "timm": dict(forward_ratio=1.25)}
        h8, d8, peer = octic_complexity.claims_of("h", rows, judged=True)
        assert h8.holds is False and d8.holds and peer.holds is False and peer.ours == 0.8
        (peer,) = octic_complexity.claims_of("l", {}, judged=True)
        assert peer.holds is None

    def test_figures(self):
        program = programs.Compiled(start=None, memory=Memory(held=0, peak=3 * 2**20))
        figures = octic_complexity.figures("forward", 0.5, 0.25, program, batch=64)
        assert figures == dict(forward_throughput=256, forward_ratio=2, forward_mib=3)

    def test_the_papers_ratios(self):
        assert octic_complexity.paper_rows(["h"])["h"]["D8"]["ratio_paper"] == pytest.approx(1.578, abs=1e-3)


class TestWidth:
    def test_end_to_end(self, tmp_path, monkeypatch):
        monkeypatch.setattr(octic_flops_width, "WIDTHS", (256, 1024))
        status, written = run(octic_flops_width, tmp_path)
        assert status == 0 and [row["width"] for row in written["rows"]] == [256, 1024]
        # 12 D^2 + 2 N D over 12 D^2 3/16 + 2 N D, with D = 1024 and N = 196
        assert written["rows"][1]["matmul"] == pytest.approx((12 * 1024 + 392) / (2304 + 392))
        assert (tmp_path / "results.png").stat().st_size > 0

    def test_intensity(self):
        # 2 * 2 * 3 * 5 operations; (2 * 3 + 15 + 2 * 5) values of two bytes
        assert octic_flops_width.intensity(2, 3, 5, weights=15, macs=30) == pytest.approx(60 / 62)
        values = octic_flops_width.intensities(8, tokens=1)  # F = 32: 8 in, 256 weights, 32 out
        assert values["standard"] == pytest.approx(256 / 296)
        assert values["octic"] == pytest.approx(48 / (8 + 32 + 32))
        assert values["E"] == pytest.approx(32 / (2 * 2 + 16 + 2 * 8))
        assert values["lines"] == pytest.approx(4 / (1 + 4 + 4))

    def test_crossover(self):
        assert octic_flops_width.crossover(lambda d: d - 1000) == pytest.approx(1000, abs=1e-2)
        assert octic_flops_width.crossover(lambda d: -1) is None
        # D F / 3 = 13/3 B (D + F) and D F / 2 = 3 B (D + F), with F = 4D
        crossings = octic_flops_width.crossovers()
        assert crossings["octic"] == pytest.approx(16.25 * 196) and crossings["E"] == pytest.approx(7.5 * 196)
        assert crossings["lines"] is None


class TestKernels:
    def test_end_to_end(self, tmp_path):
        names = ("d8_gelu gradient", "octic_linear_gelu")
        options = [f"--operation={name}" for name in names]
        status, written = run(kernels_bench, tmp_path, "--quick", "--type=float32", *options, *ONCE)
        rows = {(row["operation"], row["variant"]): row for row in written["rows"]}
        assert status == 0 and set(rows) == {(name, variant) for name in names for variant in ("xla", "eight")}
        for (_, variant), row in rows.items():
            assert row["bandwidth"] > 0 and row["arithmetic"] > 0
            assert variant == "eight" or (row["over_xla"] == 1 and row["error"] == 0)
        assert (tmp_path / "results.png").stat().st_size > 0

    @pytest.mark.parametrize("name", kernels_bench.OPERATIONS)
    def test_eight_arrays_give_the_same(self, name):
        operation = kernels_bench.OPERATIONS[name]
        arguments = kernels_bench.random_arguments(operation, SHAPE, "float32", 0)
        ours = operation.eight(*kernels_bench.apart(operation, arguments))
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
        pairs += list(zip(ours, kernels_bench.to_eight(*expected), strict=True))
        for a, b in pairs:
            np.testing.assert_allclose(a, b, atol=2e-5)  # sums of 48 terms; the GELU within 5e-7

    def test_every_call_is_in_the_program(self):
        """None is removed, merged or moved out: as many products as calls."""
        seen, compile_ = [], jax.stages.Lowered.compile
        options = kernels_bench._options([])
        sets = [tuple(jax.random.normal(jax.random.key(2 * i + j), (64, 64)) for j in (0, 1)) for i in range(4)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.stages.Lowered, "compile", lambda self: seen.append(compile_(self)) or seen[-1])
            call = kernels_bench.repeated(jnp.matmul, sets, options)
        assert seen[0].as_text().count("dot(") == 4 or seen[0].as_text().count("custom-call(") == 4
        for result, (a, b) in zip(call(), sets, strict=True):
            np.testing.assert_allclose(result, a @ b, rtol=1e-5)

    def test_bytes_and_operations(self):
        values = 8 * 2 * 3 * 24  # of the hidden field
        weights = 4 * 16 * 24 + 32 * 48 + 24
        gelu, linear = kernels_bench.OPERATIONS["d8_gelu"], kernels_bench.OPERATIONS["octic_linear_gelu"]
        assert kernels_bench.bytes_moved(gelu, SHAPE, "bfloat16") == 2 * 2 * values
        assert kernels_bench.bytes_moved(linear, SHAPE, "float32") == 4 * (8 * 2 * 3 * 16 + weights + values)
        assert kernels_bench.operations(gelu, SHAPE) == 14 * values  # two transforms of three additions, a GELU at 8
        macs = 6 * (4 * 16 * 24 + 2 * 32 * 48)
        bias = 6 * 4 * 24 * 2  # as a broadcast product and sum
        assert kernels_bench.operations(linear, SHAPE) == pytest.approx(2 * macs + bias + 14 * values, rel=0.01)

    def test_share_of_the_copy(self):
        moved = 2 * kernels_bench.COPY_BYTES
        assert kernels_bench.share_of_copy(moved, seconds=2.0, copy_seconds=1.0) == 0.5

    def test_targets(self):
        row = dict(operation="d8_gelu", shape="ViT-H", type="bfloat16", variant="gpu", error=3e-3, bandwidth=0.8)
        error, share = kernels_bench.claims_of([{**row, "field_bytes": 2**27}], judged=True)
        assert error.holds and share.holds is False
        (error,) = kernels_bench.claims_of([{**row, "field_bytes": 2**20, "error": math.nan}], judged=True)
        assert error.holds is False  # NaN never passes


class TestCompileTime:
    @pytest.fixture
    def compiling(self):
        """Without the cache of tests/conftest.py: what is compiled is timed."""
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX looks at the setting once
        yield
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()

    def test_end_to_end(self, tmp_path, monkeypatch, compiling):
        monkeypatch.setattr(compile_time, "FAMILIES", {"plain": "vit_ti16"})
        monkeypatch.setattr(compile_time, "REMAT", ("full",))
        _, written = run(compile_time, tmp_path, "--runs=1", "--warmup=0", "--depths", "3")
        (row,) = written["rows"]
        assert row["depth"] == 3 and row["rounds"] == 1 and min(row["lines"], row["instructions"]) > 100
        assert row["seconds"] == pytest.approx(row["trace_seconds"] + row["xla_seconds"])
        assert row["fastest"] == row["seconds"] == row["slowest"] and row["cpu_seconds"] > 0

    def test_targets(self):
        rows = [
            dict(family="plain", remat="none", depth=depth, cpu_seconds=seconds, lines=lines)
            for depth, seconds, lines in ((2, 10.0, 100), (24, 15.0, 100), (48, 25.0, 105))
        ]
        claims = compile_time.claims_of(rows, (2, 24, 48))
        assert claims[0].ours == 2.5 and claims[0].holds is False and claims[1].holds
        assert all(claim.holds is None for claim in claims[2:])


def test_an_implementation_without_a_kernel_is_left_out(monkeypatch):
    class Gpu:
        platform = "gpu"

    operation = kernels_bench.OPERATIONS["octic_linear_gelu"]
    odd = kernels_bench.random_arguments(operation, Shape("odd", (2,), 3, 5, 7), "float32", 0)
    monkeypatch.setattr(jax, "local_devices", lambda: [Gpu()])
    assert kernels_bench.variants(operation, odd) == ["xla", "eight", "auto"]
    with pytest.raises(ValueError):
        octic_linear_gelu(*odd[0], *odd[1], implementation="gpu")


class TestBlockOnACpu:
    def test_end_to_end(self, tmp_path, monkeypatch):
        monkeypatch.setitem(octic_block_cpu.SIZES, 384, (6, 9, 2))
        output = tmp_path / "out.json"
        options = [*ONCE, "--peer=none", "--widths=384", "--types=float32,bfloat16", f"--output={output}"]
        assert octic_block_cpu.main(options) == 0  # without a peer nothing is judged
        results = json.loads(output.read_text())
        assert [row["type"] for row in results["rows"]] == ["float32", "bfloat16"]
        assert all(row["dense"] > 0 and row["octic"] > 0 for row in results["rows"])
        assert [claim["holds"] for claim in results["claims"]] == [None, None]

    def test_targets(self):
        row = dict(width=384, type="float32", octic_over_torch=1.01, dense_over_torch=1.29)
        assert [claim.holds for claim in octic_block_cpu.claims_of(row)] == [False, True]
        assert not octic_block_cpu.claims_of(row | dict(type="bfloat16"))

    def test_turns(self):
        log = []
        variants = {name: lambda name=name: log.append(name) or 0.5 for name in "ab"}
        assert octic_block_cpu.in_turn(variants, warmup=1, runs=2) == {"a": [0.5, 0.5], "b": [0.5, 0.5]}
        assert log == ["a", "b", "b", "a", "a", "b"]
