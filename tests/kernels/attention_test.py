"""Softmax attention on a TPU: where heads lie, the kernel in interpret mode against the reference, and what lowers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from equivit import kernels
from equivit.kernels.attention import arranged, attention, reference, tpu
from equivit.kernels.attention.lanes import LANES, Exchange, Piece, arrange
from equivit.kernels.isotypic_attention import isotypic_attention
from equivit.kernels.isotypic_attention import reference as isotypic_reference
from equivit.layers import dense, isotypic
from equivit.symmetry.fields import Isotypic
from equivit.symmetry.groups import FLIP, OCTIC
from experiments.benchmarks.field_shapes import REALISTIC
from tests.kernels.comparison import draw, value_and_gradient, widen

# Of the norm of a result.  Float32: a few roundings.  Bfloat16: weights, gradients of logits and results are rounded
# to 8 bits, and in the isotypic case what the first linear map makes too: up to 6e-3 was measured.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2.0**-7}
HEADS = {"ViT-S": 6, "ViT-B": 12}  # all others: 16, ViT-22B: 48
MODELS = [(shape, HEADS.get(shape.name, 48 if shape.channels == 768 else 16)) for shape in REALISTIC]


def distances(found, expected):
    found, expected = ([np.asarray(a, np.float32) for a in jax.tree.leaves(x)] for x in (found, expected))
    assert [a.shape for a in found] == [a.shape for a in expected]
    return [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(found, expected, strict=True)]


def assert_near(found, expected, dtype="float32"):
    assert max(distances(found, expected)) < TOLERANCES[dtype]


def octic_parts(channels):
    return (channels,) * 4 + (2 * channels,) * 2


@pytest.mark.parametrize("parts, heads", [
    *((octic_parts(shape.channels // heads), heads) for shape, heads in MODELS),
    *(((8 * shape.channels // heads,), heads) for shape, heads in MODELS),
    ((32, 32), 16), ((96,), 4), ((24,), 16), (octic_parts(10), 2),
    *((octic_parts(channels), heads) for channels in range(9, 17) for heads in range(8, 72, 8)),
], ids=str)  # fmt: skip
def test_no_two_channels_of_a_head_share_a_lane(parts, heads):
    arrangement = arrange(parts, heads)
    lanes = [arrangement.lanes(i, part) for i, part in enumerate(parts)]
    for i, (qkv_width, width) in enumerate(zip(arrangement.qkv_widths, arrangement.widths, strict=True)):
        for own, whole in ((lanes[i][:3], qkv_width), (lanes[i][3], width)):
            assert len(np.unique(own)) == own.size and own.max() < whole and whole % LANES == 0
            assert len(np.unique(own // LANES)) == whole // LANES  # no register is left unwritten
    in_registers = np.concatenate(lanes, axis=2) % arrangement.period
    np.testing.assert_array_equal(in_registers[0], in_registers[1])  # q and k
    np.testing.assert_array_equal(in_registers[2], in_registers[3])  # v and y
    for head in in_registers.reshape(-1, sum(parts)):
        assert len(np.unique(head)) == sum(parts)
    for sources, _ in arrangement.exchanges:  # each of them must have something in a register that they exchange
        for of in (slice(3), slice(3, 4)):  # what q, k and v have together, and y
            pieces = [piece for unit in arrangement.units for array in unit[of] for piece in array]
            taken = {(piece.source, piece.register) for piece in pieces if piece.source in sources}
            assert taken == {(i, register) for i in sources for _, register in taken}
    if len(parts) == 1:  # as a linear map makes it
        np.testing.assert_array_equal(lanes[0][:3].ravel(), np.arange(3 * heads * parts[0]))


def test_heads_of_vit_h_take_fewer_registers_than_each_of_q_k_and_v_apart():
    arrangement = arrange(octic_parts(10), 16)
    assert arrangement.qkv_widths == (512,) * 4 + (3 * 384,) * 2  # lines: 480 lanes are taken
    assert arrangement.widths == (256,) * 4 + (384,) * 2


@pytest.mark.parametrize(
    "parts, heads", [(octic_parts(8), 16), (octic_parts(10), 16), (octic_parts(14), 16), ((80,), 8)], ids=str
)
def test_the_pieces_of_a_unit_are_all_lanes_of_its_heads_and_none_of_others(parts, heads):
    arrangement = arrange(parts, heads)
    shared = LANES // arrangement.period
    lanes = [arrangement.lanes(i, part) for i, part in enumerate(parts)]
    for array, arrays in enumerate(([0, 1, 2],) * 3 + ([3],)):
        taken = {(i, lane) for i in range(len(parts)) for lane in lanes[i][arrays].ravel().tolist()}
        for unit, pieces in enumerate(arrangement.units):
            covered = [
                (from_source(arrangement, p.source, lane), p.register * LANES + lane + half)
                for p in pieces[array]
                for lane in range(p.start, p.stop)
                for half in range(0, LANES, arrangement.period)
            ]
            own = range(shared * unit, shared * (unit + 1))
            expected = {(i, lane) for i in range(len(parts)) for lane in lanes[i][array, own].ravel().tolist()}
            assert len(set(covered)) == len(covered) and set(covered) & taken == expected


def from_source(arrangement, source, lane):
    """The source from which a lane of a register comes, if it exchanges blocks with others."""
    for sources, block in arrangement.exchanges:
        if source in sources:
            return sources[0] + ((source - sources[0]) ^ lane // block % len(sources))
    return source


@pytest.mark.parametrize("count, block", [(4, 10), (2, 28)])
def test_an_exchange_moves_blocks_between_arrays_and_is_its_own_inverse(count, block):
    arrays, exchange = draw([(5, LANES)] * count, "float32"), Exchange(range(3, 3 + count), block)
    run = jax.jit(lambda *arrays: jnp.stack(tpu._exchanged(exchange, arrays)))
    found, lanes = run(*arrays), np.arange(LANES)
    for n, x in enumerate(found):
        np.testing.assert_array_equal(x, np.stack(arrays)[n ^ lanes // block % count, :, lanes].T)
    np.testing.assert_array_equal(run(*found), np.stack(arrays))


def test_what_cannot_be_arranged():
    assert arrange((136,), 8) is None  # more channels than lanes
    assert arrange((64,), 3) is None  # half a register is left
    assert arrange(octic_parts(15), 12) is None  # 120 of 128 lanes, in parts that do not fit between each other


# Batch, tokens, heads, channels: two heads in a register, a head over two registers, one key beside a full register.
@pytest.mark.parametrize(
    "batch, tokens, heads, d, dtype",
    [
        ((2, 1), 5, 2, 64, "float32"),
        ((1,), 7, 4, 96, "float32"),
        ((1,), 129, 2, 64, "float32"),
        ((1,), 129, 1, 128, "bfloat16"),
        ((), 1, 2, 64, "bfloat16"),
    ],
)
def test_values_and_gradients_are_the_reference_s(batch, tokens, heads, d, dtype):
    qkv, gradient = (
        draw([(*batch, tokens, 3 * heads * d)], dtype, scale=1.5),
        draw([(*batch, tokens, heads * d)], dtype, 1),
    )

    def both(op, arrays, gradient):
        return value_and_gradient(lambda qkv: (op(qkv, heads),), arrays, gradient)

    expected = both(reference.attention, widen(qkv), widen(gradient))
    found = both(functools.partial(attention, implementation="interpret"), qkv, gradient)
    assert {a.dtype for a in found} == {jnp.dtype(dtype)}
    if tokens == 1:  # one weight of 1, whatever q and k are
        width = heads * d
        assert_near((found[0], found[1][..., 2 * width :]), (expected[0], expected[1][..., 2 * width :]), dtype)
        assert not np.asarray(found[1][..., : 2 * width], np.float32).any()
    else:
        assert_near(found, expected, dtype)


def test_exact_logits_far_apart_stay_finite():
    qkv = 1e3 * draw([(1, 5, 384)], "float32")[0]
    found = value_and_gradient(lambda x: (attention(x, 2, implementation="interpret"),), (qkv,), (qkv[..., :128],))
    assert all(np.isfinite(a).all() for a in found)


def field_arguments(batch, tokens, heads, channels, dtype, group="D8"):
    """Field and maps, with biases, for `isotypic_attention`."""
    c, lines = heads * channels, 4 if group == "D8" else 2
    x, b, e = draw([(lines, *batch, tokens, c), (3 * c,), (c,)], dtype, scale=1.0)
    w, p = draw([(lines, c, 3 * c), (lines, c, c)], dtype, 1, c**-0.5)
    if group != "D8":
        return (x,), ((w,), b), ((p,), e)
    (y,) = draw([(2, *batch, tokens, 2 * c)], dtype, 2, 1.0)
    u, v = draw([(2 * c, 6 * c), (2 * c, 2 * c)], dtype, 3, (2 * c) ** -0.5)
    return (x, y), ((w, u), b), ((p, v), e)


# With eight heads, rows of an irrep exchange blocks, with 16 heads q, k and v of lines share registers; 18 rows of
# bfloat16 fill a register and a part of a second.
@pytest.mark.parametrize(
    "heads, channels, group, dtype, tokens",
    [
        (2, 8, "D8", "float32", 5),
        (2, 10, "D8", "bfloat16", 5),
        (2, 32, "D2", "float32", 5),
        (16, 10, "D8", "float32", 5),
        (8, 14, "D8", "bfloat16", 18),
    ],
)
def test_fields_are_the_reference_s(heads, channels, group, dtype, tokens):
    arguments = field_arguments((2,), tokens, heads, channels, dtype, group)
    leaves, structure = jax.tree.flatten(arguments)

    def both(op, leaves):
        def flat(*leaves):
            return op(*jax.tree.unflatten(structure, leaves), heads)

        return value_and_gradient(flat, leaves, draw([a.shape for a in arguments[0]], leaves[0].dtype.name, 3))

    found = both(functools.partial(isotypic_attention, implementation="interpret"), leaves)
    expected = both(isotypic_reference.isotypic_attention, widen(leaves))
    assert_near(found, expected, dtype)


@pytest.mark.parametrize("rows", [5, 32, 37])
def test_pairs_of_rows_are_selected_as_rows_are(rows):
    """In bfloat16, as integers; 37 rows fill two registers, and a part of a third."""
    arrays, piece = draw([(rows, LANES)] * 2, "bfloat16"), Piece(source=0, register=0, start=8, stop=40)

    def body(x, other, y):
        y[0], y[1] = (tpu._select(piece, 64, x[...], a) for a in (other[...], 0))

    shape = jax.ShapeDtypeStruct((2, rows, LANES), jnp.bfloat16)
    found = pl.pallas_call(body, out_shape=shape, interpret=True)(*arrays)
    x, other = map(np.asarray, arrays)
    inside = (np.arange(LANES) % 64 >= 8) & (np.arange(LANES) % 64 < 40)  # two heads share a register
    np.testing.assert_array_equal(found, np.stack([np.where(inside, x, other), np.where(inside, x, 0 * x)]))


def test_heads_in_the_natural_order_are_caught():
    """Without its own order for each row of irreps, the kernel mixes channels."""
    (x,), (y,) = draw([(4, 1, 5, 3 * 16)], "float32"), draw([(2, 1, 5, 3 * 32)], "float32", 1)

    def run(x, y, natural):
        arrangement, placed = arrange(octic_parts(8), 2), []
        for a, sources in ((x, range(4)), (y, (4, 5))):
            a = a.reshape(*a.shape[:-1], 3, a.shape[-1] // 3)
            rows = [jnp.pad(row, [(0, 0)] * 3 + [(0, LANES - row.shape[-1])]) for row in a]
            if not natural:
                maps = [arrangement.qkv_matrices(i, a.shape[-1]) for i in sources]
                rows = [jnp.einsum("...kc,kcw->...kw", row, matrices) for row, matrices in zip(a, maps, strict=True)]
            placed.append(jnp.stack([jax.lax.collapse(row, -2) for row in rows]))
        y = arranged.attend("interpret", octic_parts(8), 2, *placed)
        return y[0][:, ..., :16] if natural else y[0][..., arrangement.lanes(0, 8)[3].ravel()][:1]

    right, wrong = jax.jit(lambda x, y: (run(x, y, False), run(x, y, True)))(x, y)
    assert distances(wrong[:1], right)[0] > 0.1


def kernels_in(function, *arguments, platform="tpu"):
    with kernels.using("tpu" if platform == "tpu" else "auto"):
        traced = jax.jit(lambda *arrays: function(*arrays)).trace(*arguments)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    return re.findall(r'kernel_name = "(\w+)"', text)


def abstract(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


# ViT-L and ViT-H with their class tokens; with fewer heads, which lower the same way.
@pytest.mark.parametrize("tokens, heads, d", [(197, 4, 64), (257, 8, 80)])
def test_models_lower_with_kernels(tokens, heads, d):
    layer = jax.eval_shape(lambda: dense.Attention(heads * d, heads, rngs=nnx.Rngs(0)))
    layer, x = jax.tree.map(lambda a: abstract(*a.shape), (layer, abstract(8, tokens, heads * d)))
    both = jax.grad(lambda layer, x: jnp.square(layer(x).astype(jnp.float32)).sum(), argnums=1)
    assert kernels_in(both, layer, x) == ["attention", "attention_backward"]
    for platform in ("cpu", "cuda"):
        assert kernels_in(both, layer, x, platform=platform) == []
    text = jax.jit(lambda *a: both(*a)).trace(layer, x).lower(lowering_platforms=("tpu",)).as_text()
    assert "kernel_name" not in text  # "auto" takes kernels that have run on a chip


@pytest.mark.parametrize("group, lines", [(OCTIC, 4), (FLIP, 2)], ids=["octic", "flip"])
def test_so_do_layers_of_fields(group, lines):
    layer = jax.eval_shape(lambda: isotypic.Attention(128, 2, group=group, rngs=nnx.Rngs(0)))
    c = 128 // group.order
    planes = abstract(2, 8, 196, 2 * c) if group.planes else None
    layer, x = jax.tree.map(lambda a: abstract(*a.shape), (layer, Isotypic(abstract(lines, 8, 196, c), planes)))
    assert kernels_in(lambda layer, x: layer(x), layer, x) == ["attention"]
    assert kernels_in(lambda layer, x: layer(x), layer, x, platform="cpu") == []


@pytest.mark.parametrize("tokens, kernels", [(257, ["attention", "attention_backward"]), (336, [])])
def test_where_a_backward_kernel_does_not_fit_neither_is_there_a_forward_one(tokens, kernels):
    """ViT-H: what the forward kernel keeps has its channels where XLA is slow to differentiate."""
    layer = jax.eval_shape(lambda: isotypic.Attention(1280, 16, group=OCTIC, rngs=nnx.Rngs(0)))
    layer, x = jax.tree.map(
        lambda a: abstract(*a.shape), (layer, Isotypic(abstract(4, 8, tokens, 160), abstract(2, 8, tokens, 320)))
    )
    squares = jax.grad(lambda layer, x: sum(jnp.square(y).sum() for y in jax.tree.leaves(layer(x))))
    assert kernels_in(lambda layer, x: layer(x), layer, x) == ["attention"]
    assert kernels_in(squares, layer, x) == kernels


@pytest.mark.parametrize("lanes, tokens, backward, expected", [
    ((3840, 1280), 257, True, 2),  # ViT-H
    ((4352, 1792), 257, False, 2),  # octic ViT-H
    ((4352, 1792), 257, True, 1),
    ((4352, 1792), 320, True, 1),
    ((4352, 1792), 336, False, 2),
    ((4352, 1792), 336, True, None),
    ((4352, 1792), 352, False, None),
])  # fmt: skip
def test_images_that_the_kernel_holds(lanes, tokens, backward, expected):
    assert tpu.buffers(jnp.bfloat16, tokens, lanes, backward) == expected
    assert tpu.buffers(jnp.int8, tokens, lanes, backward) is None


def test_one_image_of_results_at_a_time(monkeypatch):
    monkeypatch.setattr(tpu, "buffers", lambda *_, **__: 1)
    qkv, gradient = draw([(3, 6, 384), (3, 6, 128)], "float32")  # a shape of its own: programs are cached

    def both(op):
        return value_and_gradient(lambda qkv: (op(qkv, 2),), (qkv,), (gradient,))

    assert_near(both(functools.partial(attention, implementation="interpret")), both(reference.attention))


@pytest.mark.parametrize("family", ["plain", "D8"])
def test_layers_are_the_same_with_the_kernel(family):
    """Heads, columns and biases of the layers are those that the kernel takes them for."""
    if family == "plain":
        layer = jax.eval_shape(lambda: dense.Attention(128, 2, rngs=nnx.Rngs(0)))
        x = draw([(2, 7, 128)], "float32")[0]
    else:
        layer = jax.eval_shape(lambda: isotypic.Attention(128, 2, group=OCTIC, rngs=nnx.Rngs(0)))
        x = Isotypic(*draw([(4, 2, 7, 16), (2, 2, 7, 32)], "float32"))
    leaves, structure = jax.tree.flatten(layer)
    layer = jax.tree.unflatten(structure, draw([a.shape for a in leaves], "float32", 1, 0.2))

    def both(layer, x):
        with kernels.using("interpret"):
            found = layer(x)
        return found, layer(x)

    assert_near(*jax.jit(both)(layer, x))


def test_eight_devices_and_vmap_equal_one():
    (qkv,) = draw([(8, 3, 384)], "float32")
    op = functools.partial(attention, heads=2, implementation="interpret")
    expected = jax.jit(functools.partial(reference.attention, heads=2))(qkv)
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        assert "shard_map" in str(jax.make_jaxpr(op)(qkv))
        batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        assert_near(jax.jit(op, in_shardings=batch)(qkv), expected)
        assert_near(jax.jit(op)(qkv[:6]), expected[:6])  # the mesh does not divide 6: plain
        field = field_arguments((6,), 3, 2, 8, "float32")
        with_kernel = functools.partial(isotypic_attention, heads=2, implementation="interpret")
        plain = functools.partial(isotypic_reference.isotypic_attention, heads=2)
        assert_near(*jax.jit(lambda *a: (with_kernel(*a), plain(*a)))(*field))
    assert_near(jax.jit(jax.vmap(op))(qkv), expected)
    assert op(qkv[:0]).shape == (0, 3, 128)


def test_what_has_no_kernel_runs_without_or_is_named():
    for heads, d, dtype in ((3, 64, "float32"), (2, 64, "float16"), (1, 136, "float32")):
        (qkv,) = draw([(1, 5, 3 * heads * d)], dtype)
        np.testing.assert_array_equal(attention(qkv, heads), reference.attention(qkv, heads))
        with pytest.raises(ValueError, match=rf"attention: implementation='tpu' has no kernel for {dtype}\[1, 5, "):
            attention(qkv, heads, implementation="tpu")
    large = abstract(1, 4096, 3 * 1024)
    with pytest.raises(ValueError, match="implementation='interpret' has no kernel for bfloat16"):
        jax.eval_shape(functools.partial(attention, heads=16, implementation="interpret"), large)
    with pytest.raises(ValueError, match="attention: implementation='fast' is not one of 'auto', 'reference', 'xla'"):
        attention(qkv, 1, implementation="fast")
    with pytest.raises(ValueError, match=r"qkv \(1, 5, 408\) must be \[\*B, N, 3 H d\]; heads=5 needs multiples of 15"):
        attention(qkv, 5)
    arguments = field_arguments((1,), 5, 2, 20, "float32")
    with pytest.raises(ValueError, match=r"isotypic_attention: implementation='tpu' has no kernel for .* and 2 heads"):
        isotypic_attention(*arguments, 2, implementation="tpu")
