"""Linear probing: a linear classifier on the features of a frozen model.

Source: MAE (arXiv 2111.06377), Appendix A.1; Jumbo (arXiv 2502.15021), Section 4.3.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from equivit.constraints import NonNegativeFloat, PositiveFloat, Share
from equivit.layers import dense
from equivit.layers.batch_norm import BatchNorm
from equivit.layers.rngs import Keys
from equivit.logical import Tensor
from equivit.models.model import ModelModule
from equivit.objectives.objective import Batch, Extra, Loss, Objective, Rule, Step, classification, usual_rule


class ProbeHead(nnx.Module):
    """Batch normalisation, then a linear classifier.  Shapes: [B, features] -> [B, num_classes].

    Args:
      objective: the `objective` section of a config.
    """

    def __init__(self, features: int, num_classes: int, objective: ConfigDict, *, rngs: nnx.Rngs):
        self.norm = BatchNorm(features, eps=objective.eps, momentum=objective.momentum, affine=objective.affine)
        self.linear = dense.Linear(features, num_classes, rngs=rngs)
        weight = objective.weight_std * jax.random.normal(rngs.params(), (features, num_classes))
        self.linear.weight.set_value(weight)

    def __call__(self, features: jax.Array, *, train: bool = False) -> jax.Array:
        return self.linear(self.norm(features, train=train))

    def folded(self) -> dense.Linear:
        """The linear layer equal to this head with fixed statistics."""
        head, (scale, bias) = jax.tree.map(lambda a: a, self.linear), self.norm.affine()
        head.bias.set_value(self.linear.bias[...] + bias @ self.linear.weight[...])
        head.weight.set_value(self.linear.weight[...] * scale[:, None])
        return head


class Probe(nnx.Module):
    """A frozen model with a `ProbeHead` on the input of the model's head.

    The backbone runs as in evaluation, without drop path.

    Shapes: [B, H, W, C] -> [B, num_classes].
    """

    def __init__(self, model: ModelModule, num_classes: int, objective: ConfigDict, *, rngs: nnx.Rngs):
        self.backbone = jax.tree.map(lambda a: a, model)  # a copy
        self.backbone.head = None
        images = jax.ShapeDtypeStruct((1, *model.config.input_shape), jnp.float32)
        features = jax.eval_shape(lambda model, x: model.pooled(x), self.backbone, images)
        self.head = ProbeHead(features.shape[-1], num_classes, objective, rngs=rngs)

    def __call__(self, images: jax.Array, *, train: bool = False) -> jax.Array:
        return self.head(self.backbone.pooled(images).astype(jnp.float32), train=train)

    def folded(self) -> nnx.Module:
        """The backbone with a linear head that includes the normalisation."""
        model = jax.tree.map(lambda a: a, self.backbone)
        model.head = nnx.data(self.head.folded())
        return model


class LinearProbe(Objective):
    """Cross-entropy of a `Probe`, training only the head.

    The statistics are over the whole batch, for any number of devices; with `optimizer.accumulation`, over each
    micro-batch.  The defaults follow MAE.  The JAX version of Jumbo's MAE has affine=True, eps=1e-5,
    momentum=0.01 (0.99 in Flax's convention) and weight_std=0.02.  It stores the biased variance; we store the unbiased
    one, as PyTorch does.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        """The `objective` section of a config."""

        affine: bool = False  # whether the normalisation has a scale and a bias
        eps: PositiveFloat = 1e-6
        momentum: Share = 0.1  # weight of the new batch in the running statistics
        weight_std: NonNegativeFloat = 0.01  # initial standard deviation of the classifier's weights

    has_head = True

    def module(self, model: nnx.Module, key: jax.Array) -> Probe:
        """The model with a new head."""
        return Probe(model, self.config.model.num_classes, self.options, rngs=Keys(key))

    def rule(self, tensor: Tensor) -> Rule:
        """The backbone is frozen."""
        return usual_rule(tensor)._replace(frozen=tensor.name.startswith("backbone."))

    def loss(self, module: Probe, batch: Batch, step: Step) -> Loss:
        """The cross-entropy and the accuracy."""
        return classification(module(batch["image"], train=True), batch["label"])

    def exported(self, module: Probe, extra: Extra, weights: str | None = None) -> nnx.Module:
        """The backbone with a linear head."""
        return module.folded()
