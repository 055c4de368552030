"""The search for the Hopper kernels' tiles, as far as a machine without a card can try it."""

import functools
import json
import types

import jax
import pytest

from equivit.kernels.hopper import best
from experiments import machine
from experiments.benchmarks import hopper_tiles
from experiments.benchmarks.field_shapes import REALISTIC
from tests.experiments import scripts

SHAPES = {shape.name: shape for shape in REALISTIC}


def test_without_a_card_it_says_so_in_one_line(capsys):
    assert scripts.status(hopper_tiles, []) == 1
    assert capsys.readouterr().err == (
        "error: hopper_tiles: there is no Hopper GPU on this machine; run it where there is one.\n"
    )


@pytest.mark.parametrize("model", hopper_tiles.MODELS)
def test_tiles_lower_for_cuda(model):
    """Lowering also counts the shared memory of a block.  For ViT-H all tiles, else the widest, which fills it most."""
    for case in hopper_tiles.cases(SHAPES[model]):
        types = {name: jax.ShapeDtypeStruct(size, case.types[name]) for name, size in case.shapes.items()}
        assert case.tiles
        for tile in case.tiles if model == "ViT-H" else case.tiles[:1]:
            traced = jax.jit(functools.partial(hopper_tiles.call, case, tile)).trace(types)
            assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_the_fastest_tile_is_the_one_that_kernels_read(tmp_path, monkeypatch):
    rows = [dict(key="a 1", tile=[1, 2], microseconds=3.0), dict(key="a 1", tile=[2, 1], microseconds=2.0)]
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"main": {"tiles": hopper_tiles.fastest(rows)}}))
    monkeypatch.setattr(best, "PATH", path)
    best._table.cache_clear()
    assert best.tile("a", 1) == (2, 1) and best.tile("a", 2) is None
    best._table.cache_clear()


def test_what_a_card_has_measured_is_kept(tmp_path, monkeypatch):
    measured = []

    def measure(case, options, budget):
        measured.append(case.key)
        return [dict(key=case.key, tile=[1], microseconds=1.0, difference=0.0)]

    monkeypatch.setattr(hopper_tiles, "measure", measure)
    monkeypatch.setattr(hopper_tiles.dispatch, "hopper", lambda: True)
    monkeypatch.setattr(hopper_tiles.jax, "local_devices", lambda: [types.SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(machine, "device", lambda: dict(name=card))
    card, output = "one", f"--output={tmp_path}/tiles.json"
    assert hopper_tiles.main([output, "--model=ViT-L"]) == 0 and len(measured) == 4
    assert hopper_tiles.main([output, "--model=ViT-H", "--model=ViT-L"]) == 0 and len(measured) == 8
    assert len(json.loads((tmp_path / "tiles.json").read_text())["main"]["tiles"]) == 8
    card = "another"
    with pytest.raises(ValueError, match="has rows of one that this run does not measure"):
        hopper_tiles.main([output, "--model=ViT-L"])
    assert hopper_tiles.main([output, "--model=ViT-L", "--model=ViT-H"]) == 0 and measured[8:] == measured[:8]
