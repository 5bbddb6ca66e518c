"""Costs and curves: what is fitted is what was measured."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace.errors import ConfigError
from grace.planner.costs import Cost, Curve


def test_what_costs_and_curves_refuse():
    for wrong in ({"call": -1e-9}, {"element": float("inf")}):
        with pytest.raises(ConfigError, match="seconds from 0 on"):
            Cost(**wrong)
    for points in ([], [(0.0, 1.0)], [(1.0, 0.0)]):
        with pytest.raises(ConfigError, match="above 0"):
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
