"""Adaptive ViTs: logits under shifts, turns and mirrors of p4m, ties, positions that carry direction."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest

from equivit import logical, models, testing
from equivit.models import zoo
from equivit.symmetry import fields, shifts
from equivit.symmetry.groups import FLIP, OCTIC

SMALL = dict(width=32, depth=1, num_heads=2, patch_size=4, num_classes=5, layer_scale=1.0, adaptive=True)
SMALL |= dict(mlp_dim=64, registers=1)
NAMES = {"plain": "vit_s16", "8": "octic_vit_s16", "2": "flip_vit_s16"}
SHIFTS = list(itertools.product(range(4), repeat=2))
SOME = [(0, 0), (1, 2), (-3, 5)]


@jax.jit
def run(m, x):
    """Logits, choices and the last patches before the final norm: one program for all that is asked of a model."""
    return m(x), m.selections(x), m.features(x, norm=False).patches


@functools.cache
def small(family, size, dtype="float64", **options):
    """The model with every parameter random, distances of unit size."""
    options = SMALL | dict(family=family, image_size=size) | options
    options |= dict(depth=2, equivariant_blocks=1) if family[0] in "HI" else {}
    name = NAMES[family if family == "plain" else family[1]]
    abstract, random = zoo.abstract(name, **options), np.random.default_rng(0)

    def draw(tensor):
        noise = random.normal(size=tensor.shape)
        if "distances" in tensor.name:
            return noise
        if len(tensor.shape) > 1:
            return noise * math.prod(tensor.shape[:-1]) ** -0.5
        return 1 + 0.2 * noise if "norm" in tensor.name and "bias" not in tensor.name else 0.5 * noise

    tensors = {t.name: draw(t).astype(dtype) for table in logical.tensors(abstract).values() for t in table.flat}
    return logical.from_logical(abstract, tensors)


def images(size, dtype="float64", seed=1):
    return np.random.default_rng(seed).normal(size=(2, *size, 3)).astype(dtype)


def objects(size):
    """Two equal objects half a patch more than a patch apart: two phases hold the same patches, arranged otherwise."""
    x, thing = np.zeros((1, *size, 3)), np.random.default_rng(3).normal(size=(2, 2, 3))
    x[0, 1:3, 1:3] = x[0, 7:9, 5:7] = thing
    return x


def deviation(m, x, elements, moves):
    """The deviation of the logits over all turns and shifts, and the smallest gap met."""
    upright = run(m, x)[0]
    worst, gaps = 0.0, []
    for element in elements:
        turned = fields.act_on_image(element, x)
        for move in moves:
            logits, chosen, _ = run(m, np.roll(turned, move, (1, 2)))
            worst = max(worst, float(np.abs(logits - upright).max()))
            gaps.append(float(chosen["patch_embed"].gap.min()))
    assert np.abs(upright).max() > 0.1
    return worst, min(gaps)


@pytest.mark.parametrize(
    ("family", "size"), [("D8", (12, 12)), ("D8", (16, 16)), ("D8", (8, 12)), ("I8", (12, 12))], ids=str
)
def test_octic_models_follow_p4m(family, size):
    """Odd, even and non-square grids: 8 orientations times all shifts."""
    with jax.enable_x64(True):
        m, x = small(family, size), images(size)
        worst, gap = deviation(m, x, OCTIC.elements, SOME)
        assert gap > 1e-9 and worst < 1e-10
        assert deviation(m, x, ["mr"], SHIFTS)[0] < 1e-10
        assert np.abs(run(m, x[..., ::-1])[0] - run(m, x)[0]).max() > 1e-2  # other colours


@pytest.mark.parametrize(
    ("family", "size", "patch"), [("D8", (8, 12), (4, 4)), ("I8", (12, 12), (6, 6)), ("D2", (9, 12), (3, 4))], ids=str
)
def test_a_choice_by_the_input_follows_turns_mirrors_and_shifts(family, size, patch):
    """A mirror maps the first pixel of a patch to its last one."""
    choose = jax.jit(lambda m, x: m.selections(x)["patch_embed"])

    def origins(x):
        chosen = choose(m, x)
        assert chosen.gap.min() > 1e-6
        return np.equal.outer(chosen.index, np.arange(math.prod(patch))).reshape(-1, *patch)

    with jax.enable_x64(True):
        m, x = small(family, size, patch_size=patch, select="input"), images(size)
        upright = origins(x)
        for element, move in itertools.product(m.config.group.elements, SOME):
            found = origins(np.roll(fields.act_on_image(element, x), move, (1, 2)))
            np.testing.assert_array_equal(found, np.roll(fields.act_on_torus(element, upright, (1, 2)), move, (1, 2)))


def test_octic_models_settle_ties():
    """Two equal objects tie in every orientation, a mirror-symmetric image too."""
    with jax.enable_x64(True):
        m = small("D8", (12, 12))
        random = images((12, 12))[:1]
        # Mirrored about a column of pixels: no phase is its own mirror image.
        for x in (objects((12, 12)), random + np.roll(random[:, :, ::-1], 1, 2)):
            worst, gap = deviation(m, np.concatenate([x, x]), OCTIC.elements, SOME)
            assert worst < 1e-10 and gap < 1e-12


def test_an_index_does_not_settle_ties(monkeypatch):
    """The two phases of equal objects differ in their logits."""
    monkeypatch.setattr(shifts, "settled", lambda scores, hashes: shifts.strongest(scores.round(9)))
    with jax.enable_x64(True):
        m, x = small("D8", (12, 12)), objects((12, 12))
        logits = [jax.jit(lambda m, x: m(x))(m, np.roll(x, move, (1, 2))) for move in ((0, 0), (2, 0), (1, 3))]
    assert np.ptp(logits, axis=0).max() > 1e-3


def test_octic_models_in_float32():
    m, x = small("D8", (12, 12), "float32"), images((12, 12), "float32")
    worst, gap = deviation(m, x, OCTIC.elements, SOME)
    assert gap > 1e-5 and worst < 1e-5  # a gap of less may be decided by rounding


@pytest.mark.parametrize("size", [(12, 12), (8, 12)], ids=str)
def test_fields_follow_p4m(size):
    """Each patch of a turned image is a turned patch of the image; `offset` tells which."""
    with jax.enable_x64(True):
        m, x = small("D8", size), images(size)
        upright = run(m, x)[2]
        width = upright.values.shape[-1]
        for element in OCTIC.elements:
            grid = run(m, fields.act_on_image(element, x))[2]
            for k in range(len(x)):
                patch = fields.act_on_image(element, patches_of(size, upright.offset[k])[..., None])[..., 0]
                patch = np.roll(patch, -np.asarray(grid.offset[k]), (0, 1))
                np.testing.assert_array_equal(patch[::4, ::4], patch[3::4, 3::4])  # whole patches
                field = fields.from_dense(np.asarray(upright.values[k]).reshape(-1, width), OCTIC)
                turned = np.asarray(fields.to_dense(fields.act_on_channels(element, field)))
                np.testing.assert_allclose(grid.values[k], turned[patch[::4, ::4]], atol=1e-10)


def patches_of(size, offset):
    """The number of the patch, in a grid that begins at `offset`, of each pixel."""
    number = np.arange(size[0] * size[1] // 16).reshape(size[0] // 4, size[1] // 4)
    return np.roll(number.repeat(4, 0).repeat(4, 1), np.asarray(offset), (0, 1))


@pytest.mark.parametrize("family", ["D8", "I8"])
def test_positions_carry_direction(family):
    """Patches go to mirrored places, their content stays as it is."""
    with jax.enable_x64(True):
        m, x = small(family, (12, 12)), images((12, 12))
        x = np.stack([np.roll(a, -np.asarray(b), (0, 1)) for a, b in zip(x, run(m, x)[2].offset, strict=True)])
        mirrored = x.reshape(2, 12, 3, 4, 3)[:, :, ::-1].reshape(x.shape)  # the patches begin at the corner
        change = np.abs(run(m, mirrored)[0] - run(m, x)[0])
    assert change.max() > 1e-2


def test_plain_models_give_the_same_bits():
    """Class token and register included; and without an anchor the layers alone, in float64."""
    size = (12, 12)
    x = np.concatenate([images(size), objects(size), np.zeros((1, *size, 3))]).astype(np.float32)
    m = small("plain", size, "float32")
    upright = jax.device_get(run(m, x))
    for move in SHIFTS[1:]:
        jax.tree.map(np.testing.assert_array_equal, run(m, np.roll(x, move, (1, 2)))[:2], upright[:2])
    with jax.enable_x64(True):
        m = small("plain", size, anchor=False)
        testing.assert_shift_equivariant(lambda x: run(m, x)[0], images(size), shifts=SHIFTS[1:])
        testing.assert_shift_equivariant(lambda x: run(m, x)[2], images(size), shifts=SHIFTS[1::4], output="grid")


def test_flip_models_follow_shifts_and_the_mirror():
    with jax.enable_x64(True):
        worst, gap = deviation(small("D2", (8, 12)), images((8, 12)), FLIP.elements, SOME)
    assert gap > 1e-9 and worst < 1e-10


def test_adapted_from_an_ordinary_model():
    """Positions go, distances are drawn, all else is kept; a table of distances follows the image size."""
    ordinary = small("plain", (12, 12), "float32", adaptive=False)
    adapted, changes = models.reconfigure(ordinary, adaptive=True)
    assert changes.dropped == ("position.table",)
    assert changes.drawn == ("blocks.0.attention.distances.table",)
    assert adapted.config == small("plain", (12, 12)).config
    larger, changes = models.reconfigure(adapted, image_size=(16, 12))
    assert changes.resized == ("blocks.0.attention.distances.table",)
    assert larger.blocks[0].attention.distances.table.shape == (4, 3, 16)
    octic, changes = models.reconfigure(small("D8", (12, 12), "float32"), image_size=(16, 12))
    assert octic.blocks[0].attention.distances.lines.shape == (4, 4, 4, 2) and len(changes.resized) == 5


@pytest.mark.parametrize("family", ["D8", "I8", "D2", "I2"])
def test_patches_that_move_against_learned_positions_would_end_the_symmetry(family):
    options = dict(SMALL, family=family, depth=2)
    with pytest.raises(ValueError, match=rf"would end the symmetry of family {family}; take adaptive=True or"):
        zoo.configuration(NAMES[family[1]], **options | dict(adaptive=("token",)))
    with pytest.raises(ValueError, match=r"know no distances around the torus; take adaptive=False, or replaced=\(\)"):
        replaced = dict(replaced=((0, "dw"),), class_token=False, pool="mean", registers=0)
        zoo.configuration(NAMES[family[1]], **options | replaced)
    assert zoo.configuration(NAMES[family[1]], **options | dict(adaptive=("position",))).parts == ("position",)
    assert zoo.configuration("octic_vit_s16", **options | dict(family="H8", adaptive=("token",))).parts == ("token",)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (
            dict(adaptive=("window",)),
            {},
            "adaptive='window' is not one of|must be True or False, or one or more of tok",
        ),
        (
            {},
            dict(keep=np.zeros((2, 3), np.int32)),
            r"patches were removed \(keep=\), so the others do not fill a grid",
        ),
    ],
)
def test_what_cannot_be_is_refused(options, arguments, message):
    with pytest.raises(ValueError, match=message):
        m = zoo.abstract("vit_s16", **SMALL | dict(image_size=(12, 12)) | options)
        jax.eval_shape(lambda m, x: m(x, **arguments), m, images((12, 12), "float32"))
