"""Errors of every family for inputs that are not a batch of images, and for an empty batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit.layers import dense
from equivit.models import decoders, zoo
from tests.models.adaptive import ADAPTIVE
from tests.models.backbones import BACKBONES

VIT = dict(width=16, depth=1, num_heads=1, patch_size=4, image_size=(8, 8), num_classes=3)
SERIES = dict(length=20, channels=2, num_classes=3, patches=4, width=8, depth=1, num_heads=2, mlp_dim=8)
FAMILIES = [
    *[("vit_ti16", dict(VIT, registers=2))],
    *[("octic_vit_ti16", dict(VIT, family=family)) for family in ("H8", "I8", "D8")],
    *[("flip_vit_ti16", dict(VIT, family=family)) for family in ("H2", "D2")],
    ("jumbo_vit_ti16", dict(VIT, jumbo=2)),
    ("jumbo_vit_release_ti16", dict(VIT, jumbo=2)),
    ("octic_jumbo_vit_ti16", dict(VIT, jumbo=2, family="D8", field="invariant")),
    *[(name, backbone.small) for name, backbone in BACKBONES.items()],
    ("cvt_13", BACKBONES["cvt_13"].small | dict(class_token=False, padding="circular")),
    ("patchtst_jumbo", SERIES),
    ("patchtst_public", SERIES),
]

ADAPTIVE_MODELS = [("vit_ti16", dict(VIT, adaptive=True)), ("octic_vit_ti16", dict(VIT, family="D8", adaptive=True))]
ADAPTIVE_MODELS += [(name, BACKBONES[name].small | facts.small) for name, facts in ADAPTIVE.items()]
FAMILIES += [(name, dict(fields, select=select)) for name, fields in ADAPTIVE_MODELS for select in ("output", "input")]


@functools.cache
def abstract(name):
    """The last model of this name among FAMILIES."""
    return zoo.abstract(name, **dict(FAMILIES)[name])


@pytest.mark.parametrize(("name", "fields"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_an_empty_batch_gives_empty_logits(name, fields):
    model = zoo.abstract(name, **fields)
    assert jax.eval_shape(lambda model, x: model(x), model, _inputs(model, 0)).shape == (0, model.config.num_classes)


@pytest.mark.parametrize("blocks", [0, None, "0", ("0",), (0.0,), (True,)], ids=repr)
@pytest.mark.parametrize("name", ["vit_ti16", *BACKBONES])
def test_blocks_that_are_no_indices_are_refused(name, blocks):
    model = abstract(name)
    with pytest.raises(ValueError, match=r": blocks=.* must be whole numbers in a tuple, such as \(0,\)"):
        jax.eval_shape(lambda model, x: model.features(x, blocks=blocks), model, _inputs(model))


def _inputs(model, batch=1):
    return jax.ShapeDtypeStruct((batch, *model.config.input_shape), jnp.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(keep=[[0, 1]] * 2), r"keep is a list; it must be an array of integers \[2, K\]"),
        (dict(keep=np.zeros((2, 2))), r"keep is float64 \[2, 2\]; it must be an array of integers"),
        (dict(keep=np.zeros((1, 2), int)), r"keep is int64 \[1, 2\]"),
        (dict(mask=np.zeros((2, 1), bool)), r"mask is bool \[2, 1\]; it must be an array of booleans \[2, 4\]"),
        (dict(mask=np.zeros((2, 4), np.float32)), r"mask is float32 \[2, 4\]; it must be an array of booleans"),
    ],
)
def test_a_keep_or_mask_of_other_images_is_refused(options, message):
    model = zoo.abstract("vit_ti16", **VIT, mask_token=True)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda model, x: model(x, **options), model, _inputs(model, 2))


def test_one_image_without_a_batch_axis_is_refused():
    model = zoo.abstract("vit_ti16", **VIT)
    with pytest.raises(ValueError, match=r"images \(8, 8, 3\) must be .*; images\[None\] is a batch of one"):
        jax.eval_shape(lambda model, x: model(x), model, jax.ShapeDtypeStruct((8, 8, 3), jnp.float32))


@pytest.mark.parametrize("name", ["swin_t", "swinv2_t", "mvitv2_t", "dinov3_vit_s16"])
def test_a_layer_that_needs_the_grid_of_its_tokens_asks_for_it(name):
    model = zoo.abstract(name, **dict(depth=1, width=32, num_heads=2) if name.startswith("dino") else {})
    layers = [m for _, m in nnx.iter_modules(model) if isinstance(m, dense.Attention)]
    tokens = jax.ShapeDtypeStruct((1, 49, 32), jnp.float32)
    with pytest.raises(ValueError, match=r"needs the grid of its tokens; pass layout=Layout\(grid=\(h, w\)\)"):
        jax.eval_shape(lambda layer, x: layer(x), layers[0], tokens)


def test_an_empty_batch_runs():
    model = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), zoo.abstract("octic_vit_ti16", **VIT))
    assert jax.jit(lambda model, x: model(x))(model, jnp.zeros((2, 0, 8, 8, 3))).shape == (2, 0, 3)
    model = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), zoo.abstract("vit_ti16", **VIT, adaptive=True))
    assert jax.jit(lambda model, x: model.selections(x))(model, jnp.zeros((0, 8, 8, 3)))["patch_embed"].gap.shape == (
        0,
    )


def test_an_empty_batch_of_a_masked_autoencoder():
    encoder = zoo.configuration("vit_ti16", **VIT | dict(num_classes=None, position="sincos"))
    config = decoders.MaskedAutoencoderConfig(encoder, decoder_width=8, decoder_depth=1, decoder_heads=1)
    model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
    images, keep = jax.ShapeDtypeStruct((0, 8, 8, 3), jnp.float32), jax.ShapeDtypeStruct((0, 2), jnp.int32)
    assert jax.eval_shape(lambda m, x, keep: m(x, keep), model, images, keep).shape == (0, 4, 48)


@pytest.mark.parametrize("name", ["vit_ti16", "swin_t", "patchtst_public"])
@pytest.mark.parametrize(
    ("value", "found"),
    [(None, "None"), ([np.zeros((8, 8, 3), np.float32)], "a list"), ("image.png", "a str"), (0.5, "a float")],
)
def test_what_is_no_array_is_refused(name, value, found):
    with pytest.raises(ValueError, match=rf"are {found}; they must be an array \[\*B, "):
        abstract(name)(value)
