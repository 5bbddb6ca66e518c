"""Choice of the cases of large products that `make test` runs: every value is met; `make thorough` runs them all."""

import os
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

THOROUGH = bool(os.environ.get("GRACE_THOROUGH"))


def covering(cases: Sequence[Any]) -> list[Any]:
    """Return some of the cases, which are tuples of values, that hold every value that any holds at its place.

    Greedy: again and again the case that holds most values not held yet; among equals the one whose CRC is least, so
    that the others' values are mixed. The order stays. If each case has a value of its own, all are chosen.

    >>> covering([("a", 1), ("a", 2), ("b", 1), ("b", 2)])
    [('a', 1), ('b', 2)]
    """
    held = [{(place, repr(value)) for place, value in enumerate(_flat(case))} for case in cases]
    order = sorted(range(len(cases)), key=lambda i: zlib.crc32(repr(cases[i]).encode()))
    missing, chosen = set().union(*held), set()
    while missing:
        best = max(order, key=lambda i: len(missing & held[i]))
        chosen.add(best)
        missing -= held[best]
    return [case for i, case in enumerate(cases) if i in chosen]


def drawn(cases: Sequence[Any]) -> list[Any]:
    """The cases of a module that computes them all at once."""
    return list(cases) if THOROUGH else covering(cases)


def left_out(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of slow tests, and of tests that start ranks, which are left to `make thorough`."""
    functions: dict[str, list[Any]] = {}
    for item in items:
        drawable = hasattr(item, "callspec") and not item.get_closest_marker("every")
        if drawable and (item.get_closest_marker("ranks") or item.get_closest_marker("slow")):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = []
    for cases in functions.values():
        numbers: dict[int, int] = {}
        values = [tuple(_plain(value, numbers) for _, value in sorted(item.callspec.params.items())) for item in cases]
        chosen = set(covering(values))
        left += [item for item, value in zip(cases, values, strict=True) if value not in chosen]
    return left


def _plain(value: Any, numbers: dict[int, int]) -> Any:
    """A parameter's value, or a number for it where it is not written as itself."""
    if isinstance(value, tuple) and all(isinstance(part, (str, int)) for part in value):
        return value
    plain = isinstance(value, (str, int, float, bool, type(None)))
    return value if plain else f"number {numbers.setdefault(id(value), len(numbers))}"


def _flat(case: Any) -> list[Any]:
    return [part for value in case for part in (_flat(value) if isinstance(value, tuple) else [value])]
