"""Jumbo ViTs, loaded from official state dicts, against everything that the official code gave: one test a file.

Of the released version `sar_test.py` has the file that is always there; the others run where $EQUIVIT_PARITY has them.
The plain ViT of the same code is among `models_test.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from equivit import logical, pretrained
from equivit.evaluation.attention_maps import attention_maps
from equivit.layers import position
from tests.parity.arrays import TOLERANCE, Comparison, files, images, load, state

FILES = [path for path in files("jumbo", "jumbo_[dl]*.npz") if not path.stem.endswith("_grads")]
# What the file of gradients has the parameters of.
BASES = {path: path.with_name(path.name.replace("_grads", "")) for path in files("jumbo", "jumbo_*_grads.npz")}


def load_model(path):
    """The model and the data of a file."""
    data = load(path)
    hints = dict(num_heads=2 if "legacy" in path.stem else 3, image_size=(32, 48) if "d48" in path.stem else None)
    return pretrained.load("jumbo", state(data), **hints), data


@functools.partial(jax.jit, static_argnames="wanted")
def results(model, x, wanted: tuple[str, ...]) -> dict[str, jax.Array]:
    """The quantities named in `wanted`."""
    last = model.config.depth - 1
    blocks = tuple(i for i in range(last + 1) if f"output/block_{i}" in wanted)
    final = model.features(x, blocks=blocks, norm=False)
    grid = final.patches.values.shape[1:3]
    result = {"output/patch_tokens": model.patch_embed(x) + model.position(grid), "output/logits": model(x)}
    result |= {f"output/block_{i}": sequence(model, block) for i, block in final.blocks.items()}
    result |= {"output/last_block_attn": model.attention_weights(x, last)}
    result |= {"output/attn_map": attention_maps(model, x).mean((1, 2)), "output/features": model.tokens(x)}
    if model.config.wide_norm:  # the patches are not read, and the public code drops them
        result |= {"output/features": model.features(x).cls, f"output/block_{last}": final.cls}
    return {name: result[name] for name in wanted}


def sequence(model, features) -> jax.Array:
    """All tokens as rows: the parts of the Jumbo token, then the patches."""
    cls, patches = features.cls, features.patches.values
    width = model.config.width
    return jnp.concatenate([cls.reshape(len(cls), -1, width), patches.reshape(len(patches), -1, width)], axis=1)


@jax.jit
def gradients(model, x, labels):
    """The mean cross-entropy, and the model with its gradient in place of each parameter."""
    loss = lambda arrays: optax.softmax_cross_entropy_with_integer_labels(  # noqa: E731
        logical.put(model, arrays)(x), labels
    ).mean()
    value, slopes = jax.value_and_grad(loss)(logical.take(model))
    return value, logical.put(model, slopes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_model(path, record_property):
    model, data = load_model(path)
    comparison = Comparison(data)
    x, outputs = images(data), sorted(key for key in data if key.startswith("output/"))
    masked = [key for key in outputs if "masked" in key]
    for key, array in results(model, x, tuple(key for key in outputs if key not in masked)).items():
        comparison.array(key, array)
    for key in masked:  # the tokens of the smallest noise are dropped
        noise, rate = data["input/noise"], float(key.rpartition("_")[2])
        keep = np.argsort(noise, axis=1)[:, int(rate * noise.shape[1]) :]
        comparison.array(key, jax.jit(lambda model, x, keep: model(x, keep=keep))(model, x, keep))
    comparison.finish(record_property, "jumbo")


@pytest.mark.parametrize("path", BASES, ids=lambda path: path.stem)
def test_gradients(path, record_property):
    model, data = load_model(BASES[path])[0], load(path)
    comparison = Comparison(data)
    loss, slopes = gradients(model, images(data), data["input/label"])
    comparison.array("output/loss", loss)
    for name, array in pretrained.state_dict("jumbo", slopes).items():
        if name != "cls_token":  # which no output depends on
            comparison.array(f"output/grad/{name}", array)
    comparison.finish(record_property, "jumbo gradients")


@pytest.mark.parametrize("path", files("jumbo", "pos_embed_resample.npz"), ids=lambda path: path.stem)
def test_positions(path, record_property):
    data = load(path)
    comparison = Comparison(data)
    for key in [key for key in data if key.startswith("output/")]:
        name = key.removeprefix("output/")
        before, after = (tuple(map(int, size.split("x"))) for size in name.split("_to_"))
        table = data[f"input/{name}"].reshape(*before, -1)
        ours = position.resize(jnp.asarray(table), after, antialias=True)
        comparison.array(key, ours.reshape(1, -1, ours.shape[-1]))
    comparison.finish(record_property, "jumbo")


def test_what_is_nearly_right_is_caught():
    """The epsilon of other codes and the approximate GELU move the logits by more than the tolerance."""
    path = next(path for path in files("jumbo") if path.stem == "sar_jumbo_nokeep")
    data = load(path)
    model = pretrained.load("jumbo", state(data), num_heads=3)
    x, expected = images(data, "input/batch_0"), data["output/logits_0"]

    def deviation(**options):
        config = dataclasses.replace(model.config, **options)
        other = jax.eval_shape(lambda: config.build(nnx.Rngs(0)))
        logits = jax.jit(lambda m, x: m(x))(logical.put(other, logical.take(model)), x)
        return np.abs(logits - expected).max() / np.abs(expected).max()

    assert deviation() < TOLERANCE
    for wrong in (dict(norm_eps=1e-6), dict(mlp="gelu_tanh")):
        assert deviation(**wrong) > 2 * TOLERANCE, wrong
