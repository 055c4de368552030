"""The account of a program's text, against numbers worked out by hand."""

import dataclasses

import numpy as np
import pytest

from equivit.targets import accounting, cards, collectives, kernels, program
from tests.targets.programs import LOOP, TRANSFERS

CARD = dataclasses.replace(cards.CARDS["h200"], bandwidth=1e3, products=dict(bf16=1e4, f32=1e3), link=1e3, network=1e2)
TARGET = cards.Target(CARD, 8)
ALL = "[1,8]<=[8]"


def transfers(groups=ALL, size=256, target=TARGET):
    text = TRANSFERS.replace("GROUPS", groups).replace("SIZE", str(size))
    return accounting.account(text, target)


def test_kernels_of_a_loop_count_once_per_iteration():
    found = accounting.account(LOOP, TARGET)
    assert found.launches == 4 * 3 + 1
    cut = 4 * 8 * 16 + 4 + 2 * 8 * 16  # a row of the stacked array, the index, and the result
    product = 2 * 8 * 16 + 2 * 16 * 32 + 4 * 8 * 32  # without the workspace
    keep = 4 * 8 * 32 + 4 + 4 * 8 * 32  # the row is written in place
    last = 3 * 4 * 4 * 8 * 32
    assert found.bytes == 4 * (cut + product + keep) + last
    slowest = max(product / 1e3, 2 * 8 * 32 * 16 / 1e4)
    assert found.floor == pytest.approx(4 * ((cut + keep) / 1e3 + slowest) + last / 1e3)
    assert not found.transfers and not found.notes


def test_a_fusion_in_two_halves_counts_once():
    """As JAX 0.11 writes a fusion that other kernels may overlap: the first half returns the operands too."""
    whole = "%a = bf16[8,16]{1,0} fusion(%stacked, %n), kind=kLoop, calls=%cut"
    begin = "%b = ((f32[4,8,16]{2,1,0}, s32[]), bf16[8,16]{1,0}, u32[]) fusion-start(%stacked, %n), calls=%cut"
    assert whole in LOOP
    halves = LOOP.replace(whole, f"{begin}\n  %a = bf16[8,16]{{1,0}} fusion-done(%b)")
    assert accounting.account(halves, TARGET) == accounting.account(LOOP, TARGET)


def test_a_loop_of_unknown_length_is_noted():
    found = accounting.account(LOOP.replace('{"known_trip_count":{"n":"4"}}', "{}"), TARGET)
    assert found.launches == 3 + 1 and found.notes == {"loops of unknown length are counted once"}


def test_a_conditional_counts_as_its_cheapest_branch():
    text = """
%short (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %c.1 = f32[8]{0} copy(%p.1)
}

%long (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8]{0} parameter(0)
  %c.2 = f32[8]{0} copy(%p.2)
  ROOT %c.3 = f32[8]{0} copy(%c.2)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %i = s32[] constant(0)
  ROOT %c = f32[8]{0} conditional(%i, %p, %p), branch_computations={%long, %short}
}
"""
    found = accounting.account(text, TARGET)
    assert (found.launches, found.bytes) == (1, 64) and len(found.notes) == 1


def test_bytes_that_a_card_sends():
    gather, total, moved = (t.collective for t in transfers().transfers)
    assert (gather.kind, gather.bytes) == ("all-gather", 7 * 1024)
    assert (total.kind, total.bytes) == ("all-reduce", 2 * 7 * 128)
    assert (moved.kind, moved.bytes) == ("collective-permute", 1024)


@pytest.mark.parametrize("size", [64, 256, 4096])
def test_what_a_kernel_covers(size):
    """The copy runs for 8 * size ms, the gather for 7,168 ms."""
    gather, total, moved = transfers(size=size).transfers
    assert gather.overlaps and gather.exposed == pytest.approx(max(7.168 - 8 * size / 1e3, 0))
    assert not total.overlaps and total.exposed == total.collective.seconds > 0
    assert not moved.overlaps and moved.exposed == 1.024


def test_what_covers_one_transfer_covers_no_other():
    """Both share the links, so the copy of 2.048 s covers the first of two gathers of 7.168 s in part."""
    twice = TRANSFERS.replace("GROUPS", ALL).replace("SIZE", "256")
    line = next(line for line in twice.splitlines() if "%gather =" in line)
    twice = twice.replace(line, f"{line}\n{line.replace('%gather =', '%other =')}")
    end = next(line for line in twice.splitlines() if "%gathered =" in line)
    other = end.replace("%gathered =", "%others =").replace("(%gather)", "(%other)")
    twice = twice.replace(end, f"{end}\n{other}")
    first, second, *_ = accounting.account(twice, TARGET).transfers
    assert first.exposed == pytest.approx(7.168 - 2.048) and second.exposed == pytest.approx(7.168)


GROUPS = {
    "[1,8]<=[8]": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "[4,2]<=[2,4]T(1,0)": [[0, 4], [1, 5], [2, 6], [3, 7]],
    "{{0,2},{1,3}}": [[0, 2], [1, 3]],
    "mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_1'}": [[0, 2], [1, 3], [4, 6], [5, 7]],
    "mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}": [[0, 1, 2, 3, 4, 5, 6, 7]],
}


@pytest.mark.parametrize("text", GROUPS)
def test_groups_of_cards(text):
    np.testing.assert_array_equal(collectives._groups(f", replica_groups={text}, x=1", 8), GROUPS[text])


