"""Which ranks share a machine, and backends over them."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.backend import Backend

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""How many ranks mpirun or srun has started. SLURM_NTASKS does not say so: a job's own script has it too."""


def node_name() -> str:
    """What this rank's node is called: GRACE_NODE, or the host's name."""
    return os.environ.get("GRACE_NODE") or socket.gethostname()


def local_rank(backend: Backend) -> int:
    """A rank's number among those of its node, from 0; the ranks ask each other, once, where nobody says it."""
    if backend.local_rank is None:
        _ask(backend)
    return backend.local_rank or 0


def local_size(backend: Backend) -> int:
    """Return how many ranks a rank's node has; the ranks ask each other, once, where nobody says it."""
    if backend.local_size is None:
        _ask(backend)
    return backend.local_size or 1


def _ask(backend: Backend) -> None:
    names = backend.allgather_object(node_name())
    mine = names[backend.rank]
    backend.local_rank, backend.local_size = names[: backend.rank].count(mine), names.count(mine)


@dataclass(frozen=True)
class Host:
    """What is known of a node without a file that describes it."""

    address: str
    gpus: Sequence[int] = ()
    cpus: Sequence[int] = ()
    network_bandwidth: float | None = None


@dataclass(frozen=True)
class Topology:
    """The cluster that the ranks say they are.

    Attributes:
        names: of the node that each rank is on.

    >>> Topology(["a", "b", "a"]).ranks
    [0, 1, 0]
    """

    names: Sequence[str]

    @property
    def world_size(self) -> int:
        """How many there are."""
        return len(self.names)

    @property
    def ranks(self) -> list[int]:
        """The number of the node that each runs on."""
        order = list(dict.fromkeys(self.names))
        return [order.index(name) for name in self.names]

    @property
    def nodes(self) -> list[Host]:
        """The nodes, of which no more than the names is known."""
        return [Host(name) for name in dict.fromkeys(self.names)]

    def members(self, leader: int | None = None) -> list[list[int]]:
        """The ranks of each node, the one first that speaks for the node: ``leader`` on its own, else the lowest.

        >>> Topology(["a", "b", "a"]).members(leader=2)
        [[2, 0], [1]]
        """
        nodes: list[list[int]] = [[] for _ in set(self.ranks)]
        for rank, node in enumerate(self.ranks):
            nodes[node].append(rank)
        return [sorted(node, key=lambda rank: (rank != leader, rank)) for node in nodes]


@dataclass
class NodeGroups:
    """The two levels of a cluster, as one rank sees them.

    Attributes:
        node: a backend over the ranks of its node.
        first: the rank in ``node`` that speaks for it.
        leaders: a backend over those of all nodes; None if this rank is not one of them.
        nodes: how many there are.
        leader_of: for each of all ranks, the number in ``leaders`` of the one that speaks for it.
        own: that of the one that speaks for this rank.
    """

    node: Backend
    first: int
    leaders: Backend | None
    nodes: int
    leader_of: list[int]
    own: int


def node_groups(backend: Backend, names: Sequence[str], leader: int | None = None) -> NodeGroups:
    """Backends over each node's ranks, and over the nodes' leaders. Every rank must call it.

    Args:
        backend: over all ranks.
        names: of the node of each rank.
        leader: speaks for its node; of other nodes the lowest rank does.
    """
    members = Topology(names).members(leader)
    leaders = sorted(node[0] for node in members)
    over_leaders = backend.split(leaders)
    node_of = {rank: node for node in members for rank in node}
    backends = [backend.split(sorted(node)) for node in members]  # all ranks make all of them
    own = next(made for made in backends if made is not None)
    mine = node_of[backend.rank]
    leader_of = [leaders.index(node_of[rank][0]) for rank in range(backend.size)]
    return NodeGroups(own, sorted(mine).index(mine[0]), over_leaders, len(members), leader_of, leader_of[backend.rank])
