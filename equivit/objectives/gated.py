"""Train a model for its task, and gates that learn where its attention becomes a convolution.

Each block mixes both by a gate; the gates are a relaxed choice of a given number of blocks or heads
(`depthwise/gates.py`).  The run exports the model with the hard choice, the largest weights:

- end to end ("DSP-e2e"), this model is the result;
- in two stages ("DSP-2S"), only its `config.replaced` is used, and stage 2 starts again from the model of stage 1.

Source: depthwise attention, Section 2.3.2, Eq. 17 and 18; Differentiable Subset Pruning (Li et al. 2021).
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import core
from jax.experimental import multihost_utils

from equivit.constraints import Above0, OneOf, PositiveFloat, PositiveInt, Words
from equivit.depthwise import gates
from equivit.depthwise.replacement import backbone, with_backbone
from equivit.layers.depthwise import BY_HEAD
from equivit.layers.depthwise_conv import check_taps
from equivit.layers.rngs import Keys
from equivit.logical import Tensor
from equivit.models.vit.config import ViTConfig
from equivit.models.vit.jumbo import JumboViTConfig
from equivit.objectives.objective import Batch, Extra, Loss, Objective, Rule, Step
from equivit.objectives.segmentation import Segmentation
from equivit.objectives.supervised import Supervised

WEIGHTS = "gates"  # the logical name of the weights
Temperatures = Annotated[tuple[PositiveFloat, PositiveFloat], Words("two positive temperatures, at first and at last")]


class GatedModel(nnx.Module):
    """A model with gates, and the weights that determine them.

    Args:
      model: as the task trains it, with gates in its ViT.
      gates: the weights, [depth, heads], or [depth, 1] where the heads of a block share one gate.
    """

    def __init__(self, model: Any, gates: jax.Array):
        self.model, self.gates = model, nnx.Param(gates, decay=False)


@dataclasses.dataclass(frozen=True)
class GateOptions:
    """The keys that gates add to the options of a task."""

    gates: PositiveInt = 12  # how many blocks, or heads, are replaced in the end
    by_head: bool = False  # each head has a gate of its own
    kind: Annotated[str, OneOf(BY_HEAD)] = "dw"  # of the convolution
    kernel_size: PositiveInt = 3
    gate_lr: PositiveFloat = 0.5  # at the peak of the schedule, in place of schedule.lr; the paper does not state it
    temperature: Temperatures = (1000.0, 1e-3)  # at first and at last; the paper states the second
    cooling: Above0 = 1.0  # the share of the run after which the last one is reached


class Gated(Objective):
    """A mixin that adds gates to an objective, which comes after this class among the bases of a subclass.

    Each step draws new noise.  The temperature falls geometrically over a share of the run.  The weights of the gates
    start as Xavier's uniform, and have their own learning rate and clip group, and no decay.
    """

    prefix = "model."

    def check_model(self, model: Any, teachers: Mapping[str, nnx.Module]) -> None:
        """Check the task; also ValueError unless a plain ViT on patches alone has that many blocks or heads."""
        super().check_model(model, teachers)
        options, name = self.options, f"config.objective.name={self.options.name!r}"
        check_taps("config.objective", options.kernel_size, "zeros")
        if not isinstance(model, ViTConfig) or isinstance(model, JumboViTConfig) or model.k or model.prefix:
            raise ValueError(
                f"{name} needs a plain ViT of patch tokens alone; take one with class_token=False, registers=0 and "
                "pool='mean'."
            )
        if model.replaced or model.parts:
            raise ValueError(f"{name} chooses among blocks with attention; set model.replaced=() and adaptive=False.")
        most = model.depth * (model.num_heads if options.by_head else 1)
        if options.gates > most:
            raise ValueError(f"config.objective.gates={options.gates} must be at most {most}, the number of gates.")

    def module(self, model: Any, key: jax.Array) -> GatedModel:
        """The module of the task, with gates in its ViT."""
        task_key, taps_key, gates_key = jax.random.split(key, 3)
        options, config = self.options, model.config
        model = gates.with_gates(model, options.kind, kernel_size=options.kernel_size, rngs=Keys(taps_key))
        shape = (config.depth, config.num_heads if options.by_head else 1)
        return GatedModel(super().module(model, task_key), nnx.initializers.xavier_uniform()(gates_key, shape))

    def rule(self, tensor: Tensor) -> Rule:
        """The weights of the gates have their own rate; all other tensors follow the task."""
        if tensor.name == WEIGHTS:
            return Rule(lr=self.options.gate_lr / self.config.schedule.lr, decay=False, clip=WEIGHTS)
        return super().rule(tensor._replace(name=tensor.name.removeprefix(self.prefix)))

    def static(self, module: GatedModel, progress: float) -> Hashable:
        """Delegates to the task's objective."""
        return super().static(module.model, progress)

    def prepare(self, module: GatedModel, batch: Batch, key: jax.Array) -> Batch:
        """Delegates to the task's objective."""
        return super().prepare(module.model, batch, key)

    def loss(self, module: GatedModel, batch: Batch, step: Step) -> Loss:
        """The task's loss with relaxed gates; the temperature is added to its metrics."""
        options, clock, (start, end) = self.options, step.clock, self.options.temperature
        temperature = gates.temperature(clock.step, start, end, max(options.cooling * clock.total, 1))
        noise_key, key = jax.random.split(step.key)
        weights = module.gates[...].astype(jnp.float32).reshape(-1)
        uniform = jax.random.uniform(noise_key, weights.shape)
        vit: Any = backbone(module.model)
        relaxed = gates.relaxed_top_k(weights, options.gates, temperature, uniform).reshape(module.gates.shape)
        gates.set_gates(vit, jnp.broadcast_to(relaxed, (len(relaxed), vit.config.num_heads)))
        loss = super().loss(module.model, batch, step._replace(key=key))
        return loss._replace(metrics={**loss.metrics, "temperature": temperature})

    def exported(self, module: GatedModel, extra: Extra, weights: str | None = None) -> nnx.Module:
        """The model of the task with the hard choice; all processes of a run must call this.

        Where only shapes are known, as under `jax.eval_shape`, the first blocks or heads are chosen.
        """
        trained: Any = super().exported(module, extra, weights)
        export = functools.partial(_without_gates, self._selected(trained), self.options.kind, self.options.kernel_size)
        return export(trained.model) if _is_abstract(trained) else jax.jit(export)(trained.model)

    def _selected(self, module: GatedModel) -> dict[int, tuple[int, ...] | None]:
        """The blocks or heads of the largest weights, as `replacement.replace` takes them."""
        weights = np.arange(module.gates.size, 0, -1).reshape(module.gates.shape)
        if not _is_abstract(module):
            weights = multihost_utils.process_allgather(module.gates[...], tiled=True)
        hard = gates.hard_top_k(np.asarray(weights).reshape(-1), self.options.gates).reshape(weights.shape)
        rows = {i: row for i, row in enumerate(hard) if row.any()}
        return {i: tuple(map(int, np.flatnonzero(row))) if self.options.by_head else None for i, row in rows.items()}


def _is_abstract(module: GatedModel) -> bool:
    return isinstance(module.gates.get_value(), jax.ShapeDtypeStruct | core.Tracer)


def _without_gates(where: dict, kind: str, kernel_size: int, model: Any) -> Any:
    return with_backbone(model, gates.without_gates(backbone(model), where, kind, kernel_size))


class GatedSupervised(Gated, Supervised):
    """Classification with gates."""

    @dataclasses.dataclass(frozen=True)
    class Options(GateOptions, Supervised.Options):
        """The `objective` section of a config."""

    FIXED = (*Supervised.FIXED, "by_head", "kind", "kernel_size")


class GatedSegmentation(Gated, Segmentation):
    """Segmentation with gates."""

    @dataclasses.dataclass(frozen=True)
    class Options(GateOptions, Segmentation.Options):
        """The `objective` section of a config."""

    FIXED = (*Segmentation.FIXED, "by_head", "kind", "kernel_size")
