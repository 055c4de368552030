"""The kernels and whole octic blocks compiled for TPU v5e by libtpu, on a machine without a TPU.

    pip install "jax[tpu]==0.12.0.1" -r requirements.txt
    python experiments/octic_tpu_compile.py             # about four minutes

Nothing runs: what is shown is that the compiler takes the kernels, and its own estimates.  For XLA's instructions these
are the cycles that it notes; for a kernel, the larger of the instruction bundles of one tile times the tiles (what it
issues if no load waits) and its bytes over the chip's bandwidth.  In the program of a kernel alone XLA's share is that
of bringing arguments and results into its layout, for which a block has no need.  In bfloat16, 8 images; gradients are
those of all parameters and the input.  Of octic blocks, "xla" is without kernels and "auto" with them.  Not in the
paper.

Exits 1 when a kernel does not compile, or a block has more estimated cycles with kernels than without.
"""

import os

# Before jax is imported: libtpu is to describe a chip that is not there, and to look for none.
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_WORKER_ID="0",
)

import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from equivit import models
from equivit.layers import isotypic
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC, Group
from experiments import benchmark
from experiments.benchmark import Claim
from kernels import d8_gelu, octic_linear_gelu, tpu_blocks
from kernels.shapes import REALISTIC, Shape

TOPOLOGY = "v5e:2x2"
BYTES_PER_CYCLE = 819 / 1.5  # GB/s, and the GHz at which four arrays of 128 x 128 make the chip's 197 TFLOP/s
DTYPE, BATCH = jnp.bfloat16, 8
SHAPES = {shape.name: dataclasses.replace(shape, batch=(BATCH,)) for shape in REALISTIC}
GELU_SHAPES = ("ViT-S", "ViT-L", "ViT-H", "ViT-22B")  # hidden widths of 192, 512, 640 and 3072 per component
BLOCKS = {"ViT-L": 16, "ViT-H": 16}  # heads
OPERATIONS = ("d8_gelu", "octic_linear_gelu")
COLUMNS = dict(
    program="",
    xla_kcycles="XLA kcycles",
    kernel_kcycles="kernels'",
    kcycles="together",
    issue_kcycles="issued",
    memory_kcycles="memory",
    vmem_mib="VMEM MiB",
    temporary_mib="temporary MiB",
    fusions="fusions",
    copies="copies",
    transposes="transposes",
    seconds="s to compile",
)


def main() -> int:
    options = benchmark.parser(__doc__, output="octic_tpu_compile.json")
    options.add_argument(
        "--kernels-into", type=pathlib.Path, help="only compile the kernels, and write their rows there"
    )
    options = options.parse_args()
    budget = benchmark.Budget(0)
    if options.kernels_into:
        rows = kernel_rows(budget, options.kernels_into.parent / "llo")
        options.kernels_into.write_text(json.dumps([rows, budget.failed]))
        return 0
    kernels, budget.failed = kernels_in_a_process_of_their_own()
    blocks = block_rows(budget, {row["program"]: row["kernel_kcycles"] for row in kernels})
    print(benchmark.table([*kernels, *blocks], COLUMNS))
    facts = dict(topology=TOPOLOGY, libtpu=importlib.metadata.version("libtpu"), batch=BATCH, type=DTYPE.dtype.name)
    return benchmark.finish(options.output, dict(**facts, kernels=kernels, blocks=blocks), claims_of(blocks), budget)


def kernels_in_a_process_of_their_own() -> tuple[list[dict], dict[str, str]]:
    """Rows and failures.  Apart, because libtpu is to write down all it does: gigabytes for a block."""
    with tempfile.TemporaryDirectory() as folder:
        dump = f"--xla_jf_dump_to={folder}/llo --xla_jf_dump_llo_text=true"
        command = [sys.executable, __file__, f"--kernels-into={folder}/rows.json"]
        subprocess.run(command, check=True, env={**os.environ, "LIBTPU_INIT_ARGS": dump})
        return json.loads(pathlib.Path(folder, "rows.json").read_text())


