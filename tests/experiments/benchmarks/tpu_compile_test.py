"""The TPU script reads libtpu's dump, and its programs can be traced; libtpu itself is not needed."""

import jax
import pytest

from equivit.symmetry.groups import OCTIC
from experiments.benchmarks import tpu_compile as script
from experiments.benchmarks.field_shapes import Shape
from experiments.benchmarks.tpu_assembly import Work

TINY = Shape("tiny", (1,), 5, 16, 64)
WORKS = {
    "issue": Work(900, 100, 0, False, True),
    "product": Work(100, 700, 0, False, True),
    "transfer": Work(10, 0, 546_000, False, True),
    "beside": Work(5, 0, 546_000, True, True),
}
TEXT = """
  %issue = f32[8]{0} copy(%a), metadata={op_name="jit(f)/attention/reshape" stack_frame_id=3}
  %product = f32[8]{0} fusion(%b), metadata={op_name="jit(f)/transpose(jvp(norm))/transpose(jvp(linear))/dot"}
  %d8_gelu.1 = f32[8]{0} custom-call(%c), custom_call_target="tpu_custom_call", metadata={op_name="activation/d8_gelu"}
  ROOT %transfer = f32[8]{0} copy(%d)
"""


def row(kind, kcycles, unread=(), tokens=197):
    return dict(model="ViT-L", tokens=tokens, direction="forward", kind=kind, kcycles=kcycles, unread=list(unread))


class TestEstimate:
    def test_the_largest_of_three_for_each_instruction(self):
        assert [script.cycles(work) for work in WORKS.values()] == [900, 700, 1000, 5]
        estimate = script.estimate(WORKS)
        assert estimate["kcycles"] == 2.605 and estimate["memory_kcycles"] == 2.0
        assert estimate["bundle_kcycles"] == 1.015 and estimate["matrix_kcycles"] == 0.8

    def test_no_faster_than_its_transfers(self):
        assert script.estimate({"beside": WORKS["beside"]})["kcycles"] == 1.0
        assert script.estimate({"issue": WORKS["issue"]}, moved=1_092_000)["kcycles"] == 2.0

    def test_what_could_not_be_read_is_named(self):
        works = {**WORKS, "odd": Work(1, 0, 0, False, False)}
        assert script.estimate(works)["unread"] == ["odd"] and script.estimate(WORKS)["unread"] == []

    def test_instructions_that_call_a_kernel(self):
        assert script.kernels_in(TEXT) == ["d8_gelu.1"]


class TestClaims:
    def test_over_both_others(self):
        kernels, xla, dense = row("octic, kernels", 2.0), row("octic, XLA", 3.0), row("dense", 1.0)
        first, second = script.claims_of([dense, xla, kernels])
        assert (first.ours, first.holds, second.ours, second.holds) == (1.5, True, 0.5, False)
        assert first.text == "ViT-L, 197 tokens, forward, octic, kernels: octic, XLA over it"

    def test_rows_of_other_tokens_do_not_count(self):
        claims = script.claims_of([row("octic, kernels", 2.0), row("dense", 4.0, tokens=196)])
        assert [claim.ours for claim in claims] == [None, None]

    @pytest.mark.parametrize("unread", ["octic, kernels", "dense"])
    def test_missing_trips_are_not_judged(self, unread):
        rows = [row(kind, 1.0, ["fusion.3"] if kind == unread else []) for kind in ("octic, kernels", "dense")]
        assert script.claims_of(rows)[1].holds is None


class TestPrograms:
    @pytest.mark.parametrize("direction", ["forward", "gradient"])
    @pytest.mark.parametrize("kind", script.KINDS)
    def test_blocks(self, kind, direction):
        group = None if kind == "dense" else OCTIC
        with script.using(script.KINDS[kind]):
            function, arguments = script.block_program(TINY, 2, group, direction)
            result = jax.eval_shape(function, *arguments)
        field = [(1, 5, 128)] if group is None else [(4, 1, 5, 16), (2, 1, 5, 32)]
        assert [a.shape for a in jax.tree.leaves(arguments[1])] == field
        expected = arguments if direction == "gradient" else arguments[1]
        assert [(a.shape, a.dtype) for a in jax.tree.leaves(result)] == [
            (a.shape, a.dtype) for a in jax.tree.leaves(expected)
        ]

    def test_kernels(self):
        titles = [
            script.title(dict(kernel=name, **script.model_of(shape))) for name, shape, *_ in script.kernel_programs()
        ]
        assert len(set(titles)) == len(titles) == 40
        assert {"d8_gelu, ViT-22B, 256 tokens", "octic_attention, ViT-H, 257 tokens"} <= set(titles)

    def test_both_numbers_of_tokens(self):
        tokens = [script.model_of(script.SHAPES[name]) for name in script.BLOCKS]
        expected = [("ViT-L", 196), ("ViT-L", 197), ("ViT-H", 256), ("ViT-H", 257)]
        assert [(row["model"], row["tokens"]) for row in tokens] == expected
