"""Train a model for its task with gates that learn where a convolution replaces attention.

A gate in each block mixes the two; the gates are a relaxed choice of a given number of blocks or heads
(`depthwise/gates.py`).  A run evaluates and exports the model with the hard choice, the largest weights without noise:

- end to end ("DSP-e2e"), this model is the result;
- in two stages ("DSP-2S"), stage 2 uses only its `config.replaced` and restarts from the model of stage 1.

Source: depthwise attention, Section 2.3.2, Eq. 17 and 18; Differentiable Subset Pruning (Li et al. 2021).  Defaults
are from the code of the former, github.com/cscribano/DWConv_VFM.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import core
from jax.experimental import multihost_utils

from equivit.constraints import OneOf, PositiveFloat, PositiveInt, Words
from equivit.depthwise import gates
from equivit.depthwise.gates import KINDS, STARTS
from equivit.depthwise.replacement import backbone, with_backbone
from equivit.layers.depthwise import BY_HEAD, FORMS
from equivit.layers.depthwise_conv import check_taps
from equivit.layers.rngs import Keys
from equivit.logical import Tensor
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.jumbo import JumboViTConfig
from equivit.objectives.clock import Clock
from equivit.objectives.objective import Batch, Extra, Loss, Objective, Rule, Step
from equivit.objectives.segmentation import Segmentation
from equivit.objectives.supervised import Supervised

WEIGHTS = "gates"  # the logical name of the weights
Temperatures = Annotated[tuple[PositiveFloat, PositiveFloat], Words("two positive temperatures, at first and at last")]


class GatedModel(nnx.Module):
    """A model with gates, and the weights that determine them.

    Args:
      model: the task's model, with gates in its ViT.
      gates: the weights, [depth, heads], or [depth, 1] if the heads of a block share a gate.
    """

    def __init__(self, model: Any, gates: jax.Array):
        self.model, self.gates = model, nnx.Param(gates, decay=False)


@dataclasses.dataclass(frozen=True)
class GateOptions:
    """Options of gates, added to the options of a task."""

    gates: PositiveInt = 12  # number of blocks, or heads, replaced in the end
    by_head: bool = False  # a separate gate for each head
    kind: Annotated[str, OneOf(KINDS)] = "dw"  # the replacement; "spvit" only for whole blocks
    form: Annotated[str, OneOf(FORMS)] = "released"
    kernel_size: PositiveInt = 3
    gate_start: Annotated[str, OneOf(STARTS)] = "uniform"  # of the weights
    gate_lr: PositiveFloat = 0.01  # peak learning rate of the weights, in place of schedule.lr
    temperature: Temperatures = (1.0, 1e-3)  # first and last
    cooling: PositiveFloat | None = 30.0  # epochs until the last temperature; None: the whole run


class Gated(Objective):
    """A mixin that adds gates to an objective; list it before the objective among the bases of a subclass.

    Each step draws new noise.  The temperature falls geometrically, then stays constant.  The gate weights have their
    own learning rate, which follows the schedule, their own clip group, and no decay.
    """

    prefix = "model."

    def check_model(self, model: Any, teachers: Mapping[str, nnx.Module]) -> None:
        """Check the task; also ValueError unless the model is a plain ViT of patches with enough blocks or heads."""
        super().check_model(model, teachers)
        options, name = self.options, f"config.objective.name={self.options.name!r}"
        check_taps("config.objective", options.kernel_size, "zeros")
        if options.by_head and options.kind not in BY_HEAD:
            raise ValueError(
                f"config.objective.by_head=True: the kind {options.kind!r} merges all heads; set it to False, or take "
                "kind='dw' or 'conv'."
            )
        if not isinstance(model, ViTConfig) or isinstance(model, JumboViTConfig) or model.k or model.prefix:
            raise ValueError(
                f"{name} needs a plain ViT of patch tokens alone; use one with class_token=False, registers=0 and "
                "pool='mean'."
            )
        if model.replaced or model.parts:
            raise ValueError(f"{name} chooses among blocks with attention; set model.replaced=() and adaptive=False.")
        most = model.depth * (model.num_heads if options.by_head else 1)
        if options.gates > most:
            raise ValueError(f"config.objective.gates={options.gates} must be at most {most}, the number of gates.")

    def module(self, model: Any, key: jax.Array) -> GatedModel:
        """The task's module, with gates in its ViT."""
        task_key, taps_key, gates_key = jax.random.split(key, 3)
        options, config = self.options, model.config
        how: dict[str, Any] = dict(form=options.form, kernel_size=options.kernel_size)
        model = gates.with_gates(model, options.kind, **how, rngs=Keys(taps_key))
        shape = (config.depth, config.num_heads if options.by_head else 1)
        return GatedModel(super().module(model, task_key), gates.start_weights(options.gate_start, gates_key, shape))

    def rule(self, tensor: Tensor) -> Rule:
        """A separate rule for the gate weights; all other tensors follow the task."""
        if tensor.name == WEIGHTS:
            return Rule(lr=self.options.gate_lr / self.config.schedule.lr, decay=False, clip=WEIGHTS)
        return super().rule(tensor._replace(name=tensor.name.removeprefix(self.prefix)))

    def static(self, module: GatedModel, progress: float) -> Hashable:
        """Delegates to the task's objective."""
        return super().static(module.model, progress)

    def prepare(self, module: GatedModel, batch: Batch, key: jax.Array) -> Batch:
        """Delegates to the task's objective."""
        return super().prepare(module.model, batch, key)

    def temperature(self, clock: Clock) -> jax.Array:
        """The temperature of a step."""
        options, (start, end) = self.options, self.options.temperature
        steps = clock.total if options.cooling is None else options.cooling * clock.per_epoch
        return gates.temperature(clock.step, start, end, steps)

    def loss(self, module: GatedModel, batch: Batch, step: Step) -> Loss:
        """The task's loss with relaxed gates; the temperature is added to its metrics."""
        temperature = self.temperature(step.clock)
        noise_key, key = jax.random.split(step.key)
        weights = module.gates[...].astype(jnp.float32).reshape(-1)
        uniform = jax.random.uniform(noise_key, weights.shape)
        vit: Any = backbone(module.model)
        relaxed = gates.relaxed_top_k(weights, self.options.gates, temperature, uniform).reshape(module.gates.shape)
        gates.set_gates(vit, jnp.broadcast_to(relaxed, (len(relaxed), vit.config.num_heads)))
        loss = super().loss(module.model, batch, step._replace(key=key))
        return loss._replace(metrics={**loss.metrics, "temperature": temperature})

    def exported(self, module: GatedModel, extra: Extra, weights: str | None = None) -> nnx.Module:
        """The task's model with the hard choice; all processes of a run must call this.

        For abstract modules, as under `jax.eval_shape`, it chooses the first blocks or heads.
        """
        trained: Any = super().exported(module, extra, weights)
        where, options = self._selected(trained), self.options

        def export(model):
            how: dict[str, Any] = dict(form=options.form, kernel_size=options.kernel_size)
            hard = gates.without_gates(backbone(model), where, options.kind, **how)
            return with_backbone(model, hard)

        return export(trained.model) if _is_abstract(trained) else jax.jit(export)(trained.model)

    def _selected(self, module: GatedModel) -> dict[int, tuple[int, ...] | None]:
        """The blocks or heads with the largest weights, in the form of `replacement.replace`."""
        weights = np.arange(module.gates.size, 0, -1).reshape(module.gates.shape)
        if not _is_abstract(module):
            weights = multihost_utils.process_allgather(module.gates[...], tiled=True)
        hard = gates.hard_top_k(np.asarray(weights).reshape(-1), self.options.gates).reshape(weights.shape)
        rows = {i: row for i, row in enumerate(hard) if row.any()}
        return {i: tuple(map(int, np.flatnonzero(row))) if self.options.by_head else None for i, row in rows.items()}


