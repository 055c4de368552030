"""`assert_equivariant` itself: what it lets pass, and what it says of functions and arguments that are none."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from equivit import models, testing
from equivit.symmetry import fields
from equivit.symmetry.groups import FLIP, OCTIC

IMAGES = np.random.default_rng(0).standard_normal((2, 4, 4, 3)).astype(np.float32)
FIELD = fields.from_dense(jnp.asarray(IMAGES.repeat(8, -1).reshape(2, 16, 24)), OCTIC)


def corner(x):
    """0 or 1: whether the corner is that of the upright images, which the group moves away."""
    return int((np.asarray(x)[..., 0, 0, 0] != IMAGES[..., 0, 0, 0]).any())


@pytest.mark.parametrize(
    "labels",
    [
        lambda x: jnp.array([1000 + 10 * corner(x), 1000]),
        lambda x: jnp.array([2**24 + corner(x)]),  # float32 does not tell them apart
        lambda x: jnp.array([not corner(x), True]),
        lambda x: (jnp.full(2, 1000.0), np.array([100 + corner(x)], np.int8)),
    ],
)
def test_integers_must_agree_exactly(labels):
    with pytest.raises(AssertionError, match=r"octic element '\w+': .* deviates by .*tol=0e\+00"):
        testing.assert_equivariant(labels, OCTIC, IMAGES)
    assert 0 < testing.assert_equivariant(labels, OCTIC, IMAGES, tol=1.0) <= 1
    assert testing.assert_equivariant(lambda x: jax.tree.map(jnp.ones_like, labels(x)), OCTIC, IMAGES) == 0


def test_labels_do_not_measure_the_deviation_of_what_is_beside_them():
    with pytest.raises(AssertionError, match="deviates by 1.00e-03"):
        testing.assert_equivariant(lambda x: (jnp.ones(1) + 1e-3 * corner(x), jnp.array([10**6])), OCTIC, IMAGES)


def test_tolerances_follow_the_type():
    for kind, gap in ((jnp.float32, 1e-4), (jnp.complex64, 1e-4), (jnp.bfloat16, 0.2)):
        with pytest.raises(AssertionError, match="deviates"):
            testing.assert_equivariant(lambda x, k=kind, g=gap: jnp.full(2, 1 + g * corner(x), k), OCTIC, IMAGES)
    testing.assert_equivariant(lambda x: jnp.full(2, 1 + 0.01 * corner(x), jnp.bfloat16), OCTIC, IMAGES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(fn=lambda x: None), r"output='invariant', so fn\(x\) must be an array, .*; there is None"),
        (dict(fn=lambda x: ()), r"fn\(x\) must be an array, .*; there is \(\)"),
        (dict(fn=lambda x: 0.5), r"fn\(x\) must be an array, .*; there is float 0.5"),
        (dict(fn=lambda x: True), r"fn\(x\) must be an array, .*; there is bool True"),
        (dict(fn=lambda x: [x, "a"]), r"fn\(x\) must be an array, .*; there is str 'a'"),
        (dict(fn=lambda x: x[:0]), r"fn\(x\) must be not empty, .* it is float32 \[0, 4, 4, 3\]"),
        (
            dict(output="field", output_grid=(4, 4)),
            r"fn\(x\) must be a field of octic, .*; it is float32 \[2, 4",
        ),
        (dict(fn=lambda x: 0.5, output="image"), r"fn\(x\) must be an array of images .*; it is float 0.5"),
        (dict(fn=lambda x: x[0, 0], output="image"), r"array of images .*; it is float32 \[4, 3\]"),
        (dict(fn=lambda x: FIELD, output="image"), r"array of images .*; it is a field of octic, \[2, 16, 24\]"),
        (dict(group="octic"), "group='octic' must be a group, FLIP or OCTIC of .*; the nearest is 'OCTIC'"),
        (dict(x=IMAGES.tolist()), r"input='image', so x must be an array of images .*; it is list \[\[\[\["),
        (dict(x=None), r"x must be an array of images .*; it is None"),
        (
            dict(input="field", grid=(4, 4)),
            r"input='field', so x must be a field of octic, .*float32 \[2, 4",
        ),
        (dict(input="field", grid=(4, 4), x=FIELD, group=FLIP), "must be a field of flip, .*; it is a field of octic"),
    ],
)
def test_what_is_no_function_of_such_things_is_told(arguments, message):
    arguments = dict(fn=lambda x: x, group=OCTIC, x=IMAGES) | arguments
    with pytest.raises(ValueError, match=message) as error:
        testing.assert_equivariant(**arguments)
    assert "\n" not in str(error.value) and len(str(error.value)) < 250


def test_a_structure_that_changes_is_told():
    with pytest.raises(AssertionError, match="octic element 'r': the output has the structure"):
        testing.assert_equivariant(lambda x: (x,) * (1 + corner(x)), OCTIC, IMAGES, tol=10.0)


def test_a_part_of_the_output_may_be_absent():
    testing.assert_equivariant(lambda x: {"cls": None, "mean": x.mean((1, 2))}, OCTIC, IMAGES)
    chex.assert_trees_all_equal(testing.assert_equivariant(lambda x: x, FLIP, IMAGES, output="image"), 0.0)


def test_random_parameters_and_statistics():
    """For an abstract model too: nothing stays a shape, a zero or a one, and variances are positive."""
    small = dict(widths=(8, 12), depths=(1, 2), partial_widths=(0, 5), num_classes=5)
    model = testing.randomise(models.abstract("shvit_s1", **small), jax.random.key(0))
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(model)}
    assert all(np.unique(leaf).size == leaf.size and not np.isin(leaf, (0, 1)).any() for leaf in leaves.values())
    variances = [leaf for name, leaf in leaves.items() if "variance" in name]
    assert variances and all(leaf.min() > 0.3 and leaf.max() < 3 for leaf in variances)
