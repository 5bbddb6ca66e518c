"""Hierarchical reduction: the ranks of each node reduce first, then one leader of each node exchanges with the others.

    1. the ranks of each node average their gradients, uncompressed
    2. the leaders of the nodes exchange these means, compressed, each weighted by the number of ranks on its node
    3. every leader broadcasts the result to its node

The result is the mean over all ranks, equally weighted, whatever the nodes' sizes. Only leaders have memories.

Two others go by nodes, and are no hierarchies: in FSDP2's compressed reduce-scatter
(:class:`grace.backends.topology.TwoHops`) no rank leads, and each exchanges a part of the node's sum; and
``local_replication`` of :class:`~grace.communicators.reduce_broadcast.ReduceBroadcast` concerns only the way back of
means, after all ranks have sent payloads of their own.
"""

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grace.backends.topology import node_groups
from grace.communicators import Allreduce
from grace.communicators.sparse import row_communicator
from grace.core.backend import Backend, LocalBackend
from grace.core.communicator import Communicator
from grace.core.compressor import Tensor
from grace.core.context import Context, SubgroupContext
from grace.core.variable import Variable
from grace.errors import PayloadError, warn
from grace.exchange.bucket import Bucket, Contribution, Outcome
from grace.exchange.header import MISSING, OVERFLOW, PRESENT, REFUSED, Header
from grace.exchange.round_trip import AnyRoundTrip, RoundTrip, advance_all
from grace.exchange.sparse_rows import Gradient, SparseRows, scaled, values_of
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of

OUT_OF_STEP = 1 + REFUSED
"""Status that a leader sends for every variable if ranks, on its node or on others, are out of step."""


class Hierarchy:
    """The nodes of a run, their leaders, and the contexts and backends of communicators over them.

    Args:
        backend: the channel over all ranks.
        names: the name of each rank's node.
    """

    def __init__(self, backend: Backend, names: Sequence[str]):
        self.node_groups = node_groups(backend, names)
        node = self.node_groups.node
        self.weight = node.size * self.node_groups.nodes / backend.size
        """Weight of this node's mean in the mean over nodes, with which that is the mean over all ranks."""
        self.inside = Allreduce("none")
        self.inside.bind(Context(rank=node.rank, size=node.size, partial=True), node)

    def context(self, whole: Context) -> SubgroupContext:
        """Return the context of exchanges between leaders, which are numbered among themselves; other ranks are
        alone."""
        return SubgroupContext(whole, self.backend.rank, self.backend.size)

    @property
    def leads(self) -> bool:
        """True if this rank leads its node."""
        return self.node_groups.leaders is not None

    @property
    def backend(self) -> Backend:
        """Backend of the exchanges between leaders; on other ranks a local one."""
        return self.node_groups.leaders or LocalBackend()

    def node_bucket(self, bucket: Bucket) -> Bucket:
        """Return a bucket for the sum over this rank's node."""
        inside: Communicator = self.inside
        if bucket.variables[0].sparse:
            inside = row_communicator(self.inside, "")
            inside.bind(self.inside.context, self.node_groups.node)
        variables = bucket.variables
        if not _is_exact(bucket):
            variables = [replace(variable, dtype="float32") for variable in variables]
        return Bucket(
            bucket.index, inside, variables, label=f"{bucket.label}.node", carries_stamps=bucket.carries_stamps
        )


def advise_hierarchy(runner: Any) -> None:
    """Warn, on rank 0, if several ranks of each node send over the network, where one of them could send for all.

    Args:
        runner: the runner, after the ranks have agreed.
    """
    nodes = len(set(runner.node_names()))
    size = runner.backend.size
    possible = not (runner.hierarchical or runner.backend.pairs_by_name or any(c.delayed for c in runner.communicators))
    if possible and 1 < nodes < size and runner.backend.rank == 0:
        warn(
            f"{size} ranks on {nodes} nodes each exchange over the network: with hierarchical=True the ranks of a node "
            "average first, and one of them sends for all"
        )


