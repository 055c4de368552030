"""The losses of DINOv2: streamed rows against whole arrays of logits, padding, groups, devices, memory, collapse."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from equivit import logical
from equivit.layers.dino_head import DinoHead
from equivit.objectives import dino_losses, streams
from equivit.training import sharding
from tests.drawing import normal
from tests.objectives import dino_definitions
from tests.training.state_test import mesh_of

IMAGES, LOCAL, PATCHES, WIDTH, PROTOTYPES = 16, 3, 6, 8, 11
HEAD = dict(hidden=16, bottleneck=5)
GROUPS, CAPACITY = 8, 19  # 2 images, 4 views of 6 patches; from 6 to 18 of them are masked
TEMPERATURE = 0.07


@functools.cache
def head(seed):
    """Every parameter random: matrices of unit gain, biases of 1/2, gains around 1."""
    abstract = nnx.eval_shape(lambda: DinoHead(WIDTH, PROTOTYPES, **HEAD, rngs=nnx.Rngs(0)))
    random = np.random.default_rng(seed)

    def draw(tensor):
        noise = random.normal(size=tensor.shape).astype(np.float32)
        if tensor.name == "gains":
            return 1 + 0.2 * noise
        return noise * (0.5 if len(tensor.shape) == 1 else tensor.shape[0] ** -0.5)

    table = [t for table in logical.tensors(abstract).values() for t in table.flat]
    return logical.from_logical(abstract, {t.name: draw(t) for t in table})


STUDENT, TEACHER = (head(0), head(1)), (head(2), head(3))
SEEN = {"cls": normal(2, IMAGES, WIDTH, seed=4), "patches": normal(2, IMAGES, PATCHES, WIDTH, seed=5)}
TOKENS = {"cls": normal(2, IMAGES, WIDTH, seed=6), "local_cls": normal(LOCAL, IMAGES, WIDTH, seed=7)}
TOKENS["patches"] = normal(2, IMAGES, PATCHES, WIDTH, seed=8)
# Some views without a mask, and every group with another number of masked patches.
RATIO = np.random.default_rng(9).uniform(-0.4, 0.9, size=(2, IMAGES, 1))
MASKS = np.random.default_rng(10).uniform(size=(2, IMAGES, PATCHES)) < RATIO
CENTERS = (0.1 * normal(PROTOTYPES, seed=11), 0.1 * normal(PROTOTYPES, seed=12))


def streamed(student_heads, tokens, targets, capacity=CAPACITY, seen=SEEN):
    return dino_losses.dinov2(
        student_heads,
        TEACHER,
        tokens,
        seen,
        MASKS,
        teacher_temperature=TEMPERATURE,
        targets=targets,
        centers=CENTERS if targets == "centering" else None,
        groups=GROUPS,
        capacity=capacity,
        at_once=4,  # five parts of patches, some of them all padding; one image with its five views
    )


def plain(student_heads, tokens, targets):
    """From whole arrays of logits and the functions of the plain definitions."""
    rows = (*np.nonzero(MASKS),)
    weights = jnp.asarray((MASKS / np.maximum(MASKS.sum(-1, keepdims=True), 1))[rows], jnp.float32)
    theirs = (TEACHER[0](SEEN["cls"]), TEACHER[1](SEEN["patches"][rows]))
    if targets == "sinkhorn_knopp":
        probabilities = [dino_definitions.sinkhorn_knopp(x.reshape(-1, PROTOTYPES), TEMPERATURE) for x in theirs]
        centers = (None, None)
    else:
        probabilities = [
            dino_definitions.centred_targets(x, c, TEMPERATURE) for x, c in zip(theirs, CENTERS, strict=True)
        ]
        centers = tuple(dino_definitions.moved_center(c, x) for c, x in zip(CENTERS, theirs, strict=True))
    classes = probabilities[0].reshape(2, IMAGES, PROTOTYPES)
    whole, local = dino_definitions.dino(
        classes, student_heads[0](tokens["cls"]), student_heads[0](tokens["local_cls"])
    )
    losses = {"global": whole, "local": local}
    losses["koleo"] = 0.1 * sum(dino_losses.koleo(view, GROUPS) for view in tokens["cls"])
    ours = student_heads[1](tokens["patches"][rows])
    losses["ibot"] = dino_definitions.ibot(probabilities[1], ours, weights, 2 * IMAGES)
    losses["total"] = sum(losses.values())
    spreads = [dino_definitions.spread(x.reshape(-1, PROTOTYPES)) for x in (classes, probabilities[1])]
    return dino_losses.Outcome(losses, *spreads, centers)


@functools.cache
def differentiated(function, targets, capacity=CAPACITY):
    options = {} if function is plain else dict(capacity=capacity)

    def total(student_heads, tokens):
        outcome = function(student_heads, tokens, targets, **options)
        return outcome.losses["total"], outcome

    return jax.device_get(jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(STUDENT, TOKENS))


def close(ours, theirs, tolerance=2e-6):
    """Equal up to rounding, relative to the largest entry of each array."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(np.abs(b).max(), 1e-3))


