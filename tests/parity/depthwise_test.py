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
OFFICIAL_FILES = files("depthwise", "official_*.npz")
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
    """The printed module of a case of a file, with its taps and gamma."""
    kind = case.removeprefix("scattered_").removesuffix("_wrap")
    taps = data[f"taps/{case.removesuffix('_wrap')}"]
    module = depthwise.replace_attention(
        attention,
        kind,
        form="printed",
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


def of_channels(a):
    return a[:, 0].transpose(1, 2, 0)  # [C, 1, k, k] -> [k, k, C]


def released(data):
    """The arrays of a file with our names and layouts, without those that PyTorch drew at the start."""
    depthwise_names = {"weight": ("taps", of_channels), "bias": ("bias", lambda a: a)}
    logits = {
        "conv": ("taps", lambda a: a.reshape(-1, 3, 3)),
        "spvit": ("taps", lambda a: a.reshape(-1, 3, 3).transpose(0, 2, 1)),  # theirs are in order of columns
        "ens_dw": ("gamma", lambda a: a[:, 0]),
    }
    found = {}
    for key, array in data.items():
        group, _, name = key.partition("/")
        if group == "param":
            found[key.replace(".", "_")] = array.T
        elif group not in ("start", "new", "grad") or name.endswith("/x"):
            found[key] = array
        elif not (group == "start" and name.endswith(("bias", "v_dw_conv.weight"))):
            case, _, theirs = name.partition("/")
            ours, layout = logits[case] if theirs == "head_probs" else depthwise_names[theirs.split(".")[-1]]
            found[f"{group}/{case}/{ours}"] = layout(array)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", OFFICIAL_FILES, ids=lambda path: path.stem)
def test_released(path, record_property):
    """Every array of the authors' modules: starts, counts, outputs of both forms, and gradients."""
    data = released(load(path))
    grid, comparison, attention = tuple(map(int, data["grid"])), Comparison(data), attention_of(data)
    comparison.left |= {key for key in data if key.startswith(("start/", "count/"))}
    for case in (key.removeprefix("output/") for key in data if key.startswith("output/")):
        heads = tuple(map(int, data["heads"])) if case.startswith("scattered") else None
        kind = "identity" if case == "nop" else case.removeprefix("scattered_")
        module = depthwise.replace_attention(attention, kind, heads=heads)
        own = logical.take(module)
        comparison.array(f"count/{case}", sum(array.size for array in own.values()), 0)
        given = {name: data[f"new/{case}/{name}"] for name in own if f"new/{case}/{name}" in data}
        for name in given:
            if f"start/{case}/{name}" in data:
                comparison.array(f"start/{case}/{name}", own[name], OUTPUTS)
        y, folded, by_x, slopes = everything(logical.put(module, given), data["input/x"], data["input/cotangent"], grid)
        comparison.array(f"output/{case}", folded, OUTPUTS)
        comparison.array(f"output/{case}", y, OUTPUTS)
        comparison.array(f"grad/{case}/x", by_x, GRADIENTS)
        for name in given:  # the gradient of a softmax at temperature 0.01 is a hundred times as sensitive
            comparison.array(f"grad/{case}/{name}", slopes[name], 1e-4 if is_logit(case, name) else GRADIENTS)
    comparison.finish(record_property, "depthwise")


def is_logit(case, name):
    return name == "gamma" or (case, name) == ("spvit", "taps")


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


def made(row, kind, form, folded):
    """The shapes of the module that a row of counts is about."""
    attention = dense.Attention(row["width"], row["num_heads"], rngs=nnx.Rngs(0))
    if kind == "attention":
        return attention
    module = depthwise.replace_attention(attention, kind, form=form, kernel_size=row["kernel_size"])
    return module.folded() if folded else module


def parameters(*described):
    return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(functools.partial(made, *described))))


@pytest.mark.parametrize("row", [row for path in COUNTS for row in json.loads(path.read_text())], ids=str)
def test_counts(row):
    """The counts of Tables 1 and A.3, exactly: parameters as trained and deployed, and multiply-adds as deployed.

    Those of the file are of the printed form; in the released one, depthwise convolutions have a bias.
    """
    layout = Layout((round(row["tokens"] ** 0.5),) * 2)
    x = jax.ShapeDtypeStruct((row["tokens"], row["width"]), jnp.float32)
    biases = {"dw": row["width"], "ens_dw": row["width"] // row["num_heads"]}
    for kind, macs in row["folded_macs"].items():
        for form in depthwise.FORMS:
            deployed = jax.eval_shape(functools.partial(made, row, kind, form, True))
            counted = costs.count(lambda module, x: module(x, layout), deployed, x)
            assert counted.double_macs == 2 * macs and not counted.notes, kind
            more = biases.get(kind, 0) if form == "released" else 0
            assert parameters(row, kind, form, False) == row["parameters"][kind] + more, kind
            if kind in row["folded_parameters"]:
                assert parameters(row, kind, form, True) == row["folded_parameters"][kind] + more, kind


@pytest.mark.parametrize(
    ("width", "num_heads", "folded", "kind", "printed"),
    [
        (768, 12, False, "attention", 2.362),
        (768, 12, False, "dw", 1.189),
        (768, 12, True, "ens_dw", 0.10),
        (1024, 16, False, "attention", 4.20),
        (1024, 16, False, "dw", 2.11),
        (1024, 16, True, "ens_dw", 0.13),
    ],
)
def test_parameters_in_table_a3(width, num_heads, folded, kind, printed):
    """In millions, rounded as printed; 1.189 needs the bias."""
    row = dict(width=width, num_heads=num_heads, kernel_size=3)
    digits = 3 if num_heads == 12 and not folded else 2
    assert round(parameters(row, kind, "released", folded) / 1e6, digits) == printed
