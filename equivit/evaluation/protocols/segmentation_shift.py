"""Consistency of label maps under shifts: mASCC (--config.evaluation.shift.KEY=VALUE).

    mASCC = mean_i mean_(D1, D2) of the share of pixels u with [S^-D1 f(S^D1 x_i)](u) = [S^-D2 f(S^D2 x_i)](u)

For circular shifts all pixels count; for others, the pixels visible in both copies.  `consistency.py` defines kinds,
ranges and offsets.

Source: "Making Vision Transformers Truly Shift-Equivariant" (arXiv 2305.16316), Eq. 26 and Sections 5.5 and 5.6.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from equivit.evaluation import consistency, label_maps
from equivit.evaluation.consistency import Shifts
from equivit.evaluation.predictions import by_example
from equivit.evaluation.protocol import Line, Protocol, Run
from equivit.evaluation.protocols import segmentation, shift
from equivit.symmetry import shifts


def check(config: ConfigDict) -> None:
    """As `shift.check`; also ValueError for windows that do not fit in the images of `config.data`."""
    shift.check(config)
    label_maps.settings(config)


def run(run: Run) -> dict[str, Any]:
    """Measure the consistency of label maps, with the settings of `config.evaluation.shift` and `.segmentation`.

    Returns the mASCC for each kind and range, by a name such as "circular_full".  The suffix "_standard_error" adds its
    standard error over images, "_changed" the number of images in which some pixel changes.  Also "examples".

    Raises ValueError if there are no examples, no two copies have a pixel in common, or logits are not finite.
    """
    settings, views = Shifts(**run.config.evaluation.shift.to_dict()), label_maps.settings(run.config)
    crop_size, source = shift.size(run), shift.source(run.data, settings)

    def compare(batch):
        counts, finite = [], True
        size = crop_size or batch["image"].shape[1:3]
        for pair in consistency.copies(batch, settings, size=size, mean=tuple(run.data.mean)):
            (first, sound), (second, also) = (
                label_maps.classes(label_maps.logits(run.predict, copy, views), size)
                for copy in (pair.first, pair.second)
            )
            counts.append(agreeing(pair.kind, first, second, pair.offsets))
            finite = finite & sound & also
        same, seen = (jnp.stack(part) for part in zip(*counts, strict=True))
        return {"same": same, "seen": seen, "finite": finite}

    batches = consistency.with_offsets(shift.batches(run, settings), settings, crop_size, source)
    found = by_example(compare, batches)
    shares = np.where(found["seen"] > 0, found["same"] / np.maximum(found["seen"], 1), np.nan)
    return consistency.statistics(settings, shares) | {"examples": shares.shape[-1]}


@functools.partial(jax.jit, static_argnums=0)
def agreeing(kind: str, first: jax.Array, second: jax.Array, offsets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Count the visible pixels with the same class in two copies, and all visible pixels, int32 [B] each.

    Args:
      kind: one of `consistency.KINDS`.
      first, second: the label maps of the copies, int [B, H, W].
      offsets: int32 [B, 2, 2] (`consistency.Pair`).
    """
    begin, end = offsets[:, 0], offsets[:, 1]
    offset = begin - end if kind == "crop" else end - begin  # of the same pixel, from first to second
    same, seen = first == shifts.roll(second, -offset), jnp.ones(first.shape, bool)
    if kind != "circular":
        seen = _inside(first.shape, offset)
    if kind == "zeros":
        seen &= _inside(first.shape, -begin)  # excludes padding
    return (same & seen).sum((1, 2)), seen.sum((1, 2))


def _inside(shape, offsets):
    """Whether a shifted pixel is still inside the image, [B, H, W]."""
    rows, columns = (jnp.arange(size) + offsets[:, k, None] for k, size in enumerate(shape[1:]))
    return ((rows >= 0) & (rows < shape[1]))[:, :, None] & ((columns >= 0) & (columns < shape[2]))[:, None]


def lines(result: dict[str, Any]) -> list[Line]:
    """One line for each kind and range."""
    return [(f"mASCC, {name}", value) for name, value in shift.each(result)]


PROTOCOL = Protocol(
    needs=frozenset({"maps"}), run=run, lines=lines, check=check, opens=shift.opens, inputs=segmentation.inputs
)
