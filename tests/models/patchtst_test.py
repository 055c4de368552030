"""PatchTST: patches, tokens by variant, channel independence, equal cost, dropout that is traced."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical
from equivit.layers.batch_stats import recording
from equivit.layers.dropout import dropout
from equivit.models import saved, zoo
from equivit.models.patchtst import model as patchtst

T, C = 31, 3  # odd, so that there is padding
SMALL = dict(length=T, channels=C, num_classes=5, patches=6, width=16, depth=2, num_heads=4, mlp_dim=24)
VARIANTS = {
    "plain": ("patchtst", {}),
    "registers": ("patchtst_registers", {}),
    "jumbo": ("patchtst_jumbo", dict(jumbo=3)),
    "jumbo_per_layer": ("patchtst_jumbo", dict(jumbo_ffn="per_layer", padding="zero")),
    "jumbo_post_norm": ("patchtst_jumbo", dict(norm="batch", norm_first=False, residual_attention=True)),
    "public": ("patchtst_public", {}),
}


def make(name, **changes):
    """A model with every parameter and statistic random, so that no term is zero."""
    kind, fields = VARIANTS[name]
    config = zoo.configuration(kind, **{**SMALL, **fields, **changes})
    model, rng = jax.eval_shape(lambda: config.build(nnx.Rngs(0))), np.random.default_rng(0)
    arrays = {}
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        leaf = ".".join(map(str, path))
        start = leaf.endswith(("scale", "variance"))
        arrays[leaf] = (start + 0.2 * rng.uniform(-1, 1, variable.shape)).astype(np.float32)
    return logical.put(model, jax.device_put(arrays))


@jax.jit
def run(model, x):
    return model(x)


@pytest.fixture(scope="module")
def series():
    return jax.random.normal(jax.random.key(7), (2, T, C))


@pytest.mark.parametrize("name", patchtst.NAMES)
def test_options_name_the_model_and_what_depends_on_the_data(name):
    data = dict(length=T, channels=C, num_classes=None)
    assert zoo.options(zoo.configuration(name, **data)) == dict(name=name, **data)
    changed = zoo.configuration(name, **data, width=32, dropout=0.1)
    assert zoo.configuration(**zoo.options(changed)) == changed


@pytest.mark.parametrize("length,patches,expected", [(500, 8, 112), (500, 42, 24), (24, 42, 2), (24, 8, 6), (7, 1, 8)])
def test_patches_are_the_shortest_even_ones_that_cover_the_series(length, patches, expected):
    p = zoo.configuration("patchtst", **SMALL | dict(length=length, patches=patches)).patch_length
    assert p == expected and p * (patches + 1) // 2 >= length > (p - 2) * (patches + 1) // 2


@pytest.mark.parametrize("padding", ["repeat", "zero"])
def test_patches_overlap_by_half_and_the_end_is_filled(series, padding):
    model = make("plain", padding=padding)
    patches, p = np.asarray(model.cut(series)), model.config.patch_length
    series = np.asarray(series)
    for n in range(6):
        for t in range(p):
            step = n * p // 2 + t
            expected = series[:, step] if step < T else series[:, -1] * (padding == "repeat")
            np.testing.assert_array_equal(patches[:, :, n, t], expected)
    assert 6 * p // 2 + p // 2 > T  # something was filled


@pytest.mark.parametrize("patches,expected", [(8, 10), (42, 9)])
def test_registers_of_equal_cost(patches, expected):
    """Proposition 1 with the paper's numbers; the operations counted here are those of its proof."""
    d, j = 128, 4
    assert patchtst.equal_cost_registers(d, patches, j) == expected
    assert zoo.configuration("patchtst_registers", **{**SMALL, "width": d, "patches": patches}).registers == expected

    def registers(r):
        return 8 * (patches + r) * d**2 + 2 * (patches + r) ** 2 * d

    jumbo = 4 * (patches + j) * d**2 + 2 * (patches + j) ** 2 * d + 4 * patches * d**2 + 4 * (j * d) ** 2
    assert min(range(40), key=lambda r: abs(registers(r) - jumbo)) == expected


def test_counted_costs_of_registers_and_jumbo():
    """At the paper's size: registers instead of the class token cost what Jumbo does, within half a register."""
    macs = {}
    for name, changes in (("patchtst_jumbo", {}), ("patchtst_registers", {})):
        config = zoo.configuration(name, length=96, channels=1, num_classes=2, **changes)
        block = jax.eval_shape(lambda config=config: config.build(nnx.Rngs(0)))
        tokens = 8 + (config.jumbo if config.jumbo > 1 else config.registers)

        def apply(model, x):
            return model.blocks[0](x, None, model.jumbo_mlp)

        counted = costs.count(apply, block, jax.ShapeDtypeStruct((tokens, 128), jnp.float32))
        macs[name] = counted["linear"].macs + counted["attention"].macs
    assert abs(macs["patchtst_registers"] / macs["patchtst_jumbo"] - 1) < 0.5 / 18


