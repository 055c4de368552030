"""Stacks and logical tensors."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import kernels, logical, models
from equivit.layers import isotypic
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.batch_stats import recording
from equivit.layers.stack import Stack, captured, collecting
from equivit.symmetry.groups import OCTIC


class Toy(nnx.Module):
    """A block that adds a random number when it has a key."""

    def __init__(self, width, hidden, *, rngs):
        self.up = nnx.Param(jax.random.normal(rngs.params(), (width, hidden)))
        self.down = nnx.Param(jax.random.normal(rngs.params(), (hidden, width)))

    def __call__(self, x, layout=None, *, rate=0.0, phase=0, train=False, key=None):
        noise = 0 if key is None else jax.random.normal(key)
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...] + noise


def stack(**kwargs):
    runs = [(3, lambda r: Toy(4, 8, rngs=r)), (2, lambda r: Toy(4, 6, rngs=r))]
    return Stack(runs, rngs=nnx.Rngs(0), **kwargs)


X = jnp.linspace(-1, 1, 8).reshape(2, 4)
CLOSE = dict(rtol=1e-5, atol=1e-6)  # scanned and separate programs may round differently


def one_by_one(blocks, key=None):
    x, outputs = X, []
    for i in range(len(blocks)):
        x = blocks[i](x, key=None if key is None else jax.random.fold_in(key, i))
        outputs.append(x)
    return outputs


@pytest.mark.parametrize("key", [None, jax.random.key(1)], ids=["still", "random"])
@pytest.mark.parametrize("kwargs", [{}, {"remat": "full"}, {"remat": "dots"}, {"unroll": True}], ids=str)
def test_equals_its_blocks_one_after_the_other(kwargs, key):
    blocks = stack(**kwargs)
    expected = one_by_one(blocks, key)
    chex.assert_trees_all_close(blocks(X, key=key)[0], expected[-1], **CLOSE)
    y, seen = captured(lambda x, i, j: blocks(x, start=i, stop=j, key=key)[0], X, (1, 2, 4), 0, len(blocks))
    chex.assert_trees_all_close(y, expected[-1], **CLOSE)
    assert sorted(seen) == [1, 2, 4]
    for i, value in seen.items():
        chex.assert_trees_all_close(value, expected[i], **CLOSE)


def test_parts_compose():
    blocks, key = stack(), jax.random.key(2)
    x, _ = blocks(X, stop=2, key=key)
    x, _ = blocks(x, start=2, key=key)
    chex.assert_trees_all_close(x, blocks(X, key=key)[0], **CLOSE)


def test_replace_splits_and_regroups_runs():
    blocks = stack()
    other = Toy(4, 6, rngs=nnx.Rngs(9))
    changed = blocks.replace(1, other)
    assert changed.lengths == (1, 1, 1, 2)
    chex.assert_trees_all_equal(changed[1].up[...], other.up[...])
    assert changed.replace(1, blocks[1]).lengths == (3, 2)
    assert blocks.replace(2, other).lengths == (2, 3)  # joins the run after it
    chex.assert_trees_all_close(changed(X)[0], one_by_one(changed)[-1], **CLOSE)


def test_depth_costs_no_program():
    """The jaxpr of a deep stack has as many equations as that of a shallow one."""

    def equations(length):
        blocks = Stack([(length, lambda r: Toy(4, 8, rngs=r))], rngs=nnx.Rngs(0))
        return len(str(jax.make_jaxpr(lambda b, x: b(x)[0])(blocks, X)).splitlines())

    assert equations(48) == equations(2)


def test_index_out_of_range_is_refused():
    with pytest.raises(IndexError, match="there is no block 5; the blocks are 0 to 4"):
        stack()[5]
    with pytest.raises(ValueError, match="remat='some' is not one of"):
        stack(remat="some")


class Normed(nnx.Module):
    """A block with running statistics, that reports its rate and phase through what it adds."""

    def __init__(self, rngs):
        self.norm = BatchNorm(4)
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

    def __call__(self, x, layout=None, *, rate=0.0, phase=0, train=False, key=None):
        assert isinstance(phase, int)  # static
        return x + jnp.tanh(self.norm(x, train=train) @ self.weight[...]) * (1 + rate) * (-1) ** phase


RATES = np.linspace(0, 0.5, 7, dtype=np.float32)
WAYS = [{}, {"remat": "full"}, {"remat": "dots"}, {"unroll": True}]


def normed(**options):
    return Stack([(5, Normed), (2, Normed)], rngs=nnx.Rngs(0), **options)


def written_out(blocks, phases, rates=RATES):
    """Each block by itself, and the mean that each has recorded."""
    x, means, each = X, [], [blocks[i] for i in range(len(blocks))]
    for i, block in enumerate(each):
        x = block(x, rate=rates[i], phase=i % phases, train=True)
        means.append(block.norm.mean[...])
    return x, jnp.stack(means)


@pytest.mark.parametrize("kwargs", WAYS, ids=str)
@pytest.mark.parametrize("phases", [1, 2, 3])
def test_statistics_rates_and_phases(kwargs, phases):
    """Five blocks and two: periods of two and three blocks leave some over, and a captured block cuts a run."""

    @jax.jit
    @recording()
    def run(blocks):
        def apply(x, start, stop):
            return blocks(x, start=start, stop=stop, rates=RATES, phases=phases, train=True)[0]

        x, seen = captured(apply, X, (1,), 0, len(blocks))
        return x, seen, blocks

    x, seen, blocks = run(normed(**kwargs))
    expected, means = written_out(normed(), phases)
    chex.assert_trees_all_close(x, expected, **CLOSE)
    assert sorted(seen) == [1]
    found = jnp.stack([blocks[i].norm.mean[...] for i in range(7)])
    chex.assert_trees_all_close(found, means, **CLOSE)
    assert (jnp.abs(means).max(1) > 1e-3).all()


def test_statistics_come_out_of_parts_and_gradients():
    """Statistics change in the blocks that ran, and in no others; under a gradient, and without jit."""
    blocks, whole = normed(), normed()
    blocks(X, start=1, stop=4, train=True)
    moved = [bool((blocks[i].norm.mean[...] != 0).any()) for i in range(7)]
    assert moved == [False, True, True, True, False, False, False]

    @recording()
    def loss(weights, statistics):
        model = logical.put(whole, weights)
        return jnp.square(model(X, rates=RATES, train=True)[0]).sum(), logical.take_state(model)

    _, statistics = jax.jit(jax.grad(loss, has_aux=True))(logical.take(whole), None)
    _, means = written_out(whole, 1)
    found = jnp.concatenate([statistics["runs.0.norm.mean"], statistics["runs.1.norm.mean"]])
    chex.assert_trees_all_close(found, means, **CLOSE)


@pytest.mark.parametrize("kwargs", WAYS[:2], ids=str)
def test_one_block_after_the_other_is_the_whole(kwargs):
    """With its key, rate and statistics."""

    @jax.jit
    @recording()
    def run(key, alone, whole):
        x = X
        for i in range(len(alone)):
            x, _ = alone(x, start=i, stop=i + 1, rates=RATES, train=True, key=key)
        y, _ = whole(X, rates=RATES, train=True, key=key)
        return (x, y), (logical.take_state(alone), logical.take_state(whole))

    for found, expected in run(jax.random.key(3), normed(**kwargs), normed()):
        chex.assert_trees_all_close(found, expected, **CLOSE)


def test_a_single_block_may_change_the_shape():
    class Halving(Toy):
        def __call__(self, x, layout=None, **options):
            return super().__call__(x, **options)[..., ::2, :]

    blocks = Stack([(1, lambda r: Halving(4, 8, rngs=r)), (2, lambda r: Toy(4, 8, rngs=r))], rngs=nnx.Rngs(0))
    assert jax.eval_shape(lambda blocks: blocks(X)[0], blocks).shape == (1, 4)


def test_nothing_changes_when_nothing_trains():
    blocks = normed()
    blocks(X)
    assert not any(array.any() for name, array in logical.take_state(blocks).items() if name.endswith("mean"))


def test_a_block_that_makes_variables_is_refused():
    class Growing(Normed):
        def __call__(self, x, layout=None, **options):
            self.new = nnx.BatchStat(x.mean())
            return x

    with pytest.raises(ValueError, match=r"Growing created \['new'\] when called"):
        Stack([(2, Growing)], rngs=nnx.Rngs(0))(X)


@pytest.mark.parametrize("kwargs", WAYS, ids=str)
def test_one_pass_collects_from_every_block(kwargs):
    def collect(block, x):
        return {"moments": (x.mean(0), jnp.square(x).mean(0)), "weight": block.weight[...]}

    def fold(sums, index, block, x):
        return sums.at[index].add(x * (index + 1)) + 1

    blocks = normed(**kwargs)
    x, folded = jax.jit(lambda blocks: blocks(X, phases=2, fold=fold, carry=jnp.zeros((7, *X.shape))))(blocks)
    y, collected = jax.jit(lambda blocks: blocks(X, phases=2, **collecting(collect, 7, blocks[0], X)))(blocks)
    for result in (x, y):
        chex.assert_trees_all_close(result, blocks(X, phases=2)[0], **CLOSE)
    inputs = [X, *(blocks(X, phases=2, stop=i)[0] for i in range(1, 7))]
    expected = [collect(blocks[i], inputs[i]) for i in range(7)]
    for found, parts in zip(jax.tree.leaves(collected), zip(*map(jax.tree.leaves, expected), strict=True), strict=True):
        chex.assert_trees_all_close(found, jnp.stack(parts), **CLOSE)
    chex.assert_trees_all_close(folded, 7 + jnp.stack([(i + 1) * y for i, y in enumerate(inputs)]), **CLOSE)


def test_scanned_equals_unrolled_bit_for_bit():
    """From 0.11 on XLA fuses across neighbouring blocks that are written out, and their sums round once less."""
    run = jax.jit(lambda blocks: blocks(X, rates=RATES, phases=2)[0])
    tolerance = {} if jax.__version_info__ < (0, 11) else CLOSE
    chex.assert_trees_all_close(run(normed()), run(normed(unroll=True)), **{"rtol": 0, **tolerance})


def test_unrolled_stacks_only_gradients():
    """Nothing that is kept of a block becomes a part of a larger array: only the gradients of parameters are joined."""

    def counted(**options):
        blocks = stack(**options)
        gradient = jax.jit(jax.grad(lambda blocks: blocks(X)[0].sum())).lower(blocks).as_text()
        return [gradient.count(f"stablehlo.{op}") for op in ("concatenate", "while", "dynamic_update_slice", "pad")]

    assert counted(unroll=True) == [len(jax.tree.leaves(stack())), 0, 0, 0]
    assert counted()[1] > 0


def test_apart_no_block_is_a_part_of_an_array():
    """In a compiled program, for which an axis of length 1 is nothing, nothing is cut out of stacked parameters."""

    def slices(blocks):
        return jax.jit(lambda blocks: blocks(X)[0]).lower(blocks).compile().as_text().count(" slice(")

    assert slices(stack(unroll=True)) == 2 * 5 and slices(stack().unstacked()) == 0


@pytest.mark.parametrize("phases", [1, 2])
def test_apart_they_compute_the_same(phases):
    run = jax.jit(lambda blocks: blocks(X, rates=RATES, phases=phases)[0])
    chex.assert_trees_all_close(run(normed().unstacked()), run(normed()), **CLOSE)


def test_apart_they_can_share_runs_again():
    blocks, apart = stack(), stack().unstacked()
    assert apart.lengths == (1,) * 5
    again = Stack.from_blocks([apart[i] for i in range(5)])
    chex.assert_trees_all_equal(again, blocks)


def test_scanned_equals_unrolled_over_three_training_steps():
    """Parameters and statistics.  XLA takes the sums of gradients and statistics in another order inside a loop than
    outside, so that bits differ; in float64 that leaves 1e-12, where rounding in float32 would hide an error of 1e-5.
    """

    @jax.jit
    @recording()
    def step(blocks, x):
        def loss(weights):
            model = logical.put(blocks, weights)
            return jnp.square(model(x, rates=RATES, phases=2, train=True)[0]).mean(), logical.take_state(model)

        gradient, statistics = jax.grad(loss, has_aux=True)(logical.take(blocks))
        weights = {leaf: array - 0.1 * gradient[leaf] for leaf, array in logical.take(blocks).items()}
        return logical.put(blocks, weights | statistics)

    with jax.enable_x64(True):
        scanned, unrolled = (
            jax.tree.map(lambda a: a.astype(jnp.float64), normed(**kwargs)) for kwargs in ({}, dict(unroll=True))
        )
        for i in range(3):
            x = jax.random.normal(jax.random.key(i), (6, 4), jnp.float64)
            scanned, unrolled = step(scanned, x), step(unrolled, x)
        for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(unrolled), strict=True):
            chex.assert_trees_all_close(a, b, rtol=1e-12, atol=1e-12)


class Octic(nnx.Module):
    """Two scanned linear maps and one more."""

    def __init__(self):
        def make(rngs):
            return isotypic.Linear(16, 16, group=OCTIC, rngs=rngs)

        self.blocks = Stack([(2, make)], rngs=nnx.Rngs(0))
        self.head = make(nnx.Rngs(1))


def test_logical_names_and_shapes():
    tensors = logical.to_logical(Octic())
    shapes = {"A1": (2, 2), "A2": (2, 2), "B1": (2, 2), "B2": (2, 2), "E": (4, 4), "bias": (2,)}
    prefixes = ("blocks.0", "blocks.1", "head")
    assert {k: v.shape for k, v in tensors.items()} == {f"{p}.{n}": s for p in prefixes for n, s in shapes.items()}
    assert logical.stack_axes(Octic())["blocks.runs.0.lines"] == 2


def test_logical_tensors_are_slices_and_come_back():
    model = Octic()
    tensors = logical.to_logical(model)
    chex.assert_trees_all_equal(tensors["blocks.1.B1"], model.blocks[1].lines[2])
    skeleton = jax.eval_shape(lambda: model)
    again = logical.take(logical.from_logical(skeleton, tensors))
    chex.assert_trees_all_equal(again, logical.take(model))


@pytest.mark.slow
def test_rules_are_computed_per_slice():
    model = Octic()
    table, leaf = logical.tensors(model)["blocks.runs.0.lines"], logical.take(model)["blocks.runs.0.lines"]
    values = logical.per_tensor(table, leaf, lambda t: float(t.name == "blocks.1.A2") + len(t.shape))
    chex.assert_shape(values, (2, 4, 1, 1))
    np.testing.assert_array_equal(values[..., 0, 0], [[2, 2, 2, 2], [2, 3, 2, 2]])


@pytest.mark.parametrize("unroll", [True, False])
def test_operations_are_named_by_their_block_in_a_trace(unroll):
    """The backward pass has the names, too, although it traces the block again.  The body of a scan is a named call."""
    model = models.create("vit_ti16", width=16, depth=2, num_heads=2, patch_size=8, unroll=unroll)
    gradient = jax.jit(jax.grad(lambda model, images: model(images).sum()))
    text = gradient.lower(model, jnp.zeros((1, 8, 8, 3))).as_text(debug_info=True)
    names = {re.sub(r"(transpose|jvp)?[()]", "", name) for name in re.findall('"(.*?)"', text)}
    blocks = ("jit<lambda>/blocks.0/", "jit<lambda>/blocks.1/") if unroll else ("",)
    for part in ("attn/linear", "attn/attention", "mlp/linear"):
        for block in blocks:
            assert any(name.startswith(block + part) for name in names), (block, part)
    assert unroll or any(name.startswith("jit<lambda>/blocks.0-1/while/body") for name in names)


def compilations(function):
    """The number of programs that XLA compiles during a call."""
    found = []

    def note(event, duration, **_):
        found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        jax.block_until_ready(function())
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return found.count("/jax/core/compile/backend_compile_duration")


def test_eager_calls_compile_once():
    """Forward and gradient; the implementation of kernels is a part of what is kept."""
    blocks = stack()

    def run():
        return blocks(X, key=jax.random.key(0))[0]

    def gradient():
        return jax.grad(lambda blocks: blocks(X)[0].sum())(blocks)

    for function in (run, gradient):
        function()
        assert not compilations(function)
    with kernels.using("xla"):
        assert compilations(run)


def test_a_scanned_block_keeps_the_dtype():
    with pytest.raises(ValueError, match=r"Toy maps x, bfloat16\[2, 4\], to float32\[2, 4\]; .* cast x to the dtype"):
        stack()(X.astype(jnp.bfloat16))


@pytest.mark.parametrize("options", [dict(start=-1), dict(stop=6)], ids=str)
def test_a_part_lies_within_the_stack(options):
    with pytest.raises(IndexError, match="must lie between 0 and 5, the blocks"):
        stack()(X, **options)


def test_a_block_is_a_copy_that_is_written_back():
    blocks = stack()
    block = blocks[1]
    block.up[...] = jnp.zeros_like(block.up[...])
    assert blocks[1].up[...].any() and not blocks.replace(1, block)[1].up[...].any()
