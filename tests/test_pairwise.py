"""Pairs of values meet in fewer cases than all (pairwise.py)."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairwise import pairwise


def pairs_of(cases):
    return {(i, case[i], j, case[j]) for case in cases for i, j in itertools.combinations(range(len(case)), 2)}


@given(st.lists(st.integers(1, 5), min_size=2, max_size=4), st.integers(0, 3))
def test_every_pair_of_the_product_is_there_and_nothing_that_is_not_allowed(sizes, modulus):
    def allowed(*case):
        return not modulus or sum(case) % (modulus + 1) > 0

    whole = [case for case in itertools.product(*map(range, sizes)) if allowed(*case)]
    chosen = pairwise(*map(range, sizes), allowed=allowed)
    assert pairs_of(chosen) == pairs_of(whole)
    assert chosen == [case for case in whole if case in chosen]  # the product's order, and none twice


@pytest.mark.parametrize(("sizes", "most"), [((3, 4), 12), ((6, 28, 9), 256), ((4, 4, 4), 22), ((2, 2, 2, 2, 2), 8)])
def test_the_cases_are_few_and_the_same_every_time(sizes, most):
    chosen = pairwise(*map(range, sizes))
    assert len(chosen) <= most
    assert chosen == pairwise(*map(range, sizes))
