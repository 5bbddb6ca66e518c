"""ReduceBroadcast: a parameter server. One rank reduces, and sends the mean round; compressed both ways."""

import copy
import dataclasses
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from grace.communicators.base import Communicator, Nodes, Run
from grace.core.backend import Backend, Handle
from grace.core.component import Component
from grace.core.compressor import Compressor, Tensor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.errors import ConfigError
from grace.exchange.background import PendingExchange
from grace.exchange.base import Exchange
from grace.exchange.bucket import Contribution
from grace.exchange.delayed import DelayedExchange
from grace.exchange.reduce_broadcast import ReduceBroadcastExchange
from grace.kernels import kernels_of

AHEAD = 8
"""Steps whose means may be under way at once, where nothing else bounds them."""


class ReduceBroadcast(Communicator):
    """Every rank sends its payload to one destination, which sends the mean to all.

        1. all ranks send their payloads to the destination (a gather)
        2. it decodes and averages them in float32, adds what its own memory kept, and compresses the mean
        3. the answer goes to everybody (a broadcast)

    Payloads that may be summed are added up instead, and their sum is sent round: nothing is lost on the way back.
    Else the second compression is by the same method with a memory of its own, kept at the destination, of the same
    kind as the first's (a residual if that applies momentum, which must not be applied twice). Source: Li et al.,
    OSDI 2014 (parameter server); Tang et al., ICML 2019, arXiv 1905.05957 (compression both ways with two memories).

    With ``staleness`` s > 0 the exchange runs in a thread of its own: the mean of step t is applied in step t + s, so
    that a rank may run up to s steps ahead of the slowest. The first s steps change nothing. With ``sync=False``
    a step applies the sum of the means that have come since the last one, and waits for the oldest only if those of
    more than ``ahead`` steps would be under way.

    Args:
        compressor, memory: specs or objects.
        destination: the rank that reduces.
        staleness: how many steps a rank may run ahead.
        sync: False to apply means as they come, in other steps on each rank.
        ahead: how many steps' means may be under way with ``sync=False``; each holds its payloads in memory.
        local_replication: send the answer once to each node, where one rank hands it to the others.

    Raises:
        ConfigError: the parts do not go together.

    >>> ReduceBroadcast("topk", destination=0).describe()
    'reduce_broadcast, topk, residual'
    """

    name = "reduce_broadcast"
    cost = "p; 2(W-1)p in and out of the destination"
    answer_memory: Memory | None = None
    round_trip: ClassVar[type[Exchange]] = ReduceBroadcastExchange

    def __init__(
        self,
        compressor: Any = "none",
        memory: Any = None,
        destination: int = 0,
        staleness: int = 0,
        sync: bool = True,
        local_replication: bool = False,
        ahead: int = AHEAD,
    ):
        self.destination, self.staleness, self.sync, self.ahead = destination, staleness, sync, ahead
        self.local_replication = local_replication
        self.root = destination
        """The destination among those that take part, if one speaks for several."""
        self.check_integer("destination", 0)
        self.check_integer("staleness", 0)
        self.check_integer("ahead", 1)
        for key in ("sync", "local_replication"):
            self.check_choice(key, (True, False))
        if not sync and staleness:
            raise ConfigError("reduce_broadcast: staleness goes with sync=True only; without it the bound is ahead")
        if sync and ahead != AHEAD:
            raise ConfigError("reduce_broadcast: ahead goes with sync=False only; else the bound is staleness")
        super().__init__(compressor, memory)
        self.sums = self.compressor.traits.summable  # type: ignore[misc]
        if self.delayed and self.compressor.traits.rounds > 1:
            raise ConfigError(
                f"reduce_broadcast: {self.compressor.spec} needs what a step brought to begin the next, and with "
                f"{'sync=False' if not sync else f'staleness={staleness}'} it comes later. Leave that out, or choose "
                "another method"
            )
        self.answers: Compressor = copy.deepcopy(self.compressor.answering())
        if self.answers.stateful and not self.sums:
            raise ConfigError(
                f"reduce_broadcast: {self.compressor.spec} keeps something of every variable, and the destination's "
                "answers would change it. Define answering(), which returns a method for them that keeps nothing"
            )
        self.answer_memory = self.memory.answering()
        self.answer_context = Context()
        """Of the last answer: the loss scale whose units the memory of the answers is in."""
        self._dense: ReduceBroadcast | None = None
        self.pending_exchanges: dict[str, deque[PendingExchange]] = defaultdict(deque)
        self.exchange_thread: Any = None
        self.led = False
        self.node_groups: Nodes | None = None
        self.bind(self.context)

    @property
    def delayed(self) -> bool:
        """Whether means are applied later than in their own step."""
        return not self.sync or self.staleness > 0

    @classmethod
    def accepts(cls, compressor: Compressor) -> str | None:
        traits, sparsifier = compressor.traits, getattr(compressor, "sparsifier", None)
        if sparsifier is not None and sparsifier.traits.summable and not traits.summable:
            return "its positions are drawn, and a mean of such values cannot be compressed again"
        return None

    @property
    def components(self) -> dict[str, Component]:
        """Both parts, and the memory of the answers."""
        if self.answer_memory is None or self.sums:
            return super().components
        return {**super().components, "answer_memory": self.answer_memory}

    def bind(self, context: Context, backend: Backend | None = None) -> None:
        """Join a run, the way back too."""
        super().bind(context, backend)
        if backend is not None and not self.led and self.root >= backend.size:
            raise ConfigError(
                f"reduce_broadcast: rank {self.root} cannot be the destination, there are {backend.size} ranks"
            )

    def use_leaders(self, leader_of: Sequence[int]) -> None:
        """The destination is the one that speaks for it."""
        self.root, self.led = leader_of[self.destination], True

    def open(self, runner: Run) -> None:
        """Exchanges that are applied later run beside training; replication needs to know the nodes."""
        if self.delayed:
            self.exchange_thread = runner.exchange_thread()
        if self.local_replication and runner.backend.size > 1 and not self.led:  # one of each node takes part
            backend = self.exchange_thread.backend if self.delayed else runner.backend
            if backend.pairs_by_name and backend.framework == "tensorflow":
                raise ConfigError("reduce_broadcast: local_replication is not for Horovod with TensorFlow: use MPI")
            self.node_groups = runner.node_groups(backend, self.root)

    def aside(self) -> "ReduceBroadcast":
        """The same with the thread's backend, for one step: whatever step this rank is at when the others' payloads
        and the answer are there, they are decoded as they were encoded."""
        other = self.at(dataclasses.replace(self.context))
        other.backend = self.exchange_thread.backend
        return other

    def rescale_answers(self, loss_scale: float) -> None:
        """The memory of the answers follows the loss scale when it answers a step that has another."""
        if self.answer_memory is not None and loss_scale != self.answer_context.loss_scale:
            self.answer_memory.rescale(loss_scale / self.answer_context.loss_scale)
            self.answer_context.loss_scale = loss_scale

    def resumed(self, loss_scale: float) -> None:
        """The memory of the answers is in the units of the checkpoint."""
        self.answer_context.loss_scale = loss_scale
        self.rescale_answers(self.context.loss_scale)

    def broadcast(self, wire: Tensor) -> Handle:
        """The way back."""
        return moved(wire, self._broadcast)

    def _broadcast(self, wire: Any) -> Handle:
        """To all, or to one rank of each node, which hands it on."""
        if self.node_groups is None:
            return self.backend.broadcast(wire, self.root)
        way, answer, arrived, ahead = self.node_groups, wire, False, None
        if way.leaders is not None:
            before = way.leaders.sent_bytes
            ahead = way.leaders.broadcast(wire, way.leader_of[self.root])
            self.backend.count(way.leaders.sent_bytes - before)
            self.backend.count((way.node.size - 1) * kernels_of(wire).nbytes(wire))

        def wait() -> None:
            nonlocal answer, arrived
            if not arrived:
                arrived = True
                answer = way.node.broadcast(wire if ahead is None else ahead.wait(), way.first).wait()

        return Handle(wait, later=lambda: answer)

    def dense(self, usual: Communicator) -> Communicator:
        """The same destination, uncompressed."""
        if self.compressor.traits.exact and not self.memory.stateful:
            return self
        if self._dense is None:
            self._dense = ReduceBroadcast("none", "none", **self.options())
            self._dense.beside = self.describe()
        return self._dense

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: these are in no run yet, and have nothing under way."""
        return {
            **super().__getstate__(),
            "pending_exchanges": defaultdict(deque),
            "exchange_thread": None,
            "node_groups": None,
        }

    def options(self) -> dict[str, Any]:
        """Its parameters, as they were given."""
        return {key: getattr(self, key) for key in self.parameters()}

    def begin(self, contribution: Contribution) -> Exchange:
        kind = self.round_trip
        return DelayedExchange(kind, contribution) if self.delayed else kind(contribution)

    def communicate(self, wire: Tensor) -> Handle:
        """The way to the destination."""
        return moved(wire, lambda raw: self.backend.gather(raw, self.root))


def moved(wire: Any, collective: Callable[[Any], Handle]) -> Handle:
    """A collective that only moves numbers, as bytes if engines may not know them (bfloat16)."""
    k = kernels_of(wire)
    dtype = k.dtype(wire)
    if dtype != "bfloat16":
        return collective(wire)

    def numbers(raw: Any) -> Any:
        return [numbers(one) for one in raw] if isinstance(raw, list) else k.from_bytes(raw, dtype, tuple(wire.shape))

    return collective(k.to_bytes(wire)).map(numbers)
