import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, precision
from equivit.layers.dense import unpatchify
from equivit.models import decoders, zoo
from equivit.symmetry import fields

# An odd, non-square grid: 3 x 5 patches; not the grid that positions are learned at.
IMAGES = jax.random.normal(jax.random.key(1), (2, 12, 20, 2))
KEEP = jnp.asarray([[11, 0, 7, 3], [2, 14, 5, 9]])
ENCODERS = {
    "plain": dict(name="vit_ti16", position="sincos", registers=1),
    "jumbo": dict(name="jumbo_vit_mae_ti16", jumbo=3),
    "octic": dict(name="octic_vit_ti16", depth=2),
    "flip": dict(name="flip_vit_ti16", depth=2),
    "octic_jumbo": dict(name="octic_jumbo_vit_ti16", jumbo=3, family="D8", field="invariant"),
}


@functools.cache
def autoencoder(encoder, decoder="dense", **options):
    """Every parameter random.  Drawn by numpy: nothing has to be compiled."""
    small = dict(width=48, depth=1, num_heads=2, patch_size=4, image_size=(16, 16), in_channels=2, num_classes=None)
    config = zoo.configuration(**{**small, **ENCODERS[encoder], **options})
    width = 24 if decoder == "dense" else 32
    whole = decoders.MaskedAutoencoderConfig(config, width, decoder_depth=2, decoder_heads=2, decoder=decoder)
    model, rng = jax.eval_shape(lambda: whole.build(nnx.Rngs(params=0))), np.random.default_rng(0)
    arrays = {}
    for leaf, shape in jax.eval_shape(logical.take, model).items():
        arrays[leaf] = (0.2 * rng.normal(size=shape.shape) + ("scale" in leaf)).astype(shape.dtype)
    return logical.put(model, jax.device_put(arrays))


predict = jax.jit(lambda model, images, keep: model(images, keep))
encode = jax.jit(lambda model, images, keep: model.encoder.tokens(images, keep=keep))
decode = jax.jit(lambda model, rows, keep: model.decoder(rows, keep, (3, 5)))


def pixels(images, places):
    """Images [2, 12, 20, 2] with the patches at `places` [2, K] changed."""
    rows, columns = np.divmod(np.asarray(places), 5)
    images = np.array(images)
    for image, row, column in zip(images, rows, columns, strict=True):
        for r, c in zip(row, column, strict=True):
            image[4 * r : 4 * r + 4, 4 * c : 4 * c + 4] += 1.0
    return jnp.asarray(images)


@pytest.mark.parametrize("encoder", ["plain", "octic_jumbo"])
def test_what_is_removed_is_not_seen_and_what_is_kept_is(encoder):
    model = autoencoder(encoder)
    predictions = predict(model, IMAGES, KEEP)
    chex.assert_shape(predictions, (2, 15, 4 * 4 * 2))
    removed = np.stack([np.setdiff1d(np.arange(15), row) for row in KEEP])
    chex.assert_trees_all_equal(predict(model, pixels(IMAGES, removed), KEEP), predictions)
    assert (jnp.abs(predict(model, pixels(IMAGES, KEEP[:, :1]), KEEP) - predictions).max((1, 2)) > 1e-2).all()


def test_the_order_of_kept_patches_does_not_matter_but_their_places_do():
    model = autoencoder("plain")
    predictions = predict(model, IMAGES, KEEP)
    chex.assert_trees_all_close(predict(model, IMAGES, KEEP[:, ::-1]), predictions, rtol=0, atol=2e-5)
    rows = encode(model, IMAGES, KEEP)
    wrong = decode(model, rows, KEEP[:, ::-1])
    chex.assert_trees_all_close(decode(model, rows, KEEP), predictions, rtol=0, atol=2e-5)
    assert jnp.abs(wrong - predictions).max() > 1e-2


def test_mask_tokens_fill_the_places_that_are_left():
    model = autoencoder("plain")
    changed = jax.tree.map(lambda a: a, model)
    changed.decoder.mask_token.set_value(2 * changed.decoder.mask_token[...])
    changed.decoder.blocks = model.decoder.blocks.from_blocks([])  # without mixing
    model = jax.tree.map(lambda a: a, model)
    model.decoder.blocks = changed.decoder.blocks
    rows = encode(model, IMAGES, KEEP)
    difference = jnp.abs(decode(changed, rows, KEEP) - decode(model, rows, KEEP)).max(-1)
    expected = np.ones((2, 15))
    np.put_along_axis(expected, np.asarray(KEEP), 0, axis=1)
    chex.assert_trees_all_equal(difference > 1e-6, expected)


def test_tokens_are_those_of_features():
    model = autoencoder("jumbo", wide_norm=True).encoder
    tokens, features = jax.jit(lambda model, x: (model.tokens(x, keep=KEEP), model.features(x, keep=KEEP)))(
        model, IMAGES
    )
    chex.assert_trees_all_equal(tokens[:, :3].reshape(2, -1), features.cls)
    chex.assert_trees_all_equal(tokens[:, 3:], features.patches.values)


