"""A calibration as tables, for people."""

import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.bench.common.text import of_bytes
from grace.cli.consoles import plain_table
from grace.planner.calibration import Calibration, Curves
from grace.planner.costs import Codec

COLUMNS = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
"""Bytes that are shown."""
ELEMENTS = 1_000_000


def show(made: Calibration, console: Console, age: float | None = None) -> None:
    """Print one.

    Args:
        made: it.
        console: where.
        age: seconds, if that is of interest.
    """
    key = made.key
    on = ", ".join(f"{name} ({count})" for name, count in key.hosts)
    ranks = f"{key.ranks} rank{'s' * (key.ranks > 1)}"
    threads = f"{key.threads} thread{'s' * (key.threads > 1)} each"
    console.print(f"{escape(key.engine)}, {ranks} on {escape(on)}, {threads}", style="bold")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(made.made))
    old = "" if age is None else f", {age / 86400:.0f} days ago"
    console.print(f"{escape(key.framework)}, Python {escape(key.python)}, Grace {escape(key.grace)}; made {when}{old}")
    for curves, where in ((made.curves, "all ranks"), (made.inside, "a node's ranks")):
        if curves:
            console.print(_collectives(curves, f"milliseconds of a collective over {where}"))
    if made.codecs:
        console.print(_codecs(made))
    if made.contention:
        console.print(f"computing takes {made.contention:.0%} longer while a collective is under way")


def _collectives(curves: Curves, title: str) -> Table:
    sizes = ["collective", "ranks", *(of_bytes(size) for size in COLUMNS), "MB/s beyond"]
    table = plain_table(sizes, sizes[:1], title=title, title_justify="left")
    for kind, by_ranks in curves.items():
        for ranks, curve in sorted(by_ranks.items()):
            largest = curve.points[-1][0]
            shown = [f"{curve.seconds(n) * 1e3:.3g}" if n <= largest else "" for n in COLUMNS]
            table.add_row(kind, str(ranks), *shown, f"{1e-6 / curve.slope:,.0f}" if curve.slope > 0 else "")
    return table


def _codecs(made: Calibration) -> Table:
    """What a bucket of some variables takes."""
    title = f"milliseconds of computing for {ELEMENTS:,} values in 10 variables"
    headings = ["method", "start", "between", "finish", "bits"]
    table = plain_table(headings, headings[:1], title=title, title_justify="left")
    for name, codec in made.codecs.items():
        parts = (codec.start, codec.middle, codec.finish)
        shown = [f"{part.seconds(10, ELEMENTS, made.key.ranks) * 1e3:.3g}" for part in parts]
        table.add_row(escape(name), *shown, "" if codec.bits is None else f"{codec.bits:.3g}")
    return table


def whole(codec: Codec, ranks: int) -> float:
    """Seconds that tell codecs of one method apart.

    >>> whole(Codec(), 2)
    0.0
    """
    return sum(part.seconds(10, ELEMENTS, ranks) for part in (codec.start, codec.middle, codec.finish))
