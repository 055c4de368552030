"""Kernels for CPUs: compiled here, then against their references, in layers and whole models."""

import functools
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import kernels
from equivit import models, testing
from equivit.layers import dense, isotypic
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import OCTIC
from kernels import compile_cpu, cpu
from kernels.attention import attend_rows, attention, rows_reference
from kernels.d8_gelu import d8_gelu
from kernels.d8_gelu import reference as gelu_reference
from kernels.linear import linear
from kernels.linear import reference as linear_reference
from kernels.norm import Norm, normalise, reference
from kernels.shapes import AWKWARD
from tests.conftest import AVAILABLE
from tests.kernels.comparison import assert_near, draw, value_and_gradient, widen

# Of the norm of a result.  Float32: a few roundings, measured 4e-7.  Bfloat16: one of 2^-9 for each number of a result
# and of a factor that is computed, such as P or a GELU; measured 2.6e-3.
RELATIVE = 1e-6
BOUNDS = {"float32": RELATIVE, "bfloat16": 3.5e-3}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compiled once on a machine, in eight seconds, and used by what is traced in this module."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("needs a C++ compiler")
    compile_cpu.compiled()
    jax.clear_caches()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "available", AVAILABLE)
        yield
    jax.clear_caches()


def needs(dtype):
    if dtype == "bfloat16" and not cpu._has_bfloat16():
        pytest.skip("needs a processor with AMX")


def distances(found, expected):
    pairs = zip(*(map(np.asarray, jax.tree.leaves(arrays)) for arrays in (found, expected)), strict=True)
    return [np.linalg.norm(a.astype(b.dtype) - b) / np.linalg.norm(b) for a, b in pairs]


def targets(function, *arguments, platform="cpu"):
    """The kernels in a program."""
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r"custom_call @(equivit_\w+)", text)


def rows(parts, tokens, heads, batch=(2,)):
    """Shapes of arrays of qkv and of results: parts are (rows, channels)."""
    return [[(k, *batch, tokens, thirds * heads * c) for k, c in parts] for thirds in (3, 1)]


@DTYPES
@pytest.mark.parametrize("parts, tokens, heads, batch", [
    ([(1, 64)], 197, 3, (2,)),
    ([(1, 64)], 1, 1, (1,)),
    ([(1, 5)], 7, 2, (3, 2)),
    ([(1, 80)], 400, 1, ()),  # more than one block of queries, even ones
    ([(4, 8), (2, 16)], 196, 3, (2,)),  # octic
    ([(4, 3), (2, 6)], 97, 2, (2,)),
    ([(2, 12)], 101, 4, (1, 2)),  # flip
], ids=str)  # fmt: skip
def test_attention_is_the_reference_s(parts, tokens, heads, batch, dtype):
    needs(dtype)
    qkv, y = rows(parts, tokens, heads, batch)
    qkv, gradient = draw(qkv, dtype, scale=1.0), draw(y, dtype, seed=1)
    found = value_and_gradient(functools.partial(attend_rows, heads), qkv, gradient)
    expected = value_and_gradient(functools.partial(rows_reference, heads), widen(qkv), widen(gradient))
    assert max(distances(found, expected)) < BOUNDS[dtype] and all(a.dtype == dtype for a in found)


