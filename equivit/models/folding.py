"""Models for inference: batch norms folded into the convolutions and linear maps beside them.

By its running statistics a batch norm is y = f x + s for each channel, so that a convolution before it takes f into its
kernel and s into its bias.  A module says itself what stands for it: `folded()` returns a module of the same function
up to rounding.  Where a fold would not be exact, as of a shift before zeros are padded, the norm stays.
"""

from typing import Any

import jax
from flax import nnx

from equivit.layers.batch_norm import BatchNorm
from equivit.layers.stack import Stack
from equivit.models.model import ModelModule


def fold(model: ModelModule) -> ModelModule:
    """A copy of the model in which every module that holds a batch norm and has `folded()` is replaced by that.

    Outer modules come first, and what is left inside them follows.  Stacks stay scans over their blocks.  A model
    without batch norms is as it was.  The copy is for inference: with `train=True` it records nothing any more.
    """
    return _within(jax.tree.map(lambda leaf: leaf, model))


def _folded(module: Any) -> Any:
    """The folded replacement of a module (may modify it in place)."""
    if not any(isinstance(part, BatchNorm) for _, part in nnx.iter_modules(module)):
        return module
    return _within(module.folded() if hasattr(module, "folded") else module)


def _within(module: Any) -> Any:
    """The module with its parts replaced."""
    if type(module) is Stack:
        module.runs = nnx.List([jax.vmap(_folded)(run) for run in module.runs])  # over the blocks of a run
        return module
    for name, part in list(vars(module).items()):
        if isinstance(part, nnx.List):
            setattr(module, name, nnx.List([_folded(each) for each in part]))
        elif isinstance(part, nnx.Module):
            setattr(module, name, _folded(part))
    return module