def kernel_rows(budget: benchmark.Budget, dump: pathlib.Path) -> list[dict]:
    """Every kernel on its own; `dump` is where libtpu writes."""
    rows = []
    for kernel, name, function, arguments in kernel_programs():
        with budget.trying(f"{kernel}, {name}"):
            row, text = compiled(function, arguments)
            shape, results = SHAPES[name], jax.eval_shape(function, *arguments)
            bundles = bundles_of_a_tile(dump, kernel)
            tiles = BATCH * -(-shape.tokens // tpu_blocks.ROWS)
            issued = None if bundles is None else tiles * bundles / 1e3
            memory = sum(2 * a.size for a in (*arguments, *results)) / BYTES_PER_CYCLE / 1e3
            vmem = [int(n) for n in re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', text)]
            row |= dict(program=f"{kernel}, {name}", bundles_of_a_tile=bundles, issue_kcycles=issued)
            row |= dict(memory_kcycles=memory, kernel_kcycles=max(issued or 0, memory), vmem_mib=max(vmem) / 2**20)
            rows.append(row)
        shutil.rmtree(dump, ignore_errors=True)
    return rows


def kernel_programs():
    """Name of the kernel, of the model, the function and its arguments."""
    for name in GELU_SHAPES:
        field = abstract(SHAPES[name].field(SHAPES[name].hidden))
        yield "d8_gelu", name, functools.partial(d8_gelu.forward, implementation="tpu"), field
        yield "d8_gelu_backward", name, functools.partial(d8_gelu.backward, implementation="tpu"), 2 * field
    for name in BLOCKS:
        shape = SHAPES[name]
        function = functools.partial(octic_linear_gelu.octic_linear_gelu, implementation="tpu")
        yield "octic_linear_gelu", name, function, abstract((*shape.field(shape.channels), *shape.weights()))


def block_rows(budget: benchmark.Budget, kernels: dict[str, float]) -> list[dict]:
    """Blocks without and with kernels, whose cycles are those of `kernels`."""
    rows = []
    variants = [(*block, direction) for block in BLOCKS.items() for direction in ("forward", "gradient")]
    for name, heads, direction in variants:
        for kind in ("plain", "xla", "auto"):
            program = f"{name} block, {direction}, {kind}"
            with budget.trying(program), using("xla" if kind == "xla" else "auto"):
                group = None if kind == "plain" else OCTIC
                row, text = compiled(*block_program(SHAPES[name], heads, group, direction))
                called = [f"{kernel}, {name}" for kernel in re.findall(r"%(\w+)[.\d]* = .*tpu_custom_call", text)]
                cycles = sum(kernels[kernel] for kernel in called)
                row |= dict(program=program, called=called, kernel_kcycles=cycles)
                rows.append(row | dict(kcycles=row["xla_kcycles"] + cycles))
    return rows


def using(implementation: str):
    """A context in which octic layers call the operations with an implementation."""
    patched = {name: functools.partial(getattr(isotypic, name), implementation=implementation) for name in OPERATIONS}
    return mock.patch.multiple(isotypic, **patched)


def block_program(shape: Shape, heads: int, group: Group | None, direction: str):
    """The first block of a plain or a D8 model of that width, as a function, and its arguments."""
    name, family = ("vit_ti16", "plain") if group is None else ("octic_vit_ti16", "D8")
    width = OCTIC.order * shape.channels
    options = dict(width=width, num_heads=heads, depth=1, image_size=(32, 32), num_classes=None)

    def make():
        block, x = (
            models.create(name, family=family, **options).blocks[0],
            jnp.zeros((*shape.batch, shape.tokens, width)),
        )
        x = x if group is None else fields.from_dense(x, group)
        return jax.tree.map(lambda a: a.astype(DTYPE), (block, x))

    def forward(block, x):
        return block(x)

    def loss(block, x):
        return sum(jnp.square(a.astype(jnp.float32)).sum() for a in jax.tree.leaves(block(x)))

    return {"forward": forward, "gradient": jax.grad(loss, argnums=(0, 1))}[direction], jax.eval_shape(make)


def compiled(function, arguments) -> tuple[dict, str]:
    """What the compiler says of a program for one chip, and the text of its entry computation."""
    chip = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices[0]
    sharding = NamedSharding(Mesh([chip], ("chip",)), PartitionSpec())
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments)
    start = time.perf_counter()
    program = jax.jit(lambda *a: function(*a)).lower(*arguments).compile()
    seconds = time.perf_counter() - start
    entry = program.as_text().split("\nENTRY", 1)[1]
    row = dict(
        seconds=round(seconds, 1),
        xla_kcycles=sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry))) / 1e3,
        temporary_mib=program.memory_analysis().temp_size_in_bytes / 2**20,
        fusions=len(re.findall(r" fusion\(", entry)),
        copies=len(re.findall(r" copy\(", entry)),
        transposes=len(re.findall(r" transpose\(", entry)),
    )
    return row, entry


def bundles_of_a_tile(dump: pathlib.Path, kernel: str) -> int | None:
    """Instruction bundles in the inner loop of a kernel, marked by ">>"; None where libtpu wrote none."""
    files = [f for f in dump.glob(f"*-{kernel}.*-final_bundles.txt") if "schedule-analysis" not in f.name]
    return sum(bool(re.search(r": *>> *{", line)) for line in files[0].read_text().splitlines()) if files else None


def claims_of(blocks) -> list[Claim]:
    """Cycles without kernels over those with them."""
    found = {row["program"]: row["kcycles"] for row in blocks}
    programs = [program.removesuffix(", auto") for program in found if program.endswith(", auto")]
    ratios = {program: benchmark.ratio(found.get(f"{program}, xla"), found[f"{program}, auto"]) for program in programs}
    return [Claim(f"{program}: without kernels over with", ratio, at_least=1) for program, ratio in ratios.items()]


def abstract(shapes):
    return tuple(jax.ShapeDtypeStruct(shape, DTYPE) for shape in shapes)


if __name__ == "__main__":
    sys.exit(main())