def test_large_logits_do_not_overflow():
    (qkv,) = draw([(1, 2, 9, 3 * 16)], "float32", scale=40.0)  # logits to 20,000
    y, gradient = value_and_gradient(functools.partial(attend_rows, 2), (qkv,), draw([(1, 2, 9, 16)], "float32"))
    expected = rows_reference(2, qkv)[0]
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_a_nan_is_not_lost():
    nan = float("nan")
    (qkv,) = draw([(1, 2, 9, 3 * 16)], "float32")
    dtypes = ("float32", "bfloat16") if cpu._has_bfloat16() else ("float32",)
    for dtype in dtypes:
        for column in (0, 16, 32):  # of a query, a key, a value
            y = np.isnan(attend_rows(2, qkv.at[0, 0, 4, column].set(nan).astype(dtype))[0][0, :, :, :8])
            assert y[0, slice(4, 5) if column == 0 else slice(None)].any(-1).all() and not y[1].any()
    lines, planes = draw([(4, 1, 100, 8), (2, 1, 100, 16)], "float32")
    lines = lines.at[2, 0, 7, 3].set(nan)
    for dtype in dtypes:
        field = lines.astype(dtype), planes.astype(dtype)
        y = value_and_gradient(functools.partial(d8_gelu, implementation="cpu"), field, field)
        assert all(np.isnan(a[:, 0, 7, 3]).all() for a in y) and sum(map(np.count_nonzero, map(np.isnan, y))) == 16
    y = normalise((lines, planes), (jnp.ones((4, 8)), jnp.ones(16)), jnp.ones(8), Norm(1e-5))
    assert all(np.isnan(a[:, 0, 7]).all() and np.isnan(a).sum() == a[:, 0, 7].size for a in y)
    x, weight = draw([(2, 100, 8), (8, 50)], "float32")
    for dtype in dtypes:
        y = np.isnan(by_kernel(x.at[1, 99, 3].set(nan).astype(dtype), weight.astype(dtype), None, True))
        assert y[1, 99].all() and y.sum() == 50


@pytest.mark.parametrize("wrong", ["heads", "thirds", "scale"])
def test_a_kernel_that_mixes_up_columns_is_caught(wrong):
    (qkv,) = draw([(1, 2, 9, 3 * 2 * 8)], "float32")
    columns = qkv.reshape(1, 2, 9, 3, 2, 8)
    other = {"heads": columns[..., ::-1, :], "thirds": columns[..., [1, 0, 2], :, :], "scale": columns * 1.0001}[wrong]
    found = attend_rows(2, other.reshape(qkv.shape))
    assert distances(found, rows_reference(2, qkv))[0] > 10 * RELATIVE


@DTYPES
@pytest.mark.parametrize("shape", AWKWARD, ids=lambda shape: shape.name)
def test_the_gelu_of_fields_is_the_reference_s(shape, dtype):
    needs(dtype)
    field, gradient = draw(shape.field(shape.hidden), dtype), draw(shape.field(shape.hidden), dtype, seed=1)
    found = value_and_gradient(functools.partial(d8_gelu, implementation="cpu"), field, gradient)
    expected = value_and_gradient(gelu_reference, widen(field), widen(gradient))
    if dtype == "float32":
        assert_near(found, expected)
    assert max(distances(found, expected)) < BOUNDS[dtype] and all(a.dtype == dtype for a in found)


def test_the_gelu_is_within_1e_6_of_the_exact_one():
    """A field of A1 alone has one value on the whole group, sqrt(2) / 4 of it."""
    x = np.unique(np.concatenate([np.linspace(-12, 12, 20_001), [-1e30, -1e4, 1e4, 1e30]]).astype(np.float32))
    lines, planes = jnp.zeros((4, 1, len(x), 1)).at[0, 0, :, 0].set(x * math.sqrt(8)), jnp.zeros((2, 1, len(x), 2))
    y, _, dx, _ = value_and_gradient(
        functools.partial(d8_gelu, implementation="cpu"), (lines, planes), (jnp.ones_like(lines), planes)
    )
    cumulated = np.array([math.erfc(-v / math.sqrt(2)) / 2 for v in x.astype(float)])
    density = np.exp(-0.5 * np.minimum(x.astype(float) ** 2, 1e4)) / math.sqrt(2 * math.pi)
    # Large values are rounded in each of the sums of the two transforms.
    np.testing.assert_allclose(y[0, 0, :, 0] / math.sqrt(8), x * cumulated, atol=1e-6, rtol=2e-7)
    np.testing.assert_allclose(dx[0, 0, :, 0], cumulated + x * density, atol=1e-6)


def linear_value_and_gradient(op, activated, x, weight, bias, dy):
    def both(*arrays):
        y, pullback = jax.vjp(lambda x, weight, bias: op(x, weight, bias, activated), *arrays)
        return y, pullback(dy)

    return jax.jit(both)(x, weight, bias)


