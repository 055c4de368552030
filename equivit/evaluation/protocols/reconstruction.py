"""Loss of a masked autoencoder on removed patches."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from equivit.data.pixels import normalize
from equivit.evaluation.predictions import by_example
from equivit.evaluation.protocol import Line, Protocol, Run, percent
from equivit.layers.grid import check_grid
from equivit.objectives import masking
from equivit.objectives.mae import removed_errors, targets
from equivit.precision import cast

KEYS = ("ratio", "target", "variance")  # of config.objective: the masking ratio and the prediction target


def check(config: ConfigDict) -> None:
    """ValueError unless `config.objective` has KEYS."""
    if not all(key in config.objective for key in KEYS):
        raise ValueError(
            f"evaluation: config.objective.name={config.objective.name!r} does not define how images are masked; "
            "use a config with 'mae', such as configs/mae.py."
        )


def run(run: Run) -> dict[str, Any]:
    """Measure the mean squared error over removed patches, with the masks and the target of `config.objective`.

    An example's mask depends only on the seed and its index, so the result is independent of batch size and devices.

    Returns "loss"; "explained", 1 - loss / (loss of predicting zeros), the explained variance if the target is
    normalised; "examples".  Raises ValueError if there are no examples, or predictions are not finite.
    """
    settings = (tuple(run.data.mean), tuple(run.data.std), *(run.config.objective[key] for key in KEYS))
    errors = functools.partial(_errors, settings, cast(run.model, run.precision), jax.random.key(run.config.seed))
    found = by_example(lambda batch: errors(batch["image"], batch["index"]), run.batches())
    loss, of_zeros = (found[name].mean(dtype=np.float64).item() for name in ("error", "of_zeros"))
    return {"loss": loss, "explained": 1 - loss / of_zeros if of_zeros else 0.0, "examples": len(found["error"])}


def lines(result: dict[str, Any]) -> list[Line]:
    """One line."""
    loss, explained = f"{result['loss']:.4f}", percent(result["explained"])
    return [("loss on removed patches", f"{loss}, {explained} explained ({result['examples']} images)")]


@functools.partial(jax.jit, static_argnums=0)
def _errors(settings, model, key, images, index):
    mean, std, ratio, target, variance = settings
    images, patch_size = normalize(images, mean, std), model.config.encoder.patch_size
    h, w = check_grid(images.shape[1:3], patch_size, "image")
    noise = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (h * w,)))(index)
    keep, mask = masking.from_noise(noise, masking.number_kept(h * w, ratio))
    predictions, wanted = model(images, keep=keep), targets(images, patch_size, target, variance)
    return {
        "error": removed_errors(predictions, wanted, mask),
        "of_zeros": removed_errors(jnp.zeros_like(wanted), wanted, mask),
        "finite": jnp.isfinite(predictions).all((1, 2)),
    }


PROTOCOL = Protocol(needs=frozenset({"reconstruction"}), run=run, lines=lines, check=check, curve="loss", default=True)
