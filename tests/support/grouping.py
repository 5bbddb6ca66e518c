"""Tests of many short cases, some of which run as one test: to pytest a test costs more than most of them compute."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def in_groups(
    names: Sequence[str], cases: Iterable[Any], label: Callable[..., str] = lambda *values: "all"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Parametrize a test as ``pytest.mark.parametrize`` does, but run all cases of a label as one test.

    A case that fails is named, and ends its group.

    Args:
        names: the parameters' names.
        cases: their values, or ``pytest.param`` with marks; cases of unlike marks are apart.
        label: gives a case's group by its values; else there is one.
    """
    groups: dict[str, Any] = {}
    for case in cases:
        values, marks = (case.values, case.marks) if hasattr(case, "marks") else (case, ())
        key = "-".join([label(*values), *(mark.name for mark in marks)])
        groups.setdefault(key, pytest.param([], id=key, marks=marks)).values[0].append(values)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(group: list[tuple[Any, ...]], **fixtures: Any) -> None:
            for values in group:
                case = dict(zip(names, values, strict=True))
                try:
                    body(**case, **fixtures)
                except Exception as error:
                    raise AssertionError(f"in the case {case}") from error

        kept = [parameter for name, parameter in inspect.signature(body).parameters.items() if name not in names]
        group = inspect.Parameter("group", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([*kept, group])
        return pytest.mark.parametrize("group", list(groups.values()))(test)

    return decorate
