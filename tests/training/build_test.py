"""The parts of a run: a train command resolves the configuration of its model once."""

import pathlib

import jax
import pytest

from equivit import train
from equivit.models import zoo
from equivit.training import build, loop, sharding
from equivit.training import config as configs

ROOT = pathlib.Path(__file__).parents[2]


def test_a_train_command_resolves_its_model_once(tmp_path, monkeypatch):
    """From the data to the program and the initial parameters; nothing is compiled."""
    names, configuration = [], zoo.configuration

    def counted(name, **options):
        names.append(name)
        return configuration(name, **options)

    def trace(config, *, make_program, initial, **_):
        mesh = sharding.create_mesh(config.mesh)
        with jax.set_mesh(mesh):
            assert make_program(config, mesh, total=10**4, per_epoch=10).abstract.trainable and not initial()
        raise SystemExit

    monkeypatch.setattr(zoo, "configuration", counted)
    monkeypatch.setattr(loop, "train", trace)
    config = configs.load(f"{ROOT}/configs/quickstart.py:quicktest", ["optimizer.freeze=patch_embed.*"])
    with pytest.raises(SystemExit):
        train.train(config, tmp_path)
    assert len(names) == 1


@pytest.mark.parametrize("unroll", [None, True, False])
@pytest.mark.parametrize(("platform", "by_default"), [("gpu", True), ("tpu", True), ("cpu", False)])
def test_blocks_are_written_out_in_training_on_an_accelerator(monkeypatch, platform, by_default, unroll):
    """If the config leaves it open."""
    config = configs.load(f"{ROOT}/configs/quickstart.py:plain,quicktest", ["model.depth=3", f"model.unroll={unroll}"])
    mesh = sharding.create_mesh(config.mesh)
    monkeypatch.setattr(build, "platform_of", lambda mesh: platform)
    program = build.make_program(config, mesh, total=10, per_epoch=10)
    batch = {"image": jax.ShapeDtypeStruct((8, 8, 8, 1), "float32"), "label": jax.ShapeDtypeStruct((8,), "int32")}
    assert ("while" not in program.lower(batch).as_text()) == (by_default if unroll is None else unroll)
