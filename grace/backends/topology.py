"""Nodes of the ranks, and backends over the ranks of a node and over nodes' leaders."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.backend import Backend

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables with the number of ranks that mpirun or srun has started. SLURM_NTASKS is none of them: a job's own script
has it too."""


def node_name() -> str:
    """Return the name of this rank's node: GRACE_NODE, or the host's name."""
    return os.environ.get("GRACE_NODE") or socket.gethostname()


def local_rank(backend: Backend) -> int:
    """Return a rank's number among those of its node, from 0; the ranks ask each other, once, where the engine does not
    say it."""
    if backend.local_rank is None:
        _exchange_node_names(backend)
    return backend.local_rank or 0


def local_size(backend: Backend) -> int:
    """Return the number of ranks on a rank's node; the ranks ask each other, once, where the engine does not say it."""
    if backend.local_size is None:
        _exchange_node_names(backend)
    return backend.local_size or 1


def _exchange_node_names(backend: Backend) -> None:
    names = backend.allgather_object(node_name())
    mine = names[backend.rank]
    backend.local_rank = names[: backend.rank].count(mine)
    backend.local_size = names.count(mine)


@dataclass(frozen=True)
class Host:
    """Facts that are known of a node without a file that describes it."""

    address: str
    gpus: Sequence[int] = ()
    cpus: Sequence[int] = ()
    network_bandwidth: float | None = None


@dataclass(frozen=True)
class Topology:
    """Cluster as its ranks describe it.

    Attributes:
        names: for each rank, the name of its node.

    >>> Topology(["a", "b", "a"]).ranks
    [0, 1, 0]
    """

    names: Sequence[str]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.names)

    @property
    def ranks(self) -> list[int]:
        """For each rank, the number of its node."""
        order = list(dict.fromkeys(self.names))
        return [order.index(name) for name in self.names]

    @property
    def nodes(self) -> list[Host]:
        """Nodes, of which only the names are known."""
        return [Host(name) for name in dict.fromkeys(self.names)]

    def members(self, leader: int | None = None) -> list[list[int]]:
        """Return the ranks of each node, with the node's leader first: ``leader`` on its own node, else the lowest
        rank.

        >>> Topology(["a", "b", "a"]).members(leader=2)
        [[2, 0], [1]]
        """
        nodes: list[list[int]] = [[] for _ in set(self.ranks)]
        for rank, node in enumerate(self.ranks):
            nodes[node].append(rank)
        return [sorted(node, key=lambda rank: (rank != leader, rank)) for node in nodes]


@dataclass(frozen=True)
class TwoHops:
    """The groups of a collective of two hops, inside each node and then between ranks of equal number on all nodes.

    FSDP2's reduce-scatter goes by them (:mod:`grace.torch.fsdp_reduce_scatter`). Nodes have no leaders here, unlike in
    :class:`NodeGroups`, which :mod:`grace.session.hierarchy` and ``local_replication`` of
    :class:`~grace.communicators.reduce_broadcast.ReduceBroadcast` use.

    Attributes:
        node: a backend over the ranks of this rank's node.
        peers: a backend over the ranks that have this rank's number on their nodes.
        columns: for each rank of the node, in the order of ``node``, the ranks that have its number on their nodes.
    """

    node: Backend
    peers: Backend
    columns: list[list[int]]

    @property
    def peer_ranks(self) -> list[int]:
        """Ranks of ``peers``, in its order."""
        return self.columns[self.node.rank]


def two_hops(backend: Backend, names: Sequence[str]) -> TwoHops | None:
    """Make backends for collectives of two hops. Every rank must call it.

    Args:
        backend: a backend over all ranks.
        names: for each rank, the name of its node.

    Returns:
        None unless there are several nodes, which have equally many ranks, and more than one.
    """
    members = Topology(names).members()
    sizes = {len(node) for node in members}
    if len(members) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    columns = [sorted(ranks) for ranks in zip(*members, strict=True)]
    # split is a collective: all ranks call it for all groups
    nodes = [backend.split(node) for node in members]
    peers = [backend.split(column) for column in columns]
    node = next(made for made in nodes if made is not None)
    return TwoHops(node, next(made for made in peers if made is not None), columns)


@dataclass
class NodeGroups:
    """The two levels of a cluster, as one rank sees them.

    Attributes:
        node: a backend over the ranks of this rank's node.
        first: the number, in ``node``, of the node's leader.
        leaders: a backend over the leaders of all nodes; None if this rank is not one of them.
        nodes: number of nodes.
        leader_of: for each of all ranks, the number in ``leaders`` of its node's leader.
        own: the number in ``leaders`` of this rank's leader.
    """

    node: Backend
    first: int
    leaders: Backend | None
    nodes: int
    leader_of: list[int]
    own: int


def node_groups(backend: Backend, names: Sequence[str], leader: int | None = None) -> NodeGroups:
    """Return backends over each node's ranks, and over the nodes' leaders. Every rank must call it.

    Args:
        backend: a backend over all ranks; see :meth:`grace.core.backend.Backend.split_once`.
        names: for each rank, the name of its node.
        leader: the leader of its node; the lowest rank is the leader of other nodes.
    """
    members = Topology(names).members(leader)
    leaders = sorted(node[0] for node in members)
    use = f"nodes of leader {leader}"
    over_leaders = _split(backend, leaders, use)
    node_of = {rank: node for node in members for rank in node}
    # a collective: all ranks make all groups
    backends = [_split(backend, sorted(node), use) for node in members]
    node_backend = next(made for made in backends if made is not None)
    mine = node_of[backend.rank]
    leader_of = [leaders.index(node_of[rank][0]) for rank in range(backend.size)]
    return NodeGroups(
        node=node_backend,
        first=sorted(mine).index(mine[0]),
        leaders=over_leaders,
        nodes=len(members),
        leader_of=leader_of,
        own=leader_of[backend.rank],
    )


def _split(backend: Backend, ranks: list[int], use: str) -> Backend | None:
    """Return a backend over some ranks, which knows their numbers in the run even if a user's class does not say it."""
    made = backend.split_once(ranks, use)
    if made is not None and made.members is None and len(ranks) < backend.size:
        made.members = list(map(backend.number_of, ranks))
    return made
