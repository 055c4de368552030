"""Swin transformers of both versions: windows and shifts at any size, stages as scans, and positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import logical, models, precision
from equivit.layers.grid import Layout
from equivit.layers.position import bicubic
from equivit.models import zoo
from equivit.models.swin.window import APART, Windows
from tests.models.backbones import SWIN, call, images, model, near

both = pytest.mark.parametrize("name", ["swin_t", "swinv2_t"])


# Parts


def cut_by_hand(x, size, shift):
    """The windows of one map [h, w, C] by indices: token (i, j) of window (a, b) is that at (a p + i + shift) mod h."""
    (h, w, channels), (p, q) = x.shape, size
    windows = np.zeros((math.ceil(h / p), math.ceil(w / q), p, q, channels), x.dtype)
    for a, b, i, j in np.ndindex(*windows.shape[:-1]):
        row, column = a * p + i, b * q + j
        if row < h and column < w:  # beyond, zeros
            windows[a, b, i, j] = x[(row + shift[0]) % h, (column + shift[1]) % w]
    return windows.reshape(-1, p * q, channels)


@pytest.mark.parametrize(
    "grid, size, shift", [((8, 12), (4, 4), (2, 2)), ((7, 11), (4, 3), (2, 1)), ((4, 9), (4, 3), (0, 1))]
)
def test_windows_are_cut_and_joined(grid, size, shift):
    x = np.random.default_rng(0).normal(size=(*grid, 2)).astype(np.float32)
    windows = Windows(grid, size, shift)
    found = windows.cut(jnp.asarray(x).reshape(1, -1, 2))
    np.testing.assert_array_equal(found[0], cut_by_hand(x, size, shift))
    np.testing.assert_array_equal(windows.joined(found)[0], x.reshape(-1, 2))


def test_the_mask_parts_what_the_roll_brought_together():
    """On whole windows: two tokens of a window see each other unless the seam of the map lies between them."""
    windows = Windows((8, 12), (4, 4), (2, 0))
    row = np.broadcast_to(np.arange(8)[:, None, None], (8, 12, 1))
    after = cut_by_hand(row, (4, 4), (2, 0))[..., 0] < 2  # rows 0 and 1 come after row 7
    expected = np.where(after[:, :, None] == after[:, None, :], 0, APART)[:, None]
    assert (expected != 0).any() and (expected == 0).any()
    np.testing.assert_array_equal(windows.mask(), expected)
    assert not np.any(Windows((8, 12), (4, 4)).mask())


# Models


def test_windows_and_shifts_of_stages():
    config = zoo.configuration("swin_t")
    assert [config.window(i) for i in range(4)] == [(7, 7)] * 4
    assert [config.shift(i, (224, 224)) for i in range(4)] == [(3, 3)] * 3 + [(0, 0)]
    assert config.shift(3, (448, 224)) == (3, 0)
    config = zoo.configuration("swin_t", **SWIN)
    assert [config.window(i) for i in range(3)] == [(4, 4), (4, 4), (2, 3)]
    assert [config.shift(i, (32, 48)) for i in range(3)] == [(2, 2), (0, 2), (0, 0)]
    tiny = zoo.configuration("swin_t", image_size=(32, 16))  # maps down to 1 x 0.5: the window keeps a token
    assert [tiny.window(i) for i in range(4)] == [(7, 4), (4, 2), (2, 1), (1, 1)]


@both
def test_a_scan_equals_its_blocks_one_by_one(name):
    """Three blocks: two in one step of the scan, and one after it."""
    m, x = model(name, depths=(3, 1), num_heads=(1, 2)), images((32, 48))

    @jax.jit
    def both_ways(m, x):
        first, second = m.stages
        y = m.patch_norm(m.patch_embed(x))
        for i in range(3):
            y = first.blocks[i](y, Layout((8, 12), shift=(2, 2)), phase=i % 2)
        y, grid = second.merge(y, (8, 12))
        return second.blocks[0](y, Layout(grid)), m.trunk(x)[0].tokens

    near(*both_ways(m, x))


def test_mixed_precision_of_cosines():
    """Cosines are computed in float32, so that a rounding is one of bfloat16, 2^-8."""
    m, x = model("swinv2_t"), images((32, 48))
    near(call(precision.cast(m, "mixed"), x), call(m, x), tolerance=0.1)


def test_black_image_has_finite_gradients():
    """Queries and keys of length zero are differentiated where an image is black and a model new."""
    m = model("swinv2_t", depths=(1,), num_heads=(2,))
    tensors = {n: np.asarray(t) for n, t in logical.to_logical(m).items()}
    tensors = {n: 0 * t if "qkv" in n or "q_bias" in n else t for n, t in tensors.items()}
    m = logical.from_logical(m, tensors)
    gradients = jax.device_get(jax.jit(jax.grad(lambda m, x: m(x).sum()))(m, jnp.zeros((1, 16, 16, 3))))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


@both
def test_new_blocks_of_version_2_are_the_identity(name):
    """The norm after a branch is 0 at first (as in the official code); before a branch it must not be."""

    @jax.jit
    def scales():
        tensors = logical.to_logical(models.create(name, **SWIN))
        return {n: t for n, t in tensors.items() if n.endswith("scale") and "norm" in n}

    found = {n: np.asarray(t) for n, t in scales().items()}
    assert len(found) == 2 * 5 + 4
    assert all((t == (0 if name == "swinv2_t" and ".blocks." in n else 1)).all() for n, t in found.items())


def test_tables_are_resized_with_the_windows():
    m = model("swin_t")
    other, changes = models.reconfigure(m, image_size=(64, 64), window_size=(4, 6), num_classes=3)
    names = [f"stages.{i}.blocks.{j}.attention.position.table" for i, j in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))]
    assert changes.resized == tuple(names) and changes.drawn == ("head.bias", "head.weight")
    old, new = logical.to_logical(m), logical.to_logical(other)
    for name, size in zip(names, [(7, 11)] * 4 + [(7, 7)], strict=True):
        rows, columns = (bicubic(before, after) for before, after in zip(old[name].shape, size, strict=False))
        near(new[name], np.einsum("hr,wc,rcd->hwd", rows, columns, old[name]))
    assert jax.eval_shape(lambda m, x: m(x), other, images((64, 64))).shape == (2, 3)


def test_shifts_belong_to_the_image_and_tables_to_the_model():
    """Made for a larger image with the same windows, a model computes what it did for images of that size."""
    m, x = model("swin_t", image_size=(64, 64)), images((64, 128), batch=1)
    larger, changes = models.reconfigure(m, image_size=(64, 128))
    assert not any(changes)
    programs = [str(jax.make_jaxpr(lambda m, x: m(x))(m, x)) for m in (m, larger)]
    assert programs[0] == programs[1]


def test_positions_of_version_2_follow_any_window():
    other, changes = models.reconfigure(model("swinv2_t"), window_size=(8, 3))
    position = jax.eval_shape(lambda m: m.stages[0].blocks[0].attention.position(), other)
    assert not any(changes) and position.shape == (1, 24, 24)
