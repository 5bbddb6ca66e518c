"""ReduceBroadcast: a parameter server. One rank reduces, and broadcasts the mean; both ways are compressed."""

import copy
from collections.abc import Sequence
from typing import Any

from grace.backends.topology import NodeGroups
from grace.core.backend import Backend, Handle
from grace.core.communicator import Communicator, CompressorArg, MeanCompression, MemoryArg
from grace.core.component import Component, Natural, Positive
from grace.core.compressor import Compressor, Tensor
from grace.core.context import AnyContext, Context
from grace.core.memory import Memory
from grace.core.route import BROADCAST, GATHER, Carries, Collective, EngineTraits, Leg, Route, as_bytes, as_list
from grace.errors import ConfigError
from grace.kernels import kernels_of

AHEAD = 8
"""Default of the largest number of steps whose means are under way, with ``sync=False``."""


class ReduceBroadcast(Communicator):
    """Communicator in which every rank sends its payload to one destination, which sends the mean to all.

        1. all ranks send their payloads to the destination (a gather)
        2. it decodes and averages them in float32, adds the residual of its own memory, and compresses the mean
        3. this answer is sent to all ranks (a broadcast)

    Summable payloads are added up instead, and their sum is broadcast, without a second compression. Otherwise the
    second compression uses the same method with a memory of its own at the destination, of the same kind as the
    first one's (a residual if that applies momentum, which must not be applied twice). Source: Li et al.,
    OSDI 2014 (parameter server); Tang et al., ICML 2019, arXiv 1905.05957 (compression both ways with two memories).

    With ``staleness`` s > 0 the exchange runs in a thread of its own: the mean of step t is applied in step t + s, so
    that a rank may run up to s steps ahead of the slowest. The first s steps change no weights. With ``sync=False``
    a step applies the sum of the means that arrived since the last one, and waits for the oldest only if means of
    more than ``ahead`` steps would be under way.

    Args:
        compressor, memory: specs or objects.
        destination: the rank that reduces.
        sync: False to apply means when they arrive, which may be in other steps on each rank.
        staleness: number of steps that a rank may run ahead, with ``sync`` true only.
        local_replication: True to send the answer once to each node, where one rank sends it to the others. All ranks
            still send payloads of their own, unlike with ``hierarchical`` (:mod:`grace.session.hierarchy`).
        ahead: largest number of steps whose means are under way, with ``sync`` false only; each holds its payloads in
            memory.

    Raises:
        ConfigError: the parts do not go together.

    >>> ReduceBroadcast("topk", destination=0).describe()
    'reduce_broadcast, topk, residual'
    """

    name = "reduce_broadcast"
    cost = "p; 2(W-1)p in and out of the destination"
    rooted = True
    node_groups: NodeGroups | None = None
    """The nodes that means are replicated in, and their leaders; None to send means to every rank."""

    def __init__(
        self,
        compressor: CompressorArg = "none",
        memory: MemoryArg | None = None,
        destination: Natural = 0,
        *,  # in the order of strategy files
        sync: bool = True,
        staleness: Natural = 0,
        local_replication: bool = False,
        ahead: Positive = AHEAD,
    ):
        self.destination = destination
        self.staleness = staleness
        self.sync = sync
        self.ahead = ahead
        self.local_replication = local_replication
        # Before super().__init__(), whose bind() reads it.
        self.root = destination
        """Number of the destination, or of its node's leader, among the ranks that take part."""
        self.check_integer("destination", 0)
        self.check_integer("staleness", 0)
        self.check_integer("ahead", 1)
        for key in ("sync", "local_replication"):
            self.check_choice(key, (True, False))
        if not sync and staleness:
            raise ConfigError("reduce_broadcast: staleness goes with sync=True only; without it the bound is ahead")
        if sync and ahead != AHEAD:
            raise ConfigError("reduce_broadcast: ahead goes with sync=False only; else the bound is staleness")
        self.delayed = not sync or staleness > 0
        super().__init__(compressor, memory)
        self.sums = self.compressor.traits.summable
        if self.delayed and self.compressor.traits.rounds > 1:
            raise ConfigError(
                f"reduce_broadcast: {self.compressor.spec} needs what a step brought to begin the next, and with "
                f"{'sync=False' if not sync else f'staleness={staleness}'} it comes later. Leave that out, or choose "
                "another method"
            )
        self.answer_compressor: Compressor = copy.deepcopy(self.compressor.answering())
        if self.answer_compressor.stateful and not self.sums:
            raise ConfigError(
                f"reduce_broadcast: {self.compressor.spec} keeps something of every variable, and the destination's "
                "answers would change it. Define answering(), which returns a method for them that keeps nothing"
            )
        self.answer_memory: Memory = self.memory.answering()
        self.answer_context = Context()
        """Context of the last answer: its loss scale is the unit of the answers' memory."""
        self._dense: ReduceBroadcast | None = None
        self.led = False
        self.bind(self.context)

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        traits, sparsifier = compressor.traits, getattr(compressor, "sparsifier", None)
        if sparsifier is not None and sparsifier.traits.summable and not traits.summable:
            return "its positions are drawn, and a mean of such values cannot be compressed again"
        return None

    @property
    def components(self) -> dict[str, Component]:
        """The direct parts, and the memory of the answers."""
        return super().components if self.sums else {**super().components, "answer_memory": self.answer_memory}

    def bind(self, context: AnyContext, backend: Backend | None = None) -> None:
        """Join a run; check that the destination exists."""
        super().bind(context, backend)
        if backend is not None and not self.led and self.root >= backend.size:
            raise ConfigError(
                f"reduce_broadcast: rank {self.root} cannot be the destination, there are {backend.size} ranks"
            )

    def use_leaders(self, leader_of: Sequence[int]) -> None:
        """Make the leader of the destination's node the destination."""
        self.root = leader_of[self.destination]
        self.led = True

    @property
    def mean_compression(self) -> MeanCompression | None:
        """The method and the memory of answers; None if payloads are summed."""
        return None if self.sums else MeanCompression(self.answer_compressor, self.answer_memory, "answer")

    def legs(self, nbytes: float, engine: EngineTraits) -> Route:
        """Return the legs to the destination and back: to all ranks at once, or through one rank of each node."""
        back = BROADCAST
        if self.node_groups is not None:
            replication = Replication(self.node_groups)
            back = Collective(BROADCAST.name, replication.start, replication.sent)
        carries = Carries.SUMS if self.sums else Carries.MEANS
        return [Leg(GATHER, Carries.GRADIENTS, self.root), Leg(back, carries, self.root)]

    def rescale_mean_memory(self, loss_scale: float) -> None:
        """Rescale the memory of the answers if the step that is answered has another loss scale."""
        if loss_scale != self.answer_context.loss_scale:
            self.answer_memory.rescale(loss_scale / self.answer_context.loss_scale)
            self.answer_context.loss_scale = loss_scale

    def on_resume(self, loss_scale: float) -> None:
        """Rescale the memory of the answers from the units of the checkpoint to those of the run."""
        self.answer_context.loss_scale = loss_scale
        self.rescale_mean_memory(self.context.loss_scale)

    def dense_communicator(self, shared: Communicator) -> Communicator:
        """Return the uncompressed communicator with the same destination."""
        if self.compressor.traits.exact and not self.memory.stateful:
            return self
        if self._dense is None:
            self._dense = ReduceBroadcast("none", "none", **self.options())
            self._dense.companion_of = self.describe()
        return self._dense

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of copies and pickles, which are in no run yet."""
        return {**super().__getstate__(), "node_groups": None}

    def options(self) -> dict[str, Any]:
        """Return the parameters and their values."""
        return {key: getattr(self, key) for key in self.parameters()}


class Replication:
    """Broadcast that crosses the network once for each node: from the root to the nodes' leaders, and from each leader
    to the ranks of its node.

    Args:
        node_groups: the backends over this rank's node and over the leaders, of whom the root is one.
    """

    def __init__(self, node_groups: NodeGroups):
        self.node_groups = node_groups

    def start(self, backend: Backend, wire: Tensor, root: int | None) -> Handle:
        """Start the broadcast; bfloat16, which engines may not know, is sent as bytes."""

        def to_leaders(raw: Tensor) -> Handle:
            broadcast = ReplicatedBroadcast(self.node_groups, backend, raw, root)
            return Handle(broadcast.wait, later=broadcast.result)

        return as_bytes(wire, to_leaders).map(as_list)

    def sent(self, nbytes: float, ranks: int, rank: int, root: int | None) -> float:
        """Return the bytes that leave a rank."""
        leader_of = self.node_groups.leader_of
        node = [other for other in range(ranks) if leader_of[other] == leader_of[rank]]
        leader = root if root in node else node[0]
        if rank != leader:
            return 0.0
        other_leaders = self.node_groups.nodes - 1 if rank == root else 0
        return (other_leaders + len(node) - 1) * nbytes


class ReplicatedBroadcast:
    """Broadcast of a :class:`Replication` under way. The hop within the node starts in :meth:`wait`."""

    def __init__(self, node_groups: NodeGroups, backend: Backend, wire: Tensor, root: int | None):
        self.node_groups, self.wire = node_groups, wire
        self.received: Tensor | None = None
        self.from_root: Handle | None = None
        leaders = node_groups.leaders
        if leaders is not None and root is not None:
            before = leaders.sent_bytes
            self.from_root = leaders.broadcast(wire, node_groups.leader_of[root])
            # The bucket's traffic is read from its own backend, over which neither hop goes: count both hops there.
            backend.count(leaders.sent_bytes - before)
            backend.count((node_groups.node.size - 1) * kernels_of(wire).nbytes(wire))

    def wait(self) -> None:
        """Block until this rank has the root's buffer."""
        if self.received is None:  # a second call must not start the second hop again
            wire = self.wire if self.from_root is None else self.from_root.wait()
            self.received = self.node_groups.node.broadcast(wire, self.node_groups.first).wait()

    def result(self) -> Tensor:
        """Return the root's buffer."""
        return self.received
