"""Rounding in low precision: the residual stream keeps what the blocks add to it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, models, precision, testing
from equivit.layers import dense
from equivit.layers.batch_stats import recording
from equivit.layers.stack import used
from equivit.models import decoders, zoo
from tests.drawing import normal

SMALL = dict(width=96, depth=4, num_heads=3, patch_size=8, image_size=(32, 48), num_classes=None)
MODELS = {
    "plain": ("vit_ti16", {}),
    "octic": ("octic_vit_ti16", dict(family="D8")),
    "flip": ("flip_vit_ti16", dict(family="D2")),
    "jumbo": ("jumbo_vit_ti16", dict(jumbo=2)),
    "octic_jumbo": ("octic_jumbo_vit_ti16", dict(family="D8", jumbo=2)),
}
KINDS = [*MODELS, "decoder"]


@functools.cache
def build(kind) -> nnx.Module:
    """Random parameters, but layer scales of 1e-4 as a run begins, where there are any."""
    if kind == "decoder":
        encoder = zoo.configuration("vit_ti16", **SMALL)
        config = decoders.MaskedAutoencoderConfig(encoder, decoder_width=96, decoder_depth=4, decoder_heads=3)
        model = jax.eval_shape(lambda: config.build(nnx.Rngs(0)).decoder)
    else:
        name, options = MODELS[kind]
        model = models.abstract(name, **{**SMALL, **options})
    model = testing.randomise(model, jax.random.key(0))
    scales = {name: a for name, a in logical.take(model).items() if re.search(r"\.scale[123]\.", name)}
    assert bool(scales) == (kind != "decoder")
    return logical.put(model, {name: np.full_like(a, 1e-4) for name, a in scales.items()})


@functools.partial(jax.jit, static_argnums=0)
def added(kind, model, x):
    """The sum of all blocks' additions to the residual stream."""
    if kind == "decoder":
        return model.blocks(x)[0] - x
    x, layout = model.embed(x)
    return jax.tree.map(jnp.subtract, model.trunk(x, layout)[0], x)


def cosine(a, b) -> float:
    a, b = (np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(x)]) for x in (a, b))
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_blocks_add_is_kept(kind):
    """In bfloat16 throughout most of it is lost where layer scales are 1e-4: a change of x below x / 512 is none."""
    x = normal(2, 25, 96) if kind == "decoder" else normal(2, 32, 48, 3)
    exact = added(kind, build(kind), x)
    mixed = added(kind, precision.cast(build(kind), "mixed"), x)
    assert {leaf.dtype for leaf in jax.tree.leaves(mixed)} == {jnp.dtype("float32")}
    found = cosine(mixed, exact)
    print(f"{kind}: cosine {found:.6f}")
    assert found > 0.999
    if kind != "decoder":
        assert cosine(added(kind, precision.cast(build(kind), "bfloat16"), x), exact) < 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_factors_of_products_are_rounded_and_nothing_else(kind):
    model = build(kind)
    arrays = {kind: logical.take(precision.cast(model, kind)) for kind in ("mixed", "float16")}
    for leaf, table in logical.tensors(model).items():
        before, product = logical.take(model)[leaf], table.flat[0].product
        assert arrays["mixed"][leaf].dtype == (jnp.bfloat16 if product else jnp.float32), leaf
        assert arrays["float16"][leaf].dtype == (jnp.float16 if product else jnp.float32), leaf
        assert product == (leaf.split(".")[-1] in ("weight", "kernel", "lines", "planes") and is_map(leaf)), leaf
        assert logical.take(precision.cast(model, "float32"))[leaf].dtype == before.dtype


def is_map(leaf) -> bool:
    """Lines and planes belong to maps, norms, scales and positions alike."""
    return not any(part.startswith(("norm", "scale", "position")) for part in leaf.split("."))


@pytest.mark.parametrize("family", ["plain", "D8"])
def test_hidden_fields_stay_low_and_gradients_are_those_of_the_masters(family):
    """The hidden field of an MLP is what its kernels see; gradients arrive in float32, close to the exact ones."""
    name = "vit_ti16" if family == "plain" else "octic_vit_ti16"
    options = SMALL | dict(depth=1, num_classes=5, layer_scale=1.0, family=family)
    model = testing.randomise(models.abstract(name, **options), jax.random.key(0))
    block = jax.eval_shape(lambda model: precision.cast(model, "mixed").blocks[0], model)
    x, _ = jax.eval_shape(lambda model: model.embed(np.zeros((1, 32, 48, 3), np.float32)), model)
    assert jax.eval_shape(lambda b, x: b.mlp.fc1(b.norm2(x)), block, x).dtype == jnp.bfloat16
    images = normal(4, 32, 48, 3)

    @functools.partial(jax.jit, static_argnums=1)
    def gradient(arrays, kind):
        return jax.grad(lambda a: jnp.square(precision.cast(logical.put(model, a), kind)(images)).sum())(arrays)

    exact, mixed = (gradient(logical.take(model), kind) for kind in ("float32", "mixed"))
    assert {a.dtype for a in mixed.values()} == {jnp.dtype("float32")}
    assert cosine(mixed, exact) > 0.999