def by_kernel(*arrays):
    def plain(*arrays, activated):
        pytest.fail("there is no kernel")

    with kernels.using("cpu"):
        return linear(*arrays, plain)


@DTYPES
@pytest.mark.parametrize("activated", [False, True], ids=["identity", "gelu"])
@pytest.mark.parametrize("batch, tokens, c, d, bias, maps", [
    ((2,), 197, 48, 192, True, ()),  # whole panels
    ((1,), 100, 4129, 17, True, ()),  # sums in six goes, in bfloat16 in two, and half a vector
    ((), 101, 7, 300, True, ()),  # more columns than rows, one of them more than whole tiles
    ((3, 1), 103, 50, 64, False, ()),  # four vectors of columns, two panels of two
    ((12,), 211, 5, 3, True, ()),  # more rows than two tasks take at once
    ((2,), 128, 8, 1, False, ()),
    ((2,), 101, 24, 33, True, (4,)),  # octic lines
    ((), 150, 9, 40, False, (2,)),  # flip
], ids=str)  # fmt: skip
def test_linear_maps_are_the_reference_s(batch, tokens, c, d, bias, maps, activated, dtype):
    needs(dtype)
    x, dy = draw([(*maps, *batch, tokens, c), (*maps, *batch, tokens, d)], dtype)
    weight, b = draw([(*maps, c, d), (d,)], dtype, seed=1)
    found = linear_value_and_gradient(by_kernel, activated, x, weight, b if bias else None, dy)
    x, weight, b, dy = widen((x, weight, b, dy))
    with jax.enable_x64(True):  # the reference's own rounding, of sums of 2,532 rows, is as large as the kernel's
        exact = [np.asarray(a, np.float64) for a in (x, weight, b, dy)]
        expected = linear_value_and_gradient(
            linear_reference, activated, *exact[:2], exact[2] if bias else None, exact[3]
        )
    assert max(distances(found, expected)) < BOUNDS[dtype]
    assert all(a.dtype == dtype for a in jax.tree.leaves(found))
    wrong = linear_reference(x, weight.at[-1, -1].add(4 * weight.std()), b if bias else None, activated)
    assert distances(found[0], wrong)[0] > 3 * BOUNDS[dtype]


def test_a_factor_that_is_too_large_to_be_copied_at_once():
    needs("bfloat16")
    x, dy = draw([(250_001, 1), (250_001, 33)], "bfloat16")
    weight, bias = jnp.zeros((1, 33), "bfloat16"), jnp.zeros(33)
    found = jax.jit(lambda *arrays: jax.vjp(lambda w, b: by_kernel(x, w, b, False), *arrays)[1](dy))(weight, bias)
    x, dy = widen((x, dy))
    assert max(distances(found, (x.T @ dy, dy.sum(0)))) < BOUNDS["bfloat16"]


def test_where_linear_maps_have_a_kernel():
    """As norms: with many tokens on one device, in float32.  The GELU of an MLP is computed within it."""
    mlp, few, many = dense.Mlp(16, 24, rngs=nnx.Rngs(0)), *draw([(8, 99, 16), (8, 100, 16)], "float32")
    assert targets(mlp, many) == ["equivit_linear"] * 2 and targets(mlp, few) == []
    text = jax.jit(mlp).lower(many).as_text()
    assert "erf" not in text and text.count("activated = true") == 1
    other = dense.Mlp(16, 24, activation=dense.quick_gelu, rngs=nnx.Rngs(0))
    assert "activated = true" not in jax.jit(other).lower(many).as_text()
    jax.jvp(mlp, (few,), (few,))
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        assert targets(mlp, many) == []
    octic = isotypic.Linear(64, 96, group=OCTIC, rngs=nnx.Rngs(0))
    lines, planes = draw([(4, 2, 100, 8), (2, 2, 100, 16)], "float32")
    assert targets(octic, Isotypic(lines, planes)) == ["equivit_linear"] * 2
    assert targets(octic, Isotypic(lines[..., 1:, :], planes[..., 1:, :])) == []
    half = many.astype(jnp.float16)
    assert targets(lambda x: linear(x, x[0, :16], None, False, linear_reference), half) == []
    np.testing.assert_array_equal(jax.jit(jax.vmap(mlp))(many), jax.jit(mlp)(many))


