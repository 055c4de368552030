"""Folded models against their originals: logits and features, stacks, what is left, and what has nothing to fold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.convolution import NormedConv
from equivit.layers.stack import Stack
from equivit.models import zoo
from equivit.models.inference import deployed, fold
from equivit.testing import randomise
from tests.models import segmenter_test
from tests.models.adaptive import small
from tests.models.backbones import images, model, near

ODD = (29, 46)  # images whose sides no stride divides


def norms(model):
    return sum(isinstance(part, BatchNorm) for _, part in nnx.iter_modules(model))


def outputs(model, x):
    """Logits, pooled tokens, and all tokens after the last block and after block 1."""
    last, seen = model.trunk(x, capture=(1,))
    pooled = model.pool(last)
    return model.classify(pooled), pooled, last.tokens, seen[1].tokens


def both(model, x):
    return outputs(model, x), outputs(fold(model), x)


@pytest.mark.slow
@pytest.mark.parametrize("adaptive", [False, True])
def test_a_stack_of_convolutions_folds_to_the_same_function(adaptive):
    """The first stage of the CvT is a scan over two blocks.  The adaptive one also convolves at all phases at once."""
    m = small("cvt_13", depths=(2, 1)) if adaptive else model("cvt_13")
    x = images(m.config.image_size if adaptive else ODD)
    whole, folded = jax.jit(both)(m, x)
    jax.tree.map(near, folded, whole)
    form = jax.eval_shape(fold, m)
    assert norms(m) == 6 and norms(form) == 0 and not jax.tree.leaves(nnx.state(form, nnx.BatchStat))
    assert type(form.stages[0].blocks) is Stack and form.stages[0].blocks.lengths == (2,)
    assert form.stages[0].blocks.runs[0].attention.conv_q.conv.bias.shape == (2, 8)


@pytest.mark.slow
def test_what_is_deployed_is_folded():
    m, x = model("cvt_13"), images(ODD)
    whole, form = jax.jit(lambda m, x: (m(x), deployed(m, ODD)(x)))(m, x)
    near(form, whole)
    assert norms(jax.eval_shape(lambda m: deployed(m, ODD), m)) == 0


def test_normed_queries_and_pooling_by_attention_are_deployed():
    small = dict(width=16, depth=1, num_heads=2, num_classes=5, patch_size=8, image_size=(16, 24))
    m = zoo.abstract("vit_ti16", class_token=False, pool="attention", qk_norm=True, **small)
    m, x = randomise(m, jax.random.key(0)), images((16, 24))
    whole, form = jax.jit(lambda m, x: (m(x), deployed(m, (16, 24))(x)))(m, x)
    near(form, whole)


def test_a_deployed_model_refuses_another_grid_of_as_many_patches():
    m = zoo.abstract("vit_ti16", width=16, depth=1, num_heads=2, num_classes=5, patch_size=8, image_size=(16, 16))
    with pytest.raises(ValueError, match="the positions of 2x2 patches, and these images have 1x4; call deployed"):
        jax.eval_shape(lambda m, x: deployed(m, (16, 16))(x), m, images((8, 32)))


def test_a_fold_without_the_mean_is_seen(monkeypatch):
    right = BatchNorm.affine
    monkeypatch.setattr(BatchNorm, "affine", lambda norm: (right(norm)[0], norm.bias[...]))
    whole, folded = jax.jit(lambda m, x: (m(x), fold(m)(x)))(model("cvt_13"), images(ODD))
    with pytest.raises(AssertionError):
        near(folded, whole)


def test_norms_that_have_no_convolution_stay():
    """The linear decoder's norm comes before its map, and says nothing of a fold; the pyramid's all have one."""
    for decoder, name, before, after in (("linear", "vit_ti16", 1, 1), ("upernet", "swin_t", 9, 0)):
        m = segmenter_test.model(segmenter_test.configured(name, decoder=decoder))
        x = segmenter_test.images(dtype=np.float32)
        whole, folded = jax.jit(lambda m, x: (m(x), fold(m)(x)))(m, x)
        near(folded, whole)
        assert (norms(m), norms(jax.eval_shape(fold, m))) == (before, after)


class Nested(nnx.Module):
    """A module with a form of its own, in which one convolution is left to be folded."""

    def __init__(self, rngs):
        self.parts = nnx.List([NormedConv(3, 3, kernel=(1, 1), rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        return self.parts[1](self.parts[0](x))

    def folded(self):
        self.parts = nnx.List([self.parts[0].folded(), self.parts[1]])
        return self


def test_what_an_outer_form_leaves_is_folded_too():
    m = randomise(jax.eval_shape(lambda: Nested(nnx.Rngs(0))), jax.random.key(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 2, 3)), jnp.float32)
    assert norms(fold(m)) == 0 and norms(m) == 2
    near(fold(m)(x), m(x))


def test_a_model_without_batch_norm_comes_back_as_it_is():
    """Replaced attention has a folded form too, which belongs to what is deployed."""
    small = dict(width=16, depth=2, num_heads=2, num_classes=5, class_token=False)
    m = zoo.abstract("vit_ti16", **small, replaced=((0, "dw"),))
    m = logical.put(m, {name: np.ones(a.shape, np.float32) for name, a in logical.take(m, nnx.Variable).items()})
    form = fold(m)
    assert form is not m and jax.tree.structure(form) == jax.tree.structure(m)
    assert all(a is b for a, b in zip(jax.tree.leaves(form), jax.tree.leaves(m), strict=True))
