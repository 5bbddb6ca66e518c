"""Which ranks have which stage, and what lies between them: links within nodes, and links between nodes."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from grace.errors import ConfigError
from grace.planner.network import Network

LAYOUTS = ("replicas", "stages")
"""What neighbours in the order of ranks are: replicas of one stage, or stages of one replica."""
Groups = tuple[tuple[int, ...], ...]
"""Ranks of each place in the pipeline, by replica."""


def groups_of(layout: str, replicas: Sequence[int]) -> Groups:
    """The ranks of each place in the pipeline.

    Raises:
        ConfigError: there is no such layout, or "stages" with different numbers of replicas.

    >>> groups_of("replicas", (2, 1)), groups_of("stages", (2, 2))
    (((0, 1), (2,)), ((0, 2), (1, 3)))
    """
    if layout == "replicas":
        ends = [sum(replicas[: i + 1]) for i in range(len(replicas))]
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, replicas, strict=True))
    if layout != "stages":
        raise ConfigError(f"layout {layout!r} is unknown; there are {', '.join(LAYOUTS)}")
    if len(set(replicas)) > 1:
        raise ConfigError(f"the layout stages needs as many replicas of each stage, not {tuple(replicas)}")
    places = len(replicas)
    return tuple(tuple(range(place, places * replicas[0], places)) for place in range(places))


@dataclass(frozen=True)
class Shared:
    """A network of which so many groups use each node's link at once."""

    network: Network
    groups: int

    def seconds(self, kind: str, nbytes: float, ranks: int) -> float:
        """See :class:`grace.planner.network.Network`."""
        return self.network.seconds(kind, nbytes * self.groups, ranks)


@dataclass(frozen=True)
class Route:
    """How values go from one place to the next: parts of their bytes that pass the busiest rank's link within its node,
    and the busiest node's link to others."""

    inside: float
    between: float


@dataclass(frozen=True)
class Devices:
    """The ranks.

    Attributes:
        nodes: the number of the node of each rank.
        network: between nodes; between ranks, if all are on one.
        inside: within a node; the network if left out.

    >>> from grace.planner.network import Links
    >>> two = Devices((0, 0, 1, 1), Links(1e9), Links(1e10))
    >>> two.crossing((0,), (1,), 1e9), two.crossing((0, 1), (2, 3), 1e9), two.crossing((0, 2), (1, 3), 1e9)
    (0.1, 1.0, 0.05)
    """

    nodes: tuple[int, ...]
    network: Network
    inside: Network | None = None
    _shared: dict[int, Shared] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a pipeline needs at least one device")

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return len(self.nodes)

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return len(set(self.nodes)) == 1

    @property
    def within(self) -> Network:
        """The network within a node."""
        return self.inside or self.network

    def crossing(self, senders: tuple[int, ...], receivers: tuple[int, ...], nbytes: float) -> float:
        """Seconds for a value of so many bytes, whose rows are cut evenly on both sides, to get across."""
        if not nbytes or not senders or not receivers:
            return 0.0
        route = _route(self.nodes, senders, receivers)
        within = self.within.seconds("broadcast", nbytes * route.inside, 2) if route.inside else 0.0
        between = self.network.seconds("broadcast", nbytes * route.between, 2) if route.between else 0.0
        return max(within, between)

    def exchange(self, groups: Sequence[tuple[int, ...]], place: int) -> tuple[bool, int]:
        """Of the replicas of a place: whether their exchange leaves a node, and how many groups' exchanges share the
        busiest link that it passes, when all exchange at once."""
        own = {self.nodes[rank] for rank in groups[place]}
        if len(own) == 1:
            return False, 1
        leaving = [nodes for group in groups if len(nodes := {self.nodes[rank] for rank in group}) > 1]
        return True, max(sum(node in nodes for nodes in leaving) for node in own)

    def between(self, leaves: bool, groups: int) -> Network:
        """The network of such an exchange; the same object each time."""
        if not leaves:
            return self.within
        return self.network if groups == 1 else self._shared.setdefault(groups, Shared(self.network, groups))


@functools.lru_cache(maxsize=100_000)
def _route(nodes: tuple[int, ...], senders: tuple[int, ...], receivers: tuple[int, ...]) -> Route:
    """The parts; each sender and receiver, and each node's link, in one direction."""
    inside: dict[tuple[str, int], float] = {}
    between: dict[tuple[str, int], float] = {}
    for a, sender in enumerate(senders):
        for b, receiver in enumerate(receivers):
            share = min((a + 1) / len(senders), (b + 1) / len(receivers)) - max(a / len(senders), b / len(receivers))
            if share <= 1e-12 or sender == receiver:
                continue
            ends = nodes[sender], nodes[receiver]
            same = ends[0] == ends[1]
            for key in (("out", sender), ("in", receiver)) if same else (("out", ends[0]), ("in", ends[1])):
                load = inside if same else between
                load[key] = load.get(key, 0.0) + share
    return Route(max(inside.values(), default=0.0), max(between.values(), default=0.0))
