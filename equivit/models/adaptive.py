"""Truly shift-equivariant models: options shared by all families ("Making Vision Transformers Truly Shift-Equivariant",
CVPR 2024, arXiv 2305.16316).

An adaptive model treats the image as a torus.  The ordinary model begins its grids (patches, windows, strides) at the
corner of the image; the adaptive model lets the content choose the origin.  A circular shift of the image then shifts
all maps and leaves the logits unchanged.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp

from equivit import errors
from equivit.constraints import OneOf
from equivit.layers.grid import Frame
from equivit.layers.polyphase import corner_norms, embedding_norms, lattice_norms
from equivit.models.model import ModelModule
from equivit.models.reconfiguration import check_model, reconfigure
from equivit.symmetry import shifts
from equivit.symmetry.shifts import Choice
from equivit.symmetry.views import oriented_hashes

SELECT = ("output", "input")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveConfig:
    """Base of a configuration with a field `adaptive`; a family with padded convolutions also has `padding`.

    Attributes:
      KNOWN_PARTS: the parts of the family that may be adaptive.
      select: phases are chosen by the norm of the output ("output", Eq. 15 and 22) or of the input on the lattice
        ("input"), which is almost free.  In models with a symmetry group, the input is read at the corners of patches.
      anchor: if all parts are adaptive, first roll the image into a frame chosen by its content (`aligned`), so
        that ties and rounding are shift-invariant.
    """

    KNOWN_PARTS: ClassVar[tuple[str, ...]]
    select: Annotated[str, OneOf(SELECT)] = "output"
    anchor: bool = True

    @property
    def parts(self: Any) -> tuple[str, ...]:
        """The parts that are adaptive: all, some, or none."""
        if isinstance(self.adaptive, bool):
            return self.KNOWN_PARTS if self.adaptive else ()
        return tuple(part for part in self.KNOWN_PARTS if part in self.adaptive)

    def mode(self: Any, part: str) -> str:
        """The padding mode of a part's convolutions: circular if the part is adaptive."""
        return "circular" if part in self.parts else self.padding

    @property
    def anchored(self) -> bool:
        """Whether images are rolled into a frame chosen by their content."""
        return self.anchor and self.parts == self.KNOWN_PARTS


def aligned(
    images: jax.Array,
    config: Any,
    kernel: jax.Array,
    bias: jax.Array,
    *,
    stride: tuple[int, int],
    padding: tuple[int, int] = (0, 0),
) -> tuple[jax.Array, Frame, dict[str, Choice]]:
    """Roll images [B, H, W, C] to the origin of their patches (A-token, Eq. 13 and 14); return frame and choices too.

    If `config.anchored`, each image is first rolled into a frame chosen by its content.  An image and its shifted
    copies are then the same array, so all later results are bit-identical, including how ties are broken.

    Args:
      config: a model configuration with `parts`, `anchored` and `select`.  If it has a `group`, ties are broken so that
        the origin of a rotated or mirrored image is rotated or mirrored too.
      kernel, bias: parameters of the embedding, [kh, kw, C, D] and [D].
      stride: its stride, (rows, columns).
      padding: offset of the kernel's first tap before the patch.
    """
    content = jax.lax.stop_gradient(images)
    framed, first = shifts.canonical(content) if config.anchored else (content, jnp.zeros((len(images), 2), jnp.int32))
    frame = Frame(first, (1, 1), (images.shape[1], images.shape[2]))
    if "token" not in config.parts:
        return images, frame, {}
    group = getattr(config, "group", None)
    if config.select == "output":
        norms = embedding_norms(framed, *jax.lax.stop_gradient((kernel, bias)), stride, padding)
    else:
        norms = (lattice_norms if group is None else corner_norms)(framed, stride)
    if group is None:
        choice = shifts.strongest(norms)
    else:
        hashes = oriented_hashes(content, stride, group)
        choice = shifts.settled(norms, jax.lax.collapse(hashes, 2))
    first = shifts.phases(choice.index, stride)
    return shifts.roll(images, -first - frame.offset), frame.rolled(first), {"patch_embed": choice}


def check_torus(name: str, size: tuple[int, ...], units: tuple[int, int], why: str) -> None:
    """Raise ValueError unless an image (height, width) is divisible by all strides and windows.

    Args:
      units: divisors of height and width, in pixels.
      why: the origin of the units, for the message.
    """
    errors.sides(name, "the images", size, units, f"an adaptive model needs it ({why})")


def adapt(model: ModelModule, **options) -> ModelModule:
    """The adaptive version of a model, with the same weights except for positions.

        model = models.adapt(pretrained.load("timm", "swin_tiny_patch4_window7_224.safetensors"))

    Swin and CvT keep all weights, and MViT's tables of positions are resized to distances around the torus.  A ViT
    loses its table of positions; each block gets a new one of relative positions, drawn with seed 0.

    Accuracy drops until the model is fine-tuned for some epochs.  Table A12 of the paper, on CIFAR-10: 90.1 % before,
    57.4 % right after, 92.4 % after 20 epochs.

    Args:
      options: fields of the configuration; `adaptive` defaults to True.

    Raises:
      ValueError: not a model, a family without an adaptive version, or an unknown option.
    """
    check_model("adapt", model)
    fields = [field.name for field in dataclasses.fields(model.config)]
    if "adaptive" not in fields:
        raise ValueError(
            f"adapt: a {type(model).__name__} has no adaptive version; take another model, such as swin_t."
        )
    for name in options:
        errors.one_of("adapt: field", name, fields)
    return reconfigure(model, **{"adaptive": True, **options})[0]