@pytest.mark.parametrize(
    ("groups", "rate"),
    [
        ("[2,8]<=[16]", 1e3),  # each on one host
        ("[1,16]<=[16]", 8e2),  # eight cards of a host share its network
        ("[8,2]<=[2,8]T(1,0)", 1e2),  # each card has a partner on the other host
    ],
)
def test_links_within_and_between_hosts(groups, rate):
    gather, *_ = transfers(groups, target=cards.Target(CARD, 16)).transfers
    assert gather.collective.seconds == pytest.approx(gather.collective.bytes / rate)


def one_kernel(line, *operands):
    """The account of an instruction, after the lines of its operands."""
    text = "\n".join(["ENTRY %main (p: f32[]) -> f32[] {", *operands, line, "}"])
    found = program.parse(text)
    computation = found.computations["main"]
    return kernels.kernel(found, computation, list(computation.values())[-1])


def fused(*body, operand="f32[64,32]"):
    """Bytes that a fusion reads of an operand of 8,192 bytes; `body` computes %y from %x."""
    text = "\n".join(
        ["%fused (x: f32[], i: s32[]) -> f32[] {", f"  %x = {operand}{{0}} parameter(0)"]
        + ["  %i = s32[4,1]{0} parameter(1)", *(f"  {line}" for line in body), "}"]
        + ["ENTRY %main (a: f32[], b: s32[]) -> f32[] {", f"  %a = {operand}{{0}} parameter(0)"]
        + ["  %b = s32[4,1]{0} parameter(1)", "  %c = f32[3]{0} fusion(%a, %b), kind=kLoop, calls=%fused", "}"]
    )
    found = program.parse(text)
    computation = found.computations["main"]
    assert computation["a"].bytes == 8192
    return kernels.kernel(found, computation, computation["c"]).bytes - found.computations["fused"]["y"].bytes


INDEX = 4 * 4  # bytes of the rows' numbers
ROWS = "gather(%r, %i), offset_dims={1}, collapsed_slice_dims={0}, start_index_map={0}, slice_sizes={1,32}"


@pytest.mark.parametrize(
    ("body", "read"),
    [
        (["%r = f32[64,32]{0} negate(%x)", f"%g = f32[4,32]{{0}} {ROWS}", "%y = f32[4] reduce(%g)"], 4 * 128 + INDEX),
        (
            ["%r = f32[64,32]{0} negate(%x)", f"%g = f32[4,32]{{0}} {ROWS}", "%y = f32[64,32] sort(%g, %x)"],
            8192 + INDEX,
        ),
        (["%y = f32[16,32]{0} slice(%x), slice={[0:16], [0:32]}"], 16 * 128),
        (["%y = f32[32,32]{0} slice(%x), slice={[0:64:2], [0:32]}"], 32 * 128),
        (["%y = f32[64,16]{0} slice(%x), slice={[0:64], [0:32:2]}"], 8192),  # of each sector every second entry
        (["%y = f32[64,1]{0} slice(%x), slice={[0:64], [3:4]}"], 64 * 32),  # a sector for one entry
        (["%a = f32[16,32]{0} slice(%x), slice={[0:16], [0:32]}", "%y = f32[64,32] add(%x, %a)"], 8192),
        (["%s = f32[2048]{0} bitcast(%x)", "%y = f32[512]{0} slice(%s), slice={[512:1024]}"], 2048),
        (["%d = f32[64]{0} dot(%x, %x)", "%y = f32[1]{0} slice(%d), slice={[0:1]}"], 8192),  # may need all
    ],
)
def test_a_fusion_reads_what_its_result_needs(body, read):
    """Rows are 128 bytes."""
    assert fused(*body) == read


def test_operations_of_attention():
    q = [f"  %{name} = bf16[2,10,3,64]{{3,2,1,0}} parameter(0)" for name in "qkv"]
    sizes = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "3", "10", "10"]}'
    for suffix, products in (("", 2), ("Backward", 5)):
        target = f'custom_call_target="__cudnn$fmhaSoftmax{suffix}"'
        line = f"  %y = (bf16[2,3,10,64]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%q, %k, %v), {target}, config={{{sizes}}}"
        assert one_kernel(line, *q).operations == products * 2 * 2 * 3 * 10 * 10 * 64


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("Forward", ("f32[2,8,8,3]", "f32[4,4,3,5]", "f32[2,2,2,5]")),
        ("BackwardInput", ("f32[2,2,2,5]", "f32[4,4,3,5]", "f32[2,8,8,3]")),
        ("BackwardFilter", ("f32[2,8,8,3]", "f32[2,2,2,5]", "f32[4,4,3,5]")),
    ],
)
def test_a_convolution_and_its_gradients_have_as_many_operations(kind, shapes):
    first, second, result = shapes
    operands = [f"  %a = {first}{{0}} parameter(0)", f"  %b = {second}{{0}} parameter(1)"]
    config = f'dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$conv{kind}"'
    line = f"  %y = ({result}{{0}}, u8[0]{{0}}) custom-call(%a, %b), window={{size=4x4}}, {config}"
    found = one_kernel(line, *operands)
    assert (found.operations, found.dtype) == (2 * (2 * 2 * 2 * 5) * (4 * 4 * 3), "f32")


def test_kernels_of_our_own_are_noted():
    line = '  %y = bf16[8]{0} custom-call(%x), custom_call_target="mosaic_gpu_v2", backend_config={module = "ML\\EF(("}'
    assert not one_kernel(line, "  %x = bf16[8]{0} parameter(0)").counted


@pytest.mark.parametrize(("text", "size"), [("f32[2,3]", 24), ("bf16[5]", 10), ("pred[7]", 7), ("f8e4m3fn[4]", 4)])
def test_bytes_of_arrays(text, size):
    instruction = program.parse(f"ENTRY %m (p: f32[]) -> f32[] {{\n  %x = {text}{{0}} copy(%y)\n}}")
    assert instruction.computations["m"]["x"].bytes == size
