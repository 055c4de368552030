"""All pairs of ideas and uses: each is created, trained, saved, loaded, exported and symmetric, or refused in a line.

docs/compositions.md has the table; `test_the_table_of_the_docs_is_this_one` compares both.
"""

import functools
import itertools
import pathlib
import re

import jax
import numpy as np
import pytest

from equivit import export, logical, testing
from equivit.guarantees import proof
from equivit.guarantees.motions import Shift, Turn
from equivit.layers.batch_stats import recording
from equivit.layers.rngs import Keys
from equivit.models import saved
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Step
from equivit.training import build
from equivit.training.config import get_base, validate

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "compositions.md"
IDEAS, USES = ("octic", "Jumbo", "adaptive", "depthwise"), ("MAE", "DINOv2", "segmentation")
PAIRS = [*itertools.combinations(IDEAS, 2), *itertools.product(IDEAS, USES)]
REFUSED = {
    ("Jumbo", "depthwise"): "JumboViT: replaced blocks convolve the grid of patches",
    ("adaptive", "depthwise"): "ViT: replaced blocks know no distances around the torus",
    ("adaptive", "MAE"): "the content determines its patch grid, but objective.name='mae'",
    ("depthwise", "MAE"): "MaskedAutoencoder: replaced blocks convolve the whole grid",
    ("Jumbo", "DINOv2"): "the Jumbo token replaces class token and registers",
    ("adaptive", "DINOv2"): "the content determines its patch grid, but objective.name='dinov2'",
    ("depthwise", "DINOv2"): "ViT: replaced blocks convolve the grid of patches, but there are 1 tokens before it",
}
MOTIONS = {"octic": (Turn("r"), Turn("m")), "adaptive": (Shift((1, 0)), Shift((2, 3)))}
SYMMETRIES = {"octic": "octic", "adaptive": "shift"}
SIZE = (8, 8)


def config_of(pair):
    """The smallest config of a pair."""
    use = {"MAE": "mae", "DINOv2": "dinov2", "segmentation": "segmentation"}.get(pair[1], "supervised")
    config = get_base(use)
    name = "jumbo_vit_ti16" if "Jumbo" in pair else "octic_vit_ti16" if "octic" in pair else "vit_ti16"
    model = dict(name=name, width=16, depth=2, num_heads=2, patch_size=4, mlp_dim=16, image_size=SIZE, in_channels=1)
    model |= dict(family="D8") if "octic" in pair else {}
    model |= dict(jumbo=2) if "Jumbo" in pair else {}
    model |= dict(adaptive=True) if "adaptive" in pair else {}
    model |= dict(replaced=((1, "dw"),), class_token=False, pool="mean") if "depthwise" in pair else {}
    model |= dict(class_token=True, mask_token=True) if use == "dinov2" else {}
    config.model = model | dict(num_classes=None if use in ("mae", "dinov2") else 3 if use == "segmentation" else 10)
    source = "synthetic_maps" if use == "segmentation" else "digits"
    config.data.update(source=source, channels=1, image_size=SIZE, mean=(0.3,), std=(0.4,), train_examples=8)
    config.update(batch_size=4, steps=2)
    if use == "mae":
        decoder = "equivariant" if "octic" in pair else "dense"
        config.objective.update(decoder=decoder, decoder_width=16, decoder_depth=1, decoder_heads=2)
    elif use == "dinov2":
        config.objective.update(prototypes=8, hidden=8, bottleneck=8, koleo=0.0)
        config.data.views.update(locals=0)
    elif use == "segmentation":
        decoder = "octic" if "octic" in pair else "linear"
        config.objective.update(decoder=decoder, equivariant="adaptive" in pair)
    return config


def made(config):
    """The objective, and its module with shapes in place of arrays."""
    validate(config)
    objective, model = build.make_objective(config), build.model_configuration(config)
    objective.check_model(model, {})
    return objective, jax.eval_shape(lambda: objective.module(model.build(Keys(0)), jax.random.key(0)))


@functools.partial(jax.jit, static_argnums=0)
def two_steps(loss, module, batches):
    """Two steps of gradient descent, and their losses."""

    def step(module, batch):
        value, gradient = jax.value_and_grad(loss, allow_int=True)(module, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g if g.dtype == p.dtype else p, module, gradient), value

    return jax.lax.scan(step, module, batches)


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in REFUSED], ids="+".join)
def test_a_pair_is_trained_saved_loaded_exported_and_symmetric(pair, tmp_path):
    config = config_of(pair)
    objective, abstract = made(config)
    pipeline = build.make_pipeline(config)
    rows = [{k: v for k, v in pipeline.make(t).items() if k != "unreadable"} for t in range(2)]
    start = testing.randomise(abstract, jax.random.key(0))
    extra, static = objective.extra(logical.take(start)), objective.static(abstract, 0.0)

    def loss(module, batch):
        batch = objective.prepare(abstract, batch, jax.random.key(1))
        step = Step(jax.random.key(2), Clock(0, 2, 1), static, extra, {})
        with recording():  # of running statistics, which two steps of plain descent do without
            return objective.loss(module, batch, step).value

    module, values = two_steps(loss, start, jax.tree.map(lambda *leaves: np.stack(leaves), *rows))
    assert np.isfinite(values).all() and values[0] != values[1]
    trained = objective.exported(module, objective.extra(logical.take(module)))
    saved.save(tmp_path / "model", trained)
    model = saved.load(tmp_path / "model")
    assert model.config == trained.config
    jax.tree.map(np.testing.assert_array_equal, logical.take(model), logical.take(trained))

    inner = proof.backbone(model) if pair[1] == "MAE" else model
    _, outputs = export._function(inner, SIZE, ())
    assert jax.export.export(jax.jit(outputs))(inner, jax.ShapeDtypeStruct((1, *SIZE, 1), "float32")).mlir_module()

    symmetries = [idea for idea in pair if idea in MOTIONS]
    images = np.random.default_rng(0).normal(size=(proof.BATCH, *SIZE, 1))
    moves = [motion for idea in symmetries for motion in MOTIONS[idea]]
    found = proof.prove(model, images, moves, at="float64") if moves else None
    assert [at for idea in symmetries if (at := found.broken(SYMMETRIES[idea])) is not None] == []


@pytest.mark.parametrize("pair", REFUSED, ids="+".join)
def test_a_pair_that_makes_no_sense_is_refused_in_a_line(pair):
    with pytest.raises(ValueError, match=re.escape(REFUSED[pair])) as raised:
        made(config_of(pair))
    assert "\n" not in str(raised.value).partition("\n---")[0]  # JAX adds a note to errors of traced functions


def test_the_table_of_the_docs_is_this_one():
    """With the proven symmetries, and a reason for each refusal."""
    text = DOCS.read_text()
    lines = [line[1:-1].split("|") for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = [[cell.strip() for cell in line] for line in lines]
    cells = {(row[0], column): cell for row in rows for column, cell in zip(header[1:], row[1:], strict=True) if cell}
    assert cells == {pair: _cell(pair) for pair in PAIRS}
    reasons = re.findall(r"^- \*\*(.*)\.\*\* ", text, re.MULTILINE)
    assert {tuple(words.split(" and ")) for reason in reasons for words in reason.split(", ")} == REFUSED.keys()


def _cell(pair):
    symmetries = [SYMMETRIES[idea] for idea in pair if idea in SYMMETRIES]
    return "refused" if pair in REFUSED else ": ".join(["works", *([", ".join(symmetries)] if symmetries else [])])
