"""The kernels and whole octic blocks compiled for TPU v5e by libtpu, on a machine without a TPU.

    pip install "jax[tpu]==0.12.0.1" -r requirements.txt
    python -m experiments benchmarks.tpu_compile  # half an hour or more on two cores

Nothing runs: the script shows that the compiler takes the kernels, and estimates cycles from the compiled code.  An
instruction of XLA, or a kernel, takes the largest of

  - the bundles that it issues, every trip of every loop counted in the final assembly (tpu_assembly.py),
  - the rows that the busiest of the four matrix units takes, one per cycle,
  - the bytes of its operands and results in HBM, over the bandwidth;

copies between HBM and VMEM that run beside other instructions count by their bundles.  A block takes the sum over its
instructions, or all its bytes over the bandwidth if that is more.  Stalls are left out, so it is a lower bound; the
activations of 8 images stay in VMEM, activations of 64 would not fit.  The tables also list XLA's cycle estimates, on
another scale: for copies and reductions they are 3 to 30 times the bundles.

In bfloat16, 8 images; gradients are of all parameters and the input; layouts between blocks are the compiler's choice.
A block is dense, octic without kernels ("octic, XLA") or octic with them ("octic, kernels").  Claims: every kernel
compiles, and an octic block with kernels has fewer estimated cycles than without, and than the dense one.
"""

import dataclasses
import functools
import importlib.metadata
import itertools
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from equivit import models
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC, Group
from experiments import findings, flags, timing
from experiments.benchmarks import tpu_assembly
from experiments.benchmarks.field_shapes import REALISTIC, Shape
from experiments.findings import Claim
from kernels import d8_gelu, octic_linear_gelu, using
from kernels.attention import arranged, lanes
from kernels.norm import Norm
from kernels.octic_branch import Weights, octic_attention, octic_mlp

TOPOLOGY = "v5e:2x2"
# libtpu is to describe a chip that is not there, and to look for none.
CHIP = dict(
    TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0"
)
BYTES_PER_CYCLE = 819 / 1.5  # GB/s, and the GHz at which four arrays of 128 x 128 make the chip's 197 TFLOP/s
DTYPE, BATCH = jnp.bfloat16, 8
NORM = Norm(eps=1e-5, row_weight=0.5)  # the constants of the models
SHAPES = {shape.name: dataclasses.replace(shape, batch=(BATCH,)) for shape in REALISTIC}
BLOCKS = {"ViT-L": 16, "ViT-L, class token": 16, "ViT-H": 16, "ViT-H, class token": 16}  # heads
GELU_SHAPES = ("ViT-S", *BLOCKS, "ViT-22B")  # hidden widths of 192, 512, 640 and 3072 per component
KINDS = {"dense": "tpu", "octic, XLA": "xla", "octic, kernels": "tpu"}  # and the implementation of the operations
PARTS = ("norm", "linear", "attention", "activation")  # named scopes of the layers
MEASURES = dict(kcycles="kcycles", bundle_kcycles="bundles", matrix_kcycles="matrix units", memory_kcycles="HBM")
KERNEL_COLUMNS = dict(
    kernel="", model="model", tokens="tokens", **MEASURES, vmem_mib="VMEM MiB", seconds="s to compile"
)
BLOCK_COLUMNS = dict(
    model="",
    tokens="tokens",
    direction="direction",
    kind="kind",
    **MEASURES,
    kernel_kcycles="in kernels",
    noted_kcycles="XLA's notes, no kernels",
    temporary_mib="temporary MiB",
    instructions="instructions",
    seconds="s to compile",
)


