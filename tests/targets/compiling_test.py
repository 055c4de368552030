"""Programs compiled for cards that are not here, where JAX's CUDA plugin is installed: see docs/accelerators.md."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

from equivit import summarize, targets
from equivit.training import sharding
from tests.summarize_test import CONFIG


@pytest.fixture(scope="module")
def target():
    target = targets.parse("h200x8")
    try:
        targets.devices(target)
    except ValueError as error:
        pytest.skip(str(error))
    return target


def test_a_product_on_eight_cards(target):
    """Rows of x and columns of w are split: w is gathered, and the product is cuBLAS's."""
    mesh = sharding.create_mesh(ConfigDict(dict(data=-1, fsdp=8)), targets.devices(target))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("fsdp",), (None, "fsdp")))
    x = jax.ShapeDtypeStruct((8 * 64, 128), jnp.bfloat16, sharding=rows)
    w = jax.ShapeDtypeStruct((128, 256), jnp.bfloat16, sharding=columns)
    with jax.set_mesh(mesh), targets.lowering_for(target):
        whole = jax.jit(lambda x, w: x @ jax.lax.with_sharding_constraint(w, PartitionSpec()), out_shardings=rows)
        found = targets.estimate(targets.compiled(whole.lower(x, w)), target, steps=3_600)
    assert found["memory"]["arguments"] == 2 * (64 * 128 + 128 * 256 // 8)
    assert found["collectives"]["all-gather"]["number"] == 1
    assert found["collectives"]["all-gather"]["bytes"] == 7 * 2 * 128 * 256 // 8
    least = 2 * (64 * 128 + 128 * 256 + 64 * 256)
    assert least <= found["bytes"] <= 3 * least
    assert found["hours"] == pytest.approx([ms / 1e3 for ms in found["step_ms"]])


def test_the_command(target, tmp_path, capsys):
    path = tmp_path / "tiny.py"
    path.write_text(CONFIG)
    arguments = [f"--config={path}", "--target=h200x8", "--config.batch_size=64", "--config.precision=mixed"]
    assert summarize.main([*arguments, "--config.mesh.fsdp=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["target"]
    assert found["mesh"] == {"data": 1, "fsdp": 8} and found["card"] == "NVIDIA H200"
    assert found["floor_ms"] > 0 and found["hours"] and found["collectives"]["all-gather"]["number"]
    assert summarize.main(arguments) == 0
    text = capsys.readouterr().out
    assert "8 x NVIDIA H200, mesh data=8, fsdp=1" in text and "1.44 to 1.79 times the floor" in text
