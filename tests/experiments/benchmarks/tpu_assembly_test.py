"""Reading libtpu's assembly, by small programs whose bundles can be counted by hand."""

import pytest

from experiments.benchmarks import tpu_assembly
from experiments.benchmarks.tpu_assembly import Work

DETAILS = """HLO:
  operation: %fusion.1 = f32[8,128]{{1,0:T(8,128)S(1)}} fusion(bf16[4,8,128]{{2,1,0:T(8,128)(2,1)}} %x), kind=kLoop
  emitted bundle range: [TensorCoreSequencer:0:{0:#x}, TensorCoreSequencer:0:{1:#x})
HLO:
  operation: %bitcast = f32[1024]{{0:T(1024)S(1)}} bitcast(f32[8,128]{{1,0:T(8,128)S(1)}} %fusion.1)
  emitted bundle range: <empty>
HLO:
  operation: %copy = f32[8,128]{{0,1:T(8,128)S(1)}} copy(f32[8,128]{{1,0:T(8,128)S(1)}} %fusion.1)
  emitted bundle range: [TensorCoreSequencer:0:{2:#x}, TensorCoreSequencer:0:{3:#x})
"""
LOOP = [  # three trips: the counter is in s0, and the branch back is followed by four bundles
    "s0 = simm.u32 $0",
    "s1 = sadd.s32 $1, s0; (mrf0, gmr0, msra0) = vmatmul.8x128.bf16.lgmr v3",
    "p0 = sge.s32 s1, $3; s0 = smov.u32 s1; (mrf0) = vmatmul.8x128.bf16 v4; (mrf1) = vmatmul.8x128.f32.msk v5",
    "(pc) = sbr.rel @!p0 $-2 (=0x1); (mrf1) = vmatmul.lmr.128",
    *[""] * 4,
    "_ = vtrace $0x1",
]


def times(*bundles):
    return tpu_assembly.walk([bundle.split("; ") for bundle in bundles])


def dump(folder, bundles, details):
    lines = [f"0:{hex(i):6}: {{{bundle}}}" for i, bundle in enumerate(bundles)]
    (folder / "17-TLP-01-assembly-pre-overlay.txt").write_text("\n".join(lines))
    (folder / "17-TLP-02-hlo-details.txt").write_text(details)
    (folder / "17-TLP-05-hlo-details.txt").write_text("those of another assembly")


def issued(*operations, result):
    """How often the last bundle is issued in which `result` is compared with a number: once more where they agree."""
    branch = ["(pc) = sbr.rel @p9 $+6", *[""] * 4, "", "_ = vtrace $0x1"]
    place = len(operations) + 1
    branch[0] += f" (={hex(place + 6)})"
    counts, unread = times(*operations, f"p9 = seq.s32 {result}", *branch)
    return None if unread else counts[place + 5] == 0