def main() -> int:
    options = flags.parser(__doc__, __file__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # libtpu dumps only programs that it compiles
    budget = timing.Budget(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CHIP, LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={folder} {tpu_assembly.FLAGS}")
        kernels = kernel_rows(budget, pathlib.Path(folder))
        blocks = block_rows(budget, pathlib.Path(folder))
    print(
        "Estimates in thousands of cycles, from compiled code and without stalls: lower bounds.  Nothing ran.  Kernels:"
    )
    print(findings.table(kernels, KERNEL_COLUMNS))
    print("\nOne block:")
    print(findings.table(blocks, BLOCK_COLUMNS))
    for row in kernels + blocks:
        if row["unread"]:
            print(f"{title(row)}: too low, the trips of these could not be read: {', '.join(row['unread'])}")
    facts = dict(topology=TOPOLOGY, libtpu=importlib.metadata.version("libtpu"), batch=BATCH, type=DTYPE.dtype.name)
    return findings.finish(options, dict(**facts, kernels=kernels, blocks=blocks), claims_of(blocks), budget)


def kernel_rows(budget: timing.Budget, folder: pathlib.Path) -> list[dict]:
    """A row for every kernel, without the copies that bring arguments and results into its layout."""
    rows = []
    for kernel, shape, function, arguments in kernel_programs():
        row = dict(kernel=kernel, **model_of(shape))
        print(f"compiling {title(row)}", file=sys.stderr)
        with budget.trying(title(row)):
            seconds, program, works = compiled(
                jax.jit(function, in_shardings=free(), out_shardings=free()), arguments, folder
            )
            text = entry(program)
            own = {name: work for name, work in works.items() if name in kernels_in(text)}
            moved = sum(DTYPE.dtype.itemsize * a.size for a in (*arguments, *jax.eval_shape(function, *arguments)))
            vmem = [int(n) for n in re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', text)]
            rows.append(row | estimate(own, moved) | dict(vmem_mib=max(vmem) / 2**20, seconds=seconds))
    return rows


def kernel_programs():
    """Name of the kernel, the shape, the function and its arguments."""
    for shape in map(SHAPES.get, GELU_SHAPES):
        field = abstract(shape.field(shape.hidden))
        yield "d8_gelu", shape, functools.partial(d8_gelu.d8_gelu, implementation="tpu"), field
        yield "d8_gelu_backward", shape, functools.partial(d8_gelu.backward, implementation="tpu"), 2 * field
    for shape in map(SHAPES.get, BLOCKS):
        function = functools.partial(octic_linear_gelu.octic_linear_gelu, implementation="tpu")
        yield "octic_linear_gelu", shape, function, abstract((*shape.field(shape.channels), *shape.weights()))
        for name, branch, weights in (
            ("octic_attention", functools.partial(attention_branch, BLOCKS[shape.name]), shape.attention_branch()),
            ("octic_mlp", mlp_branch, shape.mlp_branch()),
        ):
            yield name, shape, branch, abstract((*shape.field(shape.channels), *weights))
        yield from attention_programs(shape, BLOCKS[shape.name])


def attention_branch(heads, lines, planes, *weights):
    """`octic_attention` of separate arrays."""
    return octic_attention(lines, planes, Weights(*weights), heads, NORM, implementation="tpu")


def mlp_branch(lines, planes, *weights):
    """`octic_mlp` of separate arrays."""
    return octic_mlp(lines, planes, Weights(*weights), NORM, implementation="tpu")


def attention_programs(shape: Shape, heads: int):
    """Dense and octic attention, forward and backward, of heads that lie where the kernel wants them."""
    c = shape.channels // heads
    for kind, parts, rows in (("dense", (8 * c,), (1,)), ("octic", (c,) * 4 + (2 * c,) * 2, (4, 2))):
        arrangement, sources = lanes.arrange(parts, heads), (0, len(parts) - 1)[: len(rows)]
        qkv, y = (
            abstract([(n, *shape.batch, shape.tokens, widths[i]) for n, i in zip(rows, sources, strict=True)])
            for widths in (arrangement.qkv_widths, arrangement.widths)
        )
        for name, function, arguments in (("", arranged.forward, qkv), ("_backward", arranged.backward, (*qkv, *y))):
            if name and not arranged.supported(qkv, parts, heads, backward=True):
                continue
            function = functools.partial(function, "tpu", parts, heads)
            yield f"{kind} attention{name}", shape, function, arguments


def block_rows(budget: timing.Budget, folder: pathlib.Path) -> list[dict]:
    """Blocks: dense, octic without kernels and octic with them, forward and gradient."""
    rows = []
    for (name, heads), direction, kind in itertools.product(BLOCKS.items(), ("forward", "gradient"), KINDS):
        row = dict(**model_of(SHAPES[name]), direction=direction, kind=kind)
        print(f"compiling {title(row)}", file=sys.stderr)
        with budget.trying(title(row)), using(KINDS[kind]):
            group = None if kind == "dense" else OCTIC
            function, arguments = block_program(SHAPES[name], heads, group, direction)
            seconds, program, works = compiled(between_blocks(function, direction), arguments, folder)
            text = entry(program)
            called = {name: works[name] for name in kernels_in(text)}
            noted = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text))) / 1e3
            row |= estimate(works) | dict(kernel_kcycles=estimate(called)["kcycles"], noted_kcycles=noted)
            row |= dict(parts=parts(text, works), called=sorted(called), instructions=len(works), seconds=seconds)
            rows.append(row | dict(temporary_mib=program.memory_analysis().temp_size_in_bytes / 2**20))
    return rows


