"""Arrays on the ambient mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from equivit.kernels import mesh
from equivit.kernels.attention import attend, gpu


def mesh_of(**sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


@pytest.mark.parametrize("rows", [8, 11, 3])
def test_a_kernel_on_rows_of_every_device(rows):
    """Its values and gradients are those of the kernel, also where devices do not divide the rows."""
    x, y = (jax.random.normal(jax.random.key(i), (rows, 3)) for i in range(2))
    seen = []

    def kernel(x, y):
        seen.append(x.shape)
        return jnp.sin(x) * y

    def loss(apply, x, y):
        return jnp.square(apply(x, y)).sum()

    expected = jax.value_and_grad(lambda x, y: loss(kernel, x, y), argnums=(0, 1))(x, y)
    with jax.set_mesh(mesh_of(data=2, hosts=2, fsdp=2)):
        on_rows = jax.jit(jax.value_and_grad(lambda x, y: loss(lambda *a: mesh.on_rows(kernel, *a), x, y), (0, 1)))
        found = on_rows(x, y)
    assert seen[-1] == (-(-rows // 8), 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize(
    ("size", "groups", "even"), [(5, 4, 6), (5, 8, 5), (5, 16, 5), (5, 1, 8), (5, 12, 6), (8, 1, 8)]
)
def test_the_least_number_of_rows_that_split_evenly(size, groups, even):
    with jax.set_mesh(mesh_of(data=2, fsdp=4)):
        assert mesh.even(size, groups) == even == min(n for n in range(size, 99) if n * groups % 8 == 0)


def test_the_share_of_the_parameters_that_each_device_holds():
    """An axis that `fsdp` does not divide stays whole, and so does a stack."""
    whole = dict(a=(10, 6), b=(10,), c=(0,))
    assert mesh.held_share(whole, mesh_of(data=2, fsdp=4), dict.fromkeys(whole, 0)) == 1
    shapes = dict(kernel=(4, 16, 6), bias=(6,))
    share = mesh.held_share(shapes, mesh_of(data=2, fsdp=4), dict(kernel=1, bias=0))
    assert share == (4 * 4 * 6 + 6) / (4 * 16 * 6 + 6)


def test_without_a_mesh_nothing_changes():
    x = jnp.ones((3, 2))
    assert not mesh.splits() and mesh.gathered(x) is x and mesh.on_rows(lambda x: x, x) is x
    assert mesh.even(5, 4) == 5


def test_cudnn_gets_the_rows_of_one_device(monkeypatch):
    """Groups of images on a part of the devices, as with `drop_path_groups`."""
    monkeypatch.setattr(gpu, "_fused", lambda q, k, v: seen.append(q.shape) or jnp.zeros_like(q) + v)
    q, seen = jnp.ones((4, 5, 2, 7, 8), jnp.bfloat16), []
    with jax.set_mesh(mesh_of(data=2, fsdp=4)):
        assert jax.jit(gpu.attend)(q, q, q).shape == attend(q, q, q).shape
    assert seen == [(3, 7, 2, 8)]  # 20 images on 8 devices
