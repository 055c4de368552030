"""Checkpoints of Jumbo ViTs: what is left out, a new head, other image sizes, and what a file lacks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import pretrained
from tests.pretrained.formats_test import same_model, written


def test_the_unused_class_token_is_left_out(capsys):
    model, _, weights = written("Jumbo")
    random = weights | {"cls_token": np.random.default_rng(0).normal(size=(1, 1, 64)).astype(np.float32)}
    same_model(pretrained.load("jumbo", random, num_heads=2), model)
    assert capsys.readouterr().out == "jumbo: dropped on purpose: cls_token.\n"
    assert not weights["cls_token"].any()


@pytest.mark.parametrize(("width", "heads"), [(96, 3), (128, 4), (192, 3), (384, 6), (768, 12)])
def test_heads_of_the_published_sizes(width, heads):
    shapes = {"patch_embed.proj.weight": (width, 3, 16, 16), "pos_embed": (1, 196, width)}
    shapes |= {"jumbo_token": (1, 6, width), "blocks.0.attn.qkv.bias": (3 * width,)}
    shapes |= {"blocks.0.mlp.fc1.weight": (4 * width, width), "jumbo_mlp.fc1.weight": (24 * width, 6 * width)}
    state = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    config, flavour = pretrained.FORMATS["jumbo"].infer(state)
    assert (config.num_heads, config.jumbo, config.image_size, flavour) == (heads, 6, (224, 224), "release")


def test_a_new_head_starts_at_equal_probabilities(capsys):
    model, config, weights = written("Jumbo")
    found = pretrained.load("jumbo", weights, num_heads=2, num_classes=7, drop_path=0.1)
    assert capsys.readouterr().out == "jumbo: dropped on purpose: cls_token, head.weight, head.bias.\n"
    assert found.config.drop_path == 0.1 and found.head.weight.shape == ((config.jumbo + 1) * 64, 7)
    np.testing.assert_allclose(found.head.bias[...], math.log(1 / 7), rtol=1e-6)
    np.testing.assert_array_equal(found.jumbo_mlp.fc1.weight[...], model.jumbo_mlp.fc1.weight[...])


@pytest.mark.parametrize("name", ["Jumbo", "Jumbo of 2025"])
def test_other_image_sizes(name):
    logits = jax.jit(lambda m, x: m(x))(written(name)[0], jnp.ones((1, 24, 56, 3)))
    assert logits.shape == (1, 5) and bool(jnp.isfinite(logits).all())


def test_what_a_file_lacks():
    weights = dict(written("Jumbo")[2])
    del weights["jumbo_mlp.fc2.bias"], weights["blocks.1.norm3.weight"]
    weights["jumbo_token"] = weights["jumbo_token"][..., :63]
    with pytest.raises(ValueError) as caught:
        pretrained.load("jumbo", weights, num_heads=2)
    message = str(caught.value)
    assert message.startswith("jumbo (release; JumboViT, family plain, width 64, depth 3, 2 heads, patch 8x8): the")
    assert "missing: blocks.1.norm3.weight, jumbo_mlp.fc2.bias; " in message
    assert "misshapen: jumbo_token (1, 3, 63), expected (1, 3, 64)." in message


def test_names_tell_the_flavour():
    for name, flavour in (("Jumbo", "release"), ("Jumbo of 2025", "legacy"), ("Jumbo's baseline", "plain")):
        _, config, weights = written(name)
        format = pretrained.FORMATS["jumbo"]
        assert format.infer(weights, num_heads=2, image_size=config.image_size)[1] == flavour
        assert format.default_flavour(config) == flavour
