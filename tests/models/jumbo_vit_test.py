"""Jumbo ViTs: counts of the paper, what the options mean, symmetry under every element with every parameter random."""

import dataclasses
import functools
import itertools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, models, precision, testing
from equivit.layers.grid import Layout
from equivit.models import zoo
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.jumbo import JUMBO_MLPS
from equivit.models.vit.parts import SplitMlp
from equivit.symmetry.fields import Isotypic, from_dense
from equivit.training import sharding
from tests.drawing import cast, normal

SMALL = dict(width=48, depth=2, num_heads=2, patch_size=4, image_size=(16, 16), num_classes=10, jumbo=2)
FAMILIES = ("H8", "I8", "D8", "D2")
FIELDS = ("steerable", "invariant")


@functools.lru_cache
def model(name="jumbo_vit_s16", **overrides):
    """Every parameter is random; positions are learned at a 4x4 grid, so that (12, 20) also resizes them."""
    return testing.randomise(zoo.abstract(name, **{**SMALL, **overrides}), jax.random.key(0))


@functools.lru_cache
def octic(family, field):
    """Like blocks where there can be, which are compiled once."""
    options = dict(last_patch_mlp=family[0] == "D", invariant="linear_signed" if family == "D2" else "power_spectrum")
    return model("octic_jumbo_vit_s16", family=family, field=field, **options)


def images(size, dtype=jnp.float32):
    return normal(2, *size, 3, dtype=dtype)


call = jax.jit(lambda model, images, **options: model(images, **options))
first_field = jax.jit(lambda model, images: model.fields(images, (0,))[0])


def same(a, b, tolerance=1e-5):
    """Equal to rounding, relative to the largest entry."""
    a, b = jax.device_get((a, b))
    chex.assert_trees_all_close(a, b, atol=tolerance * max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(b)))


def with_parameters(other, **options):
    """A model of the same logical tensors, with other options."""
    config = dataclasses.replace(other.config, **options)
    return logical.from_logical(jax.eval_shape(lambda: config.build(nnx.Rngs(0))), logical.to_logical(other))


