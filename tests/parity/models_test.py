"""Whole models, loaded from official state dicts, against everything that the official models gave: one test a file.

Sequences of tokens are compared as dense arrays [B, class token + registers + patches, D], patches row by row.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import logical, pretrained
from equivit.pretrained import flip
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP
from tests.parity.arrays import Comparison, field, files, images, load, state

FILES = [("octic_vits", path) for path in files("octic", "model_*.npz")]
FILES += [("flip", path) for path in files("flip", "model_*.npz")]
FILES += [("timm", path) for path in files("timm", "timm_*.npz", "jumbo")]
FILES += [("jumbo", path) for path in files("jumbo", "vit_plain_*.npz")]


def hints(path) -> dict:
    """The hints that files lack."""
    if path.stem.startswith(("timm", "vit_plain")):
        return dict(num_heads=3)
    return dict(num_heads=4, family=next((name for name in ("H2", "I2") if f"_{name.lower()}" in path.stem), None))


def expected(data, order) -> dict[str, np.ndarray]:
    """The stored results, fields as dense arrays; `order` is the official order of patch tokens."""
    result = {}
    for key, array in data.items():
        head, _, last = key.rpartition("/")
        if last in ("A1", "sym"):
            result[head] = np.asarray(fields.to_dense(field(data, head + "/")))
        elif last not in ("A2", "B1", "B2", "E", "asym"):
            result[head if last == "x" else key] = array
    result = {key: array for key, array in result.items() if key.startswith(("output/", "inter/"))}
    if order is not None:
        for key in result:
            if key.startswith("inter/"):
                prefix = result[key].shape[1] - len(order)
                inverse = np.concatenate([np.arange(prefix), prefix + np.argsort(order)])
                result[key] = result[key][:, inverse]
    renamed = {"output/embedded": "inter/block_input", "output/block_0": "inter/block0"}  # as timm's files call them
    return {renamed.get(key, key): array for key, array in result.items()}


def sequence(features) -> jax.Array:
    patches = features.patches.values
    parts = [features.registers, patches.reshape(len(patches), -1, patches.shape[-1])]
    return jnp.concatenate(parts if features.cls is None else [features.cls[:, None], *parts], axis=1)


def block_input(model, x) -> jax.Array:
    """Tokens with their positions, before the first block."""
    config = model.config
    grid = tuple(size // patch for size, patch in zip(x.shape[1:3], config.patch_size, strict=True))
    patches, position = model.patch_embed(x), model.position(grid)
    if config.group is not None:
        patches, position = fields.to_dense(patches), fields.to_dense(position)
    special = model.prefix()
    special = jnp.pad(special, ((0, 0), (0, config.width - special.shape[1])))
    return jnp.concatenate([jnp.broadcast_to(special, (len(x), *special.shape)), patches + position], axis=1)


def head_input(model, final) -> jax.Array:
    """The features of the official classifiers, or timm's: all normalised tokens."""
    config = model.config
    if config.family == "D8":
        x = fields.from_dense(final, config.group)
        if config.pool_first:
            return model.readout.invariant(jax.tree.map(lambda leaf: leaf.mean(-2), x))
        return model.readout.invariant(x).mean(-2)
    if config.family == "D2":
        return model.readout.invariant(fields.from_dense(final[:, 0], FLIP))
    return final[:, 0] if config.pool == "class" else final.mean(1)