@pytest.mark.parametrize("encoder", ENCODERS)
def test_any_encoder_and_type(encoder):
    for kind in ("mixed", "bfloat16"):
        model = precision.cast(autoencoder(encoder), kind)
        predictions = jax.eval_shape(predict, model, IMAGES, KEEP)
        chex.assert_shape(predictions, (2, 15, 32))
        chex.assert_type(predictions, jnp.bfloat16)


EQUIVARIANT = {
    "octic": [dict(family="I8"), dict(family="D8")],
    "octic_jumbo": [dict()],
    "flip": [dict(family="I2"), dict(family="D2")],
}


@pytest.mark.parametrize(
    ("encoder", "changes"),
    [(name, changes) for name, several in EQUIVARIANT.items() for changes in several],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_the_reconstruction_of_a_turned_image_is_turned(encoder, changes):
    """In float64, where only rounding is left; on a grid that the positions were not learned for, too."""
    mask = np.ones((2, 15))
    np.put_along_axis(mask, np.asarray(KEEP), 0, axis=1)
    mask = mask.reshape(2, 3, 5)
    with jax.enable_x64(True):
        model = autoencoder(encoder, decoder="equivariant", **changes)
        model = jax.tree.map(lambda a: np.asarray(a, np.float64), model)
        images = np.asarray(IMAGES, np.float64)
        upright = reconstruction(model, images, mask)
        for g in model.config.group.elements:
            turned = fields.act_on_image(g, images), fields.act_on_grid(g, mask, (1, 2))
            found, expected = reconstruction(model, *turned), fields.act_on_image(g, upright)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(upright).max())
        # What is no symmetry: the image turns without its mask.
        other = reconstruction(model, images[:, :, ::-1], mask)
        assert np.abs(other[:, :, ::-1] - upright).max() > 1e-2 * np.abs(upright).max()


def test_a_dense_decoder_is_not_equivariant():
    model, mask = autoencoder("octic", family="D8"), np.ones((2, 3, 5))
    mask[:, :, ::2] = 0  # its own mirror image
    upright, turned = (reconstruction(model, x, mask) for x in (np.asarray(IMAGES), np.asarray(IMAGES)[:, :, ::-1]))
    assert np.abs(turned[:, :, ::-1] - upright).max() > 1e-2 * np.abs(upright).max()


def reconstruction(model, images, mask):
    """Predicted images [2, H, W, C] from the patches where the mask [2, h, w] is 0."""
    keep = np.stack([np.flatnonzero(row == 0) for row in mask.reshape(2, -1)])
    return unpatchify(np.asarray(predict(model, images, keep)), mask.shape[1:], (4, 4))


@pytest.mark.parametrize("kind", ["mixed", "bfloat16"])
def test_half_precision_is_close(kind):
    exact, model = predict(autoencoder("plain"), IMAGES, KEEP), precision.cast(autoencoder("plain"), kind)
    chex.assert_trees_all_close(predict(model, IMAGES, KEEP), exact, rtol=0, atol=0.1 * float(jnp.abs(exact).max()))


def test_bad_sizes_are_refused():
    config = zoo.configuration("vit_ti16")
    with pytest.raises(ValueError, match="the encoder has a head for 1000 classes.*num_classes=None"):
        decoders.MaskedAutoencoderConfig(config)
    with pytest.raises(ValueError, match="patches of this adaptive encoder begin .* create it with adaptive=False"):
        autoencoder("plain", adaptive=True)
    with pytest.raises(ValueError, match="image 12x18: the width 18 is not divisible"):
        jax.eval_shape(predict, autoencoder("plain"), IMAGES[:, :, :18], KEEP)
    with pytest.raises(ValueError, match="must be divisible by 4; the nearest are 24 and 28"):
        whole = decoders.MaskedAutoencoderConfig(autoencoder("plain").encoder.config, decoder_width=25)
        jax.eval_shape(lambda: whole.build(nnx.Rngs(0)))


@pytest.mark.parametrize(("field", "value"), [("position", "rotary"), ("adaptive", ("position",))])
def test_encoders_whose_attention_needs_the_whole_grid_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}={re.escape(repr(value))} .*reads the whole grid of patches"):
        autoencoder("plain", **{field: value})


@pytest.mark.parametrize(
    ("encoder", "width", "message"),
    [
        ("plain", 32, "needs an encoder with a symmetry, such as family D8 or I8, not plain"),
        ("octic", 32, "dense blocks of family H8 end its symmetry, .* take family I8 or D8, or decoder='dense'"),
        ("octic_jumbo", 24, "decoder_width=24 .* decoder_heads=2 times 8, .*; the nearest are 16 and 32"),
    ],
)
def test_equivariant_decoders_that_cannot_be_are_refused(encoder, width, message):
    with pytest.raises(ValueError, match=f"decoder='equivariant'.*{message}"):
        config = autoencoder(encoder).config
        dataclasses.replace(config, decoder_width=width, decoder="equivariant")
