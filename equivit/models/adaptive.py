"""Truly shift-equivariant models: the options that all families share ("Making Vision Transformers Truly
Shift-Equivariant", CVPR 2024, arXiv 2305.16316).

An adaptive model takes its image for a torus.  Wherever the ordinary model begins a grid at the corner of the image, of
patches, of windows, of what a stride keeps, the adaptive one begins it where the content decides, so that a circular
shift of the image shifts all of its maps with it and leaves the logits as they are.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from equivit import errors
from equivit.layers.grid import Frame
from equivit.layers.polyphase import embedding_norms, lattice_norms
from equivit.models.model import ModelModule
from equivit.models.reconfiguration import reconfigure
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice
from equivit.symmetry.views import oriented_hashes

SELECT = ("output", "input")


class AdaptiveConfig:
    """Base of a configuration with the fields `adaptive` and `anchor`; KNOWN_PARTS are those that its family has.

    A family whose convolutions pad has the field `padding` too.
    """

    KNOWN_PARTS: ClassVar[tuple[str, ...]]
    adaptive: Any
    anchor: Any
    padding: Any

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are adaptive: all, some, or none."""
        if isinstance(self.adaptive, bool):
            return self.KNOWN_PARTS if self.adaptive else ()
        return tuple(part for part in self.KNOWN_PARTS if part in self.adaptive)

    def mode(self, part: str) -> str:
        """The padding of a part's convolutions: around the torus where an adaptive part chooses."""
        return "circular" if part in self.parts else self.padding

    @property
    def anchored(self) -> bool:
        """Whether images are rolled into a frame of their content."""
        return self.anchor and self.parts == self.KNOWN_PARTS


def placed(
    images: jax.Array,
    config: Any,
    kernel: jax.Array,
    bias: jax.Array,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int] = (0, 0),
) -> tuple[jax.Array, Frame, dict[str, Choice]]:
    """Images [B, H, W, C] rolled to where their patches begin (A-token, Eq. 13 and 14), and what was chosen for that.

    Args:
      config: a model's, with `parts`, `anchored` and `select`; if it has a `group`, ties are settled so
        that a turned or mirrored image begins at the turned or mirrored place.
      kernel, bias: of the embedding, [kh, kw, C, D] and [D].
      stride: of it, (rows, columns).
      padding: so far before a patch lies the first tap of the kernel.
    """
    content = jax.lax.stop_gradient(images)
    images, frame = framed(images, config.anchored)
    if "token" not in config.parts:
        return images, frame, {}
    if config.select == "output":
        kernel, bias = jax.lax.stop_gradient((kernel, bias))
        norms = embedding_norms(jax.lax.stop_gradient(images), kernel, bias, stride, padding)
    else:
        norms = lattice_norms(jax.lax.stop_gradient(images), stride)
    group = getattr(config, "group", None)
    if group is None:
        choice = shifts.strongest(norms)
    else:
        hashes = oriented_hashes(content, stride, group)
        choice = shifts.settled(norms, jax.lax.collapse(hashes, 2))
    first = shifts.phases(choice.index, stride)
    return shifts.roll(images, -first), frame.rolled(first), {"patch_embed": choice}


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
    errors.sides(name, "the images", size, units, f"an adaptive model needs it ({why})")


def adapt(model: ModelModule, **options) -> ModelModule:
    """The adaptive version of a model, with the same weights.

        model = models.adapt(pretrained.load("timm", "swin_tiny_patch4_window7_224.safetensors"))

    Accuracy falls until it is fine-tuned for some epochs (Table A12 of the paper: 90.1 %, 57.4 % at once, 92.4 % after
    20 epochs, on CIFAR-10).

    Args:
      options: fields of its configuration; `adaptive=True` if not given.

    Raises:
      ValueError: it is no model, the family has no adaptive version, or no such option.
    """
    if not hasattr(model, "config"):
        name = errors.shown(model) if isinstance(model, str) else "'swin_t'"
        raise ValueError(f"adapt: {errors.shown(model)} is no model; give one, such as models.create({name}).")
    fields = [field.name for field in dataclasses.fields(model.config)]
    if "adaptive" not in fields:
        raise ValueError(
            f"adapt: a {type(model).__name__} has no adaptive version; take another model, such as swin_t."
        )
    for name in options:
        errors.one_of("adapt: field", name, fields)
    return reconfigure(model, **{"adaptive": True, **options})[0]