@pytest.mark.parametrize("name", VARIANTS)
def test_channels_are_independent_until_the_head(series, name):
    model = make(name)
    apply = jax.jit(lambda model, x: (model(x), model.features(x)))
    logits, features = apply(model, series)
    changed_logits, changed = apply(model, series.at[..., 1].set(jnp.cos(series[..., 1])))
    for before, after in zip(jax.tree.leaves(features), jax.tree.leaves(changed), strict=True):
        chex.assert_trees_all_equal(before[:, [0, 2]], after[:, [0, 2]])
    assert abs(features.cls[:, 1] - changed.cls[:, 1]).max() > 1e-2 < abs(logits - changed_logits).max()
    # The model leaves out what its head does not read; the features have everything.
    read = model.head(features.cls.reshape(2, -1))
    chex.assert_trees_all_close(logits, read, rtol=0, atol=2e-5)
    number = model.config.registers
    chex.assert_shape((features.patches.values, features.registers), [(2, C, 6, 16), (2, C, number, 16)])


def test_features_of_blocks(series):
    model = make("jumbo")
    features = jax.jit(lambda model, x, norm: model.features(x, blocks=(0, 1), norm=norm), static_argnums=2)
    raw = features(model, series, False)
    chex.assert_trees_all_equal(raw.blocks[1].patches.values, raw.patches.values)
    assert abs(raw.blocks[0].cls - raw.cls).max() > 1e-2
    normed = features(model, series, True).blocks[0]
    chex.assert_trees_all_close(normed.patches.values, model.norm(raw.blocks[0].patches.values), rtol=0, atol=1e-6)


def test_jumbo_written_out(series):
    """The Jumbo token of each channel, token by token; the same with its parts in another order must differ."""
    model, j, d = make("jumbo", channels=1), 3, 16
    patches = model.cut(series[..., :1])

    @functools.partial(jax.jit, static_argnums=2)
    def reference(model, patches, order):
        rows = [*model.class_token[...], *(model.embed(patches) + model.position[...])]
        x = jnp.stack(rows)
        for block in model.blocks:
            x = x + block.attention(block.norm1(x))
            wide = jnp.concatenate([x[i] for i in order])
            wide = wide + model.jumbo_mlp(block.norm3(wide))
            x = jnp.concatenate([wide.reshape(j, d), jnp.stack([t + block.mlp(block.norm2(t)) for t in x[j:]])])
        return model.head(model.norm(x)[:j].mean(0))

    ours = run(model, series[..., :1])
    np.testing.assert_allclose(ours[0], reference(model, patches[0, 0], (0, 1, 2)), atol=2e-5)
    assert abs(ours[0] - reference(model, patches[0, 0], (1, 0, 2))).max() > 1e-2


def test_parameters_by_variant():
    """The shared FFN counts once, the others once a block; registers add a row each."""

    def count(name, **changes):
        kind, fields = VARIANTS[name]
        config = zoo.configuration(kind, **{**SMALL, **fields, **changes})
        model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
        return sum(variable.size for _, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)))

    plain, wide = count("plain"), 3 * 16
    ffn, norms, token = 4 * wide**2 + 3 * wide, 2 * 2 * wide, 2 * 16
    assert count("jumbo") == plain + ffn + norms + token
    assert count("jumbo", jumbo_ffn="per_layer") == plain + 2 * ffn + norms + token
    assert count("registers") == plain + 16 * patchtst.equal_cost_registers(16, 6, 4)


def test_instance_norm_takes_each_channel_of_each_series_by_itself(series):
    x = np.asarray(series) * np.array([3.0, 0.2, 0.0]) + np.array([1.0, -50.0, 7.0])  # the last channel is constant
    by_hand = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    plain, public = make("plain"), make("plain", instance_norm=True)
    cut = jax.jit(lambda model, x: model.cut(x))
    found = cut(public, jnp.asarray(x, jnp.float32))
    chex.assert_trees_all_close(found, cut(plain, jnp.asarray(by_hand, jnp.float32)), rtol=0, atol=1e-4)
    assert not np.any(found[:, 2])
    for name in ("patchtst_public", "patchtst_public_registers", "patchtst_public_jumbo"):
        config = zoo.configuration(name, **SMALL)
        assert config.instance_norm and config.residual_attention and config.norm == "batch" and not config.norm_first
        assert config.pool == ("last" if name == "patchtst_public" else "class")


