"""The socket: what a model offers, what protocols need, and a protocol that is one value, on a model without a head."""

import ast
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import evaluate, logical, precision
from equivit.evaluation import adaptation, predictions, protocols, runner, summary
from equivit.evaluation.protocol import NEEDS, Protocol, offers
from equivit.models import saved, zoo
from equivit.models.decoders import MaskedAutoencoder, MaskedAutoencoderConfig
from equivit.training.config import get_base
from tests.evaluation.predictors import batches, random_model
from tests.evaluation.runner_test import CONFIG

IMAGES = np.random.default_rng(0).integers(0, 256, (8, 12, 20, 1)).astype(np.uint8)
PIXELS = dict(mean=(0.3,), std=(0.3,))


@pytest.fixture(scope="module")
def headless():
    return random_model("plain", num_classes=None)


@pytest.fixture
def config():
    config = get_base()
    config.batch_size = 16
    config.data.update(image_size=(12, 20), mean=(0.3,), std=(0.3,), eval_examples=20)
    return config


def measure(run):
    """The mean square of the class token's features."""
    extract = predictions.extractor(run.model, run.data.mean, run.data.std, run.precision)

    def one(batch):
        cls, weight = extract(batch["image"]).cls, batch["weight"]
        finite = jnp.isfinite(cls).all(-1)
        return {"sum": (jnp.square(cls).mean(-1) * weight).sum(), "examples": weight.sum(), "finite": finite}

    found = list(predictions.measured(one, run.batches()))
    examples = int(sum(part["examples"] for part in found))
    return {"square": float(sum(part["sum"] for part in found)) / examples, "examples": examples}


SPREAD = Protocol(
    needs=frozenset({"features"}),
    run=measure,
    lines=lambda result: [("mean square of the features", f"{result['square']:.3f}")],
    default=True,
)


@pytest.fixture
def spread(monkeypatch):
    monkeypatch.setitem(runner.PROTOCOLS, "spread", SPREAD)


class Nothing(nnx.Module):
    """Neither a head nor features."""

    config = types.SimpleNamespace(num_classes=None)


class Segmenter(nnx.Module):
    """No config, but label maps."""

    def label_maps(self, images):
        return images[..., 0]


def test_what_models_offer(headless):
    autoencoder = MaskedAutoencoder(MaskedAutoencoderConfig(headless.config, 16, 1, 2), headless, rngs=nnx.Rngs(0))
    assert offers(random_model("D8")) == {"logits", "features"}
    assert offers(headless) == {"features"}
    assert "reconstruction" in offers(autoencoder) and "logits" not in offers(autoencoder)
    assert offers(logical.abstract(random_model("plain"))) == {"logits", "features"}
    assert "maps" in offers(Segmenter())


def test_every_file_is_a_protocol_and_says_what_it_does():
    files = pathlib.Path(protocols.__file__).parent.glob("*.py")
    assert set(runner.PROTOCOLS) == set(protocols.about()) == {p.stem for p in files} - {"__init__"}
    assert all(protocol.needs <= NEEDS.keys() for protocol in runner.PROTOCOLS.values())
    assert all(len(line) <= 100 and line.endswith(".") for line in protocols.about().values())


def test_curves_are_numbers_that_protocols_return(config):
    results = runner.evaluate(random_model("plain"), config, ["accuracy", "orientation", "sar", "present_classes"])
    found = {f"eval/{name}" for name in runner.scalars(results)}
    assert found >= {curve for curve in runner.curves() if curve.split("/")[1] in results}


def test_protocols_are_named_in_their_files_only():
    """Adding one touches nothing else, so no other file of the room may ask for a name."""
    room = pathlib.Path(protocols.__file__).parents[1]
    for path in room.glob("*.py"):
        words = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        named = words & (set(runner.PROTOCOLS) - {"accuracy", *NEEDS})  # "accuracy" is a training metric too
        assert not named, f"{path.name} names {named}"


