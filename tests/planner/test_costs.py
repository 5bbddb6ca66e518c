"""Costs and curves: what is fitted is what was measured."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace.errors import ConfigError
from grace.planner.costs import Cost, Curve

SIZES = [(1, 1e3, 2), (1, 1e6, 2), (50, 1e4, 2), (100, 1e6, 4), (7, 1e5, 8)]
PARTS = st.sampled_from([0.0, 1.0, 10.0])


@given(call=PARTS, variable=PARTS, element=PARTS, peer=PARTS)
def test_a_fit_finds_the_cost_that_was_measured(call, variable, element, peer):
    true = Cost(call * 1e-5, variable * 1e-6, element * 1e-9, peer * 1e-9)
    times = [true.seconds(*size) for size in SIZES]
    if min(times) <= 0:
        return
    found = Cost.fitted([(*size, seconds) for size, seconds in zip(SIZES, times, strict=True)])
    np.testing.assert_allclose([found.seconds(*size) for size in SIZES], times, rtol=1e-6)
    assert min(found.call, found.variable, found.element, found.peer) >= 0


def test_nothing_is_fitted_to_nothing():
    for measured in ([], [(1, 1.0, 2, 0.0)]):
        with pytest.raises(ConfigError, match="fitted to times above zero"):
            Cost.fitted(measured)
    for points in ([], [(0.0, 1.0)], [(1.0, 0.0)]):
        with pytest.raises(ConfigError, match="above zero"):
            Curve.through(points)


POINTS = st.lists(
    st.tuples(st.floats(1, 1e9), st.floats(1e-6, 1e2)), min_size=1, max_size=8, unique_by=lambda point: point[0]
)


@given(points=POINTS, sizes=st.lists(st.floats(0, 1e10), min_size=2, max_size=20))
def test_a_curve_never_falls(points, sizes):
    curve = Curve.through(points)
    times = [curve.seconds(nbytes) for nbytes in sorted(sizes)]
    assert all(b >= a * (1 - 1e-12) for a, b in itertools.pairwise(times))
    assert min(times) > 0


def test_a_curve_is_straight_between_points_and_as_steep_beyond_them():
    curve = Curve.through([(100, 1.0), (200, 3.0), (400, 4.0)])
    assert [curve.seconds(n) for n in (0, 100, 150, 200, 300, 400)] == [1, 1, 2, 3, 3.5, 4]
    assert curve.slope == pytest.approx(3 / 300)
    assert curve.seconds(700) == pytest.approx(7)
    assert Curve.through([(10, 2.0)]).seconds(1e6) == 2.0


def test_noise_is_pooled():
    assert Curve.through([(1, 1.0), (2, 4.0), (3, 1.0), (4, 5.0)]).points == ((1, 1), (2, 2), (3, 2), (4, 5))
