"""Models with replaced blocks: what is inherited, runs of like blocks, files, refusals, and equivariance."""

import functools
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical, pretrained, safetensors_files
from equivit.depthwise.replacement import patches_only, replace
from equivit.layers.depthwise import ReplacedAttention, replace_attention
from equivit.models import saved, zoo
from equivit.models.vit.replaced import Replaced, as_replaced
from equivit.testing import assert_equivariant

SMALL = dict(width=16, depth=4, num_heads=2, patch_size=4, image_size=(12, 20), num_classes=5, layer_scale=1.0)
ALONE = dict(class_token=False, pool="mean")
OCTIC_SMALL = SMALL | dict(width=64, image_size=(16, 16))


@functools.cache
def model(name="vit_ti16", **options):
    """With every parameter random, drawn by NumPy: scales near 1, matrices of unit gain, biases and taps of 1/2."""
    abstract, random = zoo.abstract(name, **SMALL | options), np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if "taps" in tensor.name or len(tensor.shape) == 1:
            noise = 1 + 0.2 * noise if "scale" in tensor.name else 0.5 * noise
        else:
            noise *= math.prod(tensor.shape[:-1]) ** -0.5
        return noise.astype(np.float32)

    tensors = {t.name: draw(t) for table in logical.tensors(abstract).values() for t in table.flat}
    return logical.from_logical(abstract, tensors)


def images(size, batch=2):
    return jnp.asarray(np.random.default_rng(1).normal(size=(batch, *size, 3)), jnp.float32)


call = jax.jit(lambda model, x: model(x))
DINO = dict(registers=2, mask_token=True, class_position=True)


def test_patches_only():
    """All that patches do not need is gone, and the head is a new one; everything else stays."""
    whole = model(**DINO)
    alone = patches_only(whole, num_classes=5, seed=1)
    before, after = logical.to_logical(whole), logical.to_logical(alone)
    gone = {"prefix.class_token", "prefix.class_position", "prefix.registers", "mask_token"}
    assert before.keys() - after.keys() == gone and after.keys() <= before.keys()
    for name in after.keys() - {"head.weight", "head.bias"}:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert np.abs(after["head.weight"] - before["head.weight"]).max() > 0.01 and not after["head.bias"].any()
    assert patches_only(whole).head is None
    x, apart = images((12, 20)), jax.jit(lambda model, x: model.head(model.features(x).patches.values.mean((1, 2))))
    np.testing.assert_allclose(call(alone, x), apart(alone, x), rtol=0, atol=1e-6)
    other = patches_only(whole, num_classes=5, seed=2)
    assert np.abs(other.head.weight[...] - alone.head.weight[...]).max() > 0.01


def test_a_projection_and_the_norm_before_blocks():
    """CLIP loses its projection, even if there are as many classes; the norm before the blocks stays."""
    whole = model(projection=5, num_classes=None, pre_norm=True, patch_bias=False)
    alone = patches_only(whole, num_classes=5)
    assert alone.config.projection is None and alone.head.bias is not None and alone.pre_norm is not None
    assert np.abs(alone.head.weight[...] - whole.head.weight[...]).max() > 0.01


@pytest.mark.parametrize(("name", "kind"), [("swin_t", "Swin"), ("jumbo_vit_s16", "JumboViT")])
def test_other_models_are_refused(name, kind):
    other = types.SimpleNamespace(config=zoo.configuration(name))
    with pytest.raises(ValueError, match=f"patches_only: the model is a {kind}; it must be a ViT without"):
        patches_only(other)
    with pytest.raises(ValueError, match=f"replace: the model is a {kind}"):
        replace(other, {0: None})


def by_hand(model, blocks):
    """The same surgery on the stack itself."""
    stack = model.blocks
    for i, attention in blocks.items():
        block = stack[i]
        block.attention = attention
        stack = stack.replace(i, block)
    return stack


def test_replace_is_the_surgery_of_the_stack():
    """The same parameters and runs as by `Stack.replace`: neighbours that are alike share a scan."""
    plain = model(**ALONE)
    drawn = dict(start="normal", rngs=nnx.Rngs(params=3))
    new = replace(plain, {2: None, 1: None}, **drawn)
    assert new.config.replaced == (Replaced(1), Replaced(2)) and new.blocks.lengths == (1, 2, 1)
    drawn["rngs"] = nnx.Rngs(params=3)
    stack = by_hand(plain, {i: replace_attention(plain.blocks[i].attention, "dw", **drawn) for i in (1, 2)})
    assert stack.lengths == new.blocks.lengths
    assert jax.tree.structure(stack) == jax.tree.structure(new.blocks)
    jax.tree.map(np.testing.assert_array_equal, stack, new.blocks)
    taps = np.asarray(new.blocks.runs[1].attention.taps[...])
    assert np.abs(taps[0] - taps[1]).max() > 0.01 and abs(taps.std() - 0.02) < 0.005  # each block has its own


