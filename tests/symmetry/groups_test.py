"""Group axioms, representations and the Fourier pair, for every element."""

import copy
import itertools
import pickle

import numpy as np
import pytest

from equivit.symmetry.groups import FLIP, OCTIC

GROUPS = pytest.mark.parametrize("group", [FLIP, OCTIC], ids=lambda g: g.name)
EXACT = 1e-14  # float64 products of at most eight terms of size one


@GROUPS
def test_is_a_group(group):
    for g, h, k in itertools.product(group.elements, repeat=3):
        assert group.product(g, "e") == g == group.product("e", g)
        assert group.product(group.product(g, h), k) == group.product(g, group.product(h, k))
    assert all(group.product(g, group.inverse(g)) == "e" for g in group.elements)


def test_octic_relations():
    assert OCTIC.product("m", "r") == "mr"  # the word mr turns first
    assert OCTIC.product("r", "m") == "mrrr"  # m r m = r^3
    assert OCTIC.product("rr", "rr") == "e"
    assert OCTIC.product("mr", "mr") == "e"


@GROUPS
def test_irreps_and_regular_are_homomorphisms(group):
    for g, h in itertools.product(group.elements, repeat=2):
        gh = group.product(g, h)
        for rep in [*group.irreps, group.regular]:
            np.testing.assert_allclose(rep(g) @ rep(h), rep(gh), atol=EXACT)


@GROUPS
def test_irreps_are_orthogonal_and_inequivalent(group):
    characters = np.array([[np.trace(i(g)) for g in group.elements] for i in group.irreps])
    np.testing.assert_allclose(characters @ characters.T / group.order, np.eye(len(group.irreps)), atol=EXACT)
    assert sum(i.dimension**2 for i in group.irreps) == group.order  # nothing is missing


@GROUPS
def test_fourier_is_orthonormal_and_block_diagonalises(group):
    q = group.fourier
    np.testing.assert_allclose(q.T @ q, np.eye(group.order), atol=EXACT)
    for g in group.elements:
        blocks = q.T @ group.regular(g) @ q
        at = 0
        for irrep in group.irreps:
            for _ in irrep.seeds:
                d = irrep.dimension
                np.testing.assert_allclose(blocks[at : at + d, at : at + d], irrep(g), atol=EXACT)
                blocks[at : at + d, at : at + d] = 0
                at += d
        np.testing.assert_allclose(blocks, 0, atol=EXACT)


def test_octic_fourier_is_the_matrix_of_appendix_a():
    signs = ["+++++++-", "++--+---", "++++---+", "++---+++", "+-+--+--", "+--+--+-", "+-+-+-++", "+--+++-+"]
    expected = np.array([[1 if s == "+" else -1 for s in row] for row in signs]) * np.sqrt(2) / 4
    np.testing.assert_allclose(OCTIC.fourier, expected, atol=EXACT)


def test_unknown_element_is_refused():
    with pytest.raises(ValueError, match=r"group flip: element 'r' is not one of e, m\."):
        FLIP.check("r")


@GROUPS
def test_a_copy_is_the_same_object(group):
    assert copy.deepcopy(group) is group and pickle.loads(pickle.dumps(group)) is group
