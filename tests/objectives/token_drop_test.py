"""Token dropping: how many tokens when, a random part of each image, and a message for each phase."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit.models import zoo
from equivit.objectives.masking import Tokens, tokens_at
from equivit.objectives.supervised import Supervised
from equivit.training import build, loop
from equivit.training.config import get_base, validate
from tests.training import tiny


def test_the_staircase():
    phases = [tokens_at(step / 1000, (0.9, 0.1), 10, 196) for step in range(1000)]
    assert phases[0] == Tokens(20, 196) and phases[-1] == Tokens(177, 196)  # int(0.9 * 196) and int(0.1 * 196) are gone
    assert len(set(phases)) == 10 and sorted(phases) == phases
    mean = np.mean([1 - tokens.kept / 196 for tokens in phases])
    np.testing.assert_allclose(mean, 0.5, atol=0.01)  # rounding leaves up to one token more
    assert [tokens_at(p, (0.9, 0.1), 1, 10).kept for p in (0, 0.99)] == [1, 1]
    assert tokens_at(1.0, (0.0, 0.5), 4, 10) == Tokens(5, 10)


def options(**objective):
    config = get_base()
    config.epochs = 1
    config.model.update(name="jumbo_vit_ti16", width=24, num_heads=2, depth=1, patch_size=4, jumbo=2, num_classes=4)
    config.model.update(image_size=(16, 8), in_channels=3)
    config.data.image_size = (16, 8)
    config.objective.update({"loss": "cross_entropy", "token_drop": (0.75, 0.25), "token_drop_phases": 2, **objective})
    validate(config)
    return config


def test_the_number_of_tokens_is_that_of_the_training_images():
    goal = Supervised(options())
    module = jax.eval_shape(lambda: build.make_model(options(), nnx.Rngs(0)))
    assert goal.static(module, 0.0) == Tokens(2, 8) and goal.static(module, 0.5) == Tokens(6, 8)
    assert Supervised(options(token_drop=None)).static(module, 0.0) is None


def test_each_image_keeps_tokens_of_its_own():
    """A spy takes the place of the model."""
    goal, seen = Supervised(options()), []

    def model(images, *, keep, **rest):
        seen.append(keep)
        return jnp.zeros((len(images), 4))

    batch = {"image": jnp.zeros((64, 16, 8, 3)), "target": jnp.ones((64, 4))}
    for key in (1, 1, 2):
        goal.loss(model, batch, tiny.step(key, static=Tokens(6, 8)))
    first, again, other = map(np.asarray, seen)
    assert first.shape == (64, 6) and all(len(set(row)) == 6 for row in first.tolist())
    assert len({tuple(sorted(row)) for row in first.tolist()}) > 10  # of 28 choices
    assert set(first.ravel()) == set(range(8))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.slow
def test_the_log_says_each_phase(tmp_path, capsys):
    compiled = []

    class Phases(Supervised):
        def static(self, module, progress):
            return Tokens(2 if progress < 0.5 else 6, 8)

        def loss(self, module, batch, step):
            compiled.append(step.static)
            return super().loss(module, batch, step._replace(static=None))

    config = tiny.config(log=dict(to=()))
    config.steps = 4
    pipeline = types.SimpleNamespace(steps_per_epoch=4, batches=lambda start: (tiny.batch(t) for t in range(start, 4)))
    make = functools.partial(tiny.make_program, objective=Phases(config))
    loop.train(config, workdir=tmp_path, pipeline=pipeline, evaluate=lambda *_: {}, make_program=make)
    said = capsys.readouterr().out
    assert said.count("tokens:") == 2
    assert "tokens: 2 of 8 from step 0." in said and "tokens: 6 of 8 from step 2." in said
    assert set(compiled) == {Tokens(2, 8), Tokens(6, 8)}


@pytest.mark.parametrize(
    "fields, fix",
    [
        (dict(position="rotary"), "position='learned'"),
        (dict(adaptive=True), r"adaptive=\('token',\)"),
        (dict(adaptive=("position",)), r"adaptive=\('token',\)"),
        (dict(class_token=False, replaced=((0, "dw"),)), r"replaced=\(\)"),
        (dict(position="sincos"), None),
        (dict(adaptive=("token",)), None),
        (dict(class_token=False, replaced=((0, "identity"),)), None),
    ],
)
def test_what_needs_the_whole_grid_is_refused_with_the_keys_and_the_rest_drops_tokens(fields, fix):
    small = dict(width=24, num_heads=2, depth=1, patch_size=4, image_size=(16, 8), in_channels=3, num_classes=4)
    goal, model = Supervised(options()), zoo.abstract("vit_ti16", **small, **fields)
    batch = {"image": jnp.zeros((2, 16, 8, 3)), "target": jnp.ones((2, 4))}

    def trace():
        jax.eval_shape(lambda m: goal.loss(m, batch, tiny.step(static=Tokens(6, 8))).value, model)

    if fix is None:
        goal.check_model(model.config, {})
        return trace()
    key = next(key for key in fields if key != "class_token")
    match = rf"config.objective.token_drop=.*: config.model.{key}.* set token_drop=None, or config.model.{fix}\.$"
    with pytest.raises(ValueError, match=match):
        goal.check_model(model.config, {})
    with pytest.raises(ValueError, match="patches were removed"):
        trace()


@pytest.mark.parametrize("rates", [0.9, (0.9,), (1.0, 0.1), ("a", 0.1)])
def test_bad_rates(rates):
    with pytest.raises(ValueError, match="token_drop=.* must be two shares in"):
        options(token_drop=rates)


def test_bad_phases():
    with pytest.raises(ValueError, match="token_drop_phases=0 must be a positive whole number"):
        options(token_drop_phases=0)
