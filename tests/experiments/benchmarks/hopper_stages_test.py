"""The stages of Hopper kernels: each variant leaves out what its name says, and nothing else."""

import jax
import pytest

from experiments.benchmarks import hopper_stages, hopper_tiles
from tests.experiments import scripts

PARTS = {"products": "wgmma_ref", "GELU": "exp2", "epilogue": "copy_smem_to_gmem", "loads": "copy_gmem_to_smem"}
MISSING = {"whole": set(), "no GELU": {"GELU"}, "no epilogue": {"GELU", "epilogue"}, "no products": {"products"}}
MISSING["loads alone"] = {"GELU", "epilogue", "products"}


def test_without_a_card_it_says_so_in_one_line(capsys):
    assert scripts.status(hopper_stages, []) == 1
    assert "there is no Hopper GPU on this machine" in capsys.readouterr().err


def parts(case):
    """The stages in the program of a kernel."""
    types = {name: jax.ShapeDtypeStruct(size, case.types[name]) for name, size in case.shapes.items()}
    text = str(jax.make_jaxpr(lambda types: hopper_tiles.call(case, case.tiles[0], types))(types))
    return {part for part, word in PARTS.items() if word in text}


@pytest.mark.parametrize("variant", hopper_stages.VARIANTS)
def test_a_variant_has_all_stages_but_one(variant):
    for case in list(hopper_stages.cases())[2:]:  # ViT-L
        whole = parts(case)
        assert {"products", "epilogue", "loads"} <= whole
        with hopper_stages.without(hopper_stages.VARIANTS[variant]):
            assert parts(case) == whole - MISSING[variant]
        assert parts(case) == whole


def test_least_times():
    """ViT-L, 64 images: 103 MB and 15 GFLOP of queries, keys and values; 128 MB and 20 GFLOP of the hidden field."""
    times = {case.key.split()[0]: hopper_stages.least(case) for case in list(hopper_stages.cases())[2:]}
    assert times == pytest.approx({"octic_mlp_gelu": 30.2, "octic_heads": 24.1}, abs=0.1)