def estimate(works: Mapping[str, tpu_assembly.Work], moved: int = 0) -> dict:
    """Thousands of cycles of instructions in sequence; `moved` is the least number of bytes that they move in HBM."""
    memory = max(moved, sum(work.bytes for work in works.values())) / BYTES_PER_CYCLE
    return dict(
        kcycles=max(sum(map(cycles, works.values())), memory) / 1e3,
        bundle_kcycles=sum(work.bundles for work in works.values()) / 1e3,
        matrix_kcycles=sum(work.rows for work in works.values()) / 1e3,
        memory_kcycles=memory / 1e3,
        unread=[name for name, work in works.items() if not work.read],
    )


def cycles(work: tpu_assembly.Work) -> float:
    """The largest of bundles, rows of the matrix units and, unless transfers are asynchronous, their cycles."""
    return max(work.bundles, work.rows, 0 if work.asynchronous else work.bytes / BYTES_PER_CYCLE)


def parts(text: str, works: Mapping[str, tpu_assembly.Work]) -> dict[str, float]:
    """Thousands of cycles by the layers' named scopes, kernels apart; "other" has none of these names."""
    result, kernels = dict.fromkeys((*PARTS, "kernels", "other"), 0.0), kernels_in(text)
    for name, work in works.items():
        line = re.search(rf'%{re.escape(name)} = .*op_name="([^"]*)"', text)
        scopes = re.findall("|".join(PARTS), line[1]) if line else []
        part = "kernels" if name in kernels else scopes[-1] if scopes else "other"
        result[part] += cycles(work) / 1e3
    return result


def model_of(shape: Shape) -> dict:
    """Model and tokens of a shape, for the tables."""
    return dict(model=shape.name.split(",")[0], tokens=shape.tokens)


def title(row: Mapping) -> str:
    """A row of either table in one line."""
    words = [row.get("kernel"), row["model"], f"{row['tokens']} tokens", row.get("direction"), row.get("kind")]
    return ", ".join(filter(None, words))


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


def between_blocks(function, direction: str):
    """A function of `block_program`, jitted for one chip, on which parameters lie as a program gets them.

    The layout of x and of the result, and of x's gradient, is the compiler's choice: in a model they come from one
    block and go to the next, and nothing copies them.
    """
    stored, between = chip(), free()
    results = {"forward": between, "gradient": (stored, between)}[direction]
    return jax.jit(function, in_shardings=(stored, between), out_shardings=results)


def compiled(
    function, arguments, folder: pathlib.Path
) -> tuple[float, jax.stages.Compiled, dict[str, tpu_assembly.Work]]:
    """Seconds, the program of a jitted function, and the work of its instructions; libtpu writes into `folder`."""
    for file in folder.iterdir():
        file.unlink()
    start = time.perf_counter()
    program = function.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    return round(seconds, 1), program, tpu_assembly.work(folder)


@functools.cache
def chip() -> NamedSharding:
    """One chip that holds whole arrays; cached, as shardings of two calls must be equal."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices[0]
    return NamedSharding(Mesh([device], ("chip",)), PartitionSpec())


def free() -> Format:
    """The layout that the compiler chooses, on `chip`."""
    return Format(Layout.AUTO, chip())


def entry(program: jax.stages.Compiled) -> str:
    """The text of the computation in which a program starts."""
    return program.as_text().split("\nENTRY", 1)[1]


def kernels_in(text: str) -> list[str]:
    """The names of the instructions that call a kernel."""
    return re.findall(r"%(\S+) = .*tpu_custom_call", text)


def claims_of(blocks: Sequence[Mapping]) -> list[Claim]:
    """Estimates without kernels, and of dense blocks, over those with kernels; not judged where trips are missing."""
    found = {title(row): row for row in blocks}
    claims = []
    for row in blocks:
        if row["kind"] != "octic, kernels":
            continue
        for kind in ("octic, XLA", "dense"):
            other = found.get(title({**row, "kind": kind}))
            ratio = timing.ratio(other and other["kcycles"], row["kcycles"])
            judged = not (row["unread"] or other and other["unread"])
            claims.append(Claim(f"{title(row)}: {kind} over it", ratio, at_least=1, judged=judged))
    return claims


def abstract(shapes):
    return tuple(jax.ShapeDtypeStruct(shape, DTYPE) for shape in shapes)