@functools.partial(jax.jit, static_argnames="wanted")
def results(model, x, wanted: tuple[str, ...], mask=None) -> dict[str, jax.Array]:
    """The quantities named in `wanted`; those that take a run of their own only if they are."""
    config, last = model.config, model.config.depth - 1
    features = model.features(x, blocks=(last,) if "output/intermediate_cls" in wanted else (), mask=mask)
    final = sequence(features)
    result = {"inter/norm": final, "output/all_features": final, "output/features": head_input(model, final)}
    result |= {"output/x_norm_clstoken": final[:, 0], "output/x_norm_regtokens": final[:, 1 : config.prefix]}
    result |= {"output/x_norm_patchtokens": final[:, config.prefix :]}
    if any(name.startswith("inter/block") or name == "output/x_prenorm" for name in wanted):
        inner = model.features(
            x, blocks=tuple(i for i in range(last + 1) if f"inter/block{i}" in wanted), norm=False, mask=mask
        )
        result |= {f"inter/block{i}": sequence(block) for i, block in inner.blocks.items()}
        result |= {"output/x_prenorm": sequence(inner)}
    if "output/intermediate_cls" in wanted:
        block = features.blocks[last]
        result |= {"output/intermediate_cls": block.cls}
        result |= {"output/intermediate_patch": sequence(block)[:, config.prefix :]}
    if "inter/patch_embed" in wanted:
        patches = model.patch_embed(x)
        result["inter/patch_embed"] = patches if config.group is None else fields.to_dense(patches)
    if "inter/block_input" in wanted:
        result["inter/block_input"] = block_input(model, x)
    if "inter/transition" in wanted:
        result["inter/transition"] = model.transition(model.fields(x, (config.k - 1,))[config.k - 1])
    if "inter/invariant" in wanted:
        invariant = model.transition.invariant(model.fields(x, (config.k - 1,))[config.k - 1])
        result |= {"inter/invariant": invariant, "inter/invariant_proj": model.transition.projection(invariant)}
    if "output/logits" in wanted:
        result["output/logits"] = model(x)
    if "output/logits_of_flipped_image" in wanted:
        result["output/logits_of_flipped_image"] = model(x[:, :, ::-1])
    return {name: result[name] for name in wanted}


@jax.jit
def gradients(model, x, cotangent):
    """The model with the gradient of sum(logits * cotangent) in place of each parameter."""
    loss = lambda arrays: (logical.put(model, arrays)(x) * cotangent).sum()  # noqa: E731
    return logical.put(model, jax.grad(loss)(logical.take(model)))


def variants(model, data, wanted):
    """(prefix of the stored names, model, images, mask): other inputs and other options of one file."""
    yield "", model, images(data), None
    if any(key.startswith("output/masked/") for key in wanted):
        yield "masked/", model, images(data), jnp.asarray(data["input/masks"])
    for key in data:
        if key.startswith("input/image_"):
            yield f"{key.removeprefix('input/image_')}/", model, images(data, key), None


def load_model(source, path, **options):
    """The model, the data of the file, and the source and flavour that it has."""
    data = load(path)
    source = "timm" if "baseline" in path.stem else source
    flavour = pretrained.FORMATS[source].infer(state(data), **hints(path))[1]
    return pretrained.load(source, state(data), **hints(path), **options), data, source, flavour


@pytest.mark.parametrize("source, path", FILES, ids=lambda value: getattr(value, "stem", value))
def test_model(source, path, record_property):
    model, data, format, flavour = load_model(source, path)
    stored = expected(data, data.get(f"param/{flip.ORDER}"))
    if source in ("timm", "jumbo"):  # all tokens, where the others keep what the head reads
        stored["output/all_features"] = stored.pop("output/features")
    comparison = Comparison(stored | {key: array for key, array in data.items() if key.startswith("grad/")})
    for prefix, variant, x, mask in [*variants(model, data, stored), *pooling(model, data, source, path)]:
        named = {key.replace(f"/{prefix}", "/", 1): key for key in stored if f"/{prefix}" in key}
        if prefix == "":
            named = {key: key for key in stored if key.count("/") == 1}
        for name, array in results(variant, x, tuple(sorted(named)), mask).items():
            comparison.array(named[name], array)
    if "input/cotangent" in data:
        slopes = pretrained.state_dict(format, gradients(model, images(data), data["input/cotangent"]), flavour=flavour)
        for key in [key for key in data if key.startswith("grad/")]:
            comparison.array(key, slopes[key.removeprefix("grad/")])
    comparison.finish(record_property, f"{source} models")


def pooling(model, data, source, path):
    """Both orders of pooling and invariantization, which a fully octic classifier's file does not tell."""
    if model.config.family == "D8":
        yield "invariant_then_pool/", model, images(data), None
        yield "pool_then_invariant/", load_model(source, path, pool_first=True)[0], images(data), None
