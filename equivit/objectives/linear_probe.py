"""Linear probing: how well a linear classifier tells classes apart by the features of a frozen model.

Source: MAE (arXiv 2111.06377), Appendix A.1; Jumbo (arXiv 2502.15021), Section 4.3.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical
from equivit.data.pixels import normalize
from equivit.layers import dense
from equivit.layers.batch_norm import BatchNorm
from equivit.logical import Tensor
from equivit.objectives.objective import Batch, Extra, Rule, Trainable


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
        """The linear map that this head is once its statistics are fixed."""
        norm, head = self.norm, jax.tree.map(lambda a: a, self.linear)
        scale = jax.lax.rsqrt(norm.variance[...] + norm.eps)
        bias = -norm.mean[...] * scale
        if norm.scale is not None:
            scale, bias = scale * norm.scale[...], bias * norm.scale[...] + norm.bias[...]
        head.bias.set_value(self.linear.bias[...] + bias @ self.linear.weight[...])
        head.weight.set_value(self.linear.weight[...] * scale[:, None])
        return head


class LinearProbe:
    """Cross-entropy of a `ProbeHead` on what the model's own head would read, which `model.pool` chooses.

    Only the head is trainable.  `extra` holds "backbone", the parameters and state of the rest of the model, which come
    from `config.init` and are saved with the run, and "state", the running statistics of the head.  Statistics are over
    the whole batch, whatever the number of devices; with `optimizer.accumulation` over each micro-batch.  The backbone
    runs as in evaluation, without drop path.

    The exported model is the backbone with one linear map as its head, into which the normalisation is folded.

    The defaults are those of MAE.  The JAX version of Jumbo's MAE has affine=True, eps=1e-5, momentum=0.01 (Flax calls
    it 0.99) and weight_std=0.02; it keeps the biased variance, this one B / (B - 1) times it, as PyTorch does.

    Args:
      objective: the `objective` section of a config.
      mean, std: of each channel (or one for all), of pixel values in 0..1.
      num_classes: entries of the logits.
    """

    DEFAULTS = dict(
        affine=False,  # whether the normalisation has a scale and a bias
        eps=1e-6,
        momentum=0.1,  # share of a new batch in the running statistics
        weight_std=0.01,  # initial deviation of the classifier's weights
    )

    @classmethod
    def create(cls, config: ConfigDict) -> "LinearProbe":
        """The objective of a config."""
        data = config.data
        return cls(config.objective, mean=data.mean, std=data.std, num_classes=config.model.num_classes)

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for impossible values."""
        for key, rule in (("eps", "positive"), ("momentum", "in [0, 1]"), ("weight_std", "zero or more")):
            errors.number(f"config.objective.{key}", config.objective[key], rule)

    def __init__(self, objective: ConfigDict, *, mean: tuple[float, ...], std: tuple[float, ...], num_classes: int):
        self._options, self._mean, self._std, self._num_classes = objective, mean, std, num_classes
        self._backbone = self._head = None

    def init(self, model: nnx.Module, key: jax.Array) -> tuple[Trainable, Extra]:
        """The parameters of a new head; the rest of the model, which must have a head, goes into `extra`."""
        model = jax.tree.map(lambda a: a, model)
        model.head = _Identity()
        images = jax.ShapeDtypeStruct((1, *model.config.image_size, model.config.in_channels), jnp.float32)
        features = jax.eval_shape(lambda model, x: model(x), model, images).shape[-1]
        head = ProbeHead(features, self._num_classes, self._options, rngs=nnx.Rngs(params=key))
        self._backbone, self._head = logical.abstract(model), logical.abstract(head)
        backbone = {**logical.take(model), **logical.take_state(model)}
        return logical.take(head), {"backbone": backbone, "state": logical.take_state(head)}

    def names(self) -> dict[str, np.ndarray]:
        """The logical tensors of each parameter leaf of the head."""
        return logical.tensors(self._head)

    def rules(self) -> Callable[[Tensor], Rule]:
        """No decay for vectors."""
        return lambda tensor: Rule(decay=len(tensor.shape) > 1)

    def static(self, progress: float) -> None:
        """One compiled step serves the whole run."""

    def prepare(self, batch: Batch, key: jax.Array) -> Batch:
        """The batch, normalised."""
        return {**batch, "image": normalize(batch["image"], self._mean, self._std)}

    def loss(self, trainable, extra, batch, key, step, static):
        """The cross-entropy over a batch, and the share of images whose best class is the label."""
        features = logical.put(self._backbone, extra["backbone"])(batch["image"]).astype(jnp.float32)
        head = logical.put(self._head, {**trainable, **extra["state"]})
        logits = head(features, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
        return loss, ({"accuracy": accuracy}, {**extra, "state": logical.take_state(head)})

    def after_step(self, trainable: Trainable, extra: Extra, step: jax.Array) -> Extra:
        """Nothing is averaged."""
        return extra

    def exported(self, trainable: Trainable, extra: Extra) -> nnx.Module:
        """The backbone with a linear head."""
        model = logical.put(self._backbone, extra["backbone"])
        model.head = logical.put(self._head, {**trainable, **extra["state"]}).folded()
        return model


class _Identity(nnx.Module):
    """In place of a head: the model then returns what its head would read."""

    def __call__(self, features):
        return features
