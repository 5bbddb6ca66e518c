"""``grace bench link``: a check of emulated links' rates on this machine."""

import os
import statistics
from typing import Annotated

import typer
from rich.console import Console

from grace.bench.common.ending import Ending
from grace.bench.common.errors import LinkError
from grace.bench.common.tables import figures_table
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
    latency: Annotated[float, typer.Option(help="Milliseconds that a packet takes besides, one way.")] = 0.0,
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
    links = [Link(ranks, parse_rate(text), latency) for text in bandwidth.split(",")]
    console = Console(highlight=False)
    ending = Ending("grace bench link", "interrupted; the network is removed")
    with ending.record_failure():
        reason = possible(latency)
        if reason:
            raise LinkError(f"not possible here: {reason}")
        measured = [_median(each, seconds, console) for each in links]
    ending.exit_if_failed()
    ratios = [found / each.rate for each, found in zip(links, measured, strict=True)]
    table = figures_table("asked", ["measured", "ratio", "can be trusted"])
    for each, found, ratio in zip(links, measured, ratios, strict=True):
        table.add_row(show_rate(each.rate), show_rate(found), f"{ratio:.3f}", "yes" if trusted(ratio) else "no")
    console.print(table)
    console.print(verdict([show_rate(each.rate) for each in links], ratios))


def trusted(ratio: float) -> bool:
    """Return True if the measured rate is near enough to the wanted one.

    >>> trusted(0.99), trusted(0.8), trusted(1.2)
    (True, False, False)
    """
    return abs(ratio - 1) <= TOLERANCE


def verdict(rates: list[str], ratios: list[float]) -> str:
    """Return the meaning of the table, in words.

    >>> print(verdict(["1gbit", "10gbit"], [0.99, 0.5]))
    The emulation can be trusted at 1gbit on this machine: what was measured is within 10 % of it.
    At 10gbit it cannot be trusted: ...
    """
    good = [rate for rate, ratio in zip(rates, ratios, strict=True) if trusted(ratio)]
    bad = [rate for rate, ratio in zip(rates, ratios, strict=True) if not trusted(ratio)]
    sentences = []
    within = f"within {100 * TOLERANCE:.0f} % of"
    if good:
        sentences.append(
            f"The emulation can be trusted at {', '.join(good)} on this machine: what was measured is {within} "
            f"{'it' if len(good) == 1 else 'them'}."
        )
    if bad:
        sentences.append(
            f"At {', '.join(bad)} it cannot be trusted: what was measured is not {within} "
            f"{'it' if len(bad) == 1 else 'them'}. {_load()} Try again when the machine does nothing else; "
            "a rate that is missed even then is more than its processors can move."
        )
    return "\n".join(sentences)


def _load() -> str:
    cores = os.cpu_count() or 1
    return f"The load is {os.getloadavg()[0]:.1f} on {cores} core{'s' if cores > 1 else ''}."


def _median(link: Link, seconds: float, console: Console) -> float:
    with console.status(f"measuring {show_rate(link.rate)} ..."), link:
        return statistics.median(measure(link, seconds) for _ in range(REPEATS))
