"""The counter on cases worked out by hand, and the figures of octic and flip ViTs."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
from absl.testing import absltest, parameterized
from flax import nnx
from jax.experimental import pallas as pl

from equivit import costs, kernels
from equivit.costs import Cost
from equivit.kernels.attention import attend
from equivit.layers import dense, isotypic
from equivit.layers.depthwise_conv import depthwise_conv
from equivit.models import zoo
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC

# What the official implementations have and their counter gives: M parameters, G multiply-adds.  The octic figures are
# counted with fused attention, the flip ones unfused.  The last four octic rows are those of the octic paper's Table 2.
FIGURES = (
    ("vit_l16", {}, 304.37, 61.78),
    ("octic_vit_l16", {"family": "H8"}, 171.32, 37.68),
    ("octic_vit_l16", {"family": "I8"}, 172.11, 37.84),
    ("octic_vit_l16", {"family": "D8"}, 39.85, 13.51),
    ("vit_h14", {}, 632.13, 167.78),
    ("octic_vit_h14", {"family": "H8"}, 355.78, 102.26),
    ("octic_vit_h14", {"family": "I8"}, 357.01, 102.57),
    ("octic_vit_h14", {"family": "D8"}, 81.54, 36.57),
    ("octic_vit_l16", {"family": "I8", "invariant": "polynomial"}, 175.52, 38.5),
    ("octic_vit_h14", {"family": "I8", "invariant": "polynomial"}, 362.33, 104.0),
    ("octic_vit_l16", {"family": "D8", "invariant": "linear"}, 39.20, 13.5),
    ("octic_vit_h14", {"family": "D8", "invariant": "linear"}, 80.51, 36.6),
    ("flip_vit_l16", {"family": "H2"}, 228.32, 47.03),
    ("flip_vit_l16", {"family": "D2"}, 152.24, 32.20),
    ("flip_vit_h14", {"family": "H2"}, 474.19, 127.64),
    ("flip_vit_h14", {"family": "D2"}, 316.15, 87.31),
)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def linear(x, w):
    with jax.named_scope("linear"):
        return x @ w


def with_rule(function):
    """A function with a custom derivative, which needs some rule to be traced."""
    if isinstance(function, jax.custom_jvp):
        function.defjvp(lambda primals, tangents: (linear(*primals), linear(*primals)))
    else:
        function.defvjp(lambda *primals: (linear(*primals), primals), lambda primals, gradient: primals)
    return function


class CountTest(parameterized.TestCase):
    def check(self, counted, **expected):
        """Exactly these costs, nothing elsewhere, and no doubt."""
        self.assertEqual(counted.kinds, {kind: expected.get(kind, Cost()) for kind in costs.KINDS})
        self.assertEmpty(counted.notes)

    def test_product_with_batch_axes(self):
        counted = costs.count(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), array(5, 2, 3), array(5, 3, 4))
        self.check(counted, other=Cost(5 * 2 * 3 * 4))

    def test_elementwise_reductions_and_moves(self):
        counted = costs.count(lambda x: jnp.sqrt(jnp.flip(x).T + 1).sum(0).reshape(-1), array(6, 7))
        self.check(counted, other=Cost(0, 42 * (4 + 1 + 1)))

    def test_integers_comparisons_and_random_bits_are_free(self):
        def function(i, x):
            return i * 2 + 1, x[i], jnp.where(x > 0, x, 0), jax.random.bits(jax.random.key(0), (9,))

        self.check(costs.count(function, array(3, dtype=jnp.int32), array(8)))

    @parameterized.parameters(
        dict(stride=1, padding="SAME", groups=1, macs=2 * 8 * 8 * 10 * 3 * 5 * 4),
        dict(stride=1, padding="VALID", groups=1, macs=2 * 6 * 4 * 10 * 3 * 5 * 4),
        dict(stride=2, padding="SAME", groups=1, macs=2 * 4 * 4 * 10 * 3 * 5 * 4),
        dict(stride=1, padding="SAME", groups=2, macs=2 * 8 * 8 * 10 * 3 * 5 * 2),
    )
    def test_convolution(self, stride, padding, groups, macs):
        def convolve(x, kernel):
            return jax.lax.conv_general_dilated(
                x,
                kernel,
                (stride, stride),
                padding,
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
                feature_group_count=groups,
            )

        self.check(costs.count(convolve, array(2, 8, 8, 4), array(3, 5, 4 // groups, 10)), other=Cost(macs))

    def test_gradient_of_a_strided_convolution_multiplies_no_inserted_zeros(self):
        def total(x, kernel):
            y = jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return y.sum()

        arguments = array(1, 8, 8, 3), array(2, 2, 3, 5)
        forward = costs.count(total, *arguments).macs
        self.assertEqual(costs.count(jax.value_and_grad(total, argnums=(0, 1)), *arguments).macs, 3 * forward)

    @parameterized.product(k=(3, 9), padding=("zeros", "wrap"))
    def test_a_depthwise_convolution_counts_the_same_in_every_form(self, k, padding):
        """k k n C, and as much for each of the two gradients."""
        x, taps = array(2, 130, 5), array(k, k, 5)
        macs = 2 * k * k * 130 * 5
        convolve = functools.partial(depthwise_conv, grid=(10, 13), padding=padding)
        for implementation in ("auto", "cpu", "reference"):
            with kernels.using(implementation):
                self.check(costs.count(lambda *arrays: convolve(*arrays), x, taps), depthwise=Cost(macs))
                if padding == "wrap":
                    continue  # whose gradient is that of a larger map: XLA has no padding that goes around
                both = costs.count(lambda x, taps: jax.vjp(convolve, x, taps)[1](x), x, taps)
            self.assertEqual((both["depthwise"].macs, both.double_macs), (3 * macs, 6 * macs), implementation)

    def test_scan_counts_as_often_as_it_runs(self):
        def layers(x, ws):
            return jax.lax.scan(lambda x, w: (linear(x, w) + 1, None), x, ws)[0]

        counted = costs.count(layers, array(2, 3), array(7, 3, 3))
        self.check(counted, linear=Cost(7 * 2 * 3 * 3), other=Cost(0, 7 * 2 * 3))

    def test_scans_multiply(self):
        def layers(x, ws):
            return jax.lax.scan(lambda x, ws: jax.lax.scan(lambda x, w: (linear(x, w), None), x, ws), x, ws)[0]

        self.check(costs.count(layers, array(2, 3), array(5, 7, 3, 3)), linear=Cost(5 * 7 * 2 * 3 * 3))

    @parameterized.named_parameters(
        ("jit", jax.jit),
        ("remat", jax.checkpoint),
        ("vmap", jax.vmap),
        ("custom_jvp", lambda f: with_rule(jax.custom_jvp(f))),
        ("custom_vjp", lambda f: with_rule(jax.custom_vjp(f))),
    )
    def test_nested_functions_are_entered(self, transform):
        counted = costs.count(transform(linear), array(6, 2, 3), array(6, 3, 4))
        self.check(counted, linear=Cost(6 * 2 * 3 * 4))

    @parameterized.parameters((False, 3), (True, 4))
    def test_gradient_costs_three_forward_passes_and_recomputing_a_fourth(self, remat, times):
        def loss(ws, x, remat):
            def body(x, w):
                return jnp.sin(linear(x, w)), None

            return jax.lax.scan(jax.checkpoint(body) if remat else body, x, ws)[0].sum()

        arguments = array(5, 4, 4), array(2, 4)
        forward = costs.count(functools.partial(loss, remat=remat), *arguments)
        gradient = costs.count(functools.partial(jax.value_and_grad(loss, argnums=(0, 1)), remat=remat), *arguments)
        self.assertEqual(forward["linear"].macs, 5 * 2 * 4 * 4)
        self.assertEqual(gradient["linear"].macs, times * forward["linear"].macs)

    def test_the_most_expensive_branch_counts(self):
        def choose(i, x, w):
            return jax.lax.switch(i, [lambda x, w: x, lambda x, w: x @ w @ w, lambda x, w: x @ w], x, w)

        self.check(costs.count(choose, array(dtype=jnp.int32), array(2, 3), array(3, 3)), other=Cost(2 * 2 * 9))

    def test_of_a_choice_by_platform_the_default_counts(self):
        def choose(x):
            return jax.lax.platform_dependent(x, tpu=lambda x: x @ x @ x, default=lambda x: x @ x)

        self.check(costs.count(choose, array(3, 3)), other=Cost(27))

    def test_kernel_counts_for_its_grid(self):
        def kernel(x, y):
            y[...] = x[...] @ x[...] + 1

        spec = pl.BlockSpec((None, 8, 8), lambda i: (i, 0, 0))
        call = pl.pallas_call(kernel, out_shape=array(5, 8, 8), grid=(5,), in_specs=[spec], out_specs=spec)
        self.check(costs.count(call, array(5, 8, 8)), other=Cost(5 * 8**3, 5 * 64))

    def test_shard_map_counts_for_all_devices(self):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("data")
        mapped = jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
        self.check(costs.count(mapped, array(8, 3)), other=Cost(0, 24))

    def test_what_cannot_be_counted_is_noted(self):
        def repeat(x):
            return jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ x, x)

        counted = costs.count(lambda x: jnp.fft.fft(repeat(x)), array(3, 3))
        self.assertEqual(counted.macs, 27)
        self.assertEqual(
            counted.notes, ("the body of a while loop is counted once", "the primitive fft is not counted")
        )


class LayerTest(parameterized.TestCase):
    """The scopes that the layers open."""

    def test_scopes_survive_transformations(self):
        def loss(w, x):
            def body(x, w):
                return dense.gelu(linear(x, w)), None

            return jax.lax.scan(jax.checkpoint(body), x, w)[0].sum()

        counted = costs.count(jax.vmap(jax.grad(loss)), array(3, 5, 4, 4), array(3, 2, 4))
        self.assertEqual(counted["linear"].macs, 4 * 3 * 5 * 2 * 4 * 4)  # forward, again, and two products backward
        self.assertGreater(counted["activation"].operations, 0)
        self.assertEqual(counted["other"].macs, 0)

    def test_attention(self):
        counted = costs.count(attend, *[array(3, 4, 10, 8)] * 3)
        logits = 3 * 4 * 10 * 10
        self.assertEqual(counted["attention"].macs, 2 * logits * 8)
        # Largest, difference, exponential and sum for each logit; the queries scaled and the result divided.
        self.assertEqual(counted["attention"].operations, 4 * logits + 2 * 960)
        self.assertEqual(counted.fvcore, counted["attention"].macs)
        self.assertEqual(counted.fvcore_unfused - counted.fvcore, counted["attention"].operations)

    @parameterized.parameters(jnp.float32, jnp.bfloat16)
    def test_attention_and_its_gradient_multiply_three_times_as_much(self, dtype):
        def loss(q, k, v):
            return attend(q, k, v).astype(jnp.float32).sum()

        counted = costs.count(jax.grad(loss, (0, 1, 2)), *[array(3, 4, 10, 8, dtype=dtype)] * 3)
        self.assertEqual(counted["attention"].macs, 3 * 2 * 3 * 4 * 10 * 10 * 8)
        self.assertEmpty(counted.notes)

    def test_gelu_costs_eight_for_each_value(self):
        self.check_activation(costs.count(dense.gelu, array(3, 5)), 8 * 15)

    @parameterized.parameters((OCTIC, 3), (FLIP, 1))
    def test_gelu_of_a_field_adds_two_fast_transforms(self, group, additions):
        """24 additions for 8 values each way (octic ViTs, Appendix A), 2 for 2 in the flip group."""
        field = jax.eval_shape(lambda x: fields.from_dense(x, group), array(3, 16))
        self.check_activation(costs.count(isotypic.gelu, field), 48 * (8 + 2 * additions))

    def check_activation(self, counted, operations):
        self.assertEqual(counted["activation"].operations, operations)
        self.assertEqual(counted.fvcore, operations)

    @parameterized.parameters((OCTIC, 8 * 8 / 12), (FLIP, 2))
    def test_equivariant_linear_maps_save(self, group, factor):
        layer = isotypic.Linear(64, 128, group=group, rngs=nnx.Rngs(0))
        field = jax.eval_shape(lambda x: fields.from_dense(x, group), array(10, 64))
        self.assertEqual(costs.count(layer, field)["linear"].macs * factor, 10 * 64 * 128)


class FiguresTest(parameterized.TestCase):
    @parameterized.parameters(*FIGURES)
    def test_parameters_and_multiply_adds(self, name, overrides, parameters, giga):
        """Within 0.02 M, and 0.25 %: elementwise conventions of the layers differ, and papers round."""
        model = zoo.abstract(name, **overrides)
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
        counted = costs.count(lambda model, x: model(x), model, array(1, 224, 224, 3))
        figure = counted.fvcore_unfused if name.startswith("flip") else counted.fvcore
        chex.assert_trees_all_close(size / 1e6, parameters, atol=0.02, rtol=0)
        chex.assert_trees_all_close(figure / 1e9, giga, rtol=0.0025)
        self.assertEmpty(counted.notes)

    @parameterized.parameters(1, 3)
    def test_costs_grow_with_the_batch(self, batch):
        """Only positions and patch kernels, which are unfolded once, do not."""
        model = zoo.abstract("octic_vit_s16")
        one, several = (costs.count(lambda model, x: model(x), model, array(b, 224, 224, 3)) for b in (1, batch))
        self.assertEqual(several.macs, batch * one.macs)
        self.assertAlmostEqual(several.fvcore / (batch * one.fvcore), 1, delta=1e-3)


if __name__ == "__main__":
    absltest.main()
