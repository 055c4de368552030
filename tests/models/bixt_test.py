"""BiXT: attention in both directions, tokens of any grid, latents, and its files."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import logical, models, precision, pretrained
from equivit.kernels.attention import attend
from equivit.models import zoo
from equivit.models.bixt.attention import attend_both
from equivit.models.bixt.model import CODE
from equivit.pretrained import bixt, mapping
from tests.drawing import normal
from tests.models.backbones import BIXT, model, near, run, tensors

NAME = "bixt_ti_p16"


def images(size, *batch):
    return normal(*(batch or (2,)), *size, 3, seed=1)


# Parts


@jax.jit
def directions(a, b, v_a, v_b):
    return attend_both(a, b, v_a, v_b), attend(a, b, v_b), attend(b, a, v_a)


def test_one_matrix_of_scores_serves_both_directions():
    a, b, v_a, v_b = (normal(2, 3, n, 4, seed=i) for i, n in enumerate((5, 7, 5, 7)))
    (first, second), one, other = directions(a, b, v_a, v_b)
    near(first, one)
    near(second, other)
    assert np.abs(np.subtract(first, directions(a, b, v_a, 2 * v_b)[0][0])).max() > 0.1


def test_the_code_is_of_a_share_of_the_image():
    """Row i of h and row 2 i + 1 of 2 h are at the same angle; neighbours differ by sines and cosines of one."""
    small, large = (CODE.table(grid).reshape(*grid, 64) for grid in ((3, 5), (6, 10)))
    np.testing.assert_allclose(large[1::2, 1::2], small, rtol=0, atol=1e-5)
    np.testing.assert_allclose(small[0, :, :2], [[math.sin(2 * math.pi / 3), math.cos(2 * math.pi / 3)]] * 5, atol=1e-5)
    np.testing.assert_allclose(small[:, 1, 32], math.sin(4 * math.pi / 5), atol=1e-5)
    np.testing.assert_allclose(small[0, 0, 2], math.sin(2 * math.pi / 3 * 10000 ** (-1 / 16)), atol=1e-5)
    with pytest.raises(ValueError, match="FourierCode: width=6 must be divisible by 4; the nearest are 4 and 8"):
        type(CODE)(6)


# Models


def test_the_last_block_changes_latents_alone():
    features = run(model(NAME), images((12, 20)))[1]
    first, second, last = (features.blocks[i] for i in range(3))
    chex.assert_trees_all_equal(second.patches, last.patches)
    assert np.abs(first.patches.values - second.patches.values).max() > 0.1
    assert np.abs(second.registers - last.registers).max() > 0.1
    chex.assert_trees_all_equal(features.registers, last.registers)


def test_a_scan_equals_its_blocks_one_by_one():
    m, x = model(NAME), images((12, 20))

    @jax.jit
    def by_hand(m, x):
        x, layout = m.embed(x)
        for i in range(3):
            x = m.blocks[i](x, layout)
        return x

    assert m.blocks.lengths == (2, 1)
    features = run(m, x)[1]
    latents, tokens = by_hand(m, x)
    near(latents, features.registers)
    near(tokens.reshape(2, 3, 5, 12), features.patches.values)


def test_a_token_reads_its_kernel():
    """Token (i, j) reads rows 4 i - 2 to 4 i + 5 and columns 4 j - 1 to 4 j + 4, zeros around the image."""
    m, x = model(NAME), np.asarray(images((12, 20)))
    _, tokens = embedded(m, x)
    padded = np.pad(x, [(0, 0), (2, 2), (1, 1), (0, 0)])
    kernel, code = np.asarray(m.patch_embed.kernel[...]), CODE.table((3, 5)).reshape(3, 5, 64)
    for i, j in ((0, 0), (1, 3), (2, 4)):
        read = np.einsum("bhwc,hwcd->bd", padded[:, 4 * i : 4 * i + 8, 4 * j : 4 * j + 6], kernel)
        position = code[i, j] @ np.asarray(m.position.weight[...]) + np.asarray(m.position.bias[...])
        near(tokens.reshape(2, 3, 5, 12)[:, i, j], read + np.asarray(m.patch_embed.bias[...]) + position)
    whole = zoo.configuration("bixt_ti_p16", **BIXT | dict(patch_size=(8, 6), image_size=(16, 18)))
    assert whole.padding == (0, 0)


embedded = jax.jit(lambda m, x: m.embed(x)[0])


def test_any_size_and_batch_with_the_same_parameters():
    """From 128 to 224 pixels no parameter changes; and any number of batch axes."""
    small, large = (zoo.abstract("bixt_ti_p16", image_size=(side, side)) for side in (128, 224))
    assert shapes(small) == shapes(large)
    m, x = model(NAME), images((8, 28), 2, 1)
    logits, features = jax.eval_shape(run, m, x)
    assert logits.shape == (2, 1, 5) and features.patches.values.shape == (2, 1, 2, 7, 12)
    assert features.registers.shape == (2, 1, 5, 12) and features.patches.offset.shape == (2, 1, 2)
    larger, changes = models.reconfigure(m, image_size=(24, 40))
    assert not any(changes) and larger.config.image_size == (24, 40)


def shapes(module):
    return {tensor.name: tensor.shape for tensor in tensors(module)}


def test_stochastic_depth():
    rates = zoo.configuration("bixt_ti_p16", drop_path=(0.0, 0.1)).rates
    np.testing.assert_allclose(rates, np.linspace(0, 0.1, 12), rtol=1e-6)
    assert zoo.configuration("bixt_ti_p16").rates is None
    m, x = model(NAME, drop_path=(0.5, 0.0), depth=2), images((12, 20), 4)
    dropped = jax.jit(lambda m, x, key: m.trunk(*m.embed(x), key=key)[0])
    one, two = (jax.device_get(dropped(m, x, jax.random.key(i))) for i in range(2))
    for a, b in zip(one, two, strict=True):
        assert (np.abs(a - b).max((1, 2)) > 1e-2).sum() >= 2  # of the four, each with draws of its own


def test_mixed_precision_keeps_the_stream():
    m, x = model(NAME), images((12, 20))
    for name, expected in (("mixed", jnp.float32), ("bfloat16", jnp.bfloat16)):
        stream = jax.eval_shape(lambda m, x: m.features(x, blocks=(0, 2)), precision.cast(m, name), x)
        for at in (stream, *stream.blocks.values()):
            assert at.patches.values.dtype == at.registers.dtype == expected
    logits, rounded = run(m, x)[0], np.asarray(call(precision.cast(m, "mixed"), x), np.float32)
    assert 0 < np.abs(rounded - logits).max() < 0.05 * np.abs(logits).max()


call = jax.jit(lambda m, x: m(x))


def test_strides():
    for name, patch, padding in (("p16", 16, 0), ("p16s8", 8, 4), ("p16s4", 4, 6)):
        config = zoo.configuration(f"bixt_ti_{name}")
        assert (config.kernel, config.patch_size, config.padding) == ((16, 16), (patch,) * 2, (padding,) * 2)


def test_official_names_there_and_back():
    m = model(NAME, kernel=(8, 8))
    written = pretrained.state_dict("bixt", m)
    assert written["fourier_pos_encode.pos"].shape == (64, 3, 5)
    found = pretrained.load("bixt", {"model": written}, num_heads=3, image_size=(12, 20))
    assert found.config == m.config
    chex.assert_trees_all_equal(logical.to_logical(found), logical.to_logical(m))
    with pytest.raises(ValueError, match="bixt: image_size=\\(12, 18\\) must be a multiple of the file's 3x5 tokens"):
        pretrained.load("bixt", written, num_heads=3, image_size=(12, 18))
    written["fourier_pos_encode.pos"] = written["fourier_pos_encode.pos"][:, ::-1]
    with pytest.raises(ValueError, match="fourier_pos_encode.pos is not the Fourier code of 64 channels on 3x5"):
        pretrained.load("bixt", written, num_heads=3, image_size=(12, 20))


@pytest.mark.parametrize(
    ("name", "options"),
    [("bixt_ti_p16", {}), ("bixt_ti_p16", dict(image_size=(128, 96))), ("bixt_ti_p16s8", {}), ("bixt_ti_p16s4", {})],
)
def test_what_a_file_tells(name, options):
    config = zoo.configuration(name, **options)
    zeros = {n: np.broadcast_to(np.float32(0), shape) for n, shape in shapes(zoo.abstract(name, **options)).items()}
    weights = mapping.write(bixt.table(config, "official"), zeros, name)
    assert bixt.FORMAT.infer(weights) == (config, "official")
