"""The paper's lemma and claims on our layers, in two dimensions, with all shifts of a small map, in float64.

Source: "Making Vision Transformers Truly Shift-Equivariant" (arXiv 2305.16316), Section 4, Appendices A1 and A2.  As
there, (S^t x)[n] = x[n + t]; sides, strides and windows differ from axis to axis, and each has its own quotient.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from equivit import logical, testing
from equivit.kernels.phases.cpu import convolved, filters
from equivit.layers import dense, polyphase
from equivit.layers.grid import Layout
from equivit.models.swin import merge, window
from equivit.symmetry import shifts

SIZE, PATCH, WINDOW, WIDTH = (6, 12), (2, 3), (2, 3), 6
SHIFTS = list(np.ndindex(SIZE))  # every remainder with every quotient
IMAGE = np.random.default_rng(0).normal(size=(*SIZE, 3))
MAP = np.random.default_rng(1).normal(size=(*SIZE, WIDTH))


def random(make):
    """The layer with every parameter random."""
    layer = testing.randomise(jax.eval_shape(lambda: make(rngs=nnx.Rngs(0))), jax.random.key(2))
    return jax.tree.map(lambda a: np.asarray(a, np.float64), layer)


def moved(x, t):
    """S^t of a map."""
    return np.roll(x, (-t[0], -t[1]), (0, 1))


def in_float64(function, layer, x, *static):
    """function(layer, S^t x for all t), compiled."""
    with jax.enable_x64(True):
        batch = np.stack([moved(x, t) for t in SHIFTS])
        return jax.device_get(jax.jit(function, static_argnums=range(2, 2 + len(static)))(layer, batch, *static))


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def check_follows(found, index, unit, step=(1, 1)):
    """That m* = (m + t) mod unit and found[t] = S^(step floor((m + t) / unit)) found[0], of the choice m at a shift t.

    Args:
      found, index: for each of SHIFTS.
      step: of the output, in tokens, for each unit.
    """
    best = np.divmod(index[0], unit[1])
    for t, output, k in zip(SHIFTS, found, index, strict=True):
        quotient, remainder = np.divmod(np.add(np.divmod(k, unit[1]), t), unit)
        assert tuple(remainder) == tuple(best)
        close(output, moved(found[0], quotient * step))


# Patches


def embedding(**options):
    return dense.PatchEmbed(PATCH, 3, WIDTH, **options)


def tokens(embed, x):
    """The map of tokens of images that begin at a patch."""
    return embed(x).reshape(len(x), SIZE[0] // PATCH[0], SIZE[1] // PATCH[1], WIDTH)


def of_each_phase(embed, x):
    """X^(m) E for each m, [phases, B, h, w, width]."""
    return jnp.stack([tokens(embed, jnp.roll(x, (-p, -q), (1, 2))) for p, q in np.ndindex(PATCH)])


def test_lemma_1():
    """Eq. 15: X^(m) of S^t x is S^floor((m + t) / L) X^((m + t) mod L) of x."""
    found = in_float64(of_each_phase, random(embedding), IMAGE)
    for m, place in enumerate(np.ndindex(PATCH)):
        for t, output in zip(SHIFTS, found[m], strict=True):
            quotient, (p, q) = np.divmod(np.add(place, t), PATCH)
            close(output, moved(found[p * PATCH[1] + q, 0], quotient))
            if (quotient % (3, 4)).any():  # the order of tokens has changed
                assert np.abs(output - found[p * PATCH[1] + q, 0]).max() > 0.1


def adaptive_tokens(embed, x, rule):
    """A-token (Eq. 13 and 14) with F by name: two that no shift changes, and one that is of a place."""
    if rule == "tokens":
        scores = polyphase.embedding_norms(x, embed.kernel[...], embed.bias[...], PATCH)
    elif rule == "pixels":
        scores = polyphase.lattice_norms(x, PATCH)
    else:
        scores = jnp.square(of_each_phase(embed, x)[:, :, 0, 0]).sum(-1).T
    choice = shifts.strongest(scores)
    return tokens(embed, shifts.roll(x, -shifts.phases(choice.index, PATCH))), choice


@pytest.mark.parametrize("rule", ["tokens", "pixels", "first token"])
def test_claim_1(rule):
    """Eq. 16: A-token follows every shift if F does not change under shifts."""
    found, (index, gap) = in_float64(adaptive_tokens, random(embedding), IMAGE, rule)
    assert gap.min() > 1e-9 and len(set(index)) == 6
    if rule == "first token":
        with pytest.raises(AssertionError):
            check_follows(found, index, PATCH)
    else:
        check_follows(found, index, PATCH)


# Windows


def attention(kind, **options):
    return functools.partial(kind, WIDTH, 2, WINDOW, circular=True, **options)


def adaptive_windows(attention, x, rule, phase):
    """A-WSA (Eq. 19 and 20), of windows that begin in a corner or, in phase 1, half a window further on."""
    if rule == "first window":
        energy = jnp.sqrt(jnp.square(x).sum(-1))
        begun = [jnp.roll(energy, (-p, -q), (1, 2)) for p, q in np.ndindex(WINDOW)]
        scores = jnp.stack([x[:, : WINDOW[0], : WINDOW[1]].mean((1, 2)) for x in begun], 1)
    else:
        scores, _ = window.spread(x, WINDOW)
    choice = shifts.strongest(scores if rule != "corner" else 0 * scores)
    x = shifts.roll(x, -shifts.phases(choice.index, WINDOW))
    y = attention(x.reshape(len(x), -1, WIDTH), Layout(SIZE, shift=(1, 1)), phase)
    return y.reshape(x.shape), choice


@pytest.mark.parametrize(
    ("kind", "phase"),
    [(window.WindowAttention, 0), (window.WindowAttention, 1), (window.CosineWindowAttention, 1)],
)
def test_claim_2(kind, phase):
    """Eq. A42: A-WSA follows every shift by whole windows if G does not change under shifts."""
    found, (index, gap) = in_float64(adaptive_windows, random(attention(kind, masked=False)), MAP, "spread", phase)
    assert gap.min() > 1e-9 and len(set(index)) == 6
    check_follows(found, index, WINDOW, WINDOW)


@pytest.mark.parametrize(("rule", "masked"), [("first window", False), ("corner", False), ("spread", True)])
def test_other_windows_do_not_follow(rule, masked):
    """G of a place; windows that begin in the corner; and the ordinary mask, which parts neighbours at the seam."""
    layer = random(attention(window.WindowAttention, masked=masked))
    found, (index, _) = in_float64(adaptive_windows, layer, MAP, rule, 1)
    with pytest.raises(AssertionError):
        check_follows(found, index, WINDOW, WINDOW)


# Distances


def test_the_example_of_figure_3():
    """M = 4: distances of queries and keys that go around the torus together stay as they are, modulo 4 only."""
    table = jax.eval_shape(lambda: window.RelativeTable((1, 4), 1, rngs=nnx.Rngs(0)))
    table = logical.from_logical(table, {"table": np.arange(-3.0, 4).reshape(1, 7, 1)})  # each entry is its distance
    linear, circular = (np.asarray(table((False, around))[0]) for around in (False, True))
    np.testing.assert_array_equal(linear, [[0, -1, -2, -3], [1, 0, -1, -2], [2, 1, 0, -1], [3, 2, 1, 0]])
    np.testing.assert_array_equal(circular, [[0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]])
    for t in (1, 2, 3):
        np.testing.assert_array_equal(np.roll(circular, (t, t), (0, 1)), circular)
        assert (np.roll(linear, (t, t), (0, 1)) != linear).any()


@pytest.mark.parametrize(
    ("kind", "circular"),
    [(window.WindowAttention, True), (window.WindowAttention, False), (window.CosineWindowAttention, True)],
)
def test_attention_over_the_whole_torus(kind, circular):
    """Eq. 24: with distances that go around it follows every shift, with linear ones it does not."""
    layer = random(functools.partial(kind, WIDTH, 2, SIZE, circular=circular))
    found = in_float64(lambda layer, x: layer(x.reshape(len(x), -1, WIDTH), Layout(SIZE)).reshape(x.shape), layer, MAP)
    deviation = max(np.abs(output - moved(found[0], t)).max() for t, output in zip(SHIFTS, found, strict=True))
    assert deviation < 1e-12 if circular else deviation > 1e-3


# Merging


def merging(norm_first, **options):
    return merge.PatchMerging(WIDTH, norm_first=norm_first, eps=1e-5, **options)


def test_claim_3():
    """Eq. 21 and 22: merging is a convolution with 2 x 2 taps and stride 2, and all its phases one with stride 1."""

    def strided(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def merged(weight, x):
        return merge.neighbours(x.reshape(len(x), -1, WIDTH), SIZE)[0] @ weight

    def both(layer, x):
        weight = layer.reduction.weight[...]
        by_columns = weight.reshape(2, 2, WIDTH, 2 * WIDTH)  # neighbours go down the columns
        by_rows = jnp.swapaxes(by_columns, 0, 1)
        phase = [merged(weight, jnp.roll(x, (-p, -q), (1, 2))) for p, q in np.ndindex(2, 2)]
        return (
            jnp.stack(phase),
            jnp.array(convolved(x, filters(by_rows))),
            strided(x, by_rows),
            strided(x, by_columns),
        )

    merges, everywhere, convolution, wrong = in_float64(both, random(functools.partial(merging, False)), MAP)
    merges = merges.reshape(everywhere.shape)
    close(merges, everywhere)
    close(merges[0, 0], convolution)
    assert np.abs(merges[0, 0] - wrong).max() > 0.1


def adaptive_merging(layer, x, select):
    y, (h, w), choice = layer.adaptive(x.reshape(len(x), -1, WIDTH), SIZE, select)
    return y.reshape(len(x), h, w, -1), choice


@pytest.mark.parametrize("norm_first", [True, False], ids=["v1", "v2"])
def test_adaptive_merging_follows(norm_first):
    """Eq. 23: the same law as that of patches."""
    layer = random(functools.partial(merging, norm_first))
    for select in ("output", "input"):
        found, (index, gap) = in_float64(adaptive_merging, layer, MAP, select)
        assert gap.min() > 1e-9 and len(set(index)) == 4
        check_follows(found, index, (2, 2))


class Classifier(nnx.Module):
    """The classifier of Appendix A2.1: merging, the mean of all tokens, a linear map."""

    def __init__(self, *, rngs):
        self.merge = merge.PatchMerging(3, norm_first=True, eps=1e-5, rngs=rngs)
        self.head = dense.Linear(6, 4, rngs=rngs)

    def __call__(self, x, adaptive):
        x = x.reshape(len(x), -1, 3)
        y = self.merge.adaptive(x, (8, 8), "output")[0] if adaptive else self.merge(x, (8, 8))[0]
        return self.head(y.mean(1))


def test_the_classifier_of_appendix_a2():
    """On 8 x 8 tokens: no shift moves the logits, and odd ones move those of the ordinary layer."""
    call, x = jax.jit(Classifier.__call__, static_argnums=2), np.random.default_rng(3).normal(size=(1, 8, 8, 3))
    with jax.enable_x64(True):
        model = random(Classifier)
        testing.assert_shift_equivariant(lambda x: call(model, x, True), x, tol=1e-14)
        for shift in ((0, 1), (3, 2)):
            assert np.abs(call(model, np.roll(x, shift, (1, 2)), False) - call(model, x, False)).max() > 1e-2


def encoded_and_decoded(layer, x):
    """Appendix A2.2: merging, windows, then all of it undone: the roll of the windows, and unpooling at the phase."""
    y, grid, merged = layer.adaptive(x.reshape(len(x), -1, 3), (8, 8), "output")
    y = y.reshape(len(x), *grid, -1)
    scores, places = window.spread(y, (2, 2))
    first = shifts.phases(shifts.strongest(scores).index, places)
    inside = shifts.roll(y, -first)
    return shifts.polyphase_up(shifts.roll(inside, first), shifts.phases(merged.index, (2, 2)), 2)


def test_the_encoder_and_decoder_of_appendix_a2():
    """On 8 x 8 tokens: features come back to where they were, and no shift changes that."""
    call, x = jax.jit(encoded_and_decoded), np.random.default_rng(3).normal(size=(1, 8, 8, 3))
    with jax.enable_x64(True):
        layer = random(functools.partial(merge.PatchMerging, 3, norm_first=True, eps=1e-5))
        y = np.asarray(call(layer, x))
        assert y.shape == (1, 8, 8, 6) and np.count_nonzero(y[..., 0]) == 16
        testing.assert_shift_equivariant(lambda x: call(layer, x), x, output="image", tol=1e-14)
