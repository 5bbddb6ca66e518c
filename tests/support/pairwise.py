"""Few cases in which all pairs of values meet, for tests of dimensions that are independent of each other."""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any


def pairwise(*dimensions: Iterable[Any], allowed: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Return allowed cases of a full product that hold every pair of values of two dimensions that any case holds.

    Greedy: again and again the first case that holds most pairs not held yet. The order is that of the product.

    >>> pairwise("ab", "xy", [1, 2])
    [('a', 'x', 1), ('a', 'y', 2), ('b', 'x', 2), ('b', 'y', 1)]
    """
    values = [list(dimension) for dimension in dimensions]
    product = itertools.product(*[range(len(dimension)) for dimension in values])
    cases = [case for case in product if allowed(*_values(values, case))]
    missing = {pair for case in cases for pair in _pairs(case)}
    # a case's gain only shrinks: one whose gain of an earlier round still leads when counted anew is the best
    gains = [(-(len(values) ** 2), place) for place in range(len(cases))]
    chosen = []
    while missing:
        _, place = heapq.heappop(gains)
        gain = len(missing.intersection(_pairs(cases[place])))
        if gains and (-gain, place) > gains[0]:
            heapq.heappush(gains, (-gain, place))
            continue
        chosen.append(place)
        missing.difference_update(_pairs(cases[place]))
    return [_values(values, cases[place]) for place in sorted(chosen)]


def _pairs(case: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    return [(i, case[i], j, case[j]) for i, j in itertools.combinations(range(len(case)), 2)]


def _values(values: list[list[Any]], case: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(dimension[place] for dimension, place in zip(values, case, strict=True))
