"""The models beside torch's: what is asked of the peer's process, what it may answer, and what is claimed."""

import contextlib
import importlib
import json
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from experiments import compiled_models, timing
from experiments.benchmarks import conv_models_cpu, model_cpu, processes
from experiments.benchmarks.processes import Peer

# In place of a Python with torch: three parameters, and half a second for each run until it is asked of "gone".
STUB = """#!{python}
import json, sys
print("a library is there")
for line in sys.stdin:
    question = json.loads(line)
    if question.get("run") == "gone":
        break
    made = dict(parameters=3, error=question.get("error"))
    print(json.dumps(dict(seconds=0.5) if "run" in question else made), flush=True)
"""


TINY = dict(width=32, num_heads=2, depth=1)


@pytest.fixture
def python(tmp_path):
    path = tmp_path / "python"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    return str(path)


def test_the_peer_answers_and_must_have_the_same_parameters(python):
    with contextlib.closing(Peer(python, "timm_models.py", dict(model="shvit_s1", shape=(8, 224, 224, 3)))) as peer:
        call = peer.variant("contiguous", 2, 3)
        assert call() == call() == 0.5
        with pytest.raises(RuntimeError, match="shvit_s1: ours has 4 parameters and the peer's 3"):
            peer.variant("contiguous", 2, 4)


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_a_peer_of_the_same_weights_must_find_the_same_logits(python, error):
    with contextlib.closing(Peer(python, "timm_models.py", dict(model="bixt_ti_p16", error=1e-6))) as peer:
        assert peer.variant("contiguous", 2, 3)() == 0.5
    with (
        contextlib.closing(Peer(python, "timm_models.py", dict(model="bixt_ti_p16", error=error))) as peer,
        pytest.raises(RuntimeError, match="bixt_ti_p16: the peer's logits differ from ours by"),
    ):
        peer.variant("contiguous", 2, 3)


def test_what_a_peer_is_given_of_our_weights(tmp_path):
    model = compiled_models.random_model("bixt_ti_p16", width=12, num_heads=3, depth=2, latents=5, image_size=(32, 48))
    images = np.random.default_rng(0).normal(size=(2, 32, 48, 3)).astype(np.float32)
    question = conv_models_cpu.with_weights(model, images, tmp_path)
    assert question == dict(file=str(tmp_path / "bixt.npz"), heads=3)
    with np.load(question["file"]) as file:
        np.testing.assert_array_equal(file["images"], images)
        assert file["logits"].shape == (2, 1000) and np.abs(file["logits"]).min() > 0
        assert file["patch_embed.proj.weight"].shape == (12, 3, 16, 16)


def test_a_peer_that_ends_is_told(python):
    with contextlib.closing(Peer(python, "timm_models.py", dict(model="shvit_s1"))) as peer:
        call = peer.variant("gone", 2, 3)
        with pytest.raises(RuntimeError, match="timm_models.py ended at {'run': 'gone'}"):
            call()


def test_gradients_of_a_peers_block_begin_at_none(monkeypatch):
    """By a stand-in for torch, in which a backward pass notes what it would add to."""
    weight, x, found = SimpleNamespace(grad=None), mock.MagicMock(grad=None), []

    def backward():
        found.extend([weight.grad, x.grad])
        weight.grad = x.grad = "of an earlier round"

    x.float().square().mean().__radd__ = lambda *_: SimpleNamespace(backward=backward)
    model = mock.MagicMock(return_value=x, parameters=lambda: [weight])
    torch = mock.MagicMock(__version__="0", compile=lambda _: model, nn=mock.MagicMock(Module=object))
    torch.cuda.is_available = lambda: False
    name = "experiments.benchmarks.torch_peers.gpu_blocks"
    stubs = {"torch": torch, "torch.nn": torch.nn, "torch.nn.functional": torch.nn.functional}
    with mock.patch.dict(sys.modules, stubs):  # the module that is imported here is forgotten, too
        script = importlib.import_module(name)
        monkeypatch.setattr(script, "inputs", lambda *_: x)
        script.answer(dict(kind="plain", task="gradient", width=8, heads=1, warmup=1, runs=2, depth=1))
    assert found == [None] * 6


def test_claims():
    """Claims are about the model as it is; without a peer nothing is judged."""
    cases = (("shvit_s1", 1.6, False), ("shvit_s1", 1.5, True), ("bixt_ti_p16", 1.2, False), ("shvit_s1", None, None))
    for name, ratio, holds in cases:
        assert conv_models_cpu.claim_of(dict(model=name, over_peer=ratio, folded_over_peer=1.0)).holds is holds


def test_whole_models_forward_and_in_training(tmp_path, monkeypatch, python):
    """One tiny block: its forward pass runs in a process of its own, and claims name the right rows."""
    started, update = processes.started, jax.config.update

    def started_or_here(name, make, *arguments):
        if make is model_cpu.forward:
            return started(name, make, *arguments)
        made, call = make(*arguments)
        return contextlib.nullcontext((made, timing.second_of_two(call)))

    def updated(name, value):
        if name != "jax_cpu_enable_async_dispatch":  # of the process
            update(name, value)

    monkeypatch.setattr(processes, "started", started_or_here)
    monkeypatch.setattr(jax.config, "update", updated)
    monkeypatch.setattr(compiled_models, "parameters", lambda name, **fields: 3)
    monkeypatch.setattr(model_cpu, "MODELS", {"D8": ("octic_vit", dict(TINY, family="D8"))})
    output = tmp_path / "out.json"
    options = ["--sizes=ti", "--types=bfloat16", "--models=D8", "--batch=2", "--image_size=32", "--runs=1"]
    assert model_cpu.main([f"--output={output}", f"--peer={python}", "--warmup=0", *options]) == 0
    rows = json.loads(output.read_text())["main"]["rows"]
    assert [(row["task"], row["timm"]) for row in rows] == [("forward", 500.0), ("training", 500.0)]
    assert all(row["D8_over_timm"] == pytest.approx(row["D8"] / 500) for row in rows)
    row = dict(size="s", task="training", type="float32", plain=900.0, D8=500.0, plain_over_timm=0.9, D8_over_timm=0.5)
    assert [claim.holds for claim in model_cpu.claims_of([row])] == [True, False]
    slow = row | dict(type="bfloat16", D8_over_timm=1.1)
    assert [claim.holds for claim in model_cpu.claims_of([slow])] == [True, False]


def test_plain_must_have_as_many_parameters_as_timm(monkeypatch, python):
    monkeypatch.setattr(processes, "started", lambda *_: contextlib.nullcontext((None, lambda: 0.5)))
    options = model_cpu._options([f"--peer={python}", "--models=plain"])
    with pytest.raises(RuntimeError, match="vit_tiny_patch16_224: ours has 5717416 parameters and the peer's 3"):
        model_cpu.measure("ti", "forward", "float32", options)


def test_a_model_that_cannot_be_made_is_told():
    process = processes.started("vit_ti16", model_cpu.forward, "no such model", "float32", 1, {})
    with pytest.raises(RuntimeError, match="vit_ti16: its process has ended"), process:
        pass