class HierarchicalRoundTrip(AnyRoundTrip):
    """Round trip of a bucket whose nodes reduce first. It wraps one or two:

    1. :meth:`start` starts the sum over the node, uncompressed, and waits for it.
    2. Then it starts the leaders' round trip, with the node's mean for a gradient. A rank that does not lead has none.
    3. :meth:`finish` broadcasts the outcomes, and errors, from the leader to its node. So the leader reads its headers
       at once.

    Args:
        contribution: this rank's gradients.
        hierarchy: the nodes and their leaders.
    """

    header: Header
    """The header of the node's round trip until a leader starts that of the leaders."""
    over_leaders: RoundTrip | None = None
    """The leaders' round trip; None on other ranks."""

    def __init__(self, contribution: Contribution, hierarchy: Hierarchy):
        super().__init__(contribution)
        self.hierarchy, self.node_groups = hierarchy, hierarchy.node_groups
        self.like = values_of(self.gradients[0])
        self.kernels = kernels_of(self.like)

    def start(self) -> None:
        """Sum gradients over the node, which blocks, and start the leaders' round trip on a rank that leads."""
        within = self._start_over_node(self.gradients)
        reduced, found = self._means_of_node(within, self.gradients)
        self.gradients = ()
        # Other ranks keep the header of the node's round trip; finish() adds the facts that the leader sends.
        self.header = within.header
        if self.hierarchy.leads:
            of_node = Contribution(self.bucket, reduced, found, self.finds_overflow, self.traffic)
            trip: RoundTrip = (self.communicator.begin or RoundTrip)(of_node)
            self.over_leaders = trip
            trip.start()
            self.header = trip.header

    # -- within the node -------------------------------------------------------------------------------

    def _start_over_node(self, gradients: Sequence[Gradient]) -> RoundTrip:
        """Start the sum over the node, and return its round trip."""
        if not (self.bucket.variables[0].sparse or _is_exact(self.bucket)):
            # Leaders compress float32. Rows are summed in float32 anyway.
            gradients = [kernels_of(gradient).cast(gradient, "float32") for gradient in gradients]
        if self.bucket.node is None:
            self.bucket.node = self.hierarchy.node_bucket(self.bucket)
        outside, within = self.communicator.context, self.bucket.node.communicator.context
        within.copy_stamped(outside)
        # The sum over a node is uncompressed: there is no state to guard.
        trip = RoundTrip(Contribution(self.bucket.node, gradients, self.present, False, self.traffic))
        trip.start()
        return trip

    def _means_of_node(self, within: RoundTrip, gradients: Sequence[Gradient]) -> tuple[list[Gradient], list[bool]]:
        """Wait for the sum over the node, and return the gradients that its leader contributes, and True for each
        variable that a rank of the node has a gradient of."""
        advance_all([within])
        outcomes = within.finish([None] * len(gradients))
        if within.header.out_of_step:
            # All collectives of this step must still be run with the other nodes; the leaders' stamps inform these.
            self.communicator.context.out_of_step = within.header.out_of_step
            return list(gradients), [False] * len(gradients)
        reduced: list[Gradient] = []
        for given, outcome in zip(gradients, outcomes, strict=True):
            value = scaled(given if outcome.value is None else outcome.value, self.hierarchy.weight)
            # The value is a view of the node's buffer, which the next step overwrites, and a memory may keep it: copy.
            reduced.append(self._copy(value) if value is outcome.value else value)
        return reduced, [outcome.value is not None for outcome in outcomes]

    def _copy(self, value: Gradient) -> Gradient:
        if isinstance(value, SparseRows):  # made at each step
            return value
        k = self.kernels
        return k.reshape(k.join([k.flat(value)]), tuple(value.shape))

    # -- over the leaders ------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Start the next leg of the leaders' round trip; return False if no leg is left, or this rank leads no node."""
        return self.over_leaders is not None and self.over_leaders.advance()

    def wait(self) -> None:
        if self.over_leaders is not None:
            self.over_leaders.wait()

    def discard(self) -> None:
        """Finish the round trip, and drop its outcomes. Other ranks of the node may not discard the step, and wait for
        the leader's outcomes."""
        self.wait()
        with contextlib.suppress(PayloadError):
            self.finish([None] * len(self.names), wait=False)

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Finish the leaders' round trip, and return its outcomes on all ranks of the node.

        Args:
            outs, wait: see :meth:`grace.exchange.round_trip.AnyRoundTrip.finish`.

        Raises:
            PayloadError: this rank, or the leader of its node, could not decode a payload.
        """
        outcomes: list[Outcome] | None = None
        if self.over_leaders is not None:
            try:
                outcomes = self.over_leaders.finish(outs, wait)
            except PayloadError:
                self._tell_of_error()
                raise
        began = time.perf_counter()
        with recorder.phase("share", "wait", bucket=self.bucket), self._sharing():
            outcomes = self._share(outcomes)
        self.traffic.wait_seconds += time.perf_counter() - began
        return outcomes

    # -- from the leader to its node -------------------------------------------------------------------

    def _tell_of_error(self) -> None:
        """Send refused statuses to the ranks of the node, which wait for outcomes."""
        if self.node_groups.node.size > 1:
            statuses = self.kernels.full([REFUSED] * len(self.names), "float32", self.like)
            with self._sharing():
                self._broadcast(statuses)

    def _sharing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this rank waits for its node; error messages name the wait."""
        return self.node_groups.node.waiting_for_ranks(lambda: f"what leaders hand on of {self.bucket.describe()}")

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """Return the leader's tensor on all ranks of the node; blocks."""
        node = self.node_groups.node
        node.started += 1
        received = node.broadcast(tensor, self.node_groups.first).wait()
        node.done += 1
        return received

    def _share(self, outcomes: list[Outcome] | None) -> list[Outcome]:
        """Return the leader's outcomes on all ranks of the node; blocks.

        Args:
            outcomes: the leader's; None at other ranks.
        """
        node, header, k = self.node_groups.node, self.header, self.kernels
        # The context's reason is that of _means_of_node(): ranks of this node differ.
        header.out_of_step = header.out_of_step or self.communicator.context.out_of_step
        if node.size == 1:  # the leader is alone on its node
            return outcomes or []
        # The leader's own round trip has counted its bytes over the nodes; these are those within the node.
        before = node.sent_bytes
        # Statuses are broadcast first: by them all ranks of the node know which means follow.
        statuses = k.to_list(self._broadcast(k.full(self._statuses(outcomes), "float32", self.like)))
        if OUT_OF_STEP in statuses:
            header.out_of_step = (
                header.out_of_step or "the ranks are out of step, on other nodes; their own errors say how"
            )
            return [Outcome(variable, None, False) for variable in self.bucket.variables]
        if REFUSED in statuses:
            leader = node.number_of(self.node_groups.first)
            raise PayloadError(
                f"rank {leader}, which speaks for this node, could not decode what others sent for {self.bucket.ends}"
            )
        shared = []
        for i, variable in enumerate(self.bucket.variables):
            value = None if outcomes is None else outcomes[i].value
            if statuses[i] != MISSING:
                value = self._share_rows(variable, value) if variable.sparse else self._share_dense(variable, value)
            shared.append(Outcome(variable, None if statuses[i] == MISSING else value, statuses[i] == OVERFLOW))
        self.traffic.sent_bytes += node.sent_bytes - before
        return shared

    def _statuses(self, outcomes: list[Outcome] | None) -> list[float]:
        """Return the status of each variable, which a leader sends to its node; on other ranks the numbers are room for
        the leader's."""
        if outcomes is None:
            return [MISSING] * len(self.names)
        if self.header.out_of_step:
            return [OUT_OF_STEP] * len(self.names)
        statuses: list[float] = []
        for outcome in outcomes:
            if outcome.value is None:
                statuses.append(MISSING)
            else:
                statuses.append(OVERFLOW if outcome.overflow else PRESENT)
        return statuses

    def _share_dense(self, variable: Variable, value: Tensor | None) -> Tensor:
        """Return the leader's mean of a dense gradient."""
        k = self.kernels
        if value is None:
            dtype = variable.dtype if _is_exact(self.bucket) else "float32"
            value = k.zeros((variable.numel,), dtype, self.like)
        return k.reshape(self._broadcast(k.flat(value)), variable.shape)

    def _share_rows(self, variable: Variable, value: SparseRows | None) -> SparseRows:
        """Return the leader's mean of a sparse gradient: the number of rows is broadcast first, then the rows."""
        k = self.kernels
        count = k.full([0 if value is None else value.rows.shape[0]], "int64", self.like)
        n = int(k.to_list(self._broadcast(count))[0])
        shape = (n, *variable.shape[1:])
        if value is None:
            rows, values = k.zeros((n,), "int32", self.like), k.zeros((math.prod(shape),), "float32", self.like)
        else:
            rows, values = k.cast(value.rows, "int32"), k.flat(value.values)
        if n > 0:  # engines need not support broadcasts of empty tensors
            rows = self._broadcast(rows)
            values = self._broadcast(values)
        return SparseRows(k.reshape(values, shape), rows)


def _is_exact(bucket: Bucket) -> bool:
    return bucket.communicator.compressor.traits.exact and not bucket.communicator.memory.stateful
