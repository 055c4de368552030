"""SHViT: the parts of its blocks, and how they begin and fold."""

import jax
import jax.numpy as jnp
import numpy as np

from equivit import logical
from equivit.layers.stochastic_depth import drop_path
from equivit.models import zoo
from equivit.models.inference import fold
from equivit.models.shvit.merging import squeezed
from tests.models.backbones import SHVIT


def test_a_draw_of_stochastic_depth_covers_a_whole_map():
    y = np.asarray(drop_path(jnp.ones((32, 2, 3, 1)), 0.5, jax.random.key(0), axes=3)).reshape(32, -1)
    assert set(y[:, 0]) == {0, 2} and (y == y[:, :1]).all()


def test_gates_are_multiples_of_8():
    assert [squeezed(width) for width in (8, 48, 512, 896, 1232, 768, 1408)] == [8, 16, 128, 224, 312, 192, 352]


def test_residual_branches_begin_as_nothing():
    """The official start: of branches the last norm's scale is 0, but not of the convolutions between stages."""

    @jax.jit
    def start():
        tensors = logical.to_logical(zoo.create("shvit_s1", **SHVIT))
        return {name: tensor for name, tensor in tensors.items() if name.endswith("norm.scale")}

    scales = jax.device_get(start())
    zero = {n for n, scale in scales.items() if not np.any(scale)}
    ends = (".conv.conv.norm.scale", ".proj.norm.scale", ".fc2.norm.scale")
    assert zero == {n for n in scales if "blocks" in n and n.endswith(ends)} | {
        f"stages.1.downsampling.mlp{i}.fc2.norm.scale" for i in (1, 2)
    }
    assert all(np.all(scales[n] == 1) for n in scales.keys() - zero)


def test_folded_kernels_that_carry_the_residuals_are_not_rounded():
    """A folded residual convolution adds x itself, so its kernel is no factor that "mixed" precision rounds."""
    form = jax.eval_shape(fold, zoo.abstract("shvit_s1", **SHVIT)).stages[1].blocks.runs[0]
    kernels = (form.conv.conv.conv.kernel, form.mlp.fc1.conv.kernel)
    assert [k.get_metadata().get("product", False) for k in kernels] == [False, True]
