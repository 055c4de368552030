"""The parts of a run: a train command resolves the configuration of its model once."""

import pathlib

import jax
import pytest

from equivit import train
from equivit.models import zoo
from equivit.training import config as configs
from equivit.training import loop, sharding

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
