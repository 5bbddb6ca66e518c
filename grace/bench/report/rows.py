"""Rows of results, sorted into the cases that a report shows."""

from collections.abc import Sequence

from grace.bench.common.results import Row
from grace.bench.common.tables import grouped

PLAIN = {"torch": ("DDP", "HSDP"), "horovod": ("Horovod",)}
"""Uncompressed baselines of each engine."""


def plain_row(rows: Sequence[Row]) -> Row | None:
    """Return the row of steps that others are compared with: the uncompressed baseline of the methods' engine, which
    is that of the first row; another engine's; Grace's ``none``; or None.

    >>> plain_row([{"name": "none", "engine": "mpi"}, {"name": "DDP"}]), plain_row([{"name": "none"}])
    ({'name': 'DDP'}, {'name': 'none'})
    """
    order = [*PLAIN.get(rows[0].get("engine", ""), ()), "DDP", "Horovod", "none"] if rows else []
    found = {row["name"]: row for row in rows}
    return next((found[name] for name in order if name in found), None)


def one_bound(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows without bounds of engines that only baselines were measured on: the first engine is that of the
    methods.

    >>> bounds = [{"engine": "torch", "kind": "bound"}, {"engine": "horovod", "kind": "bound"}]
    >>> one_bound([*bounds, {"engine": "horovod", "kind": "baseline"}])
    [{'engine': 'torch', 'kind': 'bound'}, {'engine': 'horovod', 'kind': 'baseline'}]
    """
    return [row for row in rows if row["kind"] != "bound" or row.get("engine") == rows[0].get("engine")]


def cases(rows: Sequence[Row], *keys: str) -> dict[tuple, list[Row]]:
    """Return rows by the values of some keys; numbers ascend, None comes last, texts keep their order.

    >>> list(cases([{"ranks": 4, "bandwidth": None}, {"ranks": 2, "bandwidth": 1e9}], "bandwidth", "ranks"))
    [(1000000000.0, 2), (None, 4)]
    """

    def rank(values: tuple[str | float | None, ...]) -> list[tuple[bool, float]]:
        return [(value is None, 0 if isinstance(value, str) else value or 0) for value in values]

    found = grouped(rows, *keys)
    return {values: found[values] for values in sorted(found, key=rank)}


def identity(row: Row) -> str:
    """Return the name that a row's look belongs to: its method, or else its own name."""
    return str(row.get("method") or row.get("name"))
