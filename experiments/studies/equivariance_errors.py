"""How exactly whole models commute with their group: every element, every parameter random, three types.

    JAX_DISABLE_MOST_OPTIMIZATIONS=1 python -m experiments studies.equivariance_errors

For each family the largest relative deviation over all elements and over two image sizes, one of them with an odd,
non-square token grid: of the logits where the family is invariant, else of the field after the first block.  Claims: at
most 1e-10 in float64 and 1e-5 in float32.
"""

import functools

import jax
import jax.numpy as jnp

from equivit import models, testing
from experiments import findings, flags
from experiments.findings import Claim

FAMILIES = dict.fromkeys(("H8", "I8", "D8"), "octic_vit") | dict.fromkeys(("H2", "I2", "D2"), "flip_vit")
DTYPES = ("float64", "float32", "bfloat16")
LIMITS = {"float64": 1e-10, "float32": 1e-5}
ANY = 1e6  # tolerance: deviations are returned, not judged
SIZES = ((16, 16), (12, 20))
SMALL = dict(width=96, depth=4, num_heads=3, patch_size=4, image_size=(16, 16), num_classes=10, registers=2)


def main(arguments=None) -> int:
    options = flags.parser(__doc__, __file__).parse_args(arguments)
    rows, claims = [], []
    with jax.enable_x64(True):
        for family, name in FAMILIES.items():
            errors = {dtype: max(error(family, name, dtype, size) for size in SIZES) for dtype in DTYPES}
            rows.append(dict(family=family, measured="field" if family[0] == "H" else "logits", **errors))
            for dtype, most in LIMITS.items():
                claims.append(Claim(f"{family}, {dtype}: deviation", errors[dtype], at_most=most))
    shown = [row | {dtype: f"{row[dtype]:.1e}" for dtype in DTYPES} for row in rows]
    print(findings.table(shown, {name: name for name in ("family", "measured", *DTYPES)}))
    return findings.finish(options, dict(rows=rows), claims)


def error(family: str, name: str, dtype: str, size: tuple[int, int]) -> float:
    model = jax.tree.map(lambda a: a.astype(dtype), random_model(family, name))
    images = jax.random.normal(jax.random.key(1), (2, *size, 3), jnp.float32).astype(dtype)
    group, grid = model.config.group, (size[0] // 4, size[1] // 4)
    if family[0] != "H":
        return testing.assert_equivariant(lambda x: logits(model, x), group, images, tol=ANY)
    output = dict(output="field", prefix=3, output_grid=grid)
    return testing.assert_equivariant(lambda x: field(model, x), group, images, **output, tol=ANY)


@functools.cache
def random_model(family, name):
    return testing.randomise(models.create(f"{name}_ti16", family=family, **SMALL), jax.random.key(0))


logits = jax.jit(lambda model, images: model(images))
field = jax.jit(lambda model, images: model.fields(images, (0,))[0])
