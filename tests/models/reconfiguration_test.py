"""A model under another configuration: what is kept, resized, drawn and dropped, and what can be done with it then."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from equivit import logical, models, testing
from equivit.depthwise import replacement
from equivit.models import saved
from equivit.models.segmenter.model import SegmenterConfig
from equivit.symmetry.groups import OCTIC
from tests.drawing import normal
from tests.models.backbones import BACKBONES

SMALL = dict(width=48, depth=2, num_heads=2, patch_size=4, image_size=(16, 16), num_classes=10, registers=2)
call = jax.jit(lambda model, images: model(images))


@functools.cache
def model(name="vit_ti16", **options):
    return testing.randomise(models.abstract(name, **{**SMALL, **options}), jax.random.key(0))


def images(*size):
    return normal(2, *size, 3)


def test_nothing_changes_when_nothing_is_asked_for():
    again, changes = models.reconfigure(model())
    assert not any(changes) and str(changes) == "all kept"
    chex.assert_trees_all_equal(again, model())
    unrolled, changes = models.reconfigure(model(), unroll=True, remat="full", drop_path=(0.0, 0.2))
    assert not any(changes)
    chex.assert_trees_all_close(call(unrolled, images(16, 16)), call(model(), images(16, 16)), rtol=0, atol=1e-5)


def test_tokens_are_dropped_and_a_head_is_drawn():
    other, changes = models.reconfigure(model(), class_token=False, registers=0, pool="mean", num_classes=3)
    assert changes.dropped == ("prefix.class_token", "prefix.registers")
    assert changes.drawn == ("head.bias", "head.weight") and not changes.resized
    assert str(changes) == "drawn: head.bias, head.weight; dropped: prefix.class_token, prefix.registers"
    chex.assert_shape(jax.eval_shape(call, other, images(12, 20)), (2, 3))
    chex.assert_trees_all_equal(other.blocks[1].mlp.fc1.weight[...], model().blocks[1].mlp.fc1.weight[...])
    seeds = [models.reconfigure(model(), num_classes=3, rngs=nnx.Rngs(s))[0].head.weight[...] for s in (1, 1, 2)]
    chex.assert_trees_all_equal(seeds[0], seeds[1])
    assert jnp.abs(seeds[0] - seeds[2]).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_ti16", {}),
        ("dinov2_vit_ti16", dict(position_offset=0.1, num_classes=10)),
        ("octic_vit_ti16", dict(family="D8", registers=0)),
        ("flip_vit_ti16", dict(family="I2")),
    ],
)
def test_positions_are_resized_to_what_the_model_itself_would_use(name, options):
    """Learned at the new grid, the model gives for images of that size what the old one gave by resizing."""
    before, x = model(name, **options), images(24, 24)
    after, changes = models.reconfigure(before, image_size=(24, 24))
    assert changes.resized and all(tensor.startswith("position.") for tensor in changes.resized)
    assert not changes.drawn and not changes.dropped
    expected = call(before, x)
    chex.assert_trees_all_close(call(after, x), expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))
    if before.config.group is OCTIC:
        testing.assert_equivariant(lambda x: call(after, x), OCTIC, x)


def test_what_was_changed_can_be_saved(tmp_path):
    changed, _ = models.reconfigure(model(), registers=0, image_size=(12, 20))
    saved.save(tmp_path, changed)
    again = saved.load(tmp_path)
    assert again.config == changed.config
    chex.assert_trees_all_equal(again, changed)


def test_a_masked_autoencoder_too():
    config = models.zoo.decoders.MaskedAutoencoderConfig(
        model(num_classes=None).config, decoder_width=24, decoder_depth=1, decoder_heads=2
    )
    whole = testing.randomise(jax.eval_shape(lambda: config.build(nnx.Rngs(0))), jax.random.key(0))
    deeper, changes = models.reconfigure(whole, decoder_depth=2)
    assert changes.drawn and all(name.startswith("decoder.blocks.1.") for name in changes.drawn)
    kept = logical.to_logical(whole)
    chex.assert_trees_all_equal({name: logical.to_logical(deeper)[name] for name in kept}, kept)


def test_what_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"parameters do not fit: blocks.0.attention.proj.bias is \[48\] and should"):
        models.reconfigure(model(), width=64)
    with pytest.raises(ValueError, match="reconfigure: field='registres' is not one of .*; the nearest is 'registers'"):
        models.reconfigure(model(), registres=0)
    with pytest.raises(ValueError, match="pool='class' needs class_token=True"):
        models.reconfigure(model(), class_token=False)


def test_the_head_of_a_segmenter_is_drawn():
    backbone = models.zoo.configuration("swin_t", **BACKBONES["swin_t"].small | dict(num_classes=None))
    config = SegmenterConfig(backbone, num_classes=3, width=8)
    found = []
    before = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    jax.eval_shape(lambda model: found.append(models.reconfigure(model, num_classes=7)[1]), before)
    (changes,) = found
    assert {name.rpartition(".")[0] for name in changes.drawn} == {"decoder.logits", "auxiliary.logits"}
    assert not changes.resized and not changes.dropped


def test_the_new_model_has_the_types_and_the_mode_of_the_old_one():
    before = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), model(depth=1))
    before.train()
    after, changes = models.reconfigure(before, num_classes=3)
    assert after.deterministic is False and after.use_running_average is False
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype("bfloat16")} and changes.drawn
    before.eval()
    assert models.reconfigure(before)[0].deterministic is True
    patches = replacement.patches_only(before)
    assert patches.deterministic is replacement.replace(patches, {0: None}).deterministic is True


@pytest.mark.parametrize(
    ("rngs", "message"),
    [
        (0, r"rngs=0 must be an nnx.Rngs, such as nnx.Rngs\(0\)"),
        (1, "rngs=1 must be an nnx.Rngs"),
        (nnx.Rngs(), r"rngs have neither a default nor a params stream; give nnx.Rngs\(0\)"),
    ],
)
def test_what_draws_no_parameters_is_refused(rngs, message):
    patches = models.abstract("vit_ti16", **SMALL | dict(class_token=False, registers=0))
    for function, name in (
        (lambda: models.create("vit_ti16", rngs=rngs, **SMALL), "create"),
        (lambda: models.reconfigure(model(), num_classes=3, rngs=rngs), "reconfigure"),
        (lambda: replacement.replace(patches, {0: None}, rngs=rngs), "replace"),
    ):
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            function()


def test_what_is_no_model_with_arrays_is_named():
    with pytest.raises(ValueError, match=r"reconfigure: 'swin_t' is not a model; .* models.create\('swin_t'\)"):
        models.reconfigure("swin_t")
    with pytest.raises(ValueError, match="rebuild: this ViT has shapes instead of arrays"):
        models.rebuild(models.abstract("vit_ti16", **SMALL))


def rebuilt(before, **fields):
    """The rebuilt model; every tensor of both is in one part of the report, and the kept ones are equal."""
    after, report = models.rebuild(before, **fields)
    old, new = logical.to_logical(before), logical.to_logical(after)
    assert sorted(report.kept + report.resized + report.drawn) == sorted(new)
    assert set(report.dropped) == old.keys() - new.keys()
    chex.assert_trees_all_equal({n: new[n] for n in report.kept}, {n: old[n] for n in report.kept})
    chex.assert_tree_all_finite(new)
    return after, report


@pytest.mark.parametrize("family", ["H8", "H2"])
def test_a_plain_model_made_equivariant_keeps_its_dense_half_its_head_and_symmetric_positions(family):
    after, report = rebuilt(model(), family=family, rngs=nnx.Rngs(1))
    assert {"head.weight", "head.bias", "blocks.1.attention.qkv.weight"} <= set(report.kept)
    assert {"blocks.0.mlp.fc1.bias", "prefix.class_token"} <= set(report.drawn)
    assert all(name.startswith("position.") for name in report.resized) and report.resized
    assert "position.table" in report.dropped
    assert str(report).startswith("kept: blocks.1.") and "; drawn: blocks.0." in str(report)
    assert jax.eval_shape(call, after, images(16, 16)).shape == (2, 10)
    plain = model().position.table[...]
    mean = models.fitting_tensors(after, model().config, draw=True)[0]["position.table"]
    # The mean over the group is the nearest symmetric table: what is left is orthogonal to it, and it stays the same.
    assert jnp.abs(jnp.vdot(plain - mean, mean)) < 1e-5 * jnp.vdot(plain, plain) and jnp.vdot(mean, mean) > 0.1
    symmetric = logical.put(model(), {"position.table": mean})
    again = models.fitting_tensors(symmetric, after.config, draw=True)[0]
    positions = {name: value for name, value in logical.to_logical(after).items() if name.startswith("position.")}
    chex.assert_trees_all_close({name: again[name] for name in positions}, positions, rtol=0, atol=1e-6)


def test_another_family_chooses_its_own_invariantization_and_keeps_a_given_one():
    def invariant(new, **options):
        before = models.abstract("vit_ti16", **SMALL, **options)
        return jax.eval_shape(lambda model: models.rebuild(model, family=new)[0], before).config.invariant

    assert invariant("D2") == "linear_signed" and invariant("I2", family="D2") == "power_spectrum"
    assert invariant("D2", family="I2", invariant="max_filtering") == "max_filtering"


def test_an_equivariant_model_made_invariant_or_wider():
    before = model("octic_vit_ti16", family="H8")
    _, report = rebuilt(before, family="I8")
    assert report.drawn == ("transition.projection.bias", "transition.projection.weight") and not report.dropped
    assert any(name.startswith("position.") for name in report.kept)
    _, changes = models.fitting_tensors(before, dataclasses.replace(before.config, width=64), draw=True)
    assert "head.bias" not in changes.drawn and "blocks.1.mlp.fc1.weight" in changes.drawn and not changes.dropped
    with pytest.raises(ValueError, match="rebuild: field='familie' is not one of .*; the nearest is 'family'"):
        models.rebuild(before, familie="I8")
