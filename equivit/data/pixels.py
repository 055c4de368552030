"""Normalisation of pixels on the device, from batches to model inputs."""

import jax
import jax.numpy as jnp


def normalize(images: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    """Normalise pixel values 0..255 [*B, H, W, C] to float32 of mean 0 and standard deviation 1.

    Raises ValueError unless mean and std have one entry, or one per channel.
    """
    if len(mean) not in (1, images.shape[-1]):
        raise ValueError(f"data.mean={mean} has {len(mean)} entries for images with {images.shape[-1]} channels.")
    return (images.astype(jnp.float32) / 255 - jnp.asarray(mean)) / jnp.asarray(std)
