"""Distillation: a classifier learns to match a teacher's predictions for the same images.

Source: Beyer et al. 2022 (arXiv 2106.05237); Jumbo (arXiv 2502.15021), Section 4.1.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from equivit.constraints import Above0, Share
from equivit.models.model import Config, ModelModule, check_input
from equivit.objectives.objective import Batch, Step
from equivit.objectives.supervised import MixingOptions, Supervised


class Distillation(Supervised):
    """KL(teacher || model) of predictions on mixed images, without labels.

    Both see the same crop and the same mix.  Images are loaded (`data.train_image_size`) and mixed at the teacher's
    size, then shrunk to `data.image_size` for the model, with the antialiased bicubic filter of evaluation.  The
    teacher is `step.teachers["teacher"]`.
    """

    @dataclasses.dataclass(frozen=True)
    class Options(MixingOptions):
        """The `objective` section of a config."""

        teacher: str | None = None  # a run, a saved model, "<source>:<file>" of pretrained weights, or "zoo:<name>"
        teacher_mean: tuple[Share, ...] | None = None  # pixel statistics of its training; None: as in `data`
        teacher_std: tuple[Above0, ...] | None = None

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for incompatible values or a missing teacher."""
        objective, data = config.objective, config.data
        Supervised.check(config)
        if objective.teacher is None:
            raise ValueError(
                f"config.objective.teacher={objective.teacher!r}: name a teacher: a run, a saved model, or pretrained "
                "weights such as 'timm:deit3_base_patch16_224.safetensors'."
            )
        for key in ("mean", "std"):
            value = objective[f"teacher_{key}"]
            if value is not None and len(value) != len(data[key]):
                raise ValueError(f"config.objective.teacher_{key}={value!r} must have one entry per channel, or None.")
        if data.train_image_size is not None and min(map(int.__sub__, data.train_image_size, data.image_size)) < 0:
            raise ValueError(
                f"config.data.train_image_size={data.train_image_size} is the teacher's and must not be smaller than "
                f"the model's, data.image_size={data.image_size}."
            )

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the training images for the model; the teacher's may be larger."""
        return tuple(self.config.data.image_size)

    def check_model(self, model: Config, teachers: Mapping[str, ModelModule]) -> None:
        """As in `Objective`; also ValueError if the teacher has another number of classes or cannot take the images."""
        super().check_model(model, teachers)
        teacher = teachers["teacher"].config
        self._check_classes(teacher.num_classes, model.num_classes)
        name = f"images for config.objective.teacher={self.options.teacher}"
        check_input(teacher, name, super().image_size, self.config.model.in_channels)

    def _check_classes(self, teacher: int | None, model: int | None) -> None:
        if teacher != model:
            raise ValueError(
                f"config.objective.teacher={self.options.teacher}: the teacher has {teacher or 'no'} classes, the "
                f"model {model}; use a teacher with the same classes."
            )

    def prepare(self, module: nnx.Module, batch: Batch, key: jax.Array) -> Batch:
        """Mix the batch at the teacher's size; "image" is for the model and "teacher_image" for the teacher."""
        batch = super().prepare(module, batch, key)
        options, data, images = self.options, self.config.data, batch["image"]
        teacher_mean, teacher_std = options.teacher_mean or data.mean, options.teacher_std or data.std
        # The weights of a mix sum to 1, so mixing and normalising commute.
        scale = jnp.asarray(data.std) / jnp.asarray(teacher_std)
        shift = (jnp.asarray(data.mean) - jnp.asarray(teacher_mean)) / jnp.asarray(teacher_std)
        return {**batch, "image": shrink(images, tuple(data.image_size)), "teacher_image": images * scale + shift}

    def compare(self, logits: jax.Array, batch: Batch, step: Step) -> jax.Array:
        """The divergence from the teacher's predictions, for logits [B, classes].

        Raises ValueError if the teacher has another number of classes.
        """
        target = jax.lax.stop_gradient(step.teachers["teacher"](batch["teacher_image"])).astype(jnp.float32)
        self._check_classes(target.shape[-1], logits.shape[-1])
        return divergence(logits, target)


def divergence(logits: jax.Array, teacher_logits: jax.Array) -> jax.Array:
    """KL(teacher || model): the sum over classes of p_T (log p_T - log p), averaged over the batch.

    Shapes: [B, classes] twice -> [].
    """
    log_p, log_target = jax.nn.log_softmax(logits), jax.nn.log_softmax(teacher_logits)
    return jnp.sum(jnp.exp(log_target) * (log_target - log_p), axis=-1).mean()


def shrink(images: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Resize with an antialiased bicubic filter; images of that size are unchanged.  [B, H, W, C] -> [B, *size, C]."""
    shape = (images.shape[0], *size, images.shape[-1])
    return images if images.shape == shape else jax.image.resize(images, shape, "cubic", antialias=True)