def _is_abstract(module: GatedModel) -> bool:
    return isinstance(module.gates.get_value(), jax.ShapeDtypeStruct | core.Tracer)


class GatedSupervised(Gated, Supervised):
    """Classification with gates."""

    @dataclasses.dataclass(frozen=True)
    class Options(GateOptions, Supervised.Options):
        """The `objective` section of a config."""

    FIXED = (*Supervised.FIXED, "by_head", "kind", "form", "kernel_size")

    def check_model(self, model: Any, teachers: Mapping[str, nnx.Module]) -> None:
        """As in `Gated`; also ValueError if `token_drop` is set."""
        super().check_model(model, teachers)
        if self.options.token_drop is not None:
            raise ValueError(
                f"config.objective.token_drop={self.options.token_drop}: the convolutions of "
                f"config.objective.name={self.options.name!r} need the whole grid of patches; set token_drop=None."
            )


class GatedSegmentation(Gated, Segmentation):
    """Segmentation with gates."""

    @dataclasses.dataclass(frozen=True)
    class Options(GateOptions, Segmentation.Options):
        """The `objective` section of a config."""

    FIXED = (*Segmentation.FIXED, "by_head", "kind", "form", "kernel_size")

    def check_model(self, model: Any, teachers: Mapping[str, nnx.Module]) -> None:
        """As in `Gated`; also ValueError if `frozen` is set."""
        super().check_model(model, teachers)
        if self.options.frozen:
            raise ValueError(
                f"config.objective.frozen=True: objective.name={self.options.name!r} trains gates and convolutions in "
                "the backbone; set frozen=False, and freeze the rest by "
                "optimizer.freeze=model.backbone.*,!*.attention.taps."
            )
