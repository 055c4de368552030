"""The kernels and whole octic blocks compiled for TPU v5e by libtpu, on a machine without a TPU.

    pip install "jax[tpu]==0.12.0.1" -r requirements.txt
    python -m experiments benchmarks.tpu_compile  # half an hour or more on two cores

Nothing runs: the script shows that the compiler takes the kernels, and estimates cycles from the compiled code.  An
instruction of XLA, or a kernel, takes the largest of the bundles that it issues, every trip of every loop counted in
the final assembly (tpu_assembly.py); the rows that the busiest of the four matrix units takes, one per cycle; and the
bytes of its operands and results in HBM, over the bandwidth.  Copies between HBM and VMEM that run beside other
instructions count by their bundles.  A block takes the sum over its instructions, or all its bytes over the bandwidth
if that is more.  Stalls are left out, so it is a lower bound; activations of 64 images would not fit into VMEM.

In bfloat16, 8 images; gradients are of all parameters and the input; layouts between blocks are the compiler's choice.
A block is dense, octic without kernels ("octic, XLA") or octic with them ("octic, kernels").  Claims: every kernel
compiles, and an octic block with kernels has fewer estimated cycles than without, and than the dense one.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import os
import pathlib
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from equivit import models
from equivit.kernels import d8_gelu, octic_linear_gelu, using
from equivit.kernels.attention import arranged, lanes
from equivit.kernels.norm import Norm
from equivit.kernels.octic_branch import Weights, octic_attention, octic_mlp
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC, Group
from experiments import findings, flags, timing
from experiments.benchmarks import tpu_assembly
from experiments.benchmarks.field_shapes import REALISTIC, Shape
from experiments.findings import Claim

TOPOLOGY = "v5e:2x2"
# libtpu must describe an absent chip and not search for one.
CHIP = dict(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4")
CHIP |= dict(TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
BYTES_PER_CYCLE = 819 / 1.5  # GB/s, and the GHz at which four arrays of 128 x 128 make the chip's 197 TFLOP/s
DTYPE, BATCH = jnp.bfloat16, 8
NORM = Norm(eps=1e-5, row_weight=0.5)  # the constants of the models
SHAPES = {shape.name: dataclasses.replace(shape, batch=(BATCH,)) for shape in REALISTIC}
BLOCKS = {"ViT-L": 16, "ViT-L, class token": 16, "ViT-H": 16, "ViT-H, class token": 16}  # heads
GELU_SHAPES = ("ViT-S", *BLOCKS, "ViT-22B")  # hidden widths of 192, 512, 640 and 3072 per component
KINDS = {"dense": "tpu", "octic, XLA": "xla", "octic, kernels": "tpu"}  # and the implementation of the operations
MEASURES = dict(kcycles="kcycles", bundle_kcycles="bundles", matrix_kcycles="matrix units", memory_kcycles="HBM")
MEASURES |= dict(seconds="s to compile")
KERNEL_COLUMNS = dict(kernel="", model="model", tokens="tokens", **MEASURES)
BLOCK_COLUMNS = dict(model="", tokens="tokens", direction="direction", kind="kind", **MEASURES)


def main(arguments: Sequence[str] | None = None) -> int:
    options = flags.parser(__doc__, __file__).parse_args(arguments)
    with described_chip() as dump:
        facts = dict(topology=TOPOLOGY, libtpu=importlib.metadata.version("libtpu"), batch=BATCH, type=DTYPE.dtype.name)
        entry = findings.Entry(options, facts)
        programs = {(name, *model_of(shape).values()): (name, shape, *rest) for name, shape, *rest in kernel_programs()}
        entry.keep(("kernel", "model", "tokens"), programs, "kernels")
        each = itertools.product(BLOCKS, ("forward", "gradient"), KINDS)
        places = {(*model_of(SHAPES[name]).values(), *rest): (name, *rest) for name, *rest in each}
        entry.keep(("model", "tokens", "direction", "kind"), places, "blocks")
        kernels = entry.measured(lambda *key: kernel_row(*programs[key], dump), KERNEL_COLUMNS, "kernels")
        blocks = entry.measured(lambda *key: block_row(*places[key], dump), BLOCK_COLUMNS, "blocks")
    print(
        "Estimates in thousands of cycles, from compiled code and without stalls: lower bounds.  Nothing ran.  Kernels:"
    )
    print(findings.table(kernels, KERNEL_COLUMNS))
    print("\nOne block:")
    print(findings.table(blocks, BLOCK_COLUMNS))
    for row in kernels + blocks:
        if row["unread"]:
            print(f"{title(row)}: too low, the trips of these could not be read: {', '.join(row['unread'])}")
    return entry.finish(claims_of(blocks))


@contextlib.contextmanager
def described_chip() -> Iterator[pathlib.Path]:
    """libtpu compiles for a chip that is not there, and dumps what it compiles into the folder.

    Raises:
      ValueError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError('libtpu is not installed, which compiles for TPUs; run: pip install "jax[tpu]"')
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # libtpu dumps only programs that it compiles
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(CHIP, LIBTPU_INIT_ARGS=f"--xla_jf_dump_to={folder} {tpu_assembly.FLAGS}")
        yield pathlib.Path(folder)