CONVOLUTIONS = dict(widths=(4, 4, 6, 8, 12), depths=(1, 1, 2, 1, 1), neck_widths=(10, 9), head_channels=4)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_ti16", SMALL),
        ("octic_jumbo_vit_ti16", SMALL | dict(family="D8", jumbo=2, dropout=0.1)),
        ("efficientvit_b0", CONVOLUTIONS | dict(num_classes=None)),
    ],
)
def test_a_dropped_branch_keeps_the_type_of_the_stream(name, options):
    """In a scan, which wants one type throughout; the rates of its blocks are float32."""
    model, x = models.abstract(name, **options, drop_path=(0.0, 0.1)), jax.ShapeDtypeStruct((2, 32, 48, 3), "float32")
    key = jax.eval_shape(lambda: jax.random.key(0))
    for kind, stream in (("bfloat16", "bfloat16"), ("mixed", "float32")):
        run = recording()(lambda m, x, key, kind=kind: precision.cast(m, kind).features(x, key=key, train=True))
        assert jax.eval_shape(run, model, x, key).patches.values.dtype == stream


@pytest.mark.parametrize("name", dense.ACTIVATIONS)
def test_slopes_of_large_values_are_finite_in_float16(name):
    """The square of 300 is beyond 65504."""
    slope = jax.grad(lambda x: dense.ACTIVATIONS[name](x).astype(jnp.float32).sum())
    np.testing.assert_array_equal(slope(jnp.asarray([300.0, -300.0], jnp.float16)), [1, 0])


def test_an_unknown_precision_is_refused():
    with pytest.raises(
        ValueError, match="precision='mix' is not one of float32, mixed, bfloat16, float16; the nearest"
    ):
        precision.cast(build("plain"), "mix")


ROUNDED = {"unrolled": ("vit_ti16", dict(unroll=True)), "scanned": ("octic_vit_ti16", dict(family="D8"))}


@functools.cache
def slopes(which, rounded=lambda module: module):
    """Return the gradient with respect to the parameters before rounding, and the logits."""
    name, options = ROUNDED[which]
    options |= dict(depth=2, num_classes=5)
    model = testing.randomise(models.abstract(name, **SMALL | options), jax.random.key(0))

    # Otherwise XLA may leave out a rounding in one program and not in the other; where depends on the processor.
    @functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def both(arrays, images):
        def loss(arrays):
            logits = rounded(logical.put(model, arrays))(images)
            return jnp.sin(logits.astype(jnp.float32)).sum(), logits

        return jax.grad(loss, has_aux=True)(arrays)

    return both(logical.take(model), normal(2, 32, 48, 3))


@pytest.mark.parametrize("kind", ["mixed", "bfloat16"])
@pytest.mark.parametrize("which", ROUNDED)
def test_parameters_rounded_where_they_are_used_are_those_rounded_at_once(which, kind):
    rules = functools.partial(used, use=precision.AtUse(kind)), functools.partial(precision.cast, precision=kind)
    found, expected = (slopes(which, rule) for rule in rules)
    assert found[1].dtype == expected[1].dtype
    np.testing.assert_array_equal(found[1], expected[1])
    assert cosine(found[0], expected[0]) > 1 - 1e-12  # sums of gradients in another order
    assert cosine(slopes(which)[0], expected[0]) < 1 - 1e-5  # not rounded


def test_no_second_copy_of_all_parameters_is_made():
    """In a scan forward and backward: no array in bfloat16 has the axis of the blocks."""
    model = models.abstract("vit_ti16", **SMALL | dict(depth=7, num_classes=5))

    def stacked(rounded):
        def loss(model, images):
            return rounded(model)(images).astype(jnp.float32).sum()

        text = jax.jit(jax.grad(loss)).lower(model, jnp.zeros((2, 32, 48, 3))).as_text()
        return set(re.findall(r"tensor<7x(?:\d+x)+bf16>", text))

    width = model.config.width
    weights = {f"tensor<7x{width}x{n * width}xbf16>" for n in (1, 3, 4)} | {f"tensor<7x{4 * width}x{width}xbf16>"}
    assert not weights & stacked(functools.partial(used, use=precision.AtUse("mixed")))
    assert weights <= stacked(functools.partial(precision.cast, precision="mixed"))
