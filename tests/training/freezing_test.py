"""`optimizer.freeze`: what stays exactly as it is, counts for nothing, is printed, and what is refused."""

import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from equivit import logical
from equivit.models import zoo
from equivit.objectives.objective import Objective, averaged
from equivit.training import freezing
from equivit.training.run import resuming
from tests.training import tiny
from tests.training.state_test import mesh_of

# The first of two stacked blocks and, but for its bias, what comes before them; the last pattern that matches decides.
FREEZE = ("embed.*", "blocks.0.*", "!embed.bias")
FROZEN = {"embed.kernel", "blocks.0.linear.kernel", "blocks.0.linear.bias"}


def options(name, freeze=FREEZE):
    """Clipping, decay of everything that may have it, and averages that move fast."""
    optimizer = dict(name=name, weight_decay=0.5, clip=0.01, freeze=freeze)
    return tiny.config(optimizer=optimizer, objective=dict(ema=0.7))


@functools.cache
def trained(name, freeze=FREEZE):
    """Names to arrays before and after three steps: parameters, averages, moments; and the last metrics."""
    mesh = mesh_of(1, 1)
    with jax.set_mesh(mesh):
        run = tiny.program(options(name, freeze), mesh)
        first = jax.device_get(run.init({}))
        after, metrics = tiny.run(run, mesh, 3)
    tables = logical.names(run.module)

    def named(arrays):
        return {str(tables[k][i]): np.asarray(a)[i] for k, a in arrays.items() for i in np.ndindex(tables[k].shape)}

    part = after.optimizer["adam"].mu if "adam" in after.optimizer else after.optimizer["momentum"].trace
    arrays = dict(first=first.arrays, last=after.arrays, average=after.extra["ema"], moment=part)
    return SimpleNamespace(**{k: named(jax.device_get(v)) for k, v in arrays.items()}, metrics=metrics, program=run)


@pytest.mark.parametrize("name", ["lamb", "sgd"])
def test_what_is_frozen_stays_to_the_last_bit(name):
    """Though it shares a leaf with what is trained: no update, no average that rounds, no moment, no decay in one."""
    found = trained(name)
    assert found.metrics["good"] and found.first.keys() > FROZEN
    for tensor, before in found.first.items():
        still = np.array_equal(before, found.last[tensor])
        assert still == (tensor in FROZEN), tensor
        if tensor in found.average:
            assert np.array_equal(before, found.average[tensor]) == (tensor in FROZEN), tensor
            assert (found.moment[tensor] == 0).all() == (tensor in FROZEN), tensor
    assert "embed.kernel" not in found.moment and "blocks.0.linear.kernel" in found.moment  # of a stack it has zeros


def test_frozen_gradients_are_in_no_norm():
    """Without decay and momentum, the first update is the rate times the clipped gradient."""
    mesh, rate = mesh_of(1, 1), 0.1
    for clip in (1e-3, 1e9):
        config = options("sgd")
        config.optimizer.update(weight_decay=0.0, momentum=0.0, clip=clip)
        with jax.set_mesh(mesh):
            run = tiny.program(config, mesh, lr=rate)
            first = jax.device_get(run.init({}))
            after, metrics = tiny.run(run, mesh, 1)
        change = [(np.asarray(after.trainable[k]) - first.trainable[k]).ravel() for k in first.trainable]
        moved = np.linalg.norm(np.concatenate(change).astype(np.float64)) / rate
        # Entries of about 0.1 change by some 1e-5, which float32 knows to 1e-3.
        np.testing.assert_allclose(moved, min(clip, metrics["grad_norm"]), rtol=1e-3)


def test_a_frozen_gradient_that_is_not_finite_does_no_harm():
    masks = {"a": np.array([[True], [False]])}
    found = freezing.masked({"a": np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)}, masks)
    np.testing.assert_array_equal(found["a"], [[1, 2], [0, 0]])


def test_averages_of_what_does_not_move_do_not_round():
    """0.99996 x + 0.00004 x is another number than x for most x."""
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    share = np.float32(1 - 0.99996)
    assert (share * values + (1 - share) * values != values).any()
    np.testing.assert_array_equal(averaged({"a": values}, {"a": values}, share)["a"], values)


def test_the_count_of_what_trains():
    count = {name: freezing.summary(objective(freeze), built()) for name, freeze in (("all", ()), ("part", FREEZE))}
    block, embed, head = 64 * 64 + 64, 16 * 64, 64 * 8 + 8
    total = embed + 64 + 2 * block + head + 1
    assert count["all"] == f"All {total:,} parameters are trained."
    assert count["part"] == f"{total - embed - block:,} of {total:,} parameters are trained."


@functools.cache
def built():
    return trained("lamb").program.module


def objective(freeze, **model):
    config = tiny.config(optimizer=dict(freeze=freeze))
    config.model.update(model)
    return Objective(config)


@pytest.mark.parametrize(
    ("name", "options", "frozen"),
    [
        ("vit_pico16", {}, ["position.table"]),
        ("octic_vit_pico16", {}, [f"position.{name}" for name in ("A1", "A2", "B1", "B2", "E1", "E2")]),
        ("vit_pico16", dict(position="sincos"), []),
        ("swin_t", {}, []),  # relative positions of each block
    ],
    ids=["plain", "octic", "fixed", "swin"],
)
def test_positions(name, options, frozen):
    tables = logical.tensors(zoo.abstract(name, **options))
    rule = freezing.rule(objective(("{positions}",)), tables)
    assert sorted(t.name for table in tables.values() for t in table.flat if rule(t).frozen) == frozen


@pytest.mark.parametrize(
    ("freeze", "frozen"),
    [
        (("blocks.*", "!*", "blocks.*"), ("blocks",)),
        (("{positions}", "!*", "{positions}"), ("position",)),
        (("{first_2}", "!{first_1}", "{first_0}"), ("patch_embed", "position", "prefix", "blocks.1")),
    ],
)
def test_a_pattern_that_occurs_again_decides_again(freeze, frozen):
    tables = logical.tensors(zoo.abstract("vit_pico16", depth=3))
    rule = freezing.rule(objective(freeze), tables)
    tensors = [tensor for table in tables.values() for tensor in table.flat]
    assert [t.name for t in tensors if rule(t).frozen] == [t.name for t in tensors if t.name.startswith(frozen)]


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (("head.*", "blocs.1.*"), r"optimizer.freeze: 'blocs.1.\*' matches no parameter; near are 'blocks\.\*"),
        (("*", "!haed.kernel"), "optimizer.freeze: 'haed.kernel' matches no parameter; near are 'head.kernel'"),
        (("zzz",), "optimizer.freeze: 'zzz' matches no parameter; there are such as '"),
        (("*",), r"optimizer.freeze=\('\*',\) leaves nothing to train; except some, as in '\*,!head.\*'"),
        (("*", "!*.{replaced}.*"), "no block of vit_ti16 is replaced; say which are by model.replaced"),
    ],
)
def test_what_is_refused(freeze, message):
    with pytest.raises(ValueError, match=message) as raised:
        freezing.rule(objective(freeze), logical.tensors(built()))
    assert "\n" not in str(raised.value)


def test_a_run_goes_on_with_what_it_trains(tmp_path):
    """A mask within a leaf would not be seen in the shapes of a checkpoint."""
    before, after = (options("lamb", freeze) for freeze in (FREEZE, ("embed.*",)))
    with pytest.raises(ValueError, match="optimizer.freeze=.*this setting must not change; give that value"):
        resuming.check(tmp_path, after, before)
