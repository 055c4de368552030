"""Schedules of the learning rate and of weight decay, which trace under `jax.jit`.

They are functions of the number of updates, here "step".  It is behind the number of training steps once float16 has
skipped some.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from equivit.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from equivit.objectives.clock import Clock

Schedule = Callable[[Any], jax.Array]  # a function of the number of updates, which may be traced


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """The `schedule` section of a configuration."""

    name: Literal["cosine", "constant", "poly"] = "cosine"
    lr: PositiveFloat = 1e-3
    warmup_lr: NonNegativeFloat = 1e-6
    min_lr: NonNegativeFloat = 1e-5
    warmup_epochs: NonNegativeFloat | None = None  # this or warmup_steps
    warmup_steps: NonNegativeInt | None = None
    power: PositiveFloat = 1.0  # of "poly"
    inclusive: bool = False  # the last of several warm-up steps has `lr`, not the first step after the warm-up
    length: PositiveInt | None = None  # steps of the schedule, which may be longer than the run; None: the run's
    per_epoch: bool = False  # the rate changes each epoch, not each step


def create(config: ConfigDict, *, total_steps: int, steps_per_epoch: int) -> Schedule:
    """The learning rate at each update, from the `schedule` section.

    Raises ValueError if the warm-up is not shorter than the run.
    """
    warmup = config.warmup_steps or (config.warmup_epochs or 0) * steps_per_epoch
    if warmup >= total_steps:
        key = "warmup_steps" if config.warmup_steps else "warmup_epochs"
        nearest = total_steps - 1 if config.warmup_steps else round((total_steps - 1) / steps_per_epoch, 4)
        raise ValueError(
            f"config.schedule.{key}={config[key]}: a warm-up of {warmup:g} steps does not fit in a run of "
            f"{total_steps} ({steps_per_epoch} an epoch); set it to at most {nearest}, or train for longer."
        )
    if config.name == "poly":
        return lambda step: _poly(config, step, warmup, total_steps)
    final = config.min_lr if config.name == "cosine" else config.lr
    if config.per_epoch:
        return lambda step: _by_epoch(config, final, step, total_steps / steps_per_epoch, steps_per_epoch)
    return warmup_cosine(
        config.lr, final, total=total_steps, warmup=warmup, start=config.warmup_lr, inclusive=config.inclusive
    )


def warmup_cosine(
    base: float, final: float, *, total: int, warmup: int = 0, start: float = 0.0, inclusive: bool = True
) -> Schedule:
    """Rise linearly from `start` to `base` in `warmup` steps, then follow a cosine to `final`, then stay there.

    As in DINO and DINOv2, the last step of an `inclusive` warm-up and the first of the cosine both have `base`, and a
    warm-up of one step has `start`.  Otherwise only the first step of the cosine has `base`.  If `warmup` equals
    `total`, `final` follows the warm-up without a cosine.

    Raises:
      ValueError: the warm-up is longer than the schedule.
    """
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup_cosine: {warmup=} steps do not fit in {total=}; shorten the warm-up.")

    def schedule(step):
        rising = Clock(step, total, 1).ramp(start, base, warmup if inclusive else warmup + 1)
        falling = Clock(step - warmup, max(total - warmup, 1), 1).cosine(base, final)
        return jnp.where(step < warmup, rising, jnp.where(step < total, falling, final)).astype(jnp.float32)

    return schedule


def weight_decay(config: ConfigDict, *, total_steps: int) -> Schedule:
    """The weight decay at each update, from the `optimizer` section: constant, or a cosine to `weight_decay_end`."""
    begin, end = config.weight_decay, config.get("weight_decay_end")
    return (lambda step: begin) if end is None else warmup_cosine(begin, end, total=total_steps)


def _by_epoch(config, final, step, epochs, steps_per_epoch):
    """Change the rate each epoch, like timm's scheduler stepped with the index of the finished epoch (DeiT III).

    So epochs 0 and 1 both run at `warmup_lr`, and the cosine starts at epoch 0, not at the end of the warm-up.
    """
    warmup, finished = config.warmup_epochs or 0, jnp.maximum(step // steps_per_epoch - 1, 0)
    clock = Clock(finished, epochs, 1)
    rising, falling = clock.ramp(config.warmup_lr, config.lr, warmup + 1), clock.cosine(config.lr, final)
    return jnp.where(finished < warmup, rising, falling).astype(jnp.float32)


def _poly(config, step, warmup, total_steps):
    """Decay from `lr` to `min_lr` as a power of the remaining fraction of the run, warm-up included.

    During the warm-up, a factor rises linearly from `warmup_lr / lr` to 1, as in MMSegmentation.
    """
    left = jnp.clip(1 - step / total_steps, 0, 1) ** config.power
    decayed = config.min_lr + (config.lr - config.min_lr) * left
    first = config.warmup_lr / config.lr
    factor = jnp.minimum(first + (1 - first) * step / max(warmup, 1), 1) if warmup else 1
    return (decayed * factor).astype(jnp.float32)


def check(section: ConfigDict) -> None:
    """Raise ValueError for values of the `schedule` section that exclude each other."""
    if section.warmup_epochs is not None and section.warmup_steps is not None:
        raise ValueError("config.schedule: warmup_epochs and warmup_steps are both set; set one to None.")
    if section.inclusive and (section.per_epoch or section.name == "poly"):
        raise ValueError(
            "config.schedule: inclusive=True is for name='cosine' or 'constant' with per_epoch=False; set it to False."
        )
    if section.per_epoch and section.name == "poly":
        raise ValueError("config.schedule: name='poly' changes from step to step; set per_epoch=False.")
    if section.per_epoch and section.warmup_steps is not None:
        raise ValueError("config.schedule: per_epoch=True counts in epochs; give warmup_epochs, not warmup_steps.")


def check_decay(section: ConfigDict) -> None:
    """Raise ValueError if the learning rate would rise where the `schedule` section decays it."""
    if section.name != "constant" and section.min_lr > section.lr:
        raise ValueError(
            f"config.schedule.min_lr={section.min_lr:g} must not exceed lr={section.lr:g}, as the rate would rise "
            f"after the warm-up; set min_lr to at most {section.lr:g}, or to 0."
        )
