"""Feature matching: a ViT learns the tokens of a frozen teacher for the same images, without labels.

`equivit.octify` trains octic ViTs by it.  The loss is ours: for patch tokens, and for the tokens before them,

    1 - mean cosine(s - m, t - m) + sum |s - t|^2 / sum |t - m|^2

with the student's tokens s, the teacher's t, and m, the mean of t over the batch at each position.  Without m most of
both terms would be what all images have in common, such as positions.  With optimizer.accumulation, the means and sums
are of each micro-batch.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from equivit.logical import Tensor
from equivit.models import zoo
from equivit.models.model import Config, check_input
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.model import ViT
from equivit.objectives.objective import Batch, Loss, Objective, Rule, Step, check_masking, usual_rule
from equivit.symmetry import fields
from equivit.symmetry.groups import OCTIC

PLACES = ("transition", "last")


class FeatureMatching(Objective):
    """Matches a teacher of the same depth, width and tokens, `step.teachers["teacher"]`.

    At the transition, only the student's blocks before it are trained, and the teacher's tokens are those after as many
    blocks.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        """The `objective` section of a config."""

        teacher: str | None = None  # a run, a saved model, "<source>:<file>" of pretrained weights, or "zoo:<name>"
        place: Literal["transition", "last"] = "last"  # tokens after the transition, or after the final norm
        orientations: bool = False  # average the teacher's tokens over the eight orientations of the image

    entries = ("image",)

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for a missing teacher, or a model that has a head or no fixed grid of patches."""
        if config.objective.teacher is None:
            raise ValueError(
                f"config.objective.teacher={config.objective.teacher!r}: name a teacher: a run, a saved model, or "
                "pretrained weights such as 'dinov2:dinov2_vitb14_pretrain.pth'."
            )
        check_masking(config)

    def check_model(self, model: Config, teachers: Mapping[str, Any]) -> None:
        """As in `Objective`; also ValueError if the teacher has other tokens or size, or cannot take the images.

        Also for a micro-batch of one image, whose tokens equal their mean.
        """
        super().check_model(model, teachers)
        batch, parts = self.config.batch_size, self.config.optimizer.accumulation
        if batch // parts < 2:
            raise ValueError(
                f"config.batch_size={batch} with config.optimizer.accumulation={parts}: "
                f"objective.name={self.options.name!r} compares the images of a micro-batch, and needs at least two; "
                f"set batch_size to at least {2 * parts}, or lower accumulation."
            )
        teacher, place = teachers["teacher"].config, f"config.objective.teacher={self.options.teacher}"
        for name in ("width", "depth", "patch_size", "prefix"):
            ours, theirs = getattr(model, name, None), getattr(teacher, name, None)
            if ours != theirs:
                raise ValueError(f"{place}: {name}={theirs}, not {ours}.")
        if "token" in teacher.parts:
            raise ValueError(
                f"{place}: adaptive={teacher.adaptive}: the content determines its patch grid, but patches are "
                "compared on a fixed grid; name a teacher with adaptive=False."
            )
        check_input(teacher, f"images for {place}", self.image_size, self.config.model.in_channels)

    def rule(self, tensor: Tensor) -> Rule:
        """At the transition, everything after it is frozen."""
        rule = usual_rule(tensor)
        return rule._replace(frozen=True) if self.options.place == "transition" and self._is_after(tensor) else rule

    def _is_after(self, tensor: Tensor) -> bool:
        part, *rest = tensor.name.split(".")
        if part != "blocks":
            return part in ("readout", "head")
        model: Any = zoo.configuration(**self.config.model)
        return int(rest[0]) >= model.k

    def loss(self, module: ViT, batch: Batch, step: Step) -> Loss:
        """The loss, and the mean cosine of the patch tokens."""
        images, at, prefix = batch["image"], self.options.place, module.config.prefix
        teacher: Any = step.teachers["teacher"]
        wanted = targets(teacher, images, at, module.config.k, self.options.orientations)
        found = tokens(module, images, at, module.config.k, key=step.key, train=True).astype(jnp.float32)
        mean = wanted.mean(0)
        found, wanted = found - mean, wanted - mean
        pairs = [(found[:, part], wanted[:, part]) for part in parts(prefix)]
        cosines = [cosine(*pair).mean() for pair in pairs]
        distances = [jnp.square(a - b).sum() / jnp.square(b).sum() for a, b in pairs]
        loss = jnp.stack([1 - c + d for c, d in zip(cosines, distances, strict=True)]).mean()
        return Loss(loss, {"cosine": cosines[0], "prefix_cosine": cosines[-1]})


def parts(prefix: int) -> list[slice]:
    """The tokens that the loss counts the same: the patches, and the tokens before them, if any."""
    return [slice(prefix, None), *([slice(prefix)] if prefix else [])]


def tokens(model: ViT, images: jax.Array, place: str, k: int, **options) -> jax.Array:
    """All dense tokens [B, P + N, D] at one of PLACES: after k blocks and the transition, or after the final norm."""
    if place == "last":
        return model.tokens(images, **options)
    x, layout = model.embed(images)
    return model.trunk(x, layout, stop=k, **options)[0]


def targets(teacher: ViT, images: jax.Array, place: str, k: int, orientations: bool) -> jax.Array:
    """The teacher's tokens, float32, without gradient; averaged over the orientations if these count."""

    def upright(images):
        return tokens(teacher, images, place, k).astype(jnp.float32)

    found = averaged(upright, images, teacher.config) if orientations else upright(images)
    return jax.lax.stop_gradient(found)


def averaged(tokens: Callable[[jax.Array], jax.Array], images: jax.Array, config: ViTConfig) -> jax.Array:
    """The mean over the eight orientations of `tokens(image)`, moved back: equivariant, with invariant channels."""
    total = jnp.zeros(())
    for g in OCTIC.elements:
        turned = fields.act_on_image(g, images)
        grid = turned.shape[-3] // config.patch_size[0], turned.shape[-2] // config.patch_size[1]
        total = total + fields.act_on_tokens(OCTIC.inverse(g), tokens(turned), grid, config.prefix)
    return total / OCTIC.order


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """The cosine of the angle between tokens: [*B, N, D] twice -> [*B, N]."""
    sizes = jnp.square(a).sum(-1) * jnp.square(b).sum(-1)
    return (a * b).sum(-1) * jax.lax.rsqrt(jnp.maximum(sizes, jnp.finfo(a.dtype).tiny))