def test_residual_attention_adds_the_products_of_the_block_before(series):
    model = make("public", norm="layer")
    plain = make("public", norm="layer", residual_attention=False)
    features = jax.jit(lambda model: model.features(series, blocks=(0,)))
    with_products, without = features(model), features(plain)
    first = (f.blocks[0].patches.values for f in (with_products, without))
    chex.assert_trees_all_close(*first, rtol=0, atol=1e-5)  # there is nothing to add in block 0
    assert abs(with_products.cls - without.cls).max() > 1e-3


def test_dropout_may_be_traced(series):
    model, key = make("jumbo"), jax.random.key(3)
    apply = jax.jit(lambda model, rate: model(series, key=key, train=True, dropout=rate))
    chex.assert_trees_all_close(apply(model, 0.0), run(model, series), rtol=0, atol=1e-5)
    half, tenth = apply(model, 0.5), apply(model, 0.1)
    assert abs(half - tenth).max() > 1e-2
    fixed = make("jumbo", dropout=0.5)
    chex.assert_trees_all_close(jax.jit(lambda model: model(series, key=key))(fixed), half, rtol=0, atol=1e-5)


def test_training_moves_running_statistics_and_evaluation_uses_them(series):
    model = make("public")
    before = logical.to_logical(model, nnx.BatchStat)

    @jax.jit
    @recording()
    def moved(model):
        model(series, train=True)
        return logical.to_logical(model, nnx.BatchStat)

    after = moved(model)
    assert set(before) == {f"blocks.{i}.norm{n}.{x}" for i in (0, 1) for n in (1, 2) for x in ("mean", "variance")}
    assert all(abs(before[leaf] - after[leaf]).max() > 1e-4 for leaf in before)
    alone = run(model, series[:1])  # a series does not see the others
    chex.assert_trees_all_close(run(model, series)[0], alone[0], rtol=0, atol=1e-5)


def test_saved_and_loaded_with_its_statistics(tmp_path):
    model = make("public")
    saved.save(tmp_path, model)
    again = saved.load(tmp_path)
    assert again.config == model.config
    chex.assert_trees_all_equal(again, model)


def test_any_batch_axes(series):
    model = make("registers")
    stacked = jnp.stack([series, -series], axis=1)  # [2, 2, T, C]
    logits = run(model, stacked)
    chex.assert_shape(logits, (2, 2, 5))
    chex.assert_trees_all_close(logits[0, 0], run(model, series[0]), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name,fields,message",
    [
        ("patchtst_jmbo", {}, "did you mean patchtst_jumbo"),
        ("patchtst", dict(registers_=4), "'registers_' is not one of its options; did you mean registers"),
        ("patchtst", dict(norm="group"), "norm='group' is not one of layer, batch"),
        ("patchtst_public", dict(jumbo=4), "pool='last' has patch tokens only, but jumbo=4"),
        ("patchtst", dict(patches=0), "patches=0 must be a positive whole number"),
    ],
)
def test_bad_configurations_are_refused(name, fields, message):
    with pytest.raises(ValueError, match=message):
        zoo.configuration(name, **{**SMALL, **fields})


def test_bad_series_are_refused(series):
    with pytest.raises(ValueError, match=r"series \(2, 30, 3\) must be \[\*B, 31, 3\]"):
        make("plain")(series[:, 1:])
    with pytest.raises(ValueError, match="no head"):
        make("plain", num_classes=None)(series)
    with pytest.raises(IndexError, match=r"there is no block 2; the blocks are 0 to 1"):
        make("plain").features(series, blocks=(1, 2))
    with pytest.raises(ValueError, match="num_heads=3 must divide width=16"):
        make("plain", num_heads=3)


def test_rates_of_dropout(series):
    """A share of about `rate` is zeroed and the others are larger, so that the mean stays."""
    x = jnp.ones((200, 200))
    y = jax.jit(lambda rate: dropout(x, rate, jax.random.key(0)))(jnp.float32(0.2))
    assert abs((y == 0).mean() - 0.2) < 5 * math.sqrt(0.2 * 0.8 / x.size)
    np.testing.assert_allclose(y[y > 0], 1.25, rtol=1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_xavier_weights_follow_the_widths(name):
    """In every map but the head, entries are uniform in +-sqrt(6 / (inputs + outputs))."""
    kind, fields = VARIANTS[name]
    config = zoo.configuration(kind, **{**SMALL, **fields, "init": "xavier_uniform"})
    maps = {path: a for path, a in logical.take(config.build(nnx.Rngs(0))).items() if path.endswith("weight")}
    assert len(maps) == 6 + 2 * name.startswith("jumbo")
    for path, weights in maps.items():
        if path == "head.weight":
            continue
        bound, largest = math.sqrt(6 / sum(weights.shape[-2:])), np.abs(weights).max(axis=(-2, -1))
        assert (largest <= bound).all() and (largest > 0.9 * bound).all(), path
