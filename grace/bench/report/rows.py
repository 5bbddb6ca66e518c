"""Rows of results, sorted into the cases that a report shows."""

from collections.abc import Mapping, Sequence
from typing import Any

from grace.bench.common.tables import grouped
from grace.bench.common.text import number

Row = Mapping[str, Any]
Rows = Sequence[Row]


def one_bound(rows: Rows) -> Rows:
    """Return the rows without bounds of engines that only baselines were measured on: the first engine is that of the
    methods.

    >>> bounds = [{"engine": "torch", "kind": "bound"}, {"engine": "horovod", "kind": "bound"}]
    >>> one_bound([*bounds, {"engine": "horovod", "kind": "baseline"}])
    [{'engine': 'torch', 'kind': 'bound'}, {'engine': 'horovod', 'kind': 'baseline'}]
    """
    return [row for row in rows if row["kind"] != "bound" or row.get("engine") == rows[0].get("engine")]


def plain(rows: Rows) -> Mapping[str, Any] | None:
    """Return the row that speedups are relative to: the baseline whose own is 1; else the first baseline, or "none"."""
    baselines = [row for row in rows if row["kind"] == "baseline"]
    ones = [row for row in baselines if abs((number(row.get("speedup")) or 0) - 1) < 1e-9]
    return next(iter(ones + baselines + [row for row in rows if row["name"] == "none"]), None)


def cases(rows: Rows, *keys: str) -> dict[tuple, list[Mapping[str, Any]]]:
    """Return rows by the values of some keys; numbers ascend, None comes last, texts keep their order.

    >>> list(cases([{"ranks": 4, "bandwidth": None}, {"ranks": 2, "bandwidth": 1e9}], "bandwidth", "ranks"))
    [(1000000000.0, 2), (None, 4)]
    """

    def rank(values: tuple[Any, ...]) -> list[tuple[bool, float]]:
        return [(value is None, 0 if isinstance(value, str) else value or 0) for value in values]

    found = grouped(rows, *keys)
    return {values: found[values] for values in sorted(found, key=rank)}


def identity(row: Mapping[str, Any]) -> str:
    """Return the name that a row's look belongs to: its method, or else its own name."""
    return str(row.get("method") or row.get("name"))
