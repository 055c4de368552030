"""Draw patterns of a reaction and diffusion: images without an orientation that need no download.

    python -m experiments studies.patterns --to=patterns.npz  # and patterns.png, two images of each class

Two substances u and v on a torus follow the equations of Gray and Scott:

    du/dt = D_u Laplace(u) - u v^2 + F (1 - u)
    dv/dt = D_v Laplace(v) + u v^2 - (F + k) v

A class is a pair of F, the feed rate, and k, the kill rate; the pairs lie where spots, stripes, mixtures of both, and
holes appear (Pearson, "Complex patterns in a simple system", Science 261, 1993).  Each field begins with random blots
and is cut into images of v, which get the same mean and contrast, and noise.  No field has images in both splits.

The equations, the stencil of the Laplacian and the distribution of the blots have the symmetry of the square.
"""

import argparse
import functools
import math
import pathlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from equivit import files

RATES = ((0.026, 0.059), (0.030, 0.057), (0.030, 0.060), (0.034, 0.0618))  # F and k of each class
RATES += ((0.038, 0.061), (0.042, 0.059), (0.046, 0.063), (0.058, 0.063))
DIFFUSION = (0.16, 0.08)  # of u and v, in pixels^2 a step
STEPS = 4000
BLOT = 4.0  # radius, in pixels
SIDE = 48  # of an image, about five stripes
ACROSS = 2  # images in a row of a field
FIELDS = dict(train=160, test=36)  # of each class
MEAN, CONTRAST, NOISE = 128, 40, 40  # grey values
SHOWN = 2  # test images of a class in the picture


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--to", type=pathlib.Path, required=True, help="the npz file, with splits train and test")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")
    options = parser.parse_args(arguments)
    if options.to.suffix != ".npz" or options.to.is_dir():
        parser.error(f"--to={options.to}: give a file whose name ends with .npz")
    with files.replacing(options.to) as unfinished:
        arrays = {}
        for split in FIELDS:
            arrays |= {f"{split}_{kind}": array for kind, array in examples(options.seed, split).items()}
        np.savez(unfinished, classes=np.array([f"F={feed:g}, k={kill:g}" for feed, kill in RATES]), **arrays)
    picture = options.to.with_suffix(".png")
    with files.replacing(picture) as unfinished:
        Image.fromarray(sheet(arrays["test_image"], arrays["test_label"])).save(unfinished)
    print(f"written: {options.to} and {picture}")
    return 0


def sheet(images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """SHOWN images of each class, a column a class, at twice their size with white gaps, grey: [H, W]."""
    framed = np.pad(images[..., 0], ((0, 0), (1, 1), (1, 1)), constant_values=255)
    columns = [np.concatenate(framed[labels == label][:SHOWN]) for label in range(len(RATES))]
    return np.concatenate(columns, axis=1).repeat(2, axis=0).repeat(2, axis=1)


def examples(seed: int, split: str) -> dict[str, np.ndarray]:
    """The images [N, SIDE, SIDE, 3] and labels [N] of a split, in random order."""
    drawn = [tiles for label in range(len(RATES)) for tiles in fields(seed, label, split)]
    labels = np.repeat(np.arange(len(RATES)), ACROSS**2 * FIELDS[split])
    rng = np.random.default_rng((seed, list(FIELDS).index(split)))
    order = rng.permutation(len(labels))
    return dict(image=photographed(np.concatenate(drawn)[order], rng), label=labels[order])


def fields(seed: int, label: int, split: str) -> Iterator[np.ndarray]:
    """Yield v of each field of a class and a split, cut into images [ACROSS^2, SIDE, SIDE]."""
    first = 0 if split == "train" else FIELDS["train"]
    of_class = jax.random.fold_in(jax.random.key(seed), label)
    for number in range(first, first + FIELDS[split]):
        noise = jax.random.normal(jax.random.fold_in(of_class, number), (ACROSS * SIDE,) * 2)
        v = np.asarray(grown(noise, *RATES[label], STEPS))
        yield v.reshape(ACROSS, SIDE, ACROSS, SIDE).swapaxes(1, 2).reshape(-1, SIDE, SIDE)
    print(f"{split}: class {label + 1} of {len(RATES)} drawn", flush=True)


@functools.partial(jax.jit, static_argnames="steps")
def grown(noise: jax.Array, feed: float, kill: float, steps: int) -> jax.Array:
    """v [side, side] after steps of length 1 from blots, which lie where the blurred `noise` [side, side] is high."""

    def step(_, state):
        u, v = state
        reaction = u * v * v
        u_next = u + DIFFUSION[0] * laplacian(u) - reaction + feed * (1 - u)
        return u_next, v + DIFFUSION[1] * laplacian(v) + reaction - (feed + kill) * v

    heights = blurred(noise, BLOT)
    blots = heights > heights.std()
    return jax.lax.fori_loop(0, steps, step, (jnp.where(blots, 0.5, 1.0), jnp.where(blots, 0.25, 0.0)))[1]


def laplacian(field: jax.Array) -> jax.Array:
    """The Laplacian on a torus by nine points, whose error of lowest order has no direction."""

    def shifted(*shifts):
        return sum(jnp.roll(field, shift, (0, 1)) for shift in shifts)

    sides = shifted((0, 1), (0, -1), (1, 0), (-1, 0))
    corners = shifted((1, 1), (1, -1), (-1, 1), (-1, -1))
    return (4 * sides + corners - 20 * field) / 6


def blurred(field: jax.Array, radius: float) -> jax.Array:
    """The field on a torus, convolved with a Gaussian whose standard deviation is `radius` pixels."""
    frequencies = jnp.fft.fftfreq(len(field))
    squares = frequencies[:, None] ** 2 + frequencies**2
    return jnp.fft.ifft2(jnp.fft.fft2(field) * jnp.exp(-2 * (math.pi * radius) ** 2 * squares)).real


def photographed(v: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Images [N, H, W, 3], uint8, of fields [N, H, W]: equal means and contrasts, with noise."""
    centred = v - v.mean((1, 2), keepdims=True)
    grey = MEAN + CONTRAST * centred / v.std((1, 2), keepdims=True) + NOISE * rng.standard_normal(v.shape)
    return np.repeat(np.clip(np.rint(grey), 0, 255).astype(np.uint8)[..., None], 3, axis=-1)
