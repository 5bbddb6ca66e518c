"""State changes only when a whole step succeeded."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grace.core.state import State

NAMES = st.sampled_from("abc")
ACTIONS = st.one_of(
    st.tuples(st.just("set"), NAMES, st.integers()),
    st.tuples(st.just("delete"), NAMES, st.none()),
    st.tuples(st.just("commit"), st.none(), st.none()),
    st.tuples(st.just("rollback"), st.one_of(st.none(), NAMES), st.none()),
)


@given(st.lists(ACTIONS, max_size=30))
def test_state_is_a_dict_with_transactions(actions):
    state, kept, seen = State(), {}, {}
    for action, name, value in actions:
        if action == "set":
            state[name] = seen[name] = value
        elif action == "delete":
            if name in seen:
                del state[name], seen[name]
            else:
                with pytest.raises(KeyError):
                    del state[name]
        elif action == "commit":
            state.commit()
            kept = dict(seen)
        elif name is None:
            state.rollback()
            seen = dict(kept)
        else:
            state.rollback(name)
            seen = {k: v for k, v in {**seen, name: kept.get(name)}.items() if k != name or name in kept}
        assert dict(state) == seen
        assert len(state) == len(seen)
        assert all(name in state for name in seen)


def test_a_deletion_is_undone_by_a_rollback_even_in_a_copy():
    state = State()
    state["w"], state["b"] = 1.0, 2.0
    state.commit()
    del state["w"]
    state["w"] = 3.0
    del state["w"]
    again = copy.deepcopy(state)
    assert dict(state) == dict(again) == {"b": 2.0}
    state.rollback()
    again.commit()
    again.rollback()
    assert (dict(state), dict(again)) == ({"w": 1.0, "b": 2.0}, {"b": 2.0})


def test_write_drops_what_was_deleted_and_computes_nothing_for_it():
    class Deferred:
        def __init__(self):
            self.calls = []

        def finish(self):
            self.calls.append("finish")

        def write(self, into):
            self.calls.append("write")

    state, deferred = State(), Deferred()
    state["w"], state["b"] = np.zeros(1), np.zeros(1)
    state.commit()
    state.deferred = {"w": deferred}
    del state["w"]
    state["b"] = np.ones(1)
    state.write(np.copyto)
    assert (dict(state), deferred.calls) == ({"b": np.ones(1)}, ["finish"])


def test_reads_see_staged_writes():
    state = State()
    state["w"] = 1.0
    assert state["w"] == 1.0
    assert "staged=['w']" in repr(state)


def test_map_leaves_arrays_without_dimensions_arrays():
    state = State()
    state["a"], state["b"] = np.array(3.0, np.float32), {"c": np.array(4, np.int32), "d": 5.0}
    state.map(lambda value: value * 2)
    values = [state["a"], state["b"]["c"]]
    assert [(type(x), x.shape, x.dtype.name, int(x)) for x in values] == [
        (np.ndarray, (), "float32", 6),
        (np.ndarray, (), "int32", 8),
    ]
    assert state["b"]["d"] == 10.0


def test_map_reaches_arrays_numbers_and_dicts_and_keeps_staged_writes():
    state = State()
    state["a"], state["b"] = np.float32([1, 2]), {"x": np.float32([3]), "y": 4.0}
    state.commit()
    state["c"] = 5.0
    state.map(lambda value: value * 2)
    state.rollback()
    assert state["a"].tolist() == [2, 4]
    assert {key: float(np.sum(value)) for key, value in state["b"].items()} == {"x": 6, "y": 8}
    assert state["c"] == 10


class Doubling:
    """Finishes what it is told of, in place, once."""

    def __init__(self, *values):
        self.values, self.written = values, 0

    def finish(self):
        for value in self.values:
            value *= 2

    def write(self, into):
        self.written += 1


READS = {
    "[]": lambda state: state["a"],
    "get": lambda state: state.get("a"),
    "kept": lambda state: state.committed["a"],
    "items": lambda state: dict(state)["a"],
    "map": lambda state: [state.map(lambda value: value), state["a"]][1],
    "a copy": lambda state: copy.deepcopy(state)["a"],
}


@pytest.mark.parametrize("read", READS)
def test_values_are_finished_once_before_they_are_read(read):
    state, values = State(), [np.float32([1]), np.float32([3])]
    state["a"], state["b"] = values
    state.commit()
    state.deferred = dict.fromkeys("ab", Doubling(*values))
    with state.without_deferred():
        assert READS[read](state) == [1]
    assert [READS[read](state) for _ in range(2)] == [[2], [2]]
    assert state["b"] == [6]
    assert not state.deferred


def test_what_finishes_staged_values_is_told_that_they_are_written():
    state, one, other = State(), Doubling(), Doubling()
    for name in "ab":
        state[name] = np.float32([1])
    state.commit()
    state.deferred = {"a": one, "b": other}
    state["a"] = np.float32([5])
    state.write(np.copyto)
    assert (one.written, other.written, list(state.deferred)) == (1, 0, ["a", "b"])
