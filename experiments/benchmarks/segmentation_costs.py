"""The cost of evaluating label maps beside the model: reading, resizing and counting.

    python -m experiments benchmarks.segmentation_costs --source=npz:/data/camvid_240x180.npz  # about four minutes

Swin-T with UperNet, with random weights, on frames of studies/segmentation_camvid.py, 128 x 96 pixels.  Claims: the
protocol `segmentation` on the test frames, from the file to the scores, takes at most 1.15 times the bare forward
passes on the same frames, decoded before and on the device; counting the confusion matrix of a batch at most 2 % of a
training step.
"""

import functools

import jax
import numpy as np
from flax import nnx

from equivit.data import loader
from equivit.evaluation import runner, scores
from equivit.training import build, sharding
from equivit.training import config as configs
from experiments import compiled_models, findings, flags, timing
from experiments.findings import Claim
from experiments.studies import segmentation_camvid


def main(arguments=None) -> int:
    parser = flags.timing_parser(__doc__, __file__, runs=7, warmup=1, minutes=None)
    parser.add_argument("--source", required=True, help="label maps, such as npz:<file>")
    parser.add_argument("--override", action="append", default=[], help="a key=value of the config; may be repeated")
    options = parser.parse_args(arguments)
    texts = [*segmentation_camvid.SHARED, f"data.source={options.source}", "evaluation.suite=segmentation"]
    texts += ["epochs=1", "data.eval_examples=40", *options.override]
    config = configs.load("configs/segment.py:swin_t", texts)
    config = loader.complete(config, loader.evaluate(config.data, batch_size=config.batch_size))
    mesh = sharding.create_mesh(config.mesh)
    with jax.set_mesh(mesh):
        milliseconds = [timing.milliseconds(calls, options) for calls in (evaluations(config), steps(config, mesh))]
    seconds = {name: time / 1e3 for times in milliseconds for name, time in times.items()}
    rows = [dict(name=name, seconds=f"{s:.4f}") for name, s in seconds.items()]
    print(findings.table(rows, dict(name="", seconds="seconds")))
    claims = [
        Claim("evaluation over forward passes", seconds["evaluation"] / seconds["forward passes"], at_most=1.15),
        Claim("counting over a training step", seconds["counting"] / seconds["training step"], at_most=0.02),
    ]
    settings = dict(runs=options.runs, batch_size=config.batch_size, image_size=list(config.data.image_size))
    return findings.finish(options, dict(seconds=seconds, **settings), claims)


def evaluations(config):
    """The whole evaluation, and its forward passes alone."""
    objective = build.make_objective(config)
    model = objective.module(build.make_model(config, nnx.Rngs(0)), jax.random.key(0))
    pipeline = loader.evaluate(config.data, batch_size=config.batch_size, seed=config.seed)
    batches = [jax.device_put(batch["image"].astype(np.float32) / 255) for batch in pipeline.batches()]
    forward = jax.jit(lambda model, images: model(images))
    return {
        "evaluation": lambda: runner.evaluate(model, config, ("segmentation",)),
        "forward passes": lambda: [forward(model, images) for images in batches],
    }


def steps(config, mesh):
    """A training step, and the counts of a batch."""
    run, state, batch = compiled_models.first_step(config, mesh)
    labels, weight = batch["map"], np.ones(config.batch_size, np.float32)

    def step():
        nonlocal state
        state, metrics = run.step(state, batch)
        return metrics

    return {
        "training step": step,
        "counting": functools.partial(scores.count, labels, labels, weight, config.model.num_classes),
    }
