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
    config = get_base("linear_probe")
    config.objective.update(affine=True, eps=1e-5, momentum=0.01)
    config.model = dict(SIZE, name="jumbo_vit_mae_ti16")
    goal = LinearProbe(config)
    module = jax.eval_shape(lambda: goal.module(zoo.create("jumbo_vit_mae_ti16", **SIZE), jax.random.key(0)))
    encoder = {k.removeprefix("encoder."): v for k, v in jax_names(data).items() if k.startswith("encoder.")}
    head = {name: data[f"probe_param/model/head/Dense_0/{name}"] for name in ("bias", "kernel")}
    norm = {name: data[f"probe_param/model/head/BatchNorm_0/{name}"] for name in ("scale", "bias")}
    running = {name: data[f"probe_batch_stats/model/head/BatchNorm_0/{name}"] for name in ("mean", "var")}
    abstract = zoo.abstract("jumbo_vit_mae_ti16", **{**SIZE, "num_classes": None})
    backbone = logical.take(logical.from_logical(abstract, encoder))
    ours = {f"backbone.{name}": value for name, value in backbone.items()}
    ours |= {"head.linear.bias": head["bias"], "head.linear.weight": head["kernel"]}
    ours |= {f"head.norm.{name}": value for name, value in norm.items()}
    ours |= {"head.norm.mean": running["mean"], "head.norm.variance": running["var"]}
    like = {**logical.take(module), **logical.take_state(module)}
    assert {k: v.shape for k, v in ours.items()} == {k: v.shape for k, v in like.items()}
    model = goal.exported(logical.put(module, ours), {})
    comparison = Comparison({"output/probe_logits": data["output/probe_logits"]})
    comparison.array("output/probe_logits", jax.jit(lambda: model(data["input/probe_images_nhwc"]))())
    comparison.finish(record_property, "probe")
    model = goal.exported(logical.put(module, {**ours, "head.norm.mean": 0 * running["mean"]}), {})
    assert np.abs(model(data["input/probe_images_nhwc"]) - data["output/probe_logits"]).max() > 1e-2