@functools.cache
def mixed():
    """A model with blocks of three sorts, of the image's own size."""
    new = replace(model(**ALONE), {0: (1,)}, kind="conv", kernel_size=5)
    new = replace(new, {2: None, 3: None}, kind="ens_dw")
    noise = np.random.default_rng(5)
    taps = {n: noise.normal(size=t.shape) for n, t in logical.to_logical(new).items() if n.endswith(("taps", "gamma"))}
    return logical.from_logical(new, logical.to_logical(new) | {n: t.astype(np.float32) for n, t in taps.items()})


def test_kinds_beside_each_other():
    new = mixed()
    assert new.config.replaced == (Replaced(0, "conv", 5, (1,)), Replaced(2, "ens_dw"), Replaced(3, "ens_dw"))
    assert new.blocks.lengths == (1, 1, 2)
    attentions = [new.blocks[i].attention for i in (0, 2)]
    assert all(isinstance(attention, ReplacedAttention) for attention in attentions)
    assert [attention.attending for attention in attentions] == [(0,), ()]

    @jax.jit
    def by_block(new, x):
        x, layout = new.embed(x)
        for i in range(4):
            block = new.blocks[i]
            x = x + block.scale1(block.attention(block.norm1(x), layout))
            x = x + block.scale2(block.mlp(block.norm2(x)))
        return new.head(new.readout(x, layout))

    x = images((12, 20))
    np.testing.assert_allclose(call(new, x), by_block(new, x), rtol=0, atol=2e-5)
    decay = {t.name: t.decay for table in logical.tensors(new).values() for t in table.flat}
    assert not any(decay[name] for name in decay if name.endswith(("taps", "gamma")))
    assert decay["blocks.0.attention.value.weight"]


@pytest.mark.parametrize("size", [(4, 28), (8, 8), (20, 12)])
def test_other_grids(size):
    """One row, smaller than the taps, and turned."""
    assert call(mixed(), images(size)).shape == (2, 5)


def test_saved_and_converted(tmp_path):
    saved.save(tmp_path / "a", mixed())
    again = saved.load(tmp_path / "a")
    assert again.config == mixed().config and hash(again.config) == hash(mixed().config)
    jax.tree.map(np.testing.assert_array_equal, again, mixed())
    assert pretrained.describe(again.config).endswith("replaced blocks 0 (conv), 2 (ens_dw), 3 (ens_dw)")
    with pytest.raises(ValueError, match="timm: has no names for the taps of 3 replaced blocks; keep it as a saved"):
        pretrained.state_dict("timm", again)


def test_a_model_saved_before_forms_had_names_is_the_printed_one(tmp_path):
    printed = model(**ALONE, replaced=((0, "dw", 3, None, "printed"),))
    saved.save(tmp_path, printed)
    description = json.loads((tmp_path / "model.json").read_text())
    assert description["replaced"] == [[0, "dw", 3, None, "printed"]]
    description["replaced"] = [[0, "dw", 3, None]]
    (tmp_path / "model.json").write_text(json.dumps(description))
    tensors = safetensors_files.read(tmp_path / "parameters.safetensors")
    safetensors_files.write(tmp_path / "parameters.safetensors", tensors, {})
    again = saved.load(tmp_path)
    assert again.config == printed.config
    jax.tree.map(np.testing.assert_array_equal, again, printed)


def test_no_tokens_may_be_removed():
    with pytest.raises(ValueError, match="call without keep="):
        mixed()(images((12, 20)), keep=jnp.array([[0, 2], [1, 3]]))


def test_a_replaced_block_has_no_attention_weights():
    assert mixed().attention_weights(images((12, 20)), 1).shape == (2, 2, 15, 15)
    for block in (0, 2):
        with pytest.raises(ValueError, match="is replaced by a convolution .* take another block"):
            mixed().attention_weights(images((12, 20)), block)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("3", "replaced='3' must be entries such as"),
        ((3, "dw", 3, None), r"replaced=\(3, 'dw', 3, None\) must be entries such as \(\(3, 'dw', 3, None\),\), each"),
        (((3, 3),), r"has \(3, 3\); entries are such as"),
        ((("3",),), r"has \('3',\); entries are such as"),
        (((True,),), r"has \(True,\); entries are such as"),
        (((1, "dw", 3, 2),), r"has \(1, 'dw', 3, 2\); entries are such as"),
        (((),), r"has \(\); entries are such as"),
        (((1, "conv2", 3),), "kind='conv2' is not one of conv, dw, spvit, ens_dw, identity; the nearest is 'conv'"),
        (((1, "dw", 2),), "kernel_size=2 must be odd"),
        (((1,), (2,), (1, "conv")), "has block 1 twice; a block is replaced once"),
        (((4,),), "there is no block 4; take 0 to 3"),
        (((1, "dw", 3, (0, 2)),), r"heads=\(0, 2\) must be one or more different heads, 0 to 1"),
        (((1, "spvit", 3, (0,)),), "'spvit' merges all heads"),
    ],
    ids=str,
)
def test_malformed_entries_are_refused_in_one_line(entries, message):
    with pytest.raises(ValueError, match=message) as error:
        zoo.configuration("vit_ti16", **SMALL | ALONE, replaced=entries)
    assert "\n" not in str(error.value)