def test_help_lists_the_protocols(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--help"])
    output = capsys.readouterr().out
    width = max(map(len, protocols.about()))
    for name, line in protocols.about().items():
        assert f"  {name:{width}}  {line}\n" in output
    assert "imagenet2012_real" in output  # the data sets are there too


def test_a_model_without_a_head_is_evaluated_on_its_features(spread, headless, config):
    result = runner.evaluate(headless, config, ["spread"])["spread"]
    assert result["examples"] == 20
    # The final norm's random scales are near 1, so each token's mean square is too.
    assert 0.5 < result["square"] < 2
    assert summary.rows({"spread": result})[0][0] == "mean square of the features"
    assert runner.scalars({"spread": result})["spread/square"] == result["square"]


def test_the_default_suite_is_what_fits_the_model(spread, headless, config):
    assert runner.check(None, config, headless) == ("spread",)
    assert runner.check(None, config, random_model("plain")) == ("accuracy", "spread")
    assert runner.evaluate(headless, config, None).keys() == {"spread"}
    assert runner.check("accuracy,orientation", config) == ("accuracy", "orientation")


def test_where_nothing_fits_a_default_suite_is_empty(headless, config):
    assert runner.evaluate(headless, config, None) == {}
    with pytest.raises(ValueError, match=r"offers no logits; no protocol fits it\..*config.init"):
        runner.evaluate(Nothing(), config, ["accuracy"])


def test_needs_that_are_not_met_are_one_clear_line(spread, headless, config):
    message = "'accuracy' is for classifiers, but this ViT offers no logits; protocols that fit it: .*'knn', "
    with pytest.raises(ValueError, match=message):
        runner.evaluate(headless, config, ["spread", "accuracy"])
    message = "'reconstruction' is for masked autoencoders, but this ViT offers no reconstruction; .*'accuracy', "
    with pytest.raises(ValueError, match=message):
        runner.evaluate(random_model("plain"), config, ["reconstruction"])
    with pytest.raises(ValueError, match=r"needs=\['logit'\]; a protocol can need logits, features"):
        Protocol(needs=frozenset({"logit"}), run=measure, lines=lambda result: [])


def test_a_config_that_a_protocol_cannot_run_on_is_refused_before_anything_runs(config, monkeypatch):
    def run(run):
        raise AssertionError("nothing may run")

    def check(config):
        raise ValueError(f"config.seed={config.seed}")

    for name, protocol in {
        "first": Protocol(needs=frozenset(), run=run, lines=lambda result: []),
        "second": Protocol(needs=frozenset(), run=run, lines=lambda result: [], check=check),
    }.items():
        monkeypatch.setitem(runner.PROTOCOLS, name, protocol)
    with pytest.raises(ValueError, match="config.seed=0"):
        runner.evaluate(random_model("plain"), config, ["first", "second"])
    with config.unlocked():
        config.data.source = "npz:nowhere.npz"
    with pytest.raises(FileNotFoundError, match="nowhere.npz"):
        runner.evaluate(random_model("plain"), config, ["first", "accuracy"])


def test_a_model_that_a_protocol_cannot_measure_is_refused_before_anything_runs(config):
    """A quarter turn makes the height of a patch divide the width of the image; SAR adapts layer norms."""
    sizes = dict(in_channels=1, num_classes=10)
    with config.unlocked():
        config.data.image_size = (12, 16)
    tall = zoo.abstract("vit_ti16", width=16, depth=1, num_heads=2, patch_size=(4, 8), image_size=(12, 16), **sizes)
    with pytest.raises(ValueError, match="turned by a quarter 16x12: the width 12 is not divisible by"):
        runner.prepare(tall, config, ["accuracy", "orientation"])
    convolutions = zoo.abstract("mobilenetv4_conv_small", **sizes)
    with pytest.raises(ValueError, match="sar: MobileNetV4 has no layer norm inside its blocks"):
        runner.prepare(convolutions, config, ["accuracy", "sar"])


@pytest.fixture(scope="module")
def files(headless, tmp_path_factory):
    directory = tmp_path_factory.mktemp("headless")
    saved.save(directory / "model", headless)
    (directory / "config.py").write_text(CONFIG)
    return directory


def command(files, *arguments):
    return evaluate.main([f"--model={files}/model", f"--config={files}/config.py", *arguments])


def test_the_command_on_a_model_without_a_head(spread, files, capsys):
    assert command(files, "--suite=spread") == 0
    assert "mean square of the features" in capsys.readouterr().out
    assert json.loads((files / "model" / "evaluation.json").read_text())["spread"]["examples"] == 20


def test_the_command_without_a_suite(spread, files, capsys):
    assert command(files, "--config.evaluation.suite=None") == 0
    assert "Evaluating spread of" in capsys.readouterr().out


def test_the_command_without_a_suite_where_none_is_the_default(files, capsys):
    assert command(files, "--config.evaluation.suite=None") == 1
    assert "--suite: name protocols for this ViT; those that fit it: hematology, knn, " in capsys.readouterr().err


@pytest.mark.parametrize("level", ["mixed", "bfloat16"])
def test_predictors_compute_at_a_precision_and_return_float32(level):
    model = random_model("plain", depth=4)
    exact = predictions.predictor(model, **PIXELS)(IMAGES)
    rounded = predictions.predictor(model, **PIXELS, precision=level)(IMAGES)
    assert exact.dtype == rounded.dtype == jnp.float32
    gap = float(jnp.abs(exact - rounded).max() / jnp.abs(exact).max())
    assert 1e-4 < gap < 0.1  # bfloat16 has 8 bits
    by_hand = predictions.predictor(precision.cast(model, level), **PIXELS)(IMAGES)
    np.testing.assert_array_equal(rounded, by_hand)
    features = predictions.extractor(model, **PIXELS, precision=level)(IMAGES)
    assert features.patches.offset.dtype == jnp.int32
    values = (features.cls, features.registers, features.patches.values)
    assert {leaf.dtype for leaf in values} == {jnp.dtype(jnp.float32)}


def test_a_run_is_evaluated_at_its_precision(spread, config):
    model = random_model("plain")
    with config.unlocked():
        config.precision = "mixed"
    mixed = runner.evaluate(model, config, ["spread"])["spread"]["square"]
    config.precision = "float32"
    assert runner.evaluate(model, config, ["spread"])["spread"]["square"] != mixed
    config.precision = "half"
    with pytest.raises(ValueError, match="precision='half' is not one of float32, mixed, bfloat16"):
        runner.evaluate(model, config, ["spread"])


@pytest.mark.parametrize("predictor", [predictions.predictor, predictions.extractor])
def test_casting_another_model_of_the_same_kind_compiles_nothing(predictor):
    model = random_model("plain")
    jitted = predictor(model, **PIXELS).func
    predictor(model, **PIXELS, precision="mixed")(IMAGES)
    compiled = jitted._cache_size()
    graph, state = nnx.split(model)
    other = nnx.merge(graph, jax.tree.map(lambda a: a + 0.1, state))
    predictor(other, **PIXELS, precision="mixed")(IMAGES)
    assert jitted._cache_size() == compiled


@pytest.mark.parametrize("level", ["mixed", "bfloat16"])
def test_sar_adapts_float32_norms_by_less_than_bfloat16_resolves(level):
    model = random_model("plain", depth=4)
    images = jax.random.normal(jax.random.key(0), (8, 12, 20, 1))
    begin, settings = adaptation.start(model), adaptation.Sar(lr=1e-3, margin=1.0, reset_below=0.0)
    after = {
        at: adaptation.step(settings, model, begin, images, precision=at)[0].parameters for at in ("float32", level)
    }
    for leaf, mask in adaptation.adapted(model).items():
        first, last = np.asarray(begin.parameters[leaf]), np.asarray(after[level][leaf])
        mask = np.broadcast_to(mask, first.shape)
        assert last.dtype == np.float32
        moved, ulp = np.abs(last - first)[mask], np.abs(first)[mask] / 256  # at most half of bfloat16's spacing
        assert (moved[moved > 0] < ulp[moved > 0]).mean() > 0.5  # a bfloat16 parameter would have stayed
        exact = (np.asarray(after["float32"][leaf]) - first)[mask]
        assert np.corrcoef(exact, (last - first)[mask])[0, 1] > 0.9, leaf
    # And the model sees them: what differs by 2^-11 from a number of bfloat16 would be rounded to it.
    rounded = {leaf: array.astype(jnp.bfloat16).astype(jnp.float32) for leaf, array in begin.parameters.items()}
    states = [begin._replace(parameters={k: a * factor for k, a in rounded.items()}) for factor in (1, 1 + 2**-11)]
    logits = [adaptation.step(settings, model, state, images, precision=level)[1] for state in states]
    assert (logits[0] != logits[1]).any()


def test_sar_keeps_float32_masters_of_a_model_that_was_cast():
    cast = precision.cast(random_model("plain", depth=4), "bfloat16")
    state = adaptation.start(cast)
    assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
    images = jax.random.normal(jax.random.key(0), (8, 12, 20, 1))
    after, *_ = adaptation.step(adaptation.Sar(margin=1.0, reset_below=0.0), cast, state, images)
    assert any((after.parameters[leaf] != array).any() for leaf, array in state.parameters.items())


@pytest.mark.slow
def test_the_sar_protocol_runs_at_a_precision():
    data = batches(IMAGES, np.arange(8), size=8)
    model, settings = random_model("plain", depth=4), adaptation.Sar(lr=0.0)
    result = adaptation.adaptation(model, data, settings=settings, precision="mixed", **PIXELS)
    assert result["examples"] == 8 and result["top1"] == result["unadapted_top1"]
