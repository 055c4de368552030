"""Whole models: symmetry under every element with every parameter random, at any size; contracts of the interface."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import costs, logical, models, precision, testing
from equivit.models import zoo
from equivit.models.vit.config import ViTConfig
from equivit.symmetry import fields
from tests.drawing import cast, normal

FAMILIES = {
    "plain": "vit_ti16",
    "H8": "octic_vit_ti16",
    "I8": "octic_vit_ti16",
    "D8": "octic_vit_ti16",
    "H2": "flip_vit_ti16",
    "I2": "flip_vit_ti16",
    "D2": "flip_vit_ti16",
}
INVARIANT = ("I8", "D8", "I2", "D2")
SYMMETRIC = tuple(family for family in FAMILIES if family != "plain")


@functools.lru_cache
def model(family, **overrides):
    """Learned at a 4x4 grid, so (12, 20) also resizes positions; two registers; layer scale near 1."""
    small = dict(width=48, depth=2, num_heads=2, patch_size=4, image_size=(16, 16), num_classes=10, registers=2)
    built = models.abstract(FAMILIES[family], family=family, **{**small, **overrides})
    return testing.randomise(built, jax.random.key(0))


def images(size, batch=2):
    return normal(batch, *size, 3)


call = jax.jit(lambda model, images: model(images))
first_field = jax.jit(lambda model, images: model.fields(images, (0,))[0])


@pytest.mark.parametrize("family", INVARIANT)
def test_logits_are_invariant(family):
    """At an even square grid; at an odd one that is no square in `test_float64`."""
    m = model(family)
    gap = testing.assert_equivariant(lambda x: call(m, x), m.config.group, images((16, 16)))
    print(f"{family} logits float32: {gap:.1e}")


@pytest.mark.parametrize("size", [(16, 16), (12, 20)], ids=str)  # even square grid; odd, non-square grid
@pytest.mark.parametrize("family", SYMMETRIC)
def test_fields_are_equivariant(family, size):
    m, grid = model(family), (size[0] // 4, size[1] // 4)
    gap = testing.assert_equivariant(
        lambda x: first_field(m, x),
        m.config.group,
        images(size),
        output="field",
        prefix=m.config.prefix,
        output_grid=grid,
    )
    print(f"{family} {size} field float32: {gap:.1e}")


@pytest.mark.parametrize("family", SYMMETRIC)
def test_float64(family):
    """1e-10 relative: what is left in float32 is rounding, not a broken symmetry."""
    single = model(family)  # outside of the context: other tests take it from the cache
    with jax.enable_x64(True):
        m = cast(single, "float64")
        x = normal(1, 12, 20, 3, dtype="float64")
        if family in INVARIANT:
            gap = testing.assert_equivariant(lambda x: call(m, x), m.config.group, x)
        else:
            gap = testing.assert_equivariant(
                lambda x: first_field(m, x), m.config.group, x, output="field", prefix=3, output_grid=(3, 5)
            )
    print(f"{family} float64: {gap:.1e}")


@pytest.mark.parametrize("kind", ["mixed", "bfloat16"])
@pytest.mark.parametrize("family", INVARIANT)
def test_low_precision(family, kind):
    """The rounding of bfloat16 (2^-8) is what breaks the symmetry."""
    m = precision.cast(model(family), kind)
    gap = testing.assert_equivariant(lambda x: call(m, x), m.config.group, images((16, 16)), tol=0.1)
    print(f"{family} {kind}: {gap:.1e}")
    assert call(m, images((16, 16))).dtype == jnp.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_changes_under_what_is_no_symmetry(family):
    m, x = model(family), images((16, 16))
    y = call(m, x)
    x, y = jax.device_get((x, y))
    no_symmetry = {"colours": x[..., ::-1], "shift": np.roll(x, 3, axis=2)}
    if family in ("plain", "H8", "H2"):
        no_symmetry["mirror"] = x[:, :, ::-1]
    if family in ("I2", "D2"):
        no_symmetry["turn"] = np.rot90(x, 1, (1, 2))
    for name, changed in no_symmetry.items():
        assert np.abs(call(m, changed) - y).max() / np.abs(y).max() > 1e-2, name


@pytest.mark.parametrize("family", ("I8", "D8"))
def test_black_image_has_finite_gradients(family):
    """Exact zeros meet norms and absolute values: at initialisation the image's own part of every field is zero."""
    small = dict(width=48, depth=2, num_heads=2, patch_size=4, image_size=(16, 16))
    m = jax.jit(lambda: models.create(FAMILIES[family], family=family, **small))()
    grads = jax.jit(jax.grad(lambda m, x: m(x).sum()))(m, np.zeros((1, 16, 16, 3), np.float32))
    chex.assert_tree_all_finite(grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_features(family):
    m, x = model(family), images((12, 20))
    features = jax.jit(lambda m, x: m.features(x, blocks=(0, 1)))(m, x)
    chex.assert_shape(features.patches.values, (2, 3, 5, 48))
    chex.assert_shape(features.registers, (2, 2, 48))
    chex.assert_shape(features.patches.offset, (2, 2))
    assert features.patches.stride == (4, 4)
    assert (features.cls is None) == (family == "D8")
    chex.assert_trees_all_close(features.blocks[1].patches, features.patches, atol=1e-5)  # the last block


def test_a_norm_before_the_blocks_and_a_head_of_several_blocks_are_invariant_too():
    """The class tokens of equivariant blocks are made invariant as those of the last one."""
    m, x = model("I8", pre_norm=True, pool="class_and_mean", pool_blocks=2), images((16, 16))
    features = jax.jit(lambda m, x: m.features(x, blocks=(0, 1)))(m, x)
    parts = [features.blocks[0].cls, features.cls, features.patches.values.mean((1, 2))]
    pooled = jax.jit(lambda m, x: m.pooled(x))(m, x)
    chex.assert_trees_all_close(pooled, jnp.concatenate(parts, -1), rtol=0, atol=1e-5 * float(jnp.abs(pooled).max()))
    testing.assert_equivariant(lambda x: call(m, x), m.config.group, x)


def test_a_query_that_attends_to_invariant_tokens_is_invariant_too():
    m, x = model("I8", class_token=False, pool="attention"), images((16, 24))
    testing.assert_equivariant(lambda x: call(m, x), m.config.group, x)
    assert jnp.abs(call(m, x[..., ::-1]) - call(m, x)).max() > 1e-2  # swapped colours are no symmetry


@pytest.mark.parametrize("family", ("plain", "H8", "D2"))
def test_keep_all_tokens_in_any_order_changes_nothing(family):
    """Blocks do not see the order of tokens; positions are added before tokens are taken."""
    m, x = model(family), images((16, 16))
    order = np.stack([np.random.default_rng(i).permutation(16) for i in range(2)])
    kept = jax.jit(lambda m, x, k: m(x, keep=k))(m, x, order)
    chex.assert_trees_all_close(kept, call(m, x), rtol=0, atol=1e-5 * float(jnp.abs(kept).max()))


@pytest.mark.parametrize("family", ("plain", "H8", "I2"))
def test_mask_hides_what_is_under_it(family):
    m = model(family, mask_token=True)
    x = images((16, 16))
    mask, hidden = np.arange(32).reshape(2, 16) % 16 < 4, np.array(x)  # the first row of patches
    hidden[:, :4] = 7
    masked = jax.jit(lambda m, x: m(x, mask=mask))
    y = masked(m, x)
    chex.assert_trees_all_close(masked(m, hidden), y, rtol=0, atol=1e-5 * float(jnp.abs(y).max()))
    assert float(jnp.abs(y - call(m, x)).max()) > 1e-2


def test_masks_commute_with_the_group():
    m, x = model("D8", mask_token=True), images((16, 16))
    x, mask = np.asarray(x), np.random.default_rng(3).uniform(size=(2, 16)) < 0.4
    masked = jax.jit(lambda m, x, mask: m(x, mask=mask))
    y = masked(m, x, mask)
    for g in m.config.group.elements:
        moved = fields.act_on_tokens(g, mask[..., None], (4, 4))[..., 0]
        turned = masked(m, fields.act_on_image(g, x), moved)
        chex.assert_trees_all_close(turned, y, rtol=0, atol=1e-5 * float(jnp.abs(y).max()))


def test_key_drives_drop_path_and_nothing_else():
    m = model("H8", drop_path=0.5)
    run = jax.jit(lambda m, x, key: m(x, key=key))
    x = images((16, 16))
    a, b = run(m, x, jax.random.key(0)), run(m, x, jax.random.key(1))
    assert float(jnp.abs(a - b).max()) > 1e-2
    chex.assert_trees_all_equal(a, run(m, x, jax.random.key(0)))
    chex.assert_trees_all_equal(call(m, x), call(model("H8"), x))


def test_stochastic_depth_grows_from_block_to_block():
    """A pair of rates: the first block drops nothing, so that the last one alone is random."""
    m, x = model("plain", drop_path=(0.0, 0.9)), images((16, 16), batch=8)
    assert m.config.rates.tolist() == pytest.approx([0.0, 0.9])
    run = jax.jit(lambda m, x, key: m.features(x, blocks=(0,), norm=False, key=key))
    first, second = (run(m, x, jax.random.key(i)) for i in range(2))
    chex.assert_trees_all_equal(first.blocks[0].patches.values, second.blocks[0].patches.values)
    assert float(jnp.abs(first.patches.values - second.patches.values).max()) > 1e-2


@pytest.mark.parametrize(("family", "options"), [("plain", {}), ("H8", {}), ("I2", dict(equivariant_blocks=0))])
def test_one_pass_collects_attention_from_every_block(family, options):
    """The weights of the class token in each block, as one block at a time has them; fields end between, or before."""
    m, x = model(family, **options), images((12, 20))
    collect = jax.jit(lambda m, x: m.collected(x, lambda block, tokens, layout: block.attention_weights(tokens, 1)))
    single = jax.jit(lambda m, x, i: m.attention_weights(x, i, rows=1), static_argnums=2)
    expected = jnp.stack([single(m, x, i) for i in range(m.config.depth)])
    chex.assert_trees_all_close(collect(m, x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["plain", "H8", "D8"])
def test_remat_dots_computes_no_linear_map_and_no_mean_of_values_again(family):
    linear, attention = {}, {}
    for remat in ("none", "dots", "full"):
        m = models.abstract(FAMILIES[family], family=family, width=48, depth=2, num_heads=2, patch_size=4, remat=remat)
        x = jax.ShapeDtypeStruct((2, 16, 16, 3), jnp.float32)
        counted = costs.count(jax.grad(lambda m, x: m(x).sum()), m, x)
        linear[remat], attention[remat] = (counted[kind].macs for kind in ("linear", "attention"))
    assert linear["none"] == linear["dots"] < linear["full"]
    again = attention["full"] - attention["none"]  # queries by keys, and weights by values
    assert attention["dots"] - attention["none"] == again / 2 > 0


def test_compute_type_is_a_cast():
    """In bfloat16 throughout: what casting parameters and images by hand gives."""
    m, x = precision.cast(model("H8"), "bfloat16"), images((16, 16))
    by_hand = cast(model("H8"), "bfloat16")
    chex.assert_trees_all_equal(call(m, x), call(by_hand, x.astype(jnp.bfloat16)))


def test_every_name_has_a_valid_configuration():
    depths = {zoo.configuration(name).depth for name in IMAGES}
    assert depths == {10, 11, 12, 13, 14, 16, 17, 21, 23, 24, 32, 36, 40, 48, 56}


# A name is a flavour and a size, and a model's code looks at each alone.
IMAGES = [name for name in zoo.names() if not name.startswith("patchtst")]
ONCE = [name for name in IMAGES if name.endswith("_ti16") or name.startswith("octic_vit_")]


@pytest.mark.parametrize("name", ONCE)
def test_every_flavour_and_every_size_is_constructible_without_memory(name):
    m = zoo.abstract(name)
    assert m.config == zoo.configuration(name)
    # A weak type, as of constants, would end with the first update: a step would be compiled twice, or three times.
    assert not [leaf for leaf in jax.tree.leaves(m) if leaf.weak_type]


def test_dinov2_d8_is_invariant_early_at_full_depth():
    m = zoo.abstract("octic_dinov2_vit_l16", family="D8")
    assert (m.config.family, m.config.k, m.config.num_classes) == ("I8", 24, None)


def test_only_a_class_token_has_a_position_of_its_own():
    def parts(**fields):
        return logical.take(zoo.abstract("dinov2_vit_s14_reg", depth=1, **fields)).keys()

    assert parts() - parts(class_token=False) == {"prefix.class_token", "prefix.class_position"}


def test_what_is_given_wins_over_what_a_family_chooses():
    config = zoo.configuration("octic_dinov2_vit_l16", family="D8", equivariant_blocks=3, isotypic_eps=1e-4)
    assert (config.family, config.k, config.isotypic_eps) == ("I8", 3, 1e-4)
    assert zoo.configuration("octic_dinov2_vit_l16", family="D8", equivariant_blocks=None).k == 24


@pytest.mark.parametrize(
    "name,overrides,message",
    [
        ("octic_vit_h15", {}, "did you mean octic_vit_h16 or octic_vit_h14"),
        ("octic_vit_h14", {"famly": "H8"}, "'famly' is not one of its options; did you mean family"),
        ("octic_vit_h14", {"equivariant_blocks": 32}, "H8 with equivariant_blocks=32 of 32.*use D8"),
        ("octic_vit_h14", {"equivariant_blocks": 33}, "must lie between 0 and the depth, 32"),
        ("octic_vit_h14", {"family": "D8", "equivariant_blocks": 3}, "D8 has all 32 blocks equivariant, not 3"),
        ("vit_h14", {"equivariant_blocks": 3}, "needs a family with a symmetry"),
        ("octic_vit_h14", {"family": "H4"}, "is not one of plain, H8"),
        ("vit_h14", {"image_size": (224, 220)}, "width 220 is not divisible by the patch width 14.*210 and 224"),
        ("octic_vit_ti16", {"num_heads": 5}, "num_heads=5 times 8"),
        ("octic_vit_ti16", {"patch_size": 15, "image_size": (30, 30)}, "nearest are 14x14 and 16x16"),
        ("vit_ti16", {"pool": "max"}, "pool='max' is not one of class, mean"),
        ("vit_ti16", {"class_token": False, "pool": "class"}, "pool='class' needs class_token=True"),
        ("vit_ti16", {"pool": "attention"}, "pool='attention' needs class_token=False"),
        ("octic_vit_ti16", {"qk_norm": True}, "qk_norm=True is for plain models; family H8 takes False"),
        ("vit_ti16", {"qk_norm": True, "adaptive": True}, "qk_norm=True needs attention without relative positions"),
        (
            "octic_vit_ti16",
            {"family": "D8", "pool": "attention"},
            "dense tokens, which family D8 with class_token=False",
        ),
        ("vit_ti16", {"class_token": False, "pool": "class_and_mean"}, "pool='class_and_mean' needs class_token=True"),
        ("vit_ti16", {"pool": "mean", "pool_blocks": 4}, "pool_blocks=4 is for class tokens; pool='mean' takes 1"),
        ("vit_ti16", {"pool_blocks": 13}, "pool_blocks=13 is more than the depth, 12"),
        ("flip_vit_ti16", {"family": "D2", "pool_blocks": 2}, "reads dense tokens, and family D2 ends with fields"),
        ("jumbo_vit_ti16", {"pool_blocks": 2}, "pool_blocks=2 is for class tokens; pool='jumbo' takes 1"),
        ("vit_ti16", {"projection": 8}, "num_classes=1000 and projection=8 are two heads; set one to None"),
        ("octic_vit_ti16", {"patch_bias": False}, "patch_bias=False is for plain models; family H8 takes True"),
        (
            "vit_ti16",
            {"pool": "mean", "pool_first": True},
            "pool_first=True is for the mean of fields, not for .*plain",
        ),
        (
            "flip_vit_ti16",
            {"family": "D2", "pool_first": True},
            "pool_first=True .* with pool='class'; take pool='mean'",
        ),
        ("octic_jumbo_vit_ti16", {"family": "D8", "pool_first": True}, "pool_first=True .* with pool='jumbo'"),
    ],
)
def test_bad_choices_are_refused(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        zoo.abstract(name, **overrides)


@pytest.mark.parametrize(
    "shape,dtype,message",
    [
        ((2, 16, 18, 3), jnp.float32, "image 16x18: the width 18 is not divisible.*nearest are 16 and 20"),
        ((2, 16, 16, 1), jnp.float32, r"must be \[\*B, H, W, 3\]"),
        ((16, 16, 3), jnp.float32, r"must be \[\*B, H, W, 3\]"),
        ((2, 16, 16, 3), jnp.uint8, "images are uint8; they must be floating point"),
    ],
)
def test_bad_images_are_refused(shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(model("H8"), jnp.zeros(shape, dtype))


def test_no_letter_stands_for_two_sizes():
    sizes = {}
    for name, preset in zoo.NAMES.items():
        if issubclass(preset.config, ViTConfig):
            letter = re.search(r"_([a-z]+|22b|7b)(?:14|16|32)(plus)?(_reg|_336)?$", name).group(1, 2)
            config = zoo.configuration(name)
            sizes.setdefault(letter, set()).add((config.width, config.depth, config.hidden))
    assert {letter: len(each) for letter, each in sizes.items()} == dict.fromkeys(sizes, 1) and len(sizes) == 14


def test_an_old_name_is_another_name_of_a_size_and_says_the_new_one():
    for old in ("vit_g14", "octic_dinov2_vit_g14", "jumbo_vit_g14"):
        new = old.replace("_g14", "_bigg14")
        with pytest.warns(FutureWarning, match=f"model {old} is called {new} now"):
            config = zoo.configuration(old, layer_scale=None)
        assert config == zoo.configuration(new, layer_scale=None) and config.width == 1664
        assert old not in zoo.names() and zoo.types_of(old) == zoo.types_of(new)
    assert zoo.configuration("dinov2_vit_g14").width == 1536  # DINOv2's own
