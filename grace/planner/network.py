"""Times of collectives: by formulas of a link's latency and bandwidth, or as they were measured."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from grace.core.route import DIRECT_BYTES
from grace.errors import ConfigError
from grace.planner.costs import Curve, fit

KINDS = ("allreduce", "allreduce16", "allgather", "alltoall", "broadcast", "gather")
"""``allreduce16`` is of 16-bit floats, which engines add slowly on CPUs: over gloo it takes 1.3 to 1.7 times as long as
an all-reduce of as many bytes where links are fast."""


class Network(Protocol):
    """Connection of ranks."""

    @property
    def contention(self) -> Mapping[str, float]:
        """The share of a rank's computing that a collective takes while it is under way, by its kind; else 0."""
        ...

    def seconds(self, kind: str, nbytes: float, ranks: int) -> float:
        """Return the seconds of a collective, one of :data:`KINDS`, when nothing else travels; 0 for one rank, and
        never less for more bytes. Bytes are those of a rank's buffer, for "broadcast" of the root's."""
        ...


def steps_of(kind: str, nbytes: float, ranks: int) -> tuple[float, float]:
    """Return the messages that wait for each other, and the bytes that go through one rank's link, in one direction.

        allreduce, round a ring       2 (W-1)        2 (W-1)/W n
        alltoall, all at once         1              (W-1)/W n
        allgather                     1, or W-1      (W-1) n        all at once, or round a ring if it is much
        gather, to a root             1              (W-1) n        through the root's link
        broadcast, down a tree        ceil(log2 W)   ceil(log2 W) n

    Raise ConfigError if there is no such kind.

    >>> steps_of("allreduce", 100.0, 4)
    (6.0, 150.0)
    """
    others = ranks - 1.0
    if kind in ("allreduce", "allreduce16"):
        return 2 * others, 2 * others / ranks * nbytes
    if kind == "allgather":
        return (1.0 if ranks > 3 and ranks * nbytes <= DIRECT_BYTES else others), others * nbytes
    if kind == "alltoall":
        return 1.0, others / ranks * nbytes
    if kind == "gather":
        return 1.0, others * nbytes
    if kind == "broadcast":
        deep = float(math.ceil(math.log2(ranks)))
        return deep, deep * nbytes
    raise ConfigError(f"{kind!r} is no collective; there are {', '.join(KINDS)}")


@dataclass(frozen=True)
class Links:
    """Equal links, each full duplex, by the alpha-beta model: with latency l (alpha) and bandwidth b (1 / beta) a
    collective takes l messages + bytes / b (:func:`steps_of`).

    What goes round a ring passes the link of a node once, however many ranks the node has; what everyone sends to
    everyone passes it as often as ranks share it.

    Args:
        bandwidth: bytes per second, above zero; ``math.inf`` leaves latencies only.
        latency: seconds that one message takes.
        sharing: ranks that share a link.

    Raise ConfigError if there is no bandwidth, which would predict no end, or a latency below zero or without end.

    >>> Links(bandwidth=1e9, latency=1e-5).seconds("allreduce", 1e6, 2)
    0.00102
    """

    bandwidth: float
    latency: float = 0.0
    sharing: int = 1
    contention: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ConfigError(f"a link's bandwidth must be above 0 bytes/s, not {self.bandwidth}")
        if not 0 <= self.latency < math.inf:
            raise ConfigError(f"a link's latency must be at least 0 s, and finite, not {self.latency}")

    def seconds(self, kind: str, nbytes: float, ranks: int) -> float:
        if ranks <= 1:  # nothing is sent
            return 0.0
        messages, through = steps_of(kind, nbytes, ranks)
        if kind == "alltoall":
            through *= self.sharing
        return messages * self.latency + through / self.bandwidth


@dataclass(frozen=True)
class MeasuredNetwork:
    """Network whose links were measured.

    Other numbers of ranks than that which measured, and kinds that were not measured, take what the formulas say with
    the latency and bandwidth that fit best.

    Args:
        curves: by kind of collective.
        ranks: how many measured.
        contention: shares of computing, as a :class:`Network` has them.

    Raise ConfigError if nothing was measured, or a kind that there is not.

    >>> curve = Curve.through([(n, 2e-5 + n / 1e9) for n in (1e3, 1e6, 1e8)])
    >>> network = MeasuredNetwork({"allreduce": curve}, ranks=2)
    >>> network.seconds("allreduce", 1e6, 2), round(network.seconds("allreduce", 1e8, 4), 4)
    (0.00102, 0.1501)
    >>> round(network.seconds("alltoall", 1e8, 2), 3), round(network.links.latency, 9), round(network.links.bandwidth)
    (0.05, 1e-05, 1000000000)
    """

    curves: Mapping[str, Curve]
    ranks: int
    contention: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 2 <= self.ranks < 1e9 or not self.curves:
            raise ConfigError("latency and bandwidth are fitted to collectives of 2 ranks or more, and there are none")
        if not all(0 <= share < 1 for share in self.contention.values()):
            raise ConfigError(f"a collective takes a share of computing from 0 to below 1, not {dict(self.contention)}")
        _ = self.links  # raises where a kind is none

    @functools.cached_property
    def links(self) -> Links:
        """Links that are nearest to the measurements, by the squares of relative errors."""
        points = [(kind, *point) for kind, curve in self.curves.items() for point in curve.points]
        steps = [steps_of(kind, nbytes, self.ranks) for kind, nbytes, _ in points]
        times = [seconds for _, _, seconds in points]
        latency, per_byte = fit(steps, times)
        return Links(1 / per_byte if per_byte > 0 else math.inf, latency)

    def seconds(self, kind: str, nbytes: float, ranks: int) -> float:
        if kind == "allreduce16" and kind not in self.curves:
            kind = "allreduce"
        if ranks != self.ranks or kind not in self.curves:  # nobody measured it: by the fitted links
            return self.links.seconds(kind, nbytes, ranks)
        return self.curves[kind].seconds(nbytes)


def links_of(network: Network) -> Links | None:
    """Return a network's links, as fitted if they were measured; None if nobody knows them."""
    return network if isinstance(network, Links) else getattr(network, "links", None)
