"""Cases that run as one test (grouping.py)."""

import inspect

import pytest

from tests.support.grouping import in_groups

CASES = [(1, "a"), (2, "b"), pytest.param(3, "a", marks=pytest.mark.slow), (4, "a")]


def test_cases_of_a_label_and_of_like_marks_run_together():
    seen = []

    @in_groups(("number", "letter"), CASES, lambda number, letter: letter)
    @pytest.mark.usefixtures("capsys")
    def test(number, letter, fixture):
        seen.append((number, letter, fixture))

    assert [*inspect.signature(test).parameters] == ["fixture", "group"]
    used, cases = test.pytestmark
    assert (used.name, cases.name) == ("usefixtures", "parametrize")
    groups = {param.id: (param.values[0], [mark.name for mark in param.marks]) for param in cases.args[1]}
    assert groups == {"a": ([(1, "a"), (4, "a")], []), "b": ([(2, "b")], []), "a-slow": ([(3, "a")], ["slow"])}
    test(group=groups["a"][0], fixture="x")
    assert seen == [(1, "a", "x"), (4, "a", "x")]


def test_a_case_that_fails_is_named():
    @in_groups(("number",), [(1,), (0,)])
    def divides(number):
        assert 1 // number

    with pytest.raises(AssertionError, match=r"in the case \{'number': 0\}") as caught:
        divides(group=[(1,), (0,)])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