@pytest.mark.slow
@pytest.mark.parametrize("targets", dino_losses.TARGETS)
def test_streamed_equals_plain(targets):
    (_, ours), gradients = differentiated(streamed, targets)
    (_, theirs), expected = differentiated(plain, targets)
    assert set(ours.losses) == {"global", "local", "koleo", "ibot", "total"}
    close(ours, theirs)
    close(gradients, expected, 1e-5)  # sums over rows in another order, in three layers
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 1e-4


def test_padding_changes_nothing():
    """A buffer of all patches instead of 19; patches that no mask covers."""
    (_, ours), gradients = differentiated(streamed, "sinkhorn_knopp", None)
    (_, theirs), expected = differentiated(streamed, "sinkhorn_knopp")
    close(ours, theirs)
    close(gradients, expected, 1e-5)
    assert not gradients[1]["patches"][~MASKS].any()
    assert all(gradients[1]["patches"][MASKS].any(-1))


def test_no_local_views():
    tokens = {k: v for k, v in TOKENS.items() if k != "local_cls"}
    run = jax.jit(lambda tokens: streamed(STUDENT, tokens, "sinkhorn_knopp").losses)
    losses, expected = run(tokens), differentiated(plain, "sinkhorn_knopp")[0][1].losses
    np.testing.assert_allclose(losses["global"], expected["global"] * (2 + 2 * LOCAL) / 2, rtol=1e-5)
    assert losses["local"] == 0


def test_the_teacher_gets_no_gradient():
    def total(heads, seen):
        options = dict(teacher_temperature=TEMPERATURE, groups=GROUPS)
        return dino_losses.dinov2(STUDENT, heads, TOKENS, seen, MASKS, **options).losses["total"]

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(TEACHER, SEEN)
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradients))


MOVING = r"= f32\[([\d,]*)\]\S* (all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("


@pytest.mark.slow
@pytest.mark.parametrize("targets", dino_losses.TARGETS)
def test_eight_devices_equal_one(targets):
    """Each has a group of two images, and shards of the heads; only weights are gathered, outside of every loop."""
    mesh = mesh_of(4, 2)
    rows = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))
    heads = sharding.of_tree(mesh, STUDENT, {})

    def total(student_heads, tokens, seen):
        outcome = streamed(student_heads, tokens, targets, seen=seen)
        return outcome.losses["total"], outcome

    with jax.set_mesh(mesh):
        run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
        arguments = (jax.device_put(STUDENT, heads), *jax.device_put((TOKENS, SEEN), rows))
        compiled = run.lower(*arguments).compile()
        (_, ours), gradients = compiled(*arguments)
    (_, theirs), expected = differentiated(streamed, targets)
    close(ours, theirs)
    close(gradients, expected, 1e-5)
    text = compiled.as_text()
    whole = {a.shape for a in jax.tree.leaves((STUDENT, TEACHER))}
    whole |= {(1, *shape) for shape in whole}  # a vector may move as a row
    moved = {tuple(map(int, shape.split(","))) for shape, _ in re.findall(MOVING, text)}
    assert moved <= whole
    loops = text.split("ENTRY")[0]
    assert "while(" in text and not re.search(r"(all-reduce|all-gather)(?:-start)?\(", loops)


sinkhorn_knopp = jax.jit(dino_definitions.sinkhorn_knopp)
moved_center, spread = jax.jit(dino_definitions.moved_center), jax.jit(dino_definitions.spread)


