"""Truly shift-equivariant models: the options that all families share ("Making Vision Transformers Truly
Shift-Equivariant", CVPR 2024, arXiv 2305.16316).

An adaptive model takes its image for a torus.  Wherever the ordinary model begins a grid at the corner of the image, of
patches, of windows, of what a stride keeps, the adaptive one begins it where the content decides, so that a circular
shift of the image shifts all of its maps with it and leaves the logits as they are.
"""

import dataclasses

import jax
import jax.numpy as jnp

from equivit import errors
from equivit.layers.grid import Frame
from equivit.models.model import ModelModule
from equivit.models.remade import remade
from equivit.symmetry import shifts

SELECT = ("output", "input")


def parts_of(adaptive: bool | tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """The adaptive parts of a model: all that its family has, some, or none."""
    if isinstance(adaptive, bool):
        return known if adaptive else ()
    return tuple(part for part in known if part in adaptive)


def framed(images: jax.Array, anchor: bool) -> tuple[jax.Array, Frame]:
    """Images [B, H, W, C] in the frame in which a model computes, and that frame.

    With `anchor` each image is rolled into a frame that its content chooses.  An image and its shifted copies are then
    the same array, so that whatever follows is equal to the last bit, and choices between equals too.
    """
    size = (images.shape[1], images.shape[2])
    if not anchor:
        return images, Frame(jnp.zeros((len(images), 2), jnp.int32), (1, 1), size)
    images, first = shifts.canonical(images)
    return images, Frame(first, (1, 1), size)


def check_torus(name: str, size: tuple[int, ...], units: tuple[int, int], why: str) -> None:
    """ValueError unless an image (height, width) holds whole grids of all strides and windows.

    Args:
      units: of the height and of the width, in pixels.
      why: what the units come from.
    """
    for axis, length, unit in zip(("height", "width"), size, units, strict=True):
        if length % unit:
            raise ValueError(
                f"{name}: the {axis} {length} of the images is not a multiple of {unit}, as an adaptive model needs it "
                f"({why}); {errors.multiples(length, unit)}."
            )


def adapt(model: ModelModule, **options) -> ModelModule:
    """The adaptive version of a model, with the same weights.

        model = models.adapt(pretrained.load("timm", "swin_tiny_patch4_window7_224.safetensors"))

    Accuracy falls until it is fine-tuned for some epochs (Table A12 of the paper: 90.1 %, 57.4 % at once, 92.4 % after
    20 epochs, on CIFAR-10).

    Args:
      options: fields of its configuration; `adaptive=True` if not given.

    Raises:
      ValueError: the family has no adaptive version, or no such option.
    """
    fields = [field.name for field in dataclasses.fields(model.config)]
    if "adaptive" not in fields:
        raise ValueError(
            f"adapt: a {type(model).__name__} has no adaptive version; take another model, such as swin_t."
        )
    return remade(model, **{"adaptive": True, **options})[0]
