"""A step of DINOv2 beside its parts, branches on subsets beside branches per sample, and the memory of its heads.

    python -m experiments benchmarks.dinov2_step  # some three minutes on two cores
    python -m experiments benchmarks.dinov2_step --size=l16 --batch=32 --prototypes=65536 --image=224 --local=96

- step: a whole step of the small recipe (student, teacher, heads, losses, AdamW, average) over the sum of its parts
  timed alone: the student's gradient on both sizes of crops, the teacher's forward pass, heads and losses with their
  gradient; plain, H8, I8 and D8 at equal width, and each family's step over that of the plain model;
- subsets: the gradient of two blocks at rate 0.3, computed on the kept images, over that with a draw per image,
  dense and octic, width 384, 197 tokens, 16 images;
- memory: temporary memory of value and gradient of heads and losses, in float32 arrays of [masked rows, prototypes], at
  64 images of 224 px and 65,536 prototypes; only compiled.

Claims: a step at most 1.15 times its parts; subsets at most 0.75; memory below 0.5.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import models, testing
from equivit.data import batches, masking
from equivit.layers.block import Subsets
from equivit.layers.dino_head import DinoHead
from equivit.layers.stack import Stack
from equivit.objectives import dino_losses
from equivit.objectives.dinov2 import Student
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training import build, sharding
from equivit.training import config as configs
from experiments import findings, flags, machine, timing
from experiments.findings import Claim

FAMILIES = ("plain", "H8", "I8", "D8")
RATE = 0.3


def main(arguments=None) -> int:
    options = _options(arguments)
    budget, rows, subsets = timing.Budget(options.minutes), [], []
    for family in options.families:
        if budget.allows(family):
            with budget.trying(family):
                rows.append(step(family, options))
                print(findings.table(rows[-1:], STEP), flush=True)
    for kind in ("dense", "octic"):
        if budget.allows(f"{kind} blocks"):
            with budget.trying(f"{kind} blocks"):
                subsets.append(blocks(kind, options))
    plain = next((row["step"] for row in rows if row["family"] == "plain"), None)
    for row in rows:
        row["over_plain"] = timing.ratio(row["step"], plain)
    arrays = heads_memory()
    print("\nmilliseconds")
    print(findings.table(rows, STEP))
    print(findings.table(subsets, SUBSETS))
    print(f"heads and losses: {arrays:.2f} arrays of [masked rows, prototypes]")
    claims = [Claim(f"{row['family']}: a step over its parts", row["over_parts"], at_most=1.15) for row in rows]
    claims += [Claim(f"{row['kind']}: subsets over draws per image", row["ratio"], at_most=0.75) for row in subsets]
    claims.append(Claim("memory of heads and losses, in arrays of logits", arrays, at_most=0.5))
    settings = {name: getattr(options, name) for name in ("size", "batch", "image", "local", "prototypes", "runs")}
    results = dict(settings=settings, step=rows, subsets=subsets, head_arrays=arrays)
    return findings.finish(options, results, claims, budget)


def _options(arguments):
    parser = flags.timing_parser(__doc__, __file__, runs=7, warmup=2, minutes=10)
    parser.add_argument("--families", default=list(FAMILIES), type=flags.one_of(FAMILIES), help="(all)")
    parser.add_argument("--size", default="ti16", help="of the model (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images (%(default)s)")
    parser.add_argument("--image", type=int, default=96, help="side of global crops (%(default)s)")
    parser.add_argument("--local", type=int, default=48, help="side of local crops (%(default)s)")
    parser.add_argument("--prototypes", type=int, default=4096, help="(%(default)s)")
    return parser.parse_args(arguments)


STEP = dict(family="", step="step", student="student", teacher="teacher", losses="losses", over_parts="step / parts")
STEP |= dict(over_plain="step / plain")
SUBSETS = dict(kind="two blocks", sample="per image", subsets="subsets", ratio="ratio")


def step(family: str, options) -> dict:
    """Milliseconds of a whole step, and of each part."""
    config = config_of(family, options)
    mesh = sharding.create_mesh(config.mesh)
    with jax.set_mesh(mesh):
        run = build.make_program(config, mesh, total=1000, per_epoch=100)
        state = run.init({})
        module = nnx.merge(*nnx.split(jax.tree.map(jnp.copy, _module(run, state))))
        batch = sharding.to_global(mesh, batch_of(run, config, options))
        prepared = jax.jit(lambda batch: run.objective.prepare(run.module, batch, jax.random.key(0)))(batch)

        def whole():
            nonlocal state
            state, metrics = run.step(state, batch)
            return metrics

        variants = {"step": whole, **parts(run.objective, module, prepared)}
        seconds = timing.medians(timing.interleaved(variants, warmup=options.warmup, runs=options.runs))
    milliseconds = {name: 1000 * s for name, s in seconds.items()}
    together = sum(milliseconds[name] for name in ("student", "teacher", "losses"))
    return dict(family=family, **milliseconds, over_parts=milliseconds["step"] / together)


def _module(run, state):
    from equivit import logical

    return logical.put(run.module, state.arrays)


def config_of(family, options):
    """The small recipe at the sizes of the flags."""
    texts = [f"model.name={'octic_' if family != 'plain' else ''}dinov2_vit_{options.size}", "model.layer_scale=1e-2"]
    texts += [f"{key}=({options.image},{options.image})" for key in ("model.image_size", "data.image_size")]
    texts += [f"data.views.local_size=({options.local},{options.local})", "data.source=synthetic"]
    texts += [f"batch_size={options.batch}", f"objective.prototypes={options.prototypes}"]
    texts += ["model.drop_path=0.3", "model.drop_path_groups=1", "objective.hidden=2048", "objective.bottleneck=256"]
    config = configs.load(f"configs/dinov2.py:small,{family}").unlock()
    for key in ("patch_size", "width", "depth", "num_heads"):
        del config.model[key]
    for text in texts:
        configs.override(config, text)
    config.model.update(in_channels=3)
    return config.lock()


def batch_of(run, config, options):
    rng = np.random.default_rng(0)
    views = config.data.views
    sizes = {"global_crops": (2, options.image, options.image, 3)}
    sizes["local_crops"] = (views.locals, options.local, options.local, 3)
    crops = {name: rng.integers(0, 256, (options.batch, *size), np.uint8) for name, size in sizes.items()}
    transform = run.objective.transform_of(config)(config.data, 3)
    return transform.finish(crops, rng, batches.Share(options.batch))


def parts(objective, module: Student, batch):
    """The parts of a step, each compiled by itself."""
    key = jax.random.key(0)

    def tokens(module, key):
        cls, patches = module.tokens(batch["global_crops"], batch["masks"], key)
        return cls, patches, module.tokens(batch["local_crops"], key=key)[0]

    # Gradients of every output, as the losses send them.
    student = jax.jit(jax.grad(lambda module: sum(jnp.sum(jnp.sin(leaf)) for leaf in tokens(module, key))))
    teacher = jax.jit(lambda module: module.tokens(batch["global_crops"]))
    cls, patches, local = jax.jit(lambda module: tokens(module, None))(module)
    seen = {"cls": cls, "patches": patches, "local_cls": local}
    capacity = objective.capacity(len(batch["masks"]), module.backbone.config.patch_size)

    def loss(heads, seen):
        return dino_losses.dinov2(
            heads,
            heads,
            seen,
            {"cls": cls, "patches": patches},
            jnp.moveaxis(batch["masks"], 1, 0),
            teacher_temperature=0.025,
            capacity=capacity,
        ).losses["total"]

    losses = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), allow_int=True))
    return {
        "student": functools.partial(student, module),
        "teacher": functools.partial(teacher, module),
        "losses": functools.partial(losses, module.heads, seen),
    }


def blocks(kind: str, options) -> dict:
    """Milliseconds of the gradient of two blocks, by either way of dropping branches."""
    name, family = dict(dense=("vit_s16", "plain"), octic=("octic_vit_s16", "D8"))[kind]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 197, 384)), jnp.float32)
    x = x if kind == "dense" else fields.from_dense(x, OCTIC)
    model = testing.randomise(models.create(name, family=family, depth=2, num_classes=None), jax.random.key(0))
    rates = np.full(2, RATE, np.float32)

    def gradient(stack):
        def value(stack, x):
            y, _ = stack(x, rates=rates, key=jax.random.key(1), train=True)
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(y))

        compiled = jax.jit(jax.grad(value, argnums=(0, 1)))
        return lambda: compiled(stack, x)

    variants = {}
    for way, subsets in (("sample", None), ("subsets", Subsets(RATE, 1))):
        made = [model.blocks[i] for i in range(2)]
        for block in made:
            block.subsets = subsets
        variants[way] = gradient(Stack.from_blocks(made))
    seconds = timing.medians(timing.interleaved(variants, warmup=options.warmup, runs=options.runs))
    milliseconds = {way: 1000 * s for way, s in seconds.items()}
    return dict(kind=kind, **milliseconds, ratio=milliseconds["subsets"] / milliseconds["sample"])


def heads_memory(images: int = 64, prototypes: int = 65536, width: int = 1024) -> float:
    """Temporary memory of value and gradient of heads and losses, in arrays of [masked rows, prototypes]."""
    grid = (14, 14)
    rows = masking.capacity(2 * images, grid, 0.5, (0.1, 0.5))
    head = jax.eval_shape(lambda: DinoHead(width, prototypes, rngs=nnx.Rngs(0)))
    shapes = {"cls": (2, images, width), "local_cls": (8, images, width), "patches": (2, images, 196, width)}
    student = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    masks = jax.ShapeDtypeStruct((2, images, 196), bool)

    def loss(head, student, teacher, masks):
        options = dict(teacher_temperature=0.07, capacity=rows)
        return dino_losses.dinov2((head, head), (head, head), student, teacher, masks, **options).losses["total"]

    lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(head, student, student, masks)
    return machine.memory(lowered.compile()).temporary / (4 * rows * prototypes)
