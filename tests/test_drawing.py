"""Cases that `make test` draws of large products (drawing.py)."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.drawing import covering, left_out

cases = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.tuples(st.integers(0, 2), st.none())), unique=True
)


@given(cases)
def test_every_value_of_every_place_is_met_and_nothing_is_added(cases):
    chosen = covering(cases)
    assert chosen == [case for case in cases if case in chosen]
    for place in range(3):
        assert {case[place] for case in chosen} == {case[place] for case in cases}
    assert covering(cases) == chosen


def test_a_product_shrinks_to_its_longest_dimension_and_a_list_of_cases_stays():
    product = [(a, b) for a in range(6) for b in "xyz"]
    assert len(covering(product)) == 6
    listed = [(i, f"message {i}") for i in range(9)]
    assert covering(listed) == listed


class Mark:
    """A case of a test, as pytest collects it."""

    def __init__(self, marks, **params):
        self.marks, self.nodeid = marks, "test_file.py::test_it[...]"
        self.callspec = type("callspec", (), {"params": params})

    def get_closest_marker(self, name):
        return name in self.marks


def test_what_starts_ranks_or_is_slow_is_drawn_and_what_says_so_runs_in_every_case():
    values = [{"deep": 1}, {"deep": 2}]  # as written in a test: equal only if they are the same

    def product(*marks):
        return [Mark(marks, a=a, b=b) for a in values for b in (2, 3)]

    assert len(left_out(product("ranks"))) == 2
    assert len(left_out(product("slow"))) == 2
    assert left_out(product()) == left_out(product("ranks", "every")) == []