def kernel_row(kernel: str, shape: Shape, function, arguments, folder: pathlib.Path) -> dict:
    """A kernel, without the copies that bring arguments and results into its layout."""
    function = functools.partial(function, implementation="tpu")
    seconds, text, works = compiled(jax.jit(function, in_shardings=free(), out_shardings=free()), arguments, folder)
    own = {name: works[name] for name in kernels_in(text)}
    arrays = jax.tree.leaves((arguments, jax.eval_shape(function, *arguments)))
    moved = sum(DTYPE.dtype.itemsize * a.size for a in arrays)
    return dict(kernel=kernel, **model_of(shape), **estimate(own, moved), seconds=seconds)


def block_row(name: str, direction: str, kind: str, folder: pathlib.Path) -> dict:
    """A block, forward or gradient."""
    with using(KINDS[kind]):
        group = None if kind == "dense" else OCTIC
        function, arguments = block_program(SHAPES[name], BLOCKS[name], group, direction)
        # Parameters lie as a program gets them.  The layout of x, of the result and of x's gradient is the compiler's
        # choice: in a model they come from one block and go to the next, and nothing copies them.
        results = {"forward": free(), "gradient": (chip(), free())}[direction]
        jitted = jax.jit(function, in_shardings=(chip(), free()), out_shardings=results)
        seconds, _, works = compiled(jitted, arguments, folder)
    return dict(**model_of(SHAPES[name]), direction=direction, kind=kind, **estimate(works), seconds=seconds)


def kernel_programs():
    """Name of the kernel, the shape, the function, which takes `implementation`, and its arguments."""
    for shape in map(SHAPES.get, GELU_SHAPES):
        field = abstract(shape.field(shape.hidden))
        yield "d8_gelu", shape, d8_gelu.d8_gelu, field
        yield "d8_gelu_backward", shape, d8_gelu.backward, 2 * field
    for name, heads in BLOCKS.items():
        shape = SHAPES[name]
        field, weights = abstract(shape.field(shape.channels)), abstract(shape.weights())
        yield "octic_linear_gelu", shape, octic_linear_gelu.octic_linear_gelu, (*field, *weights)
        attention = functools.partial(octic_attention, heads=heads, norm=NORM)
        yield "octic_attention", shape, attention, (*field, Weights(*abstract(shape.attention_branch())))
        mlp = functools.partial(octic_mlp, norm=NORM)
        yield "octic_mlp", shape, mlp, (*field, Weights(*abstract(shape.mlp_branch())))
        yield from attention_programs(shape, heads)


def attention_programs(shape: Shape, heads: int):
    """Dense and octic attention, forward and backward, of heads that lie where the kernel wants them."""
    c = shape.channels // heads
    for kind, parts, rows in (("dense", (8 * c,), (1,)), ("octic", (c,) * 4 + (2 * c,) * 2, (4, 2))):
        arrangement, sources = lanes.arrange(parts, heads), (0, len(parts) - 1)[: len(rows)]
        qkv, y = (
            abstract([(n, *shape.batch, shape.tokens, widths[i]) for n, i in zip(rows, sources, strict=True)])
            for widths in (arrangement.qkv_widths, arrangement.widths)
        )

        def of_arrays(function, *arrays, implementation, parts=parts):
            return function(implementation, parts, heads, *arrays)

        yield f"{kind} attention", shape, functools.partial(of_arrays, arranged.forward), qkv
        if arranged.supported(qkv, parts, heads, backward=True):
            yield f"{kind} attention_backward", shape, functools.partial(of_arrays, arranged.backward), (*qkv, *y)


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
        block = models.create(name, family=family, **options).blocks[0]
        x = jnp.zeros((*shape.batch, shape.tokens, width))
        x = x if group is None else fields.from_dense(x, group)
        return jax.tree.map(lambda a: a.astype(DTYPE), (block, x))

    def forward(block, x):
        return block(x)

    def loss(block, x):
        return sum(jnp.square(a.astype(jnp.float32)).sum() for a in jax.tree.leaves(block(x)))

    return {"forward": forward, "gradient": jax.grad(loss, argnums=(0, 1))}[direction], jax.eval_shape(make)


def compiled(function, arguments, folder: pathlib.Path) -> tuple[float, str, dict[str, tpu_assembly.Work]]:
    """Seconds, the text of a jitted function's entry computation, and its instructions' work, dumped into `folder`."""
    for file in folder.iterdir():
        file.unlink()
    start = time.perf_counter()
    program = function.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    return round(seconds, 1), program.as_text().split("\nENTRY", 1)[1], tpu_assembly.work(folder)


@functools.cache
def chip() -> NamedSharding:
    """One chip that holds whole arrays; cached, as shardings of two calls must be equal."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY).devices[0]
    return NamedSharding(Mesh([device], ("chip",)), PartitionSpec())


def free() -> Format:
    """The layout that the compiler chooses, on `chip`."""
    return Format(Layout.AUTO, chip())


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