def test_gradients_of_many_steps_are_added_in_float32():
    """Adds 600 equal rows, one at a time; in bfloat16 a sum stops growing at 256 times its summands."""
    rows = np.tile(normal(1, 1, 1, 4, seed=19), (1, 600, 1, 1))
    teacher = streams.Stream(rows, normal(4, 5, seed=20), lambda w, x: x @ w)

    def total(weights, at_once):
        student = streams.Stream(rows, weights, lambda w, x: (x.astype(w.dtype) @ w).astype(jnp.float32))
        losses, _ = streams.cross_entropies(teacher, np.zeros(5), student, np.ones((1, 600), bool), at_once=at_once)
        return losses.sum()

    gradient = jax.jit(jax.grad(total), static_argnums=1)
    slow, fast = (gradient(normal(4, 5, dtype="bfloat16", seed=21), n).astype(np.float32) for n in (1, 600))
    np.testing.assert_allclose(slow, fast, rtol=2e-2, atol=1e-2 * np.abs(fast).max())


def test_sinkhorn_gives_rows_and_columns_equal_sums():
    logits = normal(40, PROTOTYPES, seed=13)
    targets = np.asarray(sinkhorn_knopp(logits, 0.2, iterations=60), np.float64)
    np.testing.assert_allclose(targets.sum(1), 1, rtol=1e-5)
    np.testing.assert_allclose(targets.sum(0), 40 / PROTOTYPES, rtol=1e-4)
    three = np.asarray(sinkhorn_knopp(logits, 0.2), np.float64)  # the default: columns only nearly
    q = np.exp(np.asarray(logits, np.float64) / 0.2)
    for _ in range(3):
        q /= q.sum(0)
        q /= q.sum(1, keepdims=True)
    np.testing.assert_allclose(three, q, rtol=1e-4)
    assert np.abs(three.sum(0) - 40 / PROTOTYPES).max() > 1e-2


def test_sinkhorn_does_not_overflow():
    """exp(400 / 0.04) would; a constant added to a column is no change."""
    logits = normal(40, PROTOTYPES, seed=14)
    moved = logits + np.linspace(-400, 400, PROTOTYPES, dtype=np.float32)
    # 400 is stored to 3e-5, which 0.04 divides.
    np.testing.assert_allclose(sinkhorn_knopp(moved, 0.04), sinkhorn_knopp(logits, 0.04), atol=2e-3)


def test_rows_of_weight_0_are_in_no_sum():
    logits, weights = np.array(normal(40, PROTOTYPES, seed=17)), np.tile([1, 0, 0.5, 0, 2], 8).astype(np.float32)
    logits[weights == 0] *= 100
    present, center = weights > 0, np.linspace(-1, 1, PROTOTYPES, dtype=np.float32)
    targets = np.asarray(sinkhorn_knopp(logits, 0.1, weights))
    np.testing.assert_allclose(targets[present], sinkhorn_knopp(logits[present], 0.1), rtol=1e-5, atol=1e-9)
    assert not targets[~present].any()
    moved = moved_center(center, logits, weights)
    np.testing.assert_allclose(moved, 0.9 * center + 0.1 * logits[present].mean(0), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(spread(targets, weights), spread(targets[present]), rtol=1e-5)
    nothing = np.zeros(40, np.float32)
    assert not sinkhorn_knopp(logits, 0.1, nothing).any()
    np.testing.assert_allclose(moved_center(center, logits, nothing), center, rtol=1e-6)


def test_a_step_without_masks():
    run = jax.jit(lambda m: dino_losses.dinov2(STUDENT, TEACHER, TOKENS, SEEN, m, teacher_temperature=0.1))
    outcome = run(np.zeros_like(MASKS))
    assert outcome.losses["ibot"] == 0 and np.isfinite(jax.tree.leaves(outcome)).all()


@pytest.mark.parametrize("targets", dino_losses.TARGETS)
def test_a_buffer_without_rows(targets):
    """As of groups so small that none of their views is masked; the centre of patches stays."""
    run = jax.jit(lambda tokens: streamed(STUDENT, tokens, targets, capacity=0))
    outcome, expected = run(TOKENS), differentiated(streamed, targets)[0][1]
    assert outcome.losses["ibot"] == 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome))
    close(outcome.classes, expected.classes)
    if targets == "centering":
        np.testing.assert_array_equal(outcome.centers[1], CENTERS[1])