def millions(name, **overrides):
    leaves = jax.tree.leaves(nnx.state(zoo.abstract(name, **overrides), nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves) / 1e6


@pytest.mark.parametrize(
    ("name", "overrides", "paper"),
    [  # Tables 1, 4 and 5; those on ImageNet-21K have 10,450 classes
        ("vit_b16", {}, 86.6),
        ("vit_l16", {}, 304.4),
        ("jumbo_vit_b16", {}, 130.7),
        ("jumbo_vit_l16", {}, 382.2),
        ("jumbo_vit_s16", dict(num_classes=10450), 88.3),
        ("jumbo_vit_s16", dict(num_classes=10450, jumbo_mlp="per_layer"), 555.6),
        ("jumbo_vit_s16", dict(num_classes=10450, jumbo_mlp="none"), 45.8),
        ("jumbo_vit_s16", dict(num_classes=10450, jumbo_mlp="lora"), 88.8),
        ("jumbo_vit_s16", dict(num_classes=10450, jumbo=10), 179.9),
        ("jumbo_vit_b16", dict(num_classes=10450), 152.5),
        ("register_vit_b16", dict(num_classes=10450), 93.9),
        ("register_vit_b16", dict(num_classes=10450, width=1024, num_heads=16), 162.9),
        ("register_vit_s16", dict(num_classes=10450), 25.7),
        ("register_vit_s16", dict(num_classes=10450, register_mlp="class_and_registers"), 39.9),
        ("register_vit_s16", dict(num_classes=10450, register_mlp="registers"), 39.9),
    ],
)  # fmt: skip
def test_parameters_of_the_paper(name, overrides, paper):
    assert millions(name, **overrides) == pytest.approx(paper, abs=0.051)  # its rounding, once cut instead of rounded


def test_registers_begin_apart():
    made = jax.jit(lambda: models.create("register_vit_pico16", depth=1, image_size=(16, 16)).prefix.registers[...])
    registers = np.asarray(made())
    gaps = np.linalg.norm(registers[:, None] - registers, axis=-1) / np.linalg.norm(registers, axis=-1)
    assert gaps[~np.eye(len(registers), dtype=bool)].min() > 1


@pytest.mark.parametrize(
    ("size", "width", "count"),
    [
        ("pico", 96, 4_779_496),
        ("nano", 128, 8_141_800),
        ("ti", 192, 17_520_616),
        ("s", 384, 66_890_728),
        ("b", 768, 131_407_336),
    ],
)
def test_parameters_of_the_released_checkpoints(size, width, count):
    """Theirs hold a class token that is never used."""
    assert round(1e6 * millions(f"jumbo_vit_release_{size}16")) == count - width


@pytest.mark.parametrize("version", ["", "release_", "legacy_", "mae_"])
def test_features(version):
    m = zoo.abstract(f"jumbo_vit_{version}s16", **SMALL)
    features = jax.eval_shape(lambda m, x: m.features(x, blocks=(0,)), m, images((12, 20)))
    chex.assert_shape(features.cls, (2, 2 * 48))
    chex.assert_shape(features.registers, (2, 0, 48))
    chex.assert_shape((features.patches.values, features.blocks[0].patches.values), (2, 3, 5, 48))
    assert features.patches.stride == (4, 4)


def test_keep_all_tokens_in_any_order_changes_nothing():
    m, x = model(), images((16, 16))
    order = jnp.stack([jax.random.permutation(jax.random.key(i), 16) for i in range(2)])
    same(call(m, x, keep=order), call(m, x))
    twice = order.at[:, 8:].set(order[:, :8])
    assert float(jnp.abs(call(m, x, keep=twice) - call(m, x)).max()) > 1e-2


def test_compute_type_is_a_cast():
    m, x = precision.cast(model(), "bfloat16"), images((16, 16))
    by_hand = cast(model(), "bfloat16")
    assert call(m, x).dtype == jnp.bfloat16
    chex.assert_trees_all_equal(call(m, x), call(by_hand, x.astype(jnp.bfloat16)))


def test_key_drives_drop_path_and_nothing_else():
    m, x = model(drop_path=0.5), images((16, 16))
    a, b = (call(m, x, key=jax.random.key(i)) for i in (0, 1))
    assert float(jnp.abs(a - b).max()) > 1e-2
    chex.assert_trees_all_equal(a, call(m, x, key=jax.random.key(0)))
    chex.assert_trees_all_equal(call(m, x), call(model(), x))


@jax.jit
def gradient(arrays, model, x):
    return jax.grad(lambda arrays: jnp.square(logical.put(model, arrays)(x)).sum())(arrays)


def slopes(model, x):
    return gradient(logical.take(model), model, x)


@functools.lru_cache
def plain_slopes():
    return slopes(model("jumbo_vit_release_s16"), images((16, 16)))


@pytest.mark.parametrize("options", [dict(unroll=True), dict(remat="full")], ids=str)
def test_how_blocks_are_run_changes_no_gradient(options):
    same(slopes(with_parameters(model("jumbo_vit_release_s16"), **options), images((16, 16))), plain_slopes())


def test_parameters_on_eight_devices_give_the_same_gradient():
    m = model("jumbo_vit_release_s16")
    mesh = jax.make_mesh((1, 8), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    where = sharding.of_tree(mesh, logical.take(m), logical.stack_axes(m))
    with jax.set_mesh(mesh):
        divided = logical.put(m, jax.device_put(logical.take(m), where))
        shared = divided.jumbo_mlp.fc1.weight[...]
        assert shared.addressable_shards[0].data.size == shared.size // 8
        found = slopes(divided, images((16, 16)))
    same(jax.device_get(found), plain_slopes())


def test_the_gradient_of_the_shared_mlp_is_the_sum_over_the_layers():
    """A model whose layers have copies of it, each with a gradient of its own, gives the same logits."""
    m, x = model("jumbo_vit_release_s16"), images((16, 16))
    tensors = logical.to_logical(m)
    shared = {name: tensors.pop(name) for name in list(tensors) if name.startswith("jumbo_mlp.")}
    tensors |= {f"blocks.{i}.{name}": tensor for name, tensor in shared.items() for i in range(2)}
    abstract = zoo.abstract("jumbo_vit_release_s16", **SMALL, jumbo_mlp="per_layer")
    copies = logical.from_logical(abstract, tensors)
    same(call(copies, x), call(m, x))
    each = logical.to_logical(logical.put(copies, slopes(copies, x)))
    for name in shared:
        same(sum(each[f"blocks.{i}.{name}"] for i in range(2)), plain_slopes()[name])


@pytest.mark.parametrize("kind", ["lora", "linear_lora"])
def test_low_rank_additions_start_at_nothing(kind):
    m, x = model(), images((16, 16))
    common, changed = logical.to_logical(m), model(jumbo_mlp=kind)

    @jax.jit
    def additions():
        tensors = logical.to_logical(models.create("jumbo_vit_s16", **SMALL, jumbo_mlp=kind))
        return {name: tensor for name, tensor in tensors.items() if name not in common}

    fresh = additions()
    chex.assert_trees_all_equal(call(logical.from_logical(changed, fresh | common), x), call(m, x))
    assert float(jnp.abs(call(changed, x) - call(m, x)).max()) > 1e-2
    # Two blocks; maps of rank 8 between 96 and 96 channels, or 96 and 384, and 384 and 96.
    assert sum(tensor.size for tensor in fresh.values()) == 2 * 8 * {"lora": 192, "linear_lora": 960}[kind]


def test_without_its_mlp_the_parts_of_the_token_are_registers():
    m, x = model(jumbo_mlp="none"), images((12, 20))
    given = {field.name: getattr(m.config, field.name) for field in dataclasses.fields(ViTConfig)}
    config = ViTConfig(**given | dict(registers=2, class_token=False, pool="mean", num_classes=None))
    registers = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    norm = {f"readout.norm.{name}": jnp.ones(48) for name in ("scale", "bias")}  # the merged token's is wider
    tensors = logical.to_logical(m) | {"prefix.registers": m.prefix.jumbo_token[...], **norm}
    features = jax.jit(lambda m, x: m.features(x, norm=False))
    a, b = features(m, x), features(logical.from_logical(registers, tensors), x)
    same((a.cls, a.patches.values), (b.registers.reshape(2, -1), b.patches.values))


def test_no_logit_depends_on_what_the_last_block_feeds_the_patches():
    m, x = model(), images((16, 16))
    same(call(with_parameters(m, last_patch_mlp=True), x), call(m, x))
    assert float(jnp.abs(call(with_parameters(m, normed_residual=True), x) - call(m, x)).max()) > 1e-2


everything = jax.jit(lambda m, x: (m.features(x, blocks=(0, 1)), m.features(x, blocks=(1,), norm=False), m.tokens(x)))


@pytest.mark.parametrize("options", [{}, dict(pool="jumbo_and_patches"), dict(wide_norm=False)], ids=str)
def test_features_have_patches_that_are_finished_and_normed(options):
    """Also those of the last block among `blocks`; raw ones are as the block leaves them."""
    m, x = model(**options), images((12, 20))
    features, raw, tokens = everything(m, x)
    same(tokens[:, m.config.prefix :], features.patches.values.reshape(2, 15, -1))
    chex.assert_trees_all_equal(features.blocks[1].patches.values, features.patches.values)
    finished = everything(with_parameters(m, last_patch_mlp=True), x)
    same((features.cls, features.patches.values), (finished[0].cls, finished[0].patches.values))
    assert float(jnp.abs(finished[1].patches.values - raw.patches.values).max()) > 1e-2
    norm = m.readout.standardise or m.readout.norm
    same(features.patches.values, norm(finished[1].patches.values))
    if m.config.wide_norm:
        for each in (features, features.blocks[0]):
            np.testing.assert_allclose(each.patches.values.mean(-1), 0, atol=1e-6)
            np.testing.assert_allclose(each.patches.values.std(-1), 1, atol=1e-4)


def test_the_mean_of_patches_that_a_head_reads_is_of_those_before_the_norm():
    """As in Jumbo's code of 2025: a wide norm is the Jumbo token's."""
    m, x = model(pool="jumbo_and_patches"), images((12, 20))
    raw = everything(m, x)[1]
    mean = raw.patches.values.mean((1, 2))
    same(jax.jit(lambda m, x: m.pooled(x))(m, x)[:, -m.config.width :], mean)


def test_the_patches_of_fields_turn_with_the_image_after_their_norm():
    m, x = octic("D8", "steerable"), images((12, 20))
    options = dict(output="field", prefix=m.config.prefix, output_grid=(3, 5))
    field = jax.jit(lambda x: from_dense(m.tokens(x), m.config.group))
    testing.assert_equivariant(field, m.config.group, x, **options)
    patches = np.asarray(field(x).lines)[:, :, m.config.prefix :]
    np.testing.assert_allclose(patches.mean(-1), 0, atol=1e-5)


def test_a_new_classifier_gives_equal_probabilities():
    """For every image; and logits that are their logarithms, as in the public code."""
    head = jax.jit(lambda: logical.take(models.create("jumbo_vit_s16", **SMALL).head))()
    np.testing.assert_array_equal(head["weight"], np.zeros((2 * 48, 10)))
    np.testing.assert_allclose(head["bias"], np.full(10, math.log(0.1)), rtol=1e-6)


def test_the_other_mlp_takes_the_rows_before_the_patches():
    x = jnp.arange(1.0, 8.0)[:, None]
    for first, expected in ((1, [1, -2, -3, 4, 5, 6, 7]), (0, [-1, -2, -3, 4, 5, 6, 7])):
        y = SplitMlp(common=lambda x: x, special=lambda x: -x, first=first)(x, Layout((4,), prefix=3))
        np.testing.assert_array_equal(y[:, 0], expected)
    for kind, first in (("registers", 1), ("class_and_registers", 0)):
        split = jax.eval_shape(lambda kind=kind: models.create("register_vit_s16", register_mlp=kind).blocks[0]).mlp
        assert split.first == first


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_symmetry(family, field):
    """Logits where they are invariant, else the field after the first block; float32 on an even square grid, float64
    on an odd one that is no square: to 1e-5 and 1e-10 relative, so that what is left in float32 is rounding."""
    m = octic(family, field)
    assert_symmetric(m, images((16, 16)), (4, 4))
    with jax.enable_x64(True):
        wide = cast(m, "float64")
        assert_symmetric(wide, images((12, 20), jnp.float64), (3, 5))


def assert_symmetric(m, x, grid):
    if m.config.family == "H8":
        options = dict(output="field", prefix=m.config.prefix, output_grid=grid)
        testing.assert_equivariant(lambda x: first_field(m, x), m.config.group, x, **options)
    else:
        testing.assert_equivariant(lambda x: call(m, x), m.config.group, x)


@pytest.mark.parametrize(("family", "field"), [("H8", "steerable"), *itertools.product(FAMILIES[1:], FIELDS)])
def test_changes_under_what_is_no_symmetry(family, field):
    m, x = octic(family, field), images((16, 16))
    y = call(m, x)
    no_symmetry = {"colours": x[..., ::-1], "shift": jnp.roll(x, 3, axis=2)}
    no_symmetry |= {"mirror": x[:, :, ::-1]} if family == "H8" else {}
    no_symmetry |= {"turn": jnp.rot90(x, 1, (1, 2))} if family == "D2" else {}
    for name, changed in no_symmetry.items():
        assert float(jnp.abs(call(m, changed) - y).max() / jnp.abs(y).max()) > 1e-2, name


class Biased(nnx.Module):
    """A map between fields with a bias where none may be."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        y = self.inner(x)
        return Isotypic(y.lines, y.planes + 1)


def test_a_wrong_layer_is_caught():
    wrong = nnx.clone(octic("I8", "steerable"))
    wrong.isotypic_jumbo_mlp = Biased(wrong.isotypic_jumbo_mlp)
    with pytest.raises(AssertionError, match="octic element"):
        testing.assert_equivariant(lambda x: call(wrong, x), wrong.config.group, images((16, 16)))


def test_an_invariant_token_holds_the_invariant_component_alone():
    """J width / 8 channels, fed by a dense MLP; a steerable one has all J width."""
    narrow, wide = (octic("D8", field) for field in ("invariant", "steerable"))
    chex.assert_shape(narrow.isotypic_jumbo_mlp.fc1.weight, (12, 48))
    chex.assert_shape(wide.isotypic_jumbo_mlp.fc1.lines, (4, 12, 48))
    field = first_field(narrow, images((16, 16)))
    others = jax.tree.leaves(Isotypic(field.lines[1:, ..., :2, :], field.planes[..., :2, :]))
    assert all(bool((leaf == 0).all()) for leaf in others)
    assert float(jnp.abs(field.lines[0, ..., :2, :]).min()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(jumbo_mlp="sharde"), f"jumbo_mlp='sharde' is not one of {', '.join(JUMBO_MLPS)}; .*'shared'"),
        (dict(field="covariant"), "field='covariant' is not one of steerable, invariant"),
        (dict(pool="class"), "pool='class' is not one of jumbo, jumbo_and_patches"),
        (dict(jumbo=0), "jumbo=0 must be a positive whole number"),
        (dict(jumbo_multiplier=-1.0), "jumbo_multiplier=-1.0 must be positive"),
        (dict(registers=4), "the Jumbo token replaces class token and registers"),
        (dict(class_token=True), "the Jumbo token replaces class token and registers"),
        (dict(register_mlp="registers"), "the Jumbo token replaces class token and registers"),
        (dict(jumbo_mlp="linear_lora", mlp="swiglu"), "'linear_lora' is for mlp='gelu', not 'swiglu'"),
        (dict(family="H8", field="invariant", jumbo_mlp="none"), "field='invariant' needs a Jumbo MLP"),
        (dict(family="D8", wide_norm=False), "family D8 reads the merged Jumbo token"),
        (dict(family="D8", mlp="swiglu"), "mlp='swiglu' is for plain models"),
        (dict(jumbo_mpl="shared"), "'jumbo_mpl' is not one of its options; did you mean jumbo_mlp"),
        (dict(num_heads=5), "num_heads=5 must divide width=384"),
    ],
)
def test_bad_choices_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract("jumbo_vit_s16", **overrides)
