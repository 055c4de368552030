"""The linear probe of the JAX version of Jumbo's MAE, with its running statistics."""

import jax
import numpy as np
import pytest

from equivit import logical
from equivit.models import zoo
from equivit.objectives.linear_probe import LinearProbe
from equivit.training.config import get_base
from tests.parity.arrays import Comparison, files, load
from tests.parity.mae_test import jax_names

SIZE = dict(width=48, depth=3, num_heads=3, patch_size=8, image_size=(32, 32), jumbo=3, num_classes=10)


@pytest.mark.parametrize("path", files("jumbo", "jumbo_mae_jax_d48_j3.npz"), ids=lambda path: path.stem)
def test_probe(path, record_property):
    data = load(path)
    section = get_base("linear_probe").objective
    section.update(affine=True, eps=1e-5, momentum=0.01)
    goal = LinearProbe(section, mean=(0.5,), std=(0.5,), num_classes=10)
    trainable, extra = goal.init(zoo.create("jumbo_vit_mae_ti16", **SIZE), jax.random.key(0))
    encoder = {k.removeprefix("encoder."): v for k, v in jax_names(data).items() if k.startswith("encoder.")}
    head = {name: data[f"probe_param/model/head/Dense_0/{name}"] for name in ("bias", "kernel")}
    norm = {name: data[f"probe_param/model/head/BatchNorm_0/{name}"] for name in ("scale", "bias")}
    running = {name: data[f"probe_batch_stats/model/head/BatchNorm_0/{name}"] for name in ("mean", "var")}
    abstract = jax.eval_shape(lambda: zoo.create("jumbo_vit_mae_ti16", **{**SIZE, "num_classes": None}))
    backbone = logical.take(logical.from_logical(abstract, encoder))
    assert set(backbone) == set(extra["backbone"])
    ours = {"linear.bias": head["bias"], "linear.weight": head["kernel"]}
    ours |= {f"norm.{name}": value for name, value in norm.items()}
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in trainable.items()}
    state = {"norm.mean": running["mean"], "norm.variance": running["var"]}
    model = goal.exported(ours, {"backbone": backbone, "state": state})
    comparison = Comparison({"output/probe_logits": data["output/probe_logits"]})
    comparison.array("output/probe_logits", jax.jit(lambda: model(data["input/probe_images_nhwc"]))())
    comparison.finish(record_property, "probe")
    model = goal.exported(ours, {"backbone": backbone, "state": {**state, "norm.mean": 0 * running["mean"]}})
    assert np.abs(model(data["input/probe_images_nhwc"]) - data["output/probe_logits"]).max() > 1e-2
