"""Semantic segmentation: cross-entropy over all pixels with a class."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx

from equivit.constraints import NonNegativeFloat, NonNegativeInt, OneOf, PositiveInt
from equivit.layers.convolution import MODES
from equivit.layers.resizing import nearest
from equivit.layers.rngs import Keys
from equivit.logical import Tensor
from equivit.models.segmenter.decoders import UPSAMPLING
from equivit.models.segmenter.model import DECODERS, Segmenter, SegmenterConfig
from equivit.objectives.objective import Batch, Loss, Objective, Rule, Step, usual_rule


class Segmentation(Objective):
    """Trains a `Segmenter`, whose backbone is the model of the config without its head, with a new decoder.

    `model.num_classes` is the number of pixel classes.  Pixels with `crops.VOID` in the label map do not count.  The
    loss is the mean over all other pixels of the batch, for any split over devices and micro-batches.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        """The `objective` section of a config."""

        decoder: Annotated[str, OneOf(DECODERS)] = "upernet"
        width: PositiveInt = 512  # of the decoder
        padding: Annotated[str, OneOf(MODES)] = "zeros"  # of the decoder's convolutions
        equivariant: bool = False  # the decoder follows circular shifts, as an adaptive backbone does
        upsampling: Annotated[str, OneOf(UPSAMPLING)] = "interpolate"  # of an equivariant UperNet
        auxiliary: NonNegativeFloat = 0.4  # weight of the loss of a second head, which UperNet has; 0.0: none
        own_size: bool = False  # resize labels to the decoder's grid, instead of logits to the image
        blocks: tuple[NonNegativeInt, ...] | tuple[()] = ()  # of a ViT, whose maps the decoder reads beside the last
        frozen: bool = False  # do not train the backbone

    FIXED = ("decoder", "width", "padding", "equivariant", "upsampling", "own_size", "blocks", "frozen")
    entries = ("image", "map")
    decodes = has_head = True

    def check_model(self, model, teachers) -> None:
        """As in `Objective`; also ValueError if the decoder does not fit the model."""
        super().check_model(model, teachers)
        self._configuration(model)

    def module(self, model: nnx.Module, key: jax.Array) -> Segmenter:
        """The model without its head, and a new decoder."""
        backbone: Any = jax.tree.map(lambda a: a, model)  # a copy
        config = self._configuration(backbone.config)
        backbone.head, backbone.config = None, config.backbone
        return Segmenter(config, backbone, rngs=Keys(key))

    def rule(self, tensor: Tensor) -> Rule:
        """Freeze the backbone if the options ask for it."""
        return usual_rule(tensor)._replace(frozen=self.options.frozen and tensor.name.startswith("backbone."))

    def prepare(self, module: Segmenter, batch: Batch, key: jax.Array) -> Batch:
        """Normalise the batch, resize maps to the logits, and add `share` [B], a pixel's weight times B."""
        batch = super().prepare(module, batch, key)
        images, maps = batch["image"], batch["map"]
        if self.options.own_size:
            maps = nearest(maps, jax.eval_shape(lambda model, x: model(x), module, images).shape[1:3])
        pixels = jnp.maximum((maps >= 0).sum(), 1).astype(jnp.float32)
        return {**batch, "map": maps, "share": jnp.full(len(images), len(images) / pixels)}

    def loss(self, module: Segmenter, batch: Batch, step: Step) -> Loss:
        """The loss, including the auxiliary head's, and the accuracy of pixels."""
        logits, second = module.both(batch["image"], key=step.key, train=True, frozen=self.options.frozen)
        loss = pixel_cross_entropy(logits, batch["map"], batch["share"])
        metrics = {"accuracy": pixel_mean(logits.argmax(-1) == batch["map"], batch["map"], batch["share"])}
        if second is None:
            return Loss(loss, metrics)
        other = pixel_cross_entropy(second, batch["map"], batch["share"])
        return Loss(loss + self.options.auxiliary * other, {**metrics, "auxiliary": other})

    def _configuration(self, model) -> SegmenterConfig:
        sizes = {name: self.options[name] for name in Segmentation.FIXED if name != "frozen"}
        backbone = dataclasses.replace(model, num_classes=None)
        return SegmenterConfig(backbone, self.config.model.num_classes, auxiliary=self.options.auxiliary > 0, **sizes)


def pixel_cross_entropy(logits: jax.Array, maps: jax.Array, share: jax.Array) -> jax.Array:
    """The cross-entropy of logits [B, H, W, classes] and maps of classes [B, H, W], averaged by `pixel_mean`."""
    logs = jax.nn.log_softmax(logits)
    right = jnp.take_along_axis(logs, jnp.maximum(maps, 0)[..., None], axis=-1)[..., 0]
    return -pixel_mean(right, maps, share)


def pixel_mean(values: jax.Array, maps: jax.Array, share: jax.Array) -> jax.Array:
    """The mean over images of the sum over pixels that have a class, times `share` [B]; a scalar."""
    return (jnp.where(maps >= 0, values, 0).sum((1, 2)) * share).mean()
