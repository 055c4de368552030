"""Replacements of attention against their definitions, computed elsewhere in float64: outputs, gradients, counts."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import costs, logical
from equivit.layers import dense, depthwise
from equivit.layers.grid import Layout
from equivit.symmetry.fields import Isotypic
from tests.parity.arrays import Comparison, files, load

OUTPUTS, GRADIENTS = 1e-5, 2e-5  # of the largest entry
FILES = files("depthwise", "replacements_*.npz")
OCTIC_FILES = files("depthwise", "octic_*.npz")
OLDER = files("losses", "conv_attention.npz")
COUNTS = files("depthwise", "counts.json")


@functools.partial(jax.jit, static_argnames="grid")
def everything(module, x, cotangent, grid):
    """The output, that of the deployed form, and the gradients of the product with the cotangent."""

    def loss(arrays, x):
        y = logical.put(module, arrays)(x, grid)
        return (y * cotangent).sum(), y

    (slopes, by_x), y = jax.grad(loss, (0, 1), has_aux=True)(logical.take(module), x)
    folded = module.folded()(x, grid) if hasattr(module, "folded") else y
    return y, folded, by_x, slopes


def attention_of(data):
    module = jax.eval_shape(
        lambda: dense.Attention(len(data["param/qkv_weight"]), int(data["num_heads"]), rngs=nnx.Rngs(0))
    )
    names = [f"{layer}.{what}" for layer in ("qkv", "proj") for what in ("weight", "bias")]
    return logical.from_logical(module, {name: data[f"param/{name.replace('.', '_')}"] for name in names})


def replaced(attention, data, case):
    """The module of a case of a file, with its taps and gamma."""
    kind = case.removeprefix("scattered_").removesuffix("_wrap")
    taps = data[f"taps/{case.removesuffix('_wrap')}"]
    module = depthwise.replace_attention(
        attention,
        kind,
        kernel_size=taps.shape[1],
        heads=tuple(map(int, data["heads"])) if case.startswith("scattered") else None,
        padding="wrap" if case.endswith("wrap") else "zeros",
    )
    given = {"taps": taps} | ({"gamma": data["gamma"]} if kind == "ens_dw" else {})
    assert module.taps.shape == taps.shape
    return logical.put(module, given)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_replacements(path, record_property):
    data = load(path)
    grid, comparison, attention = tuple(map(int, data["grid"])), Comparison(data), attention_of(data)
    for case in (key.removeprefix("output/") for key in data if key.startswith("output/")):
        if not data[f"output/{case}"].size:  # wrapped around a grid that is smaller than the taps
            comparison.left.discard(f"output/{case}")
            with pytest.raises(ValueError, match="needs a grid at least as large"):
                replaced(attention, data, case)(data["input/x"], grid)
            continue
        module = attention if case == "attention" else replaced(attention, data, case)
        y, folded, by_x, slopes = everything(module, data["input/x"], data["input/cotangent"], grid)
        comparison.array(f"output/{case}", folded, OUTPUTS)
        comparison.array(f"output/{case}", y, OUTPUTS)
        for name, slope in {"x": by_x, **slopes}.items():
            if f"grad/{case}/{name}" in data:
                comparison.array(f"grad/{case}/{name}", slope, GRADIENTS)
    comparison.finish(record_property, "depthwise")


@pytest.mark.parametrize("path", OCTIC_FILES, ids=lambda path: path.stem)
def test_octic(path, record_property):
    data = load(path)
    field = Isotypic(jnp.asarray(data["input/one"]), jnp.asarray(data["input/two"]))
    convolve = jax.jit(functools.partial(depthwise.isotypic_depthwise_conv, grid=tuple(map(int, data["grid"]))))
    y = convolve(field, data["input/taps"])
    comparison = Comparison(data)
    comparison.array("output/one", y.lines, OUTPUTS)
    comparison.array("output/two", y.planes, OUTPUTS)
    comparison.finish(record_property, "depthwise")


@pytest.mark.parametrize("path", OLDER, ids=lambda path: path.stem)
def test_an_earlier_file(path, record_property):
    """Its values have a bias only in "dw"; Sigma and fits are in sigma_test.py and fit_test.py."""
    data = load(path)
    size = data["input/x"].shape[-1]
    keys = {"conv": "k_head", "dw": "k_dw", "spvit": "k_head", "ens_dw": "k_ens"}
    compared = [f"output/{sort}{kind}{'_all' * (kind == 'conv')}" for sort in ("", "grad_x_") for kind in keys]
    comparison = Comparison({key: data[key] for key in compared})
    for kind, taps in keys.items():
        bias = data["input/b_v"] if kind == "dw" else np.zeros(size, np.float32)
        given = {
            "param/qkv_weight": np.tile(data["input/w_v"].reshape(size, size), 3),
            "param/qkv_bias": np.tile(bias, 3),
            "param/proj_weight": data["input/w_o"].reshape(size, size),
            "param/proj_bias": data["input/b_o"],
            "num_heads": len(data["input/gamma"]),
            f"taps/{kind}": data[f"input/{taps}"],
            "gamma": data["input/gamma"],
        }
        module = replaced(attention_of(given), given, kind)
        y, _, by_x, _ = everything(module, data["input/x"], data["input/cotangent"], (7, 7))
        name = f"{kind}{'_all' * (kind == 'conv')}"
        comparison.array(f"output/{name}", y, OUTPUTS)
        comparison.array(f"output/grad_x_{name}", by_x, GRADIENTS)
    comparison.finish(record_property, "depthwise")


def made(row, kind, folded):
    """The shapes of the module that a row of counts is about."""
    attention = dense.Attention(row["width"], row["num_heads"], rngs=nnx.Rngs(0))
    if kind == "attention":
        return attention
    module = depthwise.replace_attention(attention, kind, kernel_size=row["kernel_size"])
    return module.folded() if folded else module


@pytest.mark.parametrize("row", [row for path in COUNTS for row in json.loads(path.read_text())], ids=str)
def test_counts(row):
    """The counts of Tables 1 and A.3: parameters as trained and deployed, and multiply-adds as deployed, exactly."""
    layout = Layout((round(row["tokens"] ** 0.5),) * 2)
    x = jax.ShapeDtypeStruct((row["tokens"], row["width"]), jnp.float32)
    for kind, macs in row["folded_macs"].items():
        trained, deployed = (jax.eval_shape(functools.partial(made, row, kind, folded)) for folded in (False, True))
        counted = costs.count(lambda module, x: module(x, layout), deployed, x)
        assert counted.double_macs == 2 * macs and not counted.notes, kind
        assert sum(leaf.size for leaf in jax.tree.leaves(trained)) == row["parameters"][kind], kind
        if kind in row["folded_parameters"]:
            assert sum(leaf.size for leaf in jax.tree.leaves(deployed)) == row["folded_parameters"][kind], kind
