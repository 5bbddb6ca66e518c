"""Layout of stages on ranks, and the links between them: within nodes, and between nodes."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grace.errors import ConfigError
from grace.planner.network import Network

LAYOUTS = ("replicas", "stages")
"""Kinds of neighbours in the order of ranks: replicas of one stage, or stages of one replica."""
Groups = tuple[tuple[int, ...], ...]
"""Ranks of each stage, by replica."""


def groups_of(layout: str, replicas: Sequence[int]) -> Groups:
    """Return the ranks of each stage, of its number of replicas.

    Raises:
        ConfigError: the layout is unknown, or is "stages" though numbers of replicas differ.

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
    stages = len(replicas)
    return tuple(tuple(range(stage, stages * replicas[0], stages)) for stage in range(stages))


@dataclass(frozen=True)
class SharedNetwork:
    """A network in which several groups use each node's link at once."""

    network: Network
    groups: int

    def seconds(self, kind: str, nbytes: float, ranks: int) -> float:
        """Return the seconds of a collective; see :class:`grace.planner.network.Network`."""
        return self.network.seconds(kind, nbytes * self.groups, ranks)

    @property
    def contention(self) -> Mapping[str, float]:
        """The shares of computing that collectives take."""
        return self.network.contention


@dataclass(frozen=True)
class Devices:
    """The devices of a pipeline, one for each rank.

    Attributes:
        nodes: number of the node that each rank is on.
        network: the network between nodes, or between ranks if all are on one node.
        inside: the network within a node; ``network`` if left out.

    >>> from grace.planner.network import Links
    >>> two = Devices((0, 0, 1, 1), Links(1e9), Links(1e10))
    >>> two.crossing((0,), (1,), 1e9), two.crossing((0, 1), (2, 3), 1e9), two.crossing((0, 2), (1, 3), 1e9)
    (0.1, 1.0, 0.05)
    """

    nodes: tuple[int, ...]
    network: Network
    inside: Network | None = None

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a pipeline needs at least one device")

    @property
    def count(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def one_node(self) -> bool:
        """True if all ranks are on one node."""
        return len(set(self.nodes)) == 1

    @property
    def inner_network(self) -> Network:
        """Network within a node."""
        return self.inside or self.network

    def crossing(self, senders: tuple[int, ...], receivers: tuple[int, ...], nbytes: float) -> float:
        """Return the seconds of sending a value whose rows are distributed evenly over senders and over receivers."""
        if not nbytes or not senders or not receivers:
            return 0.0
        inside, between = _link_load(self.nodes, senders, receivers)
        return max(
            self.inner_network.seconds("broadcast", nbytes * inside, 2) if inside else 0.0,
            self.network.seconds("broadcast", nbytes * between, 2) if between else 0.0,
        )

    def exchange(self, groups: Sequence[tuple[int, ...]], stage: int) -> tuple[bool, int]:
        """Return True if the exchange of a stage's replicas leaves a node, and the number of groups whose exchanges
        share the busiest link that it passes, when all exchange at once."""
        own = {self.nodes[rank] for rank in groups[stage]}
        if len(own) == 1:
            return False, 1
        leaving = [nodes for group in groups if len(nodes := {self.nodes[rank] for rank in group}) > 1]
        return True, max(sum(node in nodes for nodes in leaving) for node in own)

    def exchange_network(self, leaves: bool, groups: int) -> Network:
        """Return the network of an exchange (:meth:`exchange`)."""
        if not leaves:
            return self.inner_network
        return self.network if groups == 1 else SharedNetwork(self.network, groups)


@functools.lru_cache(maxsize=100_000)
def _link_load(nodes: tuple[int, ...], senders: tuple[int, ...], receivers: tuple[int, ...]) -> tuple[float, float]:
    """Return the shares of a value's bytes that pass the busiest link of a rank within its node, and the busiest link
    of a node to others. Each link carries each direction on its own."""
    inside: dict[tuple[str, int], float] = {}
    between: dict[tuple[str, int], float] = {}
    for a, sender in enumerate(senders):
        for b, receiver in enumerate(receivers):
            share = min((a + 1) / len(senders), (b + 1) / len(receivers)) - max(a / len(senders), b / len(receivers))
            if share <= 1e-12 or sender == receiver:  # a rounding error, or no message
                continue
            ends = nodes[sender], nodes[receiver]
            same = ends[0] == ends[1]
            for key in (("out", sender), ("in", receiver)) if same else (("out", ends[0]), ("in", ends[1])):
                load = inside if same else between
                load[key] = load.get(key, 0.0) + share
    return max(inside.values(), default=0.0), max(between.values(), default=0.0)