def test_a_shift_of_tokens_shifts_the_bits_of_a_linear_map():
    x, weight = draw([(1, 105, 48), (48, 60)], "float32")
    shifted, y = (by_kernel(a, weight, None, True) for a in (jnp.roll(x, 1, axis=1), x))
    np.testing.assert_array_equal(shifted, jnp.roll(y, 1, axis=1))


FIELDS = {
    "dense": ([(1, 2, 101, 40)], [(1, 40)]),
    "flip": ([(2, 3, 101, 7)], [(2, 7)]),
    "octic": ([(4, 1, 2, 100, 24), (2, 1, 2, 100, 48)], [(4, 24), (48,)]),
}


@pytest.mark.parametrize("shapes, scales", FIELDS.values(), ids=FIELDS)
def test_the_norm_is_the_reference_s(shapes, scales):
    field = tuple(a + 3 for a in draw(shapes, "float32"))  # with a mean to subtract
    scales, bias = draw(scales, "float32", 1), draw([scales[0][-1:]], "float32", 2)[0]
    gradient, constants = draw(shapes, "float32", 3), Norm(1e-5, 0.5)

    def both(op, constants=constants):
        def of(*arrays):
            return op(*arrays, constants)

        return jax.jit(lambda *a: (of(*a), jax.vjp(of, *a)[1](gradient)))(field, scales, bias)

    assert targets(lambda *a: normalise(*a, constants), field, scales, bias) == ["equivit_norm"]
    assert max(distances(both(normalise), both(reference))) < RELATIVE
    wrong = both(reference, constants._replace(row_weight=0.6))
    assert len(shapes) == 1 or distances(both(normalise), wrong)[0] > 10 * RELATIVE


def test_where_the_norm_has_no_kernel():
    """With few tokens it keeps a forward-mode derivative; on several devices gradients of scales would be partial."""
    layer = dense.LayerNorm(16)
    few, many = draw([(8, 99, 16), (8, 100, 16)], "float32")
    assert targets(layer, many) == ["equivit_norm"] and targets(layer, few) == []
    jax.jvp(layer, (few,), (few,))
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        assert targets(layer, many) == []
    one_by_one = jax.vmap(lambda x: jax.grad(lambda x: (layer(x) ** 3).sum())(x))
    assert targets(one_by_one, many) == ["equivit_norm", "equivit_norm_backward"]
    found = one_by_one(many)
    with kernels.using("xla"):
        assert targets(lambda x: layer(x), many) == []
        expected = jax.grad(lambda x: (layer(x) ** 3).sum())(many)
    assert distances(found, expected)[0] < RELATIVE


def test_the_same_bits_each_time():
    qkv, gradient = draw([(1, 4, 150, 3 * 48)], "float32"), draw([(1, 4, 150, 48)], "float32", seed=1)
    layers = dense.LayerNorm(48), dense.Linear(48, 200, rngs=nnx.Rngs(0))

    def both(qkv, gradient):
        y, pullback = jax.vjp(functools.partial(attend_rows, 3), qkv)
        norm, linear = layers
        of_layers = jax.grad(lambda *layers: sum(jnp.square(f(gradient)).sum() for f in layers), (0, 1))(norm, linear)
        return y, pullback((gradient,)), of_layers

    first, *others = (jax.tree.leaves(jax.jit(both)(*qkv, *gradient)) for _ in range(5))
    for other in others:
        assert all(map(np.array_equal, first, other))


def test_vmap_and_eight_devices_equal_one():
    (qkv,) = draw([(8, 3, 3 * 16)], "float32")
    op = functools.partial(attention, heads=2, implementation="cpu")
    y = op(qkv)
    np.testing.assert_array_equal(jax.vmap(op)(qkv), y)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        assert targets(op, qkv) == ["equivit_attention"]
        np.testing.assert_array_equal(jax.jit(op)(qkv), y)
        np.testing.assert_allclose(jax.jit(op)(qkv[:3]), y[:3], rtol=1e-5, atol=1e-6)  # XLA: 3 images on 8 devices


