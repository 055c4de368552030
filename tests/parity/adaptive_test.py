"""Adaptive layers and models against brute force: no official code of them is public.

The reference arrays follow the paper's definitions in float64, one phase and one window after the other.  Those of
whole models take the weights and the image of the ordinary model's file.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, models, pretrained
from equivit.layers import polyphase
from equivit.models.swin import window
from equivit.models.swin.merge import PatchMerging
from equivit.symmetry import shifts
from tests.parity.arrays import FIXTURES, Comparison, files, images, load, state

# (stride, padding) of the patches of Swin, CvT and MViTv2, and of CvT's steps between stages.
EMBEDDINGS = {
    "token_patch4": (4, 0),
    "token_cvt7x4p2": (4, 2),
    "token_mvit7x4p3": (4, 3),
    "down_cvt3x2p1": (2, 1),
}
MERGING = {"v1_norm_then_reduce": True, "v2_reduce_select_norm": False}
# Of each model the weights, and how they are read; those of A-MViTv2 come with its family.
WEIGHTS = {
    "oracle_e2e_aswin": ("swin_geom224", "timm", {}),
    "oracle_e2e_acvt": ("cvt_geom224", "cvt", dict(num_heads=(1, 3, 6))),
}
# A gap is a small difference of two energies, relative to these, and so is its rounding: that of float32 sums over the
# 3136 patches of an image.
GAP = 5e-6


@jax.jit
def embedded(x, parameters):
    """For each of EMBEDDINGS the norms of all phases, the index of the largest, and its tokens."""
    found = {}
    for name, (stride, padding) in EMBEDDINGS.items():
        kernel, bias = parameters[name]
        norms = polyphase.embedding_norms(x, kernel, bias, (stride, stride), (padding, padding))
        index = shifts.strongest(norms).index
        ends = (padding, len(kernel) - 1 - padding)
        y = jnp.pad(shifts.roll(x, -shifts.phases(index, stride)), ((0, 0), ends, ends, (0, 0)), mode="wrap")
        tokens = bias + jax.lax.conv_general_dilated(
            y, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        found[name] = {"energy": norms, "index": index, "tokens": tokens}
    return found


@jax.jit
def windows(x):
    """How the energies of windows vary at each place, the best place, and the map that begins there."""
    scores, places = window.spread(x, (4, 4))
    index = shifts.strongest(scores).index
    return scores, index, shifts.roll(x, -shifts.phases(index, places))


@jax.jit
def merged(merge, x):
    """The norm at each phase, the index of the largest, and what is merged there."""
    y, (h, w), choice = merge.adaptive(x.reshape(len(x), -1, x.shape[-1]), x.shape[1:3], "output")
    return merge.at_largest(x)[1], choice.index, y.reshape(len(x), h, w, -1)


def merging(data, norm_first):
    def make():
        return PatchMerging(4, norm_first=norm_first, eps=1e-5, rngs=nnx.Rngs(0))

    norm = "norm4c" if norm_first else "norm2c"
    tensors = {"norm.scale": data[f"param/merge/{norm}_w"], "norm.bias": data[f"param/merge/{norm}_b"]}
    tensors["reduction.weight"] = data["param/merge/reduction"].T
    return logical.from_logical(jax.eval_shape(make), tensors)


def around(size):
    """A-RPE's index of all pairs of a window, out of a table that holds row * width + column of each distance."""
    table = np.full((2 * size[0] - 1, 2 * size[1] - 1), np.nan, np.float32)  # no entry of a distance below 0
    table[size[0] - 1 :, size[1] - 1 :] = np.arange(size[0] * size[1]).reshape(size)
    abstract = jax.eval_shape(lambda: window.RelativeTable(size, 1, rngs=nnx.Rngs(0)))
    return logical.from_logical(abstract, {"table": table[..., None]})((True, True))[0]


def test_layers(record_property):
    data = load(FIXTURES / "adaptive" / "oracle_adaptive_ops.npz")
    comparison = Comparison(data)

    def compare(name, found, ending=""):
        for part, array in found.items():
            comparison.array(f"output/{name}/{part}{ending}", array, *([0] if part == "index" else []))

    x, weights = data["input/image"], {name: data[f"param/{name}/weight"].transpose(2, 3, 1, 0) for name in EMBEDDINGS}
    parameters = {name: (kernel, data[f"param/{name}/bias"]) for name, kernel in weights.items()}
    upright, moved = embedded(x, parameters), embedded(np.roll(x, (-1, -2), (1, 2)), parameters)
    for name in EMBEDDINGS:
        compare(name, upright[name])
        compare(name, {part: moved[name][part] for part in ("index", "tokens")}, "_rolled_1_2")

    scores, index, rolled = windows(data["input/tokens"])
    comparison.array("output/winsel/G_var", scores)
    # The mean over all windows is the same at each place: the l2 norm has its maximum where the variance has.
    norms = np.linalg.norm(data["input/tokens"], axis=-1)
    square = np.asarray(scores) + norms.mean((1, 2))[:, None] ** 2
    comparison.array("output/winsel/G_l2", np.sqrt(norms[0].size / 16 * square))
    for rule in ("l2", "var"):
        comparison.array(f"output/winsel/index_{rule}", index, 0)
        comparison.array(f"output/winsel/rolled_{rule}", rolled, 0)
    for name, norm_first in MERGING.items():
        energy, index, out = merged(merging(data, norm_first), data["input/merge"])
        compare(f"merge/{name}", {"energy": energy, "index": index, "out": out})
    for size in ((7, 7), (4, 6)):
        comparison.array(f"output/arpe/index_{size[0]}x{size[1]}", around(size), 0)
    other = ("window_energy", "G_l1", "G_max", "index_max", "rolled_max")  # rules that are not ours
    comparison.left -= {f"output/winsel/{name}" for name in other}
    comparison.left -= {key for key in data if "/dist_" in key}  # between tokens of two strides: MViTv2's
    comparison.finish(record_property, "adaptive layers")


@jax.jit
def everything(model, x):
    """Logits, the last map before the norm, and all choices."""
    return model(x), model.features(x, norm=False).patches.values, model.selections(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for name in WEIGHTS for path in files("adaptive", f"{name}.npz")], ids=lambda path: path.stem
)
def test_models(path, record_property):
    weights, source, hints = WEIGHTS[path.stem]
    data, ordinary = load(path), load(path.with_name(f"{weights}.npz"))
    model = models.adapt(pretrained.load(source, state(ordinary), **hints), anchor=False)
    logits, last, chosen = everything(model, images(ordinary))
    comparison = Comparison(data)
    comparison.array("output/logits", logits)
    last = np.moveaxis(last, -1, 1) if source == "cvt" else last  # channels first
    comparison.array("output/last", np.reshape(last, data["output/last"].shape))
    assert {key.removeprefix("index/") for key in data if key.startswith("index/")} == chosen.keys()
    for name, (index, gap) in chosen.items():
        comparison.array(f"index/{name}", index, 0)
        np.testing.assert_allclose(gap, data[f"gap/{name}"], rtol=0, atol=GAP)
    comparison.finish(record_property, "adaptive models")
