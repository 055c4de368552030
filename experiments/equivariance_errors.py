"""How exactly whole models commute with their group: every element, every parameter random, three types.

    python experiments/equivariance_errors.py

For each family the largest relative deviation over all elements and over two image sizes, one of them with an odd,
non-square token grid: of the logits where the family is invariant, else of the field after the first block.
Exits 1 above 1e-10 in float64 or 1e-5 in float32; bfloat16 is printed only.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from equivit import models, testing

FAMILIES = {
    "H8": "octic_vit",
    "I8": "octic_vit",
    "D8": "octic_vit",
    "H2": "flip_vit",
    "I2": "flip_vit",
    "D2": "flip_vit",
}
LIMITS = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1.0}
SIZES = ((16, 16), (12, 20))
SMALL = dict(width=96, depth=4, num_heads=3, patch_size=4, image_size=(16, 16), num_classes=10, registers=2)


def main() -> int:
    jax.config.update("jax_enable_x64", True)
    print(f"{'family':8}{'measured':10}" + "".join(f"{dtype:>12}" for dtype in LIMITS) + f"   on {jax.devices()[0]}")
    off = False
    for family, name in FAMILIES.items():
        errors = {dtype: max(error(family, name, dtype, size) for size in SIZES) for dtype in LIMITS}
        off |= any(errors[dtype] > limit for dtype, limit in LIMITS.items())
        cells = "".join(f"{value:12.1e}" for value in errors.values())
        print(f"{family:8}{'field' if family[0] == 'H' else 'logits':10}{cells}")
    return int(off)


def error(family: str, name: str, dtype: str, size: tuple[int, int]) -> float:
    model = jax.tree.map(lambda a: a.astype(dtype), random_model(family, name))
    images = jax.random.normal(jax.random.key(1), (2, *size, 3), jnp.float32).astype(dtype)
    group, grid = model.config.group, (size[0] // 4, size[1] // 4)
    if family[0] != "H":
        return testing.assert_equivariant(lambda x: logits(model, x), group, images, tol=jnp.inf)
    return testing.assert_equivariant(
        lambda x: field(model, x), group, images, output="field", prefix=3, output_grid=grid, tol=jnp.inf
    )


@functools.cache
def random_model(family, name):
    return testing.randomise(models.create(f"{name}_ti16", family=family, **SMALL), jax.random.key(0))


logits = jax.jit(lambda model, images: model(images))
field = jax.jit(lambda model, images: model.fields(images, (0,))[0])


if __name__ == "__main__":
    sys.exit(main())