def test_entries_in_other_words():
    """Lists, as JSON has them, the last parts left out, and all heads by name."""
    ours = zoo.configuration("vit_ti16", **SMALL | ALONE, replaced=[[2, "conv", 5, [1, 0]], (0,)]).replaced
    assert ours == (Replaced(0), Replaced(2, "conv", 5)) and as_replaced("ViT", ()) == ()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({1.7: None}, r"replace: replaced has \(1.7, 'dw', 3, None, 'released'\); entries are such as"),
        ({1: None, "1": None}, r"has \('1', 'dw', 3, None, 'released'\)"),
        ({"a": None}, r"has \('a', 'dw', 3, None, 'released'\)"),
        ({True: None}, r"has \(True, 'dw', 3, None, 'released'\)"),
        ({1: 1}, r"has \(1, 'dw', 3, 1, 'released'\)"),
        ({1: (0.0,)}, r"has \(1, 'dw', 3, \(0.0,\), 'released'\)"),
        ({1: None, np.int64(1): (0,)}, None),
        ([1, 2], r"replace: where=\[1, 2\] must give heads by block, such as \{3: None, 7: \(0,\)\}"),
        (None, "replace: where=None must give heads by block"),
    ],
    ids=str,
)
def test_blocks_and_heads_are_whole_numbers(where, message):
    if message is None:  # NumPy's are the same numbers, also as keys
        assert replace(model(**ALONE), where).config.replaced == (Replaced(1, heads=(0,)),)
        return
    with pytest.raises(ValueError, match=message):
        replace(model(**ALONE), where)


def test_what_does_not_go_with_the_model():
    with pytest.raises(
        ValueError, match="there are 1 tokens before it; set class_token=False, registers=0 and pool='mean'"
    ):
        zoo.configuration("vit_ti16", **SMALL, replaced=((0,),))
    with pytest.raises(ValueError, match="there are 1 tokens before it"):
        replace(zoo.abstract("vit_ti16", **SMALL), {0: None})
    with pytest.raises(ValueError, match="JumboViT: replaced blocks convolve the grid of patches"):
        zoo.configuration("jumbo_vit_s16", replaced=((0,),))
    with pytest.raises(ValueError, match="block 2 is already replaced"):
        replace(mixed(), {1: None, 2: None})
    with pytest.raises(ValueError, match="there is no block 4; take 0 to 3"):
        replace(model(**ALONE), {4: None})
    with pytest.raises(ValueError, match="block 1 of family H8 is equivariant, where only 'dw' of all heads and"):
        zoo.configuration("octic_vit_ti16", **OCTIC_SMALL | ALONE, family="H8", replaced=((1, "conv"),))
    with pytest.raises(ValueError, match=r"replaced blocks know no distances.*take adaptive=\('token',\)"):
        zoo.configuration("vit_ti16", **SMALL | ALONE, adaptive=True, replaced=((0,),))


def test_costs_of_a_model():
    """Replacing one block saves what Table 1 says: 2 n d^2 + 2 n^2 d multiply-adds for k^2 n d."""
    image = jax.ShapeDtypeStruct((1, 12, 20, 3), jnp.float32)
    models = (model(**ALONE), replace(model(**ALONE), {1: None}))
    before, after = (costs.count(lambda m, x: m(x), one, image) for one in models)
    n, d = 15, 16
    assert before.double_macs - after.double_macs == 2 * (2 * n * d * d + 2 * n * n * d - 9 * n * d)
    assert after["depthwise"].macs == 9 * n * d and before["depthwise"].macs == 0


@functools.partial(jax.jit, static_argnames="whole")
def last_field(model, x, whole):
    """The logits, or the field after the last equivariant block."""
    return model(x) if whole else model.fields(x, (model.config.k - 1,))[model.config.k - 1]


@pytest.mark.parametrize(
    ("name", "family"), [("octic_vit_ti16", "D8"), ("octic_vit_ti16", "I8"), ("flip_vit_ti16", "H2")]
)
def test_equivariant_models(name, family):
    """With replaced blocks of fields and, after them, of dense tokens; on odd and non-square grids, in float64."""
    with jax.enable_x64(True):
        dense = (3, "identity") if family == "I8" else (3,)
        options = OCTIC_SMALL | ALONE | dict(family=family, replaced=((0,), (1, "identity"), dense))
        net = jax.tree.map(lambda a: a.astype(jnp.float64), model(name, **options))
        group, small, square = net.config.group, *(images(size).astype(jnp.float64) for size in ((12, 20), (20, 20)))
        assert_equivariant(lambda x: last_field(net, x, False), group, small, "image", "field", output_grid=(3, 5))
        if family in ("D8", "I8"):
            assert_equivariant(lambda x: last_field(net, x, True), group, square)
    if family == "I8":
        with pytest.raises(ValueError, match="block 3 of family I8 follows the invariantization, where a convolution"):
            model(name, **options | dict(replaced=((3,),)))
