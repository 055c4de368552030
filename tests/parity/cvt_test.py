"""CvT against Transformers: logits with both activations, maps of all stages, and gradients; one test a file.

`cvt_last_short` is the last stage of `cvt_nocls_rect` as a model of its own, which reads the map of the stage before as
its image, under the names of the official code.
"""

import jax
import numpy as np
import pytest

from equivit import logical, pretrained
from equivit.layers.grid import Layout
from tests.parity.arrays import Comparison, files, images, load, state

ALL = files("adaptive", "cvt*.npz")
FILES = [path for path in ALL if path.stem != "cvt_last_short"] or ALL  # it adds nothing to the other two
# Of the largest entry, at least 1 for logits and 3 for maps; the official outputs are themselves up to 8e-7 and 6e-6
# away from those of float64.
LOGITS, MAPS = 2e-6, 5e-6
GRADIENTS = 1e-5  # norms, of themselves
ROUNDING = 1e-7  # norms of gradients that are zero, of the largest; the smallest other one is 2e-3 of it


def hints(path) -> dict:
    """The hints that the file lacks."""
    last = dict(num_heads=(3,), activation="gelu", strides=(2,), paddings=(1,))
    return {"cvt_geom224": dict(num_heads=(1, 3, 6)), "cvt_last_short": last}.get(path.stem, dict(num_heads=(1, 2, 3)))


def flavour(data) -> str:
    return "microsoft" if "param/norm.weight" in data else "transformers"


call = jax.jit(lambda model, x: model(x))


@jax.jit
def outputs(model, x):
    """Logits; the model's outputs under the names of the file."""
    logits, lasts = _ends(model, x)
    return logits, _stages(model, x, lasts)


@jax.jit
def gradients(model, x, cotangent):
    """The same, and the gradient of sum(logits * cotangent) by the parameters, as a model, and by the image."""

    def loss(arrays, x):
        logits, lasts = _ends(logical.put(model, arrays), x)
        return (logits * cotangent).sum(), (logits, lasts)

    (by_parameter, by_image), (logits, lasts) = jax.grad(loss, (0, 1), has_aux=True)(logical.take(model), x)
    return logits, _stages(model, x, lasts), logical.put(model, by_parameter), by_image


def _ends(m, x):
    """Logits, and the features at the end of each stage."""
    ends = [stop - 1 for stop in np.cumsum(m.config.depths).tolist()]
    features = m.features(x, blocks=tuple(ends), norm=False)
    normed = m.norm(features.patches.values).mean((1, 2)) if features.cls is None else m.norm(features.cls)
    return m.head(normed), [features.blocks[i] for i in ends]  # as `pooled` has it; calling m would be another pass


def _stages(m, x, lasts):
    """Each stage's map after its convolution, tokens after its first block, and map and class token after its last."""
    found = {}
    for i, (stage, last) in enumerate(zip(m.stages, lasts, strict=True)):
        x = stage.embed(x) if i else m.patch_embed(x)
        first = stage.blocks[0](stage.tokens(jax.lax.collapse(x, 1, 3)), Layout(x.shape[1:3], m.config.prefix(i)))
        found |= {f"stage{i}_embed": x, f"stage{i}_layer0": first, f"stage{i}_cls": last.cls}
        x = found[f"stage{i}"] = last.patches.values
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_cvt(path, record_property):
    """The gradients in the file with a class token are not compared.

    PyTorch 2.13, which wrote them, misreads the gradient of a map behind a class token in the backward pass of batch
    norm: stored token by token, it is taken for one stored channel by channel.  Finite differences confirm ours, and
    with that mistake built in all norms of the file come out, to 2e-6 of themselves.
    """
    data = load(path)
    model, x, comparison = pretrained.load("cvt", state(data), **hints(path)), images(data), Comparison(data)
    if "output/logits_quickgelu" in data:
        quick = pretrained.load("cvt", state(data), **hints(path) | dict(activation="quick_gelu"))
        comparison.array("output/logits_quickgelu", call(quick, x), LOGITS)
    if model.config.class_token:
        logits, found = outputs(model, x)
    else:
        logits, found, slopes, by_image = gradients(model, x, data["input/cotangent"])
        check_gradients(data, comparison, pretrained.state_dict("cvt", slopes, flavour=flavour(data)), by_image)
    comparison.array("output/logits", logits, LOGITS)
    for name, array in found.items():
        if (theirs := data.get(f"output/{name}")) is not None:
            array = np.moveaxis(array, -1, 1) if theirs.ndim == 4 else array
            comparison.array(f"output/{name}", np.reshape(array, theirs.shape), MAPS)
    comparison.finish(record_property, "cvt")


def check_gradients(data, comparison, slopes, by_image):
    """The norm of each gradient; that of a bias of keys, which adds the same to all logits of a query, is rounding."""
    slopes["image"] = np.transpose(by_image, (0, 3, 1, 2))
    if "grad/image" in data:
        comparison.array("grad/image", slopes["image"], GRADIENTS)
    norms = {key.removeprefix("gradnorm/"): float(value) for key, value in data.items() if key.startswith("gradnorm/")}
    assert len(norms) > 30
    zero = ROUNDING * max(norms.values())
    for name, norm in norms.items():
        ours = np.linalg.norm(slopes[name])
        assert max(ours, norm) < zero if norm < zero else abs(ours - norm) < GRADIENTS * norm, name