@pytest.mark.parametrize("name, found", [
    ("vit_ti16", ["attention", "linear", "norm"]), ("octic_vit_ti16", ["attention", "d8_gelu", "linear", "norm"]),
])  # fmt: skip
def test_whole_models_have_them_and_their_values(name, found):
    fields = dict(image_size=(160, 176), depth=2, num_classes=5)
    model = testing.randomise(models.abstract(name, **fields), jax.random.key(0))
    (images,) = draw([(2, 160, 176, 3)], "float32")

    def both(model, images):
        return jax.value_and_grad(lambda model: jnp.square(model(images)).mean())(model)

    ends = dict.fromkeys(found, ("", "_backward")) | {"linear": ("", "_backward_x", "_backward_weight")}
    assert set(targets(both, model, images)) == {f"equivit_{op}{end}" for op in found for end in ends[op]}
    with kernels.using("cpu"):
        assert set(targets(lambda *a: both(*a), model, images)) == set(targets(both, model, images))
    for platform in ("cuda", "tpu"):
        assert targets(lambda *a: both(*a), model, images, platform=platform) == []
    with_kernels = jax.jit(both)(model, images)
    with kernels.using("xla"):
        assert targets(lambda *a: both(*a), model, images) == []
        assert max(distances(with_kernels, jax.jit(lambda *a: both(*a))(model, images))) < 2e-5


def test_auto_is_xla_for_other_dtypes(monkeypatch):
    (qkv,) = draw([(2, 120, 3 * 16)], "float16")
    assert targets(functools.partial(attention, heads=2), qkv) == []
    with pytest.raises(ValueError, match=r"implementation='cpu' has no kernel for float16\[2, 120, 48\]; 'auto'"):
        attention(qkv, 2, implementation="cpu")
    monkeypatch.setattr(cpu, "_has_bfloat16", lambda: False)  # a processor without such units
    assert targets(functools.partial(attention, heads=2), qkv.astype(jnp.bfloat16)) == []
    field = Isotypic(*draw([(4, 2, 5, 8), (2, 2, 5, 16)], "bfloat16"))
    assert targets(d8_gelu, field.lines, field.planes) == []


def test_without_the_library_programs_use_xla(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu, "available", AVAILABLE.__wrapped__)
    (qkv,) = draw([(2, 120, 3 * 16)], "float32")
    assert targets(functools.partial(attention, heads=2), qkv) == []
    with pytest.raises(
        ValueError, match=r"has no kernel for .*; compile it with python -m kernels.compile_cpu; 'auto'"
    ):
        attention(qkv, 2, implementation="cpu")


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu.library().parent.mkdir()
    cpu.library().write_bytes(b"not a library")
    with pytest.warns(UserWarning, match=rf"cannot be loaded, and programs use XLA.  Remove {cpu.library()}"):
        assert not AVAILABLE.__wrapped__()


def test_heads_that_do_not_divide_the_columns_are_named():
    (qkv,) = draw([(1, 2, 9, 3 * 16)], "float32")
    with pytest.raises(ValueError, match=r"attention: qkv \(1, 2, 9, 48\) must be .*; heads=5 needs multiples of 15"):
        attend_rows(5, qkv)


def test_what_stops_a_compilation_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compile_cpu.main() == 1
    assert "there is no C++ compiler no-such-compiler; install g++ or clang++" in capsys.readouterr().err
    monkeypatch.setenv("CXX", "false")
    assert compile_cpu.main() == 1
    assert "false cannot compile the kernels; it needs C++20" in capsys.readouterr().err
    assert list(tmp_path.rglob("*.so")) == [] and list((tmp_path / "equivit").iterdir()) == []


def test_another_source_or_processor_is_another_library(monkeypatch):
    names = {cpu.library()}
    monkeypatch.setattr(cpu, "_processor", lambda: "another")
    names.add(cpu.library())
    monkeypatch.setattr(cpu, "SOURCES", cpu.SOURCES[:1])
    names.add(cpu.library())
    assert len(names) == 3
