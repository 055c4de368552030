"""How well a masked autoencoder predicts the patches that it does not see."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp

from equivit.data.pixels import normalize
from equivit.evaluation.classification import total
from equivit.evaluation.predictions import Batch, all_finite, measured
from equivit.layers.grid import check_grid
from equivit.models.decoders import MaskedAutoencoder
from equivit.objectives import masking
from equivit.objectives.mae import removed_errors, targets


def reconstruction(
    model: MaskedAutoencoder,
    batches: Iterable[Batch],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    ratio: float,
    target: str,
    variance: str,
    seed: int,
) -> dict[str, float]:
    """The mean squared error over removed patches.

    An example's mask depends on `seed` and on its index alone, so the result does not depend on the batch size, nor on
    the number of devices.

    Args:
      batches: with "image" uint8 [B, H, W, C], "index" and "weight" [B]: 1 for examples, 0 for padding.
      mean, std: of each channel (or one for all), of pixel values in 0..1.
      ratio, target, variance: as in the `objective` section of a masked autoencoder's config.

    Returns:
      "loss"; "explained", 1 - loss over that of predicting zeros, so the share of the variation that is predicted where
      the target is normalised; "examples".

    Raises:
      ValueError: there is no example, or predictions are not finite.
    """
    count = functools.partial(_count, (tuple(mean), tuple(std), ratio, target, variance), model, jax.random.key(seed))
    totals = total(measured(lambda batch: count(batch["image"], batch["index"], batch["weight"]), batches))
    if not totals.get("examples"):
        raise ValueError("reconstruction: the evaluation split holds no readable example.")
    explained = 1 - totals["error"] / totals["of_zeros"] if totals["of_zeros"] else 0.0
    examples = int(totals["examples"])
    return {"loss": totals["error"] / examples, "explained": explained, "examples": examples}


@functools.partial(jax.jit, static_argnums=0)
def _count(settings, model, key, images, index, weight):
    mean, std, ratio, target, variance = settings
    images, patch_size = normalize(images, mean, std), model.config.encoder.patch_size
    h, w = check_grid(images.shape[1:3], patch_size, "image")
    noise = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (h * w,)))(index)
    keep, mask = masking.from_noise(noise, masking.number_kept(h * w, ratio))
    predictions, wanted = model(images, keep), targets(images, patch_size, target, variance)
    real = weight > 0
    return {
        "error": jnp.sum(removed_errors(predictions, wanted, mask), where=real),
        "of_zeros": jnp.sum(removed_errors(jnp.zeros_like(wanted), wanted, mask), where=real),
        "examples": real.sum(),
        "finite": all_finite(predictions, weight[:, None]),
    }
