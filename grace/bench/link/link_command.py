"""``grace bench link``: a check of emulated links' rates on this machine."""

import statistics
from typing import Annotated

import typer
from rich.console import Console

from grace.bench.common.ending import Ending, LinkError
from grace.bench.common.tables import Columns, table
from grace.bench.common.text import show_rate
from grace.bench.link.emulation import Link, measure, possible
from grace.core.quantities import parse_rate
from grace.errors import ConfigError

TOLERANCE = 0.1
"""Largest relative difference of the measured rate to the wanted one."""
REPEATS = 3
"""Number of measurements; their median counts, so that a disturbance of one does not matter."""


def link(
    bandwidth: Annotated[
        str, typer.Option(help="Rates, separated by commas: 800kbit, 100mbit, 2.5gbit ...")
    ] = "100mbit,1gbit,10gbit",
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Ranks that the network joins.")] = 2,
    seconds: Annotated[float, typer.Option(help="Length of each of the three measurements.")] = 1.0,
) -> None:
    """Emulate slow networks on this machine, and measure whether they are what they claim to be.

    Each rank gets a network namespace of its own, joined to the others by a
    bridge, and its connection is limited in both directions by token buckets.
    For each bandwidth such a network is set up, a TCP stream from rank 0 to
    rank 1 is measured, and the network is removed. Nothing of the machine's
    own network changes. It needs Linux, root, and the programs ip and tc.

    The exit code is 1 if that is not possible here.
    """
    if ranks < 2:
        raise ConfigError(f"a link is measured between two ranks; --ranks is {ranks}")
    if not 0 < seconds <= 600:
        raise ConfigError(f"--seconds is above 0 and at most 600, not {seconds:g}")
    links = [Link(ranks, parse_rate(text)) for text in bandwidth.split(",")]
    console = Console(highlight=False)
    ending = Ending("grace bench link", "interrupted; the network is removed")
    with ending.record_failure():
        reason = possible()
        if reason:
            raise LinkError(f"not possible here: {reason}")
        rates = [(each.rate, _median(each, seconds, console)) for each in links]
    ending.exit_if_failed()
    columns: Columns[tuple[float, float]] = {
        "asked": lambda row: show_rate(row[0]),
        "measured": lambda row: show_rate(row[1]),
        "ratio": lambda row: f"{row[1] / row[0]:.3f}",
        "can be trusted": lambda row: "yes" if trusted(row[1] / row[0]) else "no",
    }
    console.print(table(rates, columns))
    console.print(
        f"\nA rate can be trusted where what was measured is within {TOLERANCE:.0%} of it. One that is missed while "
        "the machine does nothing else is more than its processors can move.",
        style="dim",
    )


def trusted(ratio: float) -> bool:
    """Return True if the measured rate is near enough to the wanted one.

    >>> trusted(0.99), trusted(0.8), trusted(1.2)
    (True, False, False)
    """
    return abs(ratio - 1) <= TOLERANCE


def _median(link: Link, seconds: float, console: Console) -> float:
    with console.status(f"measuring {show_rate(link.rate)} ..."), link:
        return statistics.median(measure(link, seconds) for _ in range(REPEATS))
