"""Hierarchical reduction: the ranks of a node reduce among themselves first, and one of them speaks for the node.

    1. the ranks of each node average their gradients, uncompressed
    2. the leaders of the nodes exchange these, compressed, each weighted by the ranks that it speaks for
    3. every leader hands the result to its node

The result is the mean over all ranks, equally weighted, whatever the nodes' sizes. Memories live at the leaders.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grace.backends.topology import node_groups
from grace.communicators import Allreduce
from grace.communicators.sparse import row_communicator
from grace.core.backend import Backend, LocalBackend
from grace.core.compressor import Tensor
from grace.core.context import Among, Context
from grace.errors import PayloadError
from grace.exchange.base import Exchange
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.sparse_rows import SparseRows, scaled
from grace.exchange.tracing import recorder
from grace.exchange.wire import MISSING, OVERFLOW, PRESENT, REFUSED
from grace.kernels import kernels_of

ASTRAY = 1 + REFUSED


class Hierarchy:
    """The two levels around an exchange.

    Args:
        backend: over all ranks.
        names: of the node of each rank.
    """

    def __init__(self, backend: Backend, names: Sequence[str]):
        self.node_groups = node_groups(backend, names)
        node = self.node_groups.node
        self.weight = node.size * self.node_groups.nodes / backend.size
        self.traffic = Traffic()
        self.inside = Allreduce("none")
        members = [rank for rank, leader in enumerate(self.node_groups.leader_of) if leader == self.node_groups.own]
        self.inside.bind(Context(rank=node.rank, size=node.size, names=members), node)

    @property
    def leaders_of_nodes(self) -> list[int]:
        """The ranks that speak for the nodes."""
        return [self.node_groups.leader_of.index(number) for number in range(self.node_groups.nodes)]

    def context(self, whole: Context) -> Any:
        """That of what the leaders exchange: they are numbered among themselves; others are alone there."""
        return Among(whole, self.backend.rank, self.backend.size, self.leaders_of_nodes)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its node."""
        return self.node_groups.leaders is not None

    @property
    def backend(self) -> Backend:
        """What communicators run over: the leaders; nobody elsewhere."""
        return self.node_groups.leaders or LocalBackend()

    def begin(self, contribution: Contribution) -> Exchange:
        """Reduce among the node's ranks, and start the leaders' exchange."""
        bucket, gradients, present, _, traffic = contribution
        self.like = gradients[0].values if bucket.variables[0].sparse else gradients[0]
        self.traffic = traffic
        reduced, found = self.reduced(bucket, gradients, present, traffic)
        if not self.leads:
            return Followed(bucket)
        return bucket.communicator.begin(contribution._replace(gradients=reduced, present=found))

    def reduced(
        self, bucket: Bucket, gradients: Sequence[Any], present: Sequence[bool], traffic: Traffic
    ) -> tuple[list[Any], list[bool]]:
        """The node's gradients, as its leader exchanges them; blocks."""
        inside: Any = row_communicator(self.inside, "") if bucket.variables[0].sparse else self.inside
        if inside is not self.inside:
            inside.bind(self.inside.context, self.node_groups.node)
            inside.compressor.shapes = {v.name: v.shape for v in bucket.variables}
        # rows sum up in float32, and so do dense gradients that the leaders will compress
        widened = gradients if bucket.variables[0].sparse or _exact(bucket) else [_wide(g) for g in gradients]
        variables = bucket.variables if _exact(bucket) else [replace(v, dtype="float32") for v in bucket.variables]
        own = Bucket(bucket.index, inside, variables, label=f"{bucket.label}.node", carries=bucket.carries)
        outside, within = bucket.communicator.context, inside.context
        for number in ("step", "updates", "left_out", "settings"):
            setattr(within, number, getattr(outside, number))
        exchange = inside.begin(Contribution(own, widened, present, False, traffic))
        while exchange.advance():
            pass
        outcomes = exchange.finish([None] * len(own.variables))
        if exchange.astray:
            outside.astray = exchange.astray
            return list(gradients), [False] * len(gradients)
        reduced = [
            scaled(given if outcome.value is None else outcome.value, self.weight)
            for given, outcome in zip(gradients, outcomes, strict=True)
        ]
        return reduced, [outcome.value is not None for outcome in outcomes]

    def finish(self, exchange: Exchange, outs: Sequence[Any]) -> list[Outcome]:
        """What the leader's exchange brings, on all ranks of the node; they hear it too if it cannot be decoded."""
        try:
            brought = exchange.finish(outs)
        except PayloadError:
            if self.node_groups.node.size > 1:
                marks = kernels_of(self.like).full([REFUSED] * len(exchange.bucket.variables), "float32", self.like)
                with self._sharing(exchange):
                    self.node_groups.node.broadcast(marks, self.node_groups.first).wait()
            raise
        began = time.perf_counter()
        with recorder.phase("share", "wait", bucket=exchange.bucket), self._sharing(exchange):
            outcomes = self.shared(exchange, brought)
        self.traffic.wait_seconds += time.perf_counter() - began
        return outcomes

    def _sharing(self, exchange: Exchange) -> Any:
        """The context of the way from the leader to its node."""
        return self.node_groups.node.awaiting(lambda: f"what leaders hand on of {exchange.bucket.describe()}")

    def shared(self, exchange: Exchange, brought: Sequence[Outcome]) -> list[Outcome]:
        """What the leader's exchange brought, on all ranks of the node; blocks."""
        node, first, bucket, like = self.node_groups.node, self.node_groups.first, exchange.bucket, self.like
        exchange.astray = exchange.astray or bucket.communicator.context.astray
        if node.size == 1:
            return list(brought)
        outcomes, before = brought if self.leads else None, node.sent_bytes
        k = kernels_of(like)
        marks = [ASTRAY if exchange.astray else _mark(outcome) for outcome in outcomes or ()]
        marks = k.full(marks or [MISSING] * len(bucket.variables), "float32", like)
        told = k.to_list(node.broadcast(marks, first).wait())
        if ASTRAY in told:
            exchange.astray = exchange.astray or "the ranks are out of step, on other nodes; their own errors say how"
            return exchange.nothing()
        if REFUSED in told:
            raise PayloadError(
                f"the rank that speaks for this node could not decode what others sent for {bucket.ends}"
            )
        shared = []
        for i, variable in enumerate(bucket.variables):
            value = outcomes[i].value if outcomes is not None else None
            if told[i] != MISSING:
                value = (
                    self._rows(k, variable, value, like) if variable.sparse else self._dense(k, bucket, i, value, like)
                )
            shared.append(Outcome(variable, None if told[i] == MISSING else value, told[i] == OVERFLOW))
        self.traffic.sent_bytes += node.sent_bytes - before
        return shared

    def _dense(self, k: Any, bucket: Bucket, i: int, value: Any, like: Any) -> Any:
        variable = bucket.variables[i]
        dtype = variable.dtype if _exact(bucket) else "float32"
        buffer = k.zeros((variable.numel,), dtype, like) if value is None else k.flat(value)
        return k.reshape(self.node_groups.node.broadcast(buffer, self.node_groups.first).wait(), variable.shape)

    def _rows(self, k: Any, variable: Any, value: Any, like: Any) -> SparseRows:
        node, first = self.node_groups.node, self.node_groups.first
        count = k.full([0 if value is None else value.rows.shape[0]], "int64", like)
        n = int(k.to_list(node.broadcast(count, first).wait())[0])
        rows = k.zeros((n,), "int32", like) if value is None else k.cast(value.rows, "int32")
        shape = (n, *variable.shape[1:])
        values = k.zeros((math.prod(shape),), "float32", like) if value is None else k.flat(value.values)
        if not n:
            return SparseRows(k.reshape(values, shape), rows)
        rows = node.broadcast(rows, first).wait()
        return SparseRows(k.reshape(node.broadcast(values, first).wait(), shape), rows)


def _exact(bucket: Bucket) -> bool:
    return bucket.communicator.compressor.traits.exact and not bucket.communicator.memory.stateful


def _wide(gradient: Any) -> Any:
    return kernels_of(gradient).cast(gradient, "float32")


def _mark(outcome: Outcome) -> float:
    return MISSING if outcome.value is None else OVERFLOW if outcome.overflow else PRESENT


class Followed(Exchange):
    """The exchange of a rank whose node's leader does it: waits for nothing, and brings nothing."""

    def __init__(self, bucket: Bucket):
        self.bucket = bucket

    def advance(self) -> bool:
        return False

    def wait(self) -> None:
        return None

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        return [Outcome(variable, None, False) for variable in self.bucket.variables]
