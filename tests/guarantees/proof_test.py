"""Proofs of small models with random parameters, and of deliberately wrong ones."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from equivit import models, testing
from equivit.guarantees import examine, proof
from equivit.guarantees.motions import Shift, Turn, shifts, turns
from equivit.models import zoo
from tests.models.backbones import BACKBONES

SMALL = dict(width=16, depth=3, num_heads=2, patch_size=4, mlp_dim=16, num_classes=5, in_channels=1)
SWIN = dict(width=8, depths=(2, 1), num_heads=(1, 2), patch_size=2, window_size=(2, 2), mlp_ratio=1.0, in_channels=1)


@functools.cache
def small(family, **options):
    name = "octic_vit_ti16" if family[1:] == "8" else "vit_ti16"
    return testing.randomise(models.abstract(name, family=family, **SMALL, **options), jax.random.key(0))


def inputs(size):
    return np.random.default_rng(0).normal(size=(proof.BATCH, *size, 1))


@functools.cache
def proven(family):
    """Two quarter turns and a mirror generate the group; maps of 2x3 tokens."""
    moves = (*map(Turn, ("e", "r", "m", "mr")), Shift((0, 4)), Shift((1, 0)))
    return proof.prove(small(family), inputs((8, 12)), moves, at="float64")


def test_an_invariant_model_is_symmetric_at_every_stage():
    """Fields in its first block, invariant tokens after it; rounding grows with depth, hence 1e-12 and no less."""
    found = proven("I8")
    assert [stage.name for stage in found.stages] == ["the embedding", "block 0", "block 1", "block 2", "the output"]
    assert [stage.group is not None for stage in found.stages] == [True, True, False, False, False]
    assert found.broken("octic") is None and found.broken("flip") is None
    rows = found.rows("octic")
    assert len(rows) == 4 and 0 < found.deviations[rows].max() < 1e-12
    np.testing.assert_allclose(found.correlations[rows], 1, atol=1e-12)
    at = found.broken("shift")
    assert at is not None and at.stage == "the embedding" and at.motion == "shift (1, 0)" and at.deviation > 0.1


@pytest.mark.parametrize("family", ["I8", "I2"])
def test_the_embedding_is_a_field_even_if_no_block_is_equivariant(family):
    found = proof.prove(small(family, equivariant_blocks=0), inputs((8, 12)), (Turn("e"), Turn("m")), at="float64")
    assert [stage.group is not None for stage in found.stages] == [True, False, False, False, False]
    assert found.broken("flip") is None and found.deviations[1, 0] > 0


def test_a_hybrid_model_breaks_at_its_first_dense_block():
    found = proven("H8")
    at = found.broken("octic")
    assert at is not None and at.stage == "block 1" and at.deviation > 0.1 and at.bound == 1e-10
    assert f"{at}" == (f"octic: {at.motion} deviates by {at.deviation:.1e} at block 1 in float64; the bound is 1e-10")
    assert found.deviations[1:4, :2].max() < 1e-12 < 0.1 < found.deviations[1:4, 2:].max(1).min()
    assert not found.deviations[0].any()  # the identity


def test_a_plain_model_breaks_at_its_embedding():
    """Only the positions break shifts by whole patches there, so its features correlate with the moved ones."""
    found = proven("plain")
    for symmetry in ("octic", "flip", "shift"):
        at = found.broken(symmetry)
        assert at is not None and at.stage == "the embedding"
    whole, part = found.correlations[4:, 0]
    assert 0.9 < whole < 0.9999 and part < 0.5


def test_one_wrong_channel_of_a_block_is_found(monkeypatch):
    """A constant in a channel of a field that must change its sign; the smallest that the bound does not allow."""
    model, right = small("I8"), proof.features
    run = functools.partial(proof.prove, model, inputs((8, 12)), (Turn("e"), Turn("r"), Turn("m")), at="float64")

    def wrong(size, block, channel, *arguments):
        grids = right(*arguments)
        values = np.array(grids[block].values)
        values[..., channel] += size * np.abs(values).max()
        grids[block] = dataclasses.replace(grids[block], values=values)
        return grids

    for channel, broken in ((0, False), (2, True), (15, True)):  # A1, A2, E
        monkeypatch.setattr(proof, "features", functools.partial(wrong, 1e-9, 1, channel))
        at = run().broken("octic")
        assert (at is not None) == broken
        assert at is None or at.stage == "block 0" and 1e-10 < at.deviation < 1e-8


def test_a_map_that_is_not_finite_or_of_another_shape_deviates(monkeypatch):
    model, right = small("I8"), proof.features

    def wrong(change, module, images):
        grids = right(module, images)
        if images.shape[1] == 12:  # the turned ones
            grids[2] = dataclasses.replace(grids[2], values=change(np.array(grids[2].values)))
        return grids

    for change in (lambda values: values * np.nan, lambda values: values[:, 1:]):
        monkeypatch.setattr(proof, "features", functools.partial(wrong, change))
        at = proof.prove(model, inputs((8, 12)), (Turn("e"), Turn("r")), at="float64").broken("octic")
        assert at is not None and (at.motion, at.stage, at.deviation) == ("element 'r'", "block 1", np.inf)


def test_an_adaptive_model_follows_shifts_to_the_bit():
    """Every residue of its stride and of its windows, in float64 and bfloat16."""
    options = dict(adaptive=True, image_size=(8, 16), num_classes=5, **SWIN)
    model = testing.randomise(models.abstract("swin_t", **options), jax.random.key(0))
    assert examine.stride(model, (8, 16)) == (4, 4) and model.config.period == (8, 8)
    moves = shifts((4, 4), model.config.period)
    assert len(moves) == 10
    found = proof.prove(model, inputs((8, 16)), (*moves, Turn("m")), at="float64")
    assert found.broken("shift") is None and not found.deviations[:-1].any()
    at = found.broken("flip")
    assert at is not None and at.deviation > 0.1


@pytest.mark.parametrize("backbone", BACKBONES.values(), ids=lambda one: one.name)
def test_every_backbone_has_stages(backbone):
    """By shapes alone: nothing is compiled."""
    model, size = zoo.abstract(backbone.name, **backbone.small), backbone.size
    image = jax.ShapeDtypeStruct((1, *size, model.config.in_channels), "float32")
    found = jax.eval_shape(proof._traced, model, image)
    assert len(found) == len(proof.stages_of(model)) == sum(blocks for blocks, *_ in backbone.stages) + 2
    assert found[-1].shape == (1, model.config.num_classes)
    assert found[0].values.ndim == 4 and found[-2].values.shape[-1] == backbone.stages[-1][1]


def test_what_proves_nothing_is_refused():
    model = small("plain")
    with pytest.raises(ValueError, match="symmetry: the embedding is NaN or infinite"):
        proof.prove(model, inputs((8, 12)) * np.nan, turns(square=False), at="float64")
    with pytest.raises(ValueError, match="takes series, not images"):
        examine.examine(models.abstract("patchtst", length=16, channels=1, num_classes=2))