class TestWalk:
    def test_a_loop(self):
        assert times(*LOOP) == ([1, *[3] * 7, 1], set())

    def test_nested_loops_with_a_spilled_counter(self):
        bundles = [
            "s0 = simm.u32 $0; s5 = simm.u32 $64",
            "s1 = simm.u32 $0; [smem:s5+$0x2] = sst s0",
            "s1 = sadd.s32 $1, s1",
            "p1 = slt.s32 s1, $4",
            "(pc) = sbr.rel @p1 $-2 (=0x2); s0 = simm.u32 $99",
            *[""] * 4,
            "s0 = sld [smem:$0x42]",
            "s0 = sadd.s32 $1, s0",
            "p2 = slt.s32 s0, $5",
            "(pc) = sbr.rel @p2 $-11 (=0x1)",
            *[""] * 4,
        ]
        counts, unread = times(*bundles)
        assert not unread and counts == [1, 5, *[20] * 7, *[5] * 8]

    def test_a_branch_forward(self):
        bundles = ["p0 = seq.s32 $3, $3", "(pc) = sbr.rel @p0 $+7 (=0x8)", *[""] * 4, "skipped", "skipped", "reached"]
        assert times(*bundles) == ([1] * 6 + [0, 0, 1], set())

    def test_what_is_unknown_is_reported(self):
        """The number of trips comes from memory: one is counted, and the place of the branch is returned."""
        bundles = ["s7 = sld [smem:$0x3fff]", *LOOP]
        bundles[3] = bundles[3].replace("$3", "s7")
        assert times(*bundles) == ([1] * 10, {4})
        assert times("s31 = scall.abs $0x12", "_ = vtrace $0x1") == ([1, 1], {0})
        assert issued("s0 = smov.u32 $-1e-38", result="s0, $0") is None  # not a whole number

    @pytest.mark.parametrize(
        ("operation", "expected"),
        [
            ("s0 = ssub.s32 $7, s2", "$4"),
            ("s0 = smul.u32 $-2071460803, s2", "$-1919415113"),
            ("s0 = sshrl.u32 s4, $0x1c", "$15"),
            ("s0 = sshra.s32 s4, $0x1", "$-1"),
            ("s0 = sshll.u32 s2, $0x1f", "$-2147483648"),
            ("s0 = sand.u32 $0x2, s2", "$2"),
            ("s0 = sxor.u32 $0x1, s2", "$2"),
            ("s0 = smin.u32 s2, s4", "$3"),
            ("s0 = smulhi.u32 $-1171354717, s2", "$2"),
            ("s0 = simm.u32 @p1 $5", "$5"),
            ("s0 = simm.u32 @!p1 $5", "$8"),
            ("s0 = smov.u32 s2; s2 = smov.u32 s0", "$3"),
        ],
    )
    def test_operations(self, operation, expected):
        begin = ["s0 = simm.u32 $8; s2 = simm.u32 $3; s4 = simm.u32 $-2", "p1 = por !p3, $1; p3 = seq.s32 s2, $3"]
        begin = ["p3 = seq.s32 $0, $1", begin[0], begin[1]]
        assert issued(*begin, operation, result=f"s0, {expected}")

    def test_all_operations_of_a_bundle_read_before_one_writes(self):
        bundles = ("s0 = simm.u32 $1; s1 = simm.u32 $2", "s0 = smov.u32 s1; s1 = smov.u32 s0")
        assert issued(*bundles, result="s0, $2") and issued(*bundles, result="s1, $1")

    @pytest.mark.parametrize(
        "operation", ["s0 = spop (sfrf)", "s0 = simm.u32 @p5 $3", "s0 = sld [smem:s9]", "s0 = smagic.u32 s0"]
    )
    def test_unknown_values(self, operation):
        assert issued("s0 = simm.u32 $3", "[smem:s8] = sst s0", operation, result="s0, $3") is None


class TestWork:
    def test_of_two_instructions(self, tmp_path):
        dump(tmp_path, LOOP, DETAILS.format(0, 8, 8, 9))
        rows = 3 * 2 * tpu_assembly.PACKED_ROWS  # of unit 0; unit 1 takes 3 * 2 * 8
        work = {"fusion.1": Work(22, rows, 2 * 4 * 8 * 128, False, True), "copy": Work(1, 0, 0, False, True)}
        assert tpu_assembly.work(tmp_path) == work

    def test_ranges_that_overlap(self, tmp_path):
        """Every bundle is counted once."""
        dump(tmp_path, LOOP, DETAILS.format(0, 4, 2, 9))
        work = tpu_assembly.work(tmp_path)
        assert (work["fusion.1"].bundles, work["copy"].bundles) == (4, 19)

    def test_an_instruction_with_an_unknown_branch(self, tmp_path):
        dump(tmp_path, [bundle.replace("$3", "s7") for bundle in LOOP], DETAILS.format(0, 8, 8, 9))
        assert [work.read for work in tpu_assembly.work(tmp_path).values()] == [False, True]

    def test_a_dump_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="was libtpu given FLAGS"):
            tpu_assembly.work(tmp_path)

    def test_a_line_that_is_no_bundle(self, tmp_path):
        dump(tmp_path, LOOP, "")
        file = tmp_path / "17-TLP-01-assembly-pre-overlay.txt"
        file.write_text("1:0x0 : {}\n" + file.read_text())
        with pytest.raises(ValueError, match="no bundle: '1:0x0"):
            tpu_assembly.work(tmp_path)


class TestBytes:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("bf16[8,4]{1,0} fusion(f32[4]{0} %a, s8[2,3]{1,0:S(1)} %b), kind=kLoop, calls=%f", (80, False)),
            ("(f32[2]{0}, pred[5]{0}) fusion(f32[]{:T(256)} %a), kind=kLoop", (17, False)),
            ("(bf16[9]{0:S(1)}, bf16[9]{0}, u32[]{:S(2)}) copy-start(bf16[9]{0} %a)", (0, True)),
            ("bf16[9]{0:S(1)} copy-done((bf16[9]{0:S(1)}, bf16[9]{0}, u32[]{:S(2)}) %copy-start)", (18, True)),
            ("((f32[8,2]{1,0}), f32[4,2]{1,0:S(1)}, s32[]{:S(2)}) async-start(f32[8,2]{1,0} %a)", (0, True)),
            ("f32[4,2]{1,0:S(1)} async-done(((f32[8,2]{1,0}), f32[4,2]{1,0:S(1)}) %slice-start)", (32, True)),
        ],
    )
    def test_by_hand(self, text, expected):
        assert tpu_assembly.hbm_bytes(text) == expected
