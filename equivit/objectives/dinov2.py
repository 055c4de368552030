"""DINOv2: from masked and small crops, a student predicts the output of a teacher, its moving average.

Sources: DINOv2 (Oquab et al. 2023, arXiv 2304.07193), Section 4 and its public code; octic ViTs (arXiv 2505.15441),
Sections 4.4 and D.2.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from equivit import errors, logical
from equivit.constraints import Above0, Inside, NonNegativeFloat, NonNegativeInt, OneOf, PositiveFloat, PositiveInt
from equivit.data import device_colour, masking
from equivit.data.pixels import normalize
from equivit.data.views import MaskedViews
from equivit.intervals import Interval
from equivit.layers.dino_head import DinoHead
from equivit.layers.grid import check_grid
from equivit.layers.rngs import Keys
from equivit.logical import Arrays, Tensor
from equivit.models import zoo
from equivit.models.model import check_input
from equivit.objectives import dino_losses
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Batch, Extra, Loss, Objective, Rule, Step, averaged, check_masking, usual_rule

UNIFORM = 0.998  # of log K; healthy runs may reach it in their first steps
ONE_PROTOTYPE = 0.5  # share of rows


class Student(nnx.Module):
    """A backbone with a head for class tokens and one for masked patches, or one for both.

    Args:
      backbone: a model with a class token and a mask token.
      options: the `objective` section.
    """

    def __init__(self, backbone: Any, options: ConfigDict, *, rngs: nnx.Rngs):
        self.backbone = backbone
        sizes = dict(hidden=options.hidden, bottleneck=options.bottleneck)
        width = backbone.config.width
        self.dino_head = DinoHead(width, options.prototypes, **sizes, rngs=rngs)
        self.ibot_head = None if options.shared_head else DinoHead(width, options.prototypes, **sizes, rngs=rngs)

    @property
    def heads(self) -> tuple[DinoHead, DinoHead]:
        """The head of class tokens and the head of patches."""
        return self.dino_head, self.dino_head if self.ibot_head is None else self.ibot_head

    def tokens(
        self, crops: jax.Array, masks: jax.Array | None = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Class tokens [V, B, D] and patch tokens [V, B, N, D] of crops [B, V, h, w, C], after the final norm.

        Args:
          masks: [B, V, N], True where a patch is replaced by the mask token.
          key: for stochastic depth; None for evaluation.
        """
        # All crops of an image are consecutive, so that they stay on its device and in its group.
        images = crops.reshape(-1, *crops.shape[2:])
        masks = None if masks is None else masks.reshape(len(images), -1)
        found = self.backbone.features(images, mask=masks, key=key, train=key is not None)
        cls, patches = (
            jnp.moveaxis(leaf.reshape(*crops.shape[:2], *leaf.shape[1:]), 1, 0)
            for leaf in (found.cls, found.patches.values)
        )
        return cls, patches.reshape(*patches.shape[:2], -1, patches.shape[-1])


