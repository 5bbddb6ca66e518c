"""Tables of a calibration."""

import time
from collections.abc import Mapping
from functools import partial
from operator import itemgetter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from grace.bench.common.tables import Columns, table
from grace.bench.common.text import digits, of_bytes
from grace.cli.calibration import Calibration
from grace.planner.costs import CodecCost, Curve

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 22, 1 << 26)
"""Bytes of collectives in the table."""
VARIABLES, ELEMENTS = 10, 1_000_000
"""Variables and elements of the bucket in the table of methods."""


def print_calibration(calibration: Calibration, console: Console, age: float | None = None) -> None:
    """Print a calibration.

    Args:
        calibration: the calibration.
        console: the console to print to.
        age: its age in seconds, to be printed too.
    """
    key = calibration.key
    hosts = ", ".join(f"{name} ({count})" for name, count in key.hosts.items())
    ranks = f"{key.ranks} rank{'s' * (key.ranks > 1)}"
    threads = f"{key.threads} thread{'s' * (key.threads > 1)} each"
    console.print(f"{escape(key.engine)}, {ranks} on {escape(hosts)}, {threads}", style="bold")
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(calibration.made))
    days = "" if age is None else f", {age / 86400:.0f} days ago"
    versions = f"{escape(key.framework)}, Python {escape(key.python)}, Grace {escape(key.grace)}"
    console.print(f"{versions}; made {when}{days}")
    for network, among in ((calibration.network, "all {} ranks"), (calibration.inside, "the {} ranks of a node")):
        if network is not None:
            title = f"milliseconds of a collective over {among.format(network.ranks)}"
            console.print(_collectives_table(network.curves, title))
    if calibration.codecs:
        console.print(_codecs_table(calibration))


def _collectives_table(curves: Mapping[str, Curve], title: str) -> Table:
    def cell(size: int, kind: str) -> str:
        return digits(1e3 * curves[kind].seconds(size)) if size <= curves[kind].points[-1][0] else ""

    columns: Columns = {
        "collective": str,
        **{of_bytes(size): partial(cell, size) for size in SIZES},
        "MB/s beyond": lambda kind: f"{1e-6 / curves[kind].slope:,.0f}" if curves[kind].slope > 0 else "",
    }
    return table(curves, columns, title=title)


def _codecs_table(calibration: Calibration) -> Table:
    rows = [
        [name, *(digits(1e3 * seconds) for seconds in _seconds(codec, calibration.key.ranks)), digits(codec.bits)]
        for name, codec in calibration.codecs.items()
    ]
    headings = ("method", "start", "between", "finish", "bits")
    columns: Columns = {heading: itemgetter(i) for i, heading in enumerate(headings)}
    title = f"milliseconds of computing for {ELEMENTS:,} values in {VARIABLES} variables"
    return table(rows, columns, title=title)


def _seconds(codec: CodecCost, ranks: int) -> list[float]:
    """Return the seconds of a codec's three parts for the bucket in the table."""
    return [part.seconds(VARIABLES, ELEMENTS, ranks) for part in (codec.start, codec.middle, codec.finish)]
