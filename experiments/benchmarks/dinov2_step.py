"""A step of DINOv2 beside its parts, branches on subsets beside branches per sample, and the memory of its heads.

    python -m experiments benchmarks.dinov2_step  # some three minutes on two cores
    python -m experiments benchmarks.dinov2_step --size=l16 --batch=32 --prototypes=65536 --image=224 --local=96

- step: a whole step of the small recipe (student, teacher, heads, losses, AdamW, average) over the sum of its parts
  timed alone: the student's gradient on both sizes of crops, the teacher's forward pass, heads and losses with their
  gradient; each family at equal width, also over the plain model;
- subsets: the gradient of two blocks at rate 0.3, on the kept images, over a draw per image; width 384, 197 tokens, 16
  images;
- memory: temporary memory of value and gradient of heads and losses, in float32 arrays of [masked rows, prototypes], at
  64 images of 224 px and 65,536 prototypes; only compiled.

Claims: a step at most 1.15 times its parts; subsets at most 0.75; memory below 0.5.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from equivit import logical, models, testing
from equivit.data import masking
from equivit.layers.block import Subsets
from equivit.layers.dino_head import DinoHead
from equivit.layers.stack import Stack
from equivit.objectives import dino_losses
from equivit.objectives.dinov2 import Student
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC
from equivit.training import config as configs
from equivit.training import sharding
from experiments import compiled_models, findings, flags, machine, timing
from experiments.findings import Claim

FAMILIES = ("plain", "H8", "I8", "D8")
RATE = 0.3
STEP = dict(family="", step="step", student="student", teacher="teacher", losses="losses", over_parts="step / parts")
STEP |= dict(over_plain="step / plain")
SUBSETS = dict(kind="two blocks", sample="per image", subsets="subsets", ratio="ratio")


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=7, warmup=2, minutes=10)
    parser.add_argument("--families", default=list(FAMILIES), type=flags.one_of(FAMILIES), help="(all)")
    parser.add_argument("--size", default="ti16", help="of the model (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="images (%(default)s)")
    parser.add_argument("--image", type=int, default=96, help="side of global crops (%(default)s)")
    parser.add_argument("--local", type=int, default=48, help="side of local crops (%(default)s)")
    parser.add_argument("--prototypes", type=int, default=4096, help="(%(default)s)")
    options = parser.parse_args(arguments)
    settings = {name: getattr(options, name) for name in ("size", "batch", "image", "local", "prototypes", "runs")}
    entry = findings.Entry(options, dict(settings=settings), timing.Budget(options.minutes))
    entry.keep(("family",), [(family,) for family in options.families], "step")
    entry.keep(("kind",), [("dense",), ("octic",)], "subsets")
    rows = entry.measured(functools.partial(step, options=options), STEP, "step")
    subsets = entry.measured(functools.partial(blocks, options=options), SUBSETS, "subsets")
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
    return entry.finish(claims, head_arrays=arrays)


def step(family: str, options) -> dict:
    """Milliseconds of a whole step, and of each part."""
    config = config_of(family, options)
    mesh = sharding.create_mesh(config.mesh)
    with jax.set_mesh(mesh):
        run, state, batch = compiled_models.first_step(config, mesh)
        module = nnx.merge(*nnx.split(jax.tree.map(jnp.copy, logical.put(run.module, state.arrays))))
        prepared = jax.jit(lambda batch: run.objective.prepare(run.module, batch, jax.random.key(0)))(batch)

        def whole():
            nonlocal state
            state, metrics = run.step(state, batch)
            return metrics

        variants = {"step": whole, **parts(run.objective, module, prepared)}
        milliseconds = timing.milliseconds(variants, options)
    together = sum(milliseconds[name] for name in ("student", "teacher", "losses"))
    return dict(family=family, **milliseconds, over_parts=milliseconds["step"] / together)


def config_of(family, options):
    """The small recipe at the sizes of the flags."""
    config = configs.load(f"configs/dinov2.py:small,{family}", ["data.source=synthetic"]).unlock()
    for key in ("patch_size", "width", "depth", "num_heads"):
        del config.model[key]
    config.batch_size, config.data.image_size = options.batch, (options.image, options.image)
    config.data.views.local_size = (options.local, options.local)
    config.objective.update(prototypes=options.prototypes, hidden=2048, bottleneck=256)
    config.model.name = f"{'octic_' if family != 'plain' else ''}dinov2_vit_{options.size}"
    config.model.update(image_size=config.data.image_size, layer_scale=1e-2, drop_path=0.3, drop_path_groups=1)
    return config.lock()


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
        masks, teacher = jnp.moveaxis(batch["masks"], 1, 0), {"cls": cls, "patches": patches}
        settings = dict(teacher_temperature=0.025, capacity=capacity)
        return dino_losses.dinov2(heads, heads, seen, teacher, masks, **settings).losses["total"]

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
    milliseconds = timing.milliseconds(variants, options)
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