class DinoV2(Objective):
    """Trains a `Student`, whose backbone is the model of the config, and exports the teacher's backbone.

    The teacher's parameters are averages of the student's; its running statistics are copies.

    `groups` of consecutive images correspond to the devices of the public code: mask ratios are spread evenly, and
    KoLeo finds neighbours, within each group; `model.drop_path_groups` must be the same number.  With
    `optimizer.accumulation`, each micro-batch has a part of every group and computes its targets separately.

    Raises:
      ValueError: the model has a head, no mask token or no class token.
    """

    @dataclasses.dataclass(frozen=True)
    class Options:
        """The `objective` section of a config."""

        prototypes: Annotated[int, Interval(2, words="two or more")] = 65536
        hidden: PositiveInt = 2048  # width of the hidden layers of the heads
        bottleneck: PositiveInt = 256  # width of the vectors compared with prototypes
        shared_head: bool = True  # one head for class tokens and patches
        fixed_gains: bool = False  # the gains of the prototypes stay 1, as in DINO
        targets: Annotated[str, OneOf(dino_losses.TARGETS)] = "sinkhorn_knopp"
        student_temperature: PositiveFloat = 0.1
        teacher_temperature: tuple[PositiveFloat, PositiveFloat] = (0.04, 0.07)  # rises linearly from first to second
        temperature_steps: PositiveInt = 37500  # warm-up of the teacher temperature
        momentum: tuple[Above0, Above0] = (0.992, 1.0)  # of the teacher, along a cosine from the first to the last step
        koleo: NonNegativeFloat = 0.1  # weight of the term that spreads class tokens
        groups: PositiveInt = 1
        mask_share: Above0 = 0.5  # share of global crops that are masked
        mask_ratio: tuple[Inside, Inside] = (0.1, 0.5)  # masked share of a crop's patches
        mask_block: PositiveInt | None = None  # most patches in one rectangle; None: half of the grid
        prototypes_start: NonNegativeInt = 1250  # first step that updates the prototypes
        patch_lr: NonNegativeFloat = 0.2  # factor of the learning rate of the patch embedding
        # "matrices" decay; "by_name": as in the public code, tokens, positions and the prototypes' gains too
        decay: Literal["matrices", "by_name"] = "matrices"

    FIXED = ("prototypes", "hidden", "bottleneck", "shared_head", "fixed_gains", "targets")
    entries = ("image",)
    weights = ("teacher", "student")

    @staticmethod
    def check(config: ConfigDict) -> None:
        """ValueError for incompatible values, or a model that has a head or is not a ViT."""
        check_masking(config)
        options, parts = config.objective, config.optimizer.accumulation
        low, high = options.mask_ratio
        if low > high:
            raise ValueError(
                f"config.objective.mask_ratio={(low, high)} must be (smallest, largest), as {(high, low)}."
            )
        unit = options.groups * parts
        if config.batch_size % unit or config.batch_size < 2 * unit:
            nearest = errors.multiples(max(config.batch_size, 2 * unit), unit)
            raise ValueError(
                f"config.objective.groups={options.groups} does not split a micro-batch of "
                f"{config.batch_size // parts} images into equal groups of two or more; of config.batch_size {nearest}."
            )

    @staticmethod
    def transform_of(config: ConfigDict) -> functools.partial:
        """The transform to global and local crops with patch masks for the model."""
        options, size = config.objective, config.data.train_image_size or config.data.image_size
        model: Any = zoo.configuration(**{"image_size": size, **config.model})
        return functools.partial(
            MaskedViews,
            grid=check_grid(size, model.patch_size, "global crops"),
            share=options.mask_share,
            ratio=tuple(options.mask_ratio),
            groups=options.groups,
            micro_batches=config.optimizer.accumulation,
            largest=options.mask_block,
        )

    def check_model(self, model: Any, teachers: Mapping[str, nnx.Module]) -> None:
        """As in `Objective`; also ValueError if the model lacks a token or local crops do not fit it."""
        super().check_model(model, teachers)
        for token in ("class_token", "mask_token"):
            if not getattr(model, token, False):
                raise ValueError(
                    f"config.model.{token}=False: DINOv2 trains it; set it to True, or use a model such as "
                    "dinov2_vit_s16."
                )
        if getattr(model, "projection", None) is not None:
            raise ValueError(
                f"config.model.projection={model.projection}: DINOv2 does not train this head; set it to None."
            )
        views = self.config.data.views
        if views.locals:
            check_input(model, "config.data.views.local_size", tuple(views.local_size), self.config.model.in_channels)
        wanted = self.options.groups
        if (groups := getattr(model, "drop_path_groups", None)) not in (None, wanted):
            raise ValueError(f"config.model.drop_path_groups={groups} must equal objective.groups={wanted}.")

    def module(self, model: nnx.Module, key: jax.Array) -> Student:
        """The model with new heads."""
        return Student(model, self.options, rngs=Keys(key))

    def rule(self, tensor: Tensor) -> Rule:
        """Clip each part separately; start prototypes later; slow down the patch embedding."""
        options, part = self.options, tensor.name.split(".")[0]
        decay = usual_rule(tensor).decay
        if options.decay == "by_name":
            decay = not (tensor.norm or tensor.name.endswith(("bias", ".scale")))
        prototypes = tensor.name.endswith((".directions", ".gains"))
        return Rule(
            lr=options.patch_lr if ".patch_embed." in tensor.name else 1.0,
            decay=decay,
            clip=part,
            frozen=options.fixed_gains and tensor.name.endswith(".gains"),
            starts=options.prototypes_start if prototypes else 0,
        )

    def extra(self, trainable: Arrays) -> Extra:
        """The teacher, which starts as the student, and the centres of its logits (class tokens, patches)."""
        extra: Extra = {"teacher": jax.tree.map(jnp.copy, trainable)}
        if self.options.targets == "centering":
            extra["centers"] = tuple(jnp.zeros(self.options.prototypes) for _ in range(2))
        return extra

    def prepare(self, module: Student, batch: Batch, key: jax.Array) -> Batch:
        """Normalise the whole batch, after colour changes if they run on the device."""
        data, prepared = self.config.data, dict(batch)
        for kind in ("global", "local"):
            if (crops := prepared.get(f"{kind}_crops")) is None:
                continue
            if (colours := prepared.pop(f"{kind}_colours", None)) is not None:
                crops = device_colour.apply(crops, colours)
            prepared[f"{kind}_crops"] = normalize(crops, data.mean, data.std)
        return prepared

    def loss(self, module: Student, batch: Batch, step: Step) -> Loss:
        """The sum of the terms; each term and signs of collapse are logged."""
        options, temperature = self.options, self.temperature(step.clock)
        global_key, local_key = jax.random.split(step.key)
        teacher: Any = self.holding(module, step.extra["teacher"])
        wanted = jax.lax.stop_gradient(_tokens(teacher, batch["global_crops"]))
        seen = _tokens(module, batch["global_crops"], batch["masks"], global_key)
        seen["local_cls"] = seen["cls"][:0]
        local = batch.get("local_crops")
        if local is not None and local.shape[1]:
            seen["local_cls"] = module.tokens(local, key=local_key)[0].astype(jnp.float32)
        outcome = dino_losses.dinov2(
            module.heads,
            teacher.heads,
            seen,
            wanted,
            jnp.moveaxis(batch["masks"], 1, 0),
            teacher_temperature=temperature,
            student_temperature=options.student_temperature,
            targets=options.targets,
            centers=step.extra.get("centers"),
            koleo_weight=options.koleo,
            groups=options.groups,
            capacity=self.capacity(len(batch["masks"]), module.backbone.config.patch_size),
        )
        terms = dict(outcome.losses)
        total = terms.pop("total")
        terms |= {"temperature": temperature, "momentum": self.momentum(step.clock)}
        terms["spread"] = jnp.std(wanted["cls"], axis=(0, 1)).mean()
        for part, spread in (("classes", outcome.classes), ("patches", outcome.patches)):
            terms |= {f"{part}/{name}": value for name, value in spread._asdict().items()}
        extra = {**step.extra, "centers": outcome.centers} if "centers" in step.extra else step.extra
        return Loss(total, terms, extra)

    def capacity(self, images: int, patch_size: tuple[int, int]) -> int:
        """Rows for the masked patches of a group, for a batch of `images`."""
        options = self.options
        grid = check_grid(self.image_size, patch_size, "global crops")
        return masking.capacity(2 * images // options.groups, grid, options.mask_share, tuple(options.mask_ratio))

    def temperature(self, clock: Clock) -> jax.Array:
        """Teacher temperature."""
        begin, end = self.options.teacher_temperature
        return clock.ramp(begin, end, self.options.temperature_steps)

    def momentum(self, clock: Clock) -> jax.Array:
        """EMA momentum of the teacher."""
        return clock.cosine(*self.options.momentum)

    def after_step(self, trainable: Arrays, extra: Extra, clock: Clock) -> Extra:
        """Move the teacher towards the student."""
        return {**extra, "teacher": averaged(trainable, extra["teacher"], 1 - self.momentum(clock))}

    def remarks(self, metrics: Mapping[str, float]) -> list[str]:
        """Warnings about collapse, which a falling loss does not rule out."""
        warnings = []
        for part, name in (("classes", "class tokens"), ("patches", "patches")):
            if (rows := metrics[f"{part}/rows"]) > UNIFORM:
                warnings.append(
                    f"uniform collapse: the entropy of the targets of {name} is {rows:.4f} of log K; if it stays "
                    "there, lower objective.teacher_temperature or objective.koleo, or use fewer prototypes."
                )
            elif (share := metrics[f"{part}/fullest"]) > ONE_PROTOTYPE:  # among equal entries the first leads
                warnings.append(
                    f"collapse onto one prototype: it leads the targets of {share:.0%} of all {name}; use "
                    "objective.targets='sinkhorn_knopp', or lower schedule.lr."
                )
        return warnings

    def exported(self, module: Student, extra: Extra, weights: str | None = None) -> nnx.Module:
        """The teacher's backbone, or the student's."""
        student: Any = module if weights == "student" else logical.put(module, extra["teacher"])
        return student.backbone


def _tokens(module, crops, masks=None, key=None):
    cls, patches = module.tokens(crops, masks, key)
    return {"cls": cls.astype(jnp.float32), "patches": patches.astype(jnp.float32)}