def test_koleo_looks_for_neighbours_within_groups():
    features = normal(12, 7, seed=18)
    koleo = jax.jit(dino_losses.koleo, static_argnums=1)
    parts = [koleo(part, 1) for part in np.split(features, 3)]
    np.testing.assert_allclose(koleo(features, 3), np.mean(parts), rtol=1e-5)
    assert abs(koleo(features, 3) - koleo(features, 1)) > 1e-2
    u = np.asarray(features, np.float64) / np.linalg.norm(features, axis=-1, keepdims=True)
    apart = np.linalg.norm(u[:, None] - u, axis=-1) + 9 * np.eye(12)
    np.testing.assert_allclose(koleo(features, 1), -np.log(apart.min(1)).mean(), rtol=1e-5)
    gradient = jax.jit(jax.grad(dino_losses.koleo))(np.repeat(features, 2, axis=0))  # every image twice
    assert np.isfinite(gradient).all()


def test_collapse_shows():
    """Uniform rows; and one prototype for all rows, which balancing prevents and centering does not."""
    rows = np.zeros((40, PROTOTYPES), np.float32)
    uniform = spread(sinkhorn_knopp(rows, 0.1))
    np.testing.assert_allclose((uniform.rows, uniform.mean), 1, rtol=1e-5)
    rows[:, 3] = 9
    single = spread(jax.jit(dino_definitions.centred_targets)(rows, np.zeros(PROTOTYPES), 0.1))
    np.testing.assert_allclose(single, (0, 0, 1), atol=1e-6)
    np.testing.assert_allclose(spread(sinkhorn_knopp(rows, 0.1)).mean, 1, rtol=1e-5)
    several = spread(np.eye(PROTOTYPES, dtype=np.float32)[np.arange(40) % 8])
    np.testing.assert_allclose(several, (0, np.log(8) / np.log(PROTOTYPES), 1 / 8), atol=1e-6)


def test_temporaries_are_small_beside_the_logits():
    """At 3,900 rows and 65,536 prototypes they are 0.36 of one array of logits, where whole arrays need 5.0."""
    rows, prototypes, images, width = 1024, 8192, 16, 16
    abstract = nnx.eval_shape(lambda: DinoHead(width, prototypes, hidden=64, bottleneck=32, rngs=nnx.Rngs(0)))
    seen = {"cls": (2, images, width), "patches": (2, images, rows // images, width)}
    seen = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in seen.items()}
    masks = jax.ShapeDtypeStruct((2, images, rows // images), bool)

    def total(head, tokens, teacher, seen, masks):
        options = dict(teacher_temperature=0.05, capacity=rows, at_once=32)
        return dino_losses.dinov2((head,) * 2, (teacher,) * 2, tokens, seen, masks, **options).losses["total"]

    step = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(abstract, seen, abstract, seen, masks)
    assert step.compile().memory_analysis().temp_size_in_bytes < 0.5 * 4 * rows * prototypes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dino_losses.koleo(np.ones((6, 2)), 4), "koleo: groups=4 must divide the batch of 6 images; .* is 3"),
        (
            lambda: dino_losses.koleo(np.ones((6, 2)), 6),
            "groups=6 of 6 images hold one image each; neighbours",
        ),
        (lambda: streamed(STUDENT, TOKENS, "sinkhorn"), "targets='sinkhorn' is not one of .* 'sinkhorn_knopp'"),
    ],
)
def test_impossible_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_centres_belong_to_centering():
    options = dict(teacher_temperature=0.1)
    with pytest.raises(ValueError, match=r"targets='centering' needs centers=\(cls, patches\)"):
        dino_losses.dinov2(STUDENT, TEACHER, TOKENS, SEEN, MASKS, targets="centering", **options)
    with pytest.raises(ValueError, match="targets='sinkhorn_knopp' takes no centers"):
        dino_losses.dinov2(STUDENT, TEACHER, TOKENS, SEEN, MASKS, centers=CENTERS, **options)
