"""The summarize command: what it prints, for configs and for names of the zoo."""

import json

import pytest

from equivit import costs, summarize

CONFIG = """
from equivit.training import config

def get_config(mode="digits"):
    c = config.get_base()
    c.epochs, c.batch_size = 1, 8
    c.model = dict(name="vit_ti16", patch_size=4, depth=2)
    c.optimizer.name = "adamw"  # quick to compile
    c.data.update(image_size=(16, 16), mean=(0.5,), std=(0.25,))
    if mode == "absent":
        c.data.source = "npz:/nowhere/absent.npz"
    return c
"""


@pytest.fixture
def command(capsys):
    """A function that runs the command: exit status, what was printed, what was printed as an error."""

    def run(*arguments):
        status = summarize.main(list(arguments))
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def summary(command):
    def run(*arguments):
        status, out, err = command(*arguments, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    return path


def test_table(command):
    status, out, _ = command("--model=octic_vit_h14", "--model.family=I8")
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert status == 0
    assert "357.01 M" in out
    assert lines["octic ViTs: fvcore, attention fused"][-1] == "102.581"
    assert set(costs.KINDS) < set(lines)


def test_json_holds_the_same_sums(summary):
    result = summary("--model=vit_s16")
    assert set(result["costs"]) == set(costs.KINDS)
    assert result["macs"] == sum(kind["macs"] for kind in result["costs"].values())
    assert result["image_size"] == [224, 224]
    assert result["notes"] == []


def test_the_largest_models_need_no_memory(summary):
    assert summary("--model=vit_22b14")["parameters"] > 16e9


def test_a_model_without_a_head_is_measured_by_its_features(summary):
    """H8 H/16 with the official counter: 354.53 M, 77.51 G."""
    result = summary("--model=octic_dinov2_vit_h16")
    assert result["parameters"] / 1e6 == pytest.approx(354.53, abs=0.02)
    assert result["fvcore"] / 1e9 == pytest.approx(77.51, rel=0.0025)


def test_none_may_be_a_word(summary):
    assert summary("--model=vit_pico16", "--model.remat=none")["model"]["remat"] == "none"


def test_a_config_is_completed_from_its_data(summary, config):
    model = summary(f"--config={config}", "--config.data.image_size=(16, 24)")["model"]
    assert (model["in_channels"], model["num_classes"], model["image_size"]) == (1, 10, [16, 24])


def test_absent_data_are_noted(summary, config):
    (note,) = summary(f"--config={config}:absent")["notes"]
    assert "npz:/nowhere/absent.npz" in note


@pytest.mark.parametrize("fsdp", [1, 8])
def test_memory_of_the_compiled_steps(summary, config, fsdp):
    """Arguments can be worked out: weights, two moments with training, and the images, on each of 8 devices."""
    result = summary(f"--config={config}", "--memory", f"--config.mesh.fsdp={fsdp}")
    forward, train = result["memory"]["forward"], result["memory"]["train"]
    weights, images = 4 * result["parameters"] / fsdp, 16 * 16
    slack = 4096 if fsdp == 1 else 0.2 * weights  # labels, counters; leaves that 8 does not divide are on every device
    assert weights + images <= forward["arguments"] <= weights + images + slack
    assert 3 * weights + images <= train["arguments"] <= 3 * (weights + slack) + images
    # The new state takes the place of the old one.
    assert train["arguments"] < train["peak"] < train["arguments"] + train["outputs"] + train["temporaries"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--model=vit_l61"], "vit_l16"),
        (["--model=vit_l16", "--model.familly=H8"], "family"),
        (["--model=vit_l16", "--model.width=wide"], "width='wide'"),
        (["--model=vit_l16", "--model.patch_size=15"], "15"),
        (["--model=vit_l16", "--memry"], "--memory"),
        (["--model=vit_l16", "--config.seed=1"], "--model.KEY=VALUE"),
        (["--model=dinov2_vit_s16", "--memory"], "num_classes"),
        (["--config=/nowhere/absent.py"], "/nowhere/absent.py"),
    ],
)
def test_errors_are_one_line_naming_the_fix(command, arguments, hint):
    status, out, err = command(*arguments)
    assert (status, out) == (1, "")
    assert err.startswith("error: ") and err.count("\n") == 1
    assert hint in err


def test_debug_gives_tracebacks(command):
    with pytest.raises(ValueError, match="vit_l61"):
        command("--model=vit_l61", "--debug")
