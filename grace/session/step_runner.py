"""The runner: plans the buckets of one model, and runs a step's exchanges in one fixed order."""

import contextlib
import copy
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from grace.backends.topology import NodeGroups, node_groups, node_name
from grace.communicators import Allreduce
from grace.core.backend import Backend
from grace.core.channels import Leases
from grace.core.component import Component
from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.variable import Variable
from grace.errors import PayloadError, StepError
from grace.exchange.background import ExchangeThread, PendingExchange
from grace.exchange.base import Exchange
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.sparse_rows import add, in_units
from grace.exchange.statuses import learn
from grace.exchange.tracing import recorder
from grace.session.agreement import DRIFTED, agree, first_difference
from grace.session.hierarchy import Hierarchy
from grace.session.keepers import Keepers
from grace.session.sharding import Shard, bucketed, hierarchical
from grace.session.versions import versions


class StepRunner:
    """Assigns shards of variables to buckets, and exchanges them step by step.

    All ranks start bucket 0, 1, 2, ... in that order whatever becomes ready first.

    Args:
        variables: in declaration order; names are unique.
        shards: of these variables, in the same order.
        backend: the engine.
        context: shared by all components.
        name: what was chosen for all variables: a communicator's description, or a strategy's id.
    """

    def __init__(
        self, variables: Sequence[Variable], shards: Sequence[Shard], backend: Backend, context: Context, name: str = ""
    ):
        self.variables, self.backend, self.context, self.name = list(variables), backend, context, name
        self.hierarchical = hierarchical(shards)
        self.shards = {shard.variable.name: shard for shard in shards}
        self.shards_of: dict[str, list[Shard]] = {variable.name: [] for variable in self.variables}
        for shard in shards:
            self.shards_of[shard.whole.name].append(shard)
        self.buckets = bucketed([shard for shard in shards if not shard.period])
        for delayed in (False, True):  # one bucket of a step tells the ranks' places, and one beside training
            for bucket in [bucket for bucket in self.buckets if bucket.communicator.delayed is delayed][1:]:
                bucket.carries = False
        self.averaging = Allreduce("none")
        self.averaging.bind(Context(rank=backend.rank, size=backend.size), backend)
        alone = bucketed([shard for shard in shards if shard.period])
        self.averages = [dataclasses.replace(bucket, communicator=self.averaging) for bucket in alone]
        self.channel = backend
        """What exchanges travel over, since the ranks have agreed; ``backend`` is for questions to all ranks."""
        self._leases = Leases(backend)
        self.communicators = list({id(shard.communicator): shard.communicator for shard in shards}.values())
        self.hierarchy: Hierarchy | None = None
        self._led = {id(shard.communicator) for shard in shards if shard.hierarchical}
        self.run = ""
        """The same on all ranks, and another after each start and each load: what is saved at a step is known by it."""
        self._nodes: list[str] = []
        self._node_groups: dict[tuple[int, int], NodeGroups] = {}
        self._bind(backend)
        self.stateful = any(communicator.stateful for communicator in self.communicators)
        self.traffic = Traffic()
        self.settings: list[tuple[str, str]] = []
        self.hyperparameters: Callable[[], Sequence[tuple[str, str]]] = lambda: ()
        """Those that the last step was made with, in words; the context has their digest."""
        recorder.begin(backend, shards)
        self.numel = sum(variable.numel for variable in self.variables)
        self.nbytes = sum(variable.nbytes for variable in self.variables)
        self._begun: list[Exchange] = []
        self.learn: Callable[[Sequence[Exchange]], None] = learn  # but in a graph, of which nothing is read
        self._averaged_at, self._keepers = 0, Keepers()
        self.waits_for_step = False  # until somebody knows whether a step's means are used, and keeps what it changed
        self.owed: dict[str, Any] = {}
        self._thread: ExchangeThread | None = None
        self.computing: Callable[[], Any] = contextlib.nullcontext
        """The context that exchanges beside training compute in."""
        self.told = False  # whether somebody was told that a state holds this rank's memories only
        self.planned: Callable[[], str] = lambda: ""
        """A document of how this was planned, for checkpoints; empty where the user chose."""
        self.follows_scaler: Callable[[], bool] = lambda: False
        """Whether somebody calls :meth:`rescale` at each step, with a scaler's loss scale."""

    def _bind(self, backend: Backend) -> None:
        """Who the communicators exchange with."""
        self.context.rank, self.context.size = backend.rank, backend.size
        for communicator in self.communicators:
            if hierarchy := self.hierarchy_of(communicator):
                communicator.use_leaders(hierarchy.node_groups.leader_of)
                communicator.bind(hierarchy.context(self.context), hierarchy.backend)
            else:
                communicator.bind(self.context, backend)

    def hierarchy_of(self, communicator: Any) -> Hierarchy | None:
        """What is around its exchanges, once the ranks have agreed; None if all ranks take part in them."""
        return self.hierarchy if id(communicator) in self._led else None

    @property
    def components(self) -> list[tuple[str, Component]]:
        """The parts that keep state, with what they are: "compressor", "memory", ..."""
        found = [item for communicator in self.communicators for item in communicator.keepers.items()]
        return list({id(part.state): (kind, part) for kind, part in reversed(found)}.values())[::-1]

    def state(self) -> dict[str, dict[str, Any]]:
        """Copies of what the components remember, as of the last step that was kept: by kind and shard's name."""
        merged: dict[str, dict[str, Any]] = {}
        for kind, component in self.components:
            merged.setdefault(kind, {}).update(component.state.kept)
        return copy.deepcopy(merged)

    def views(self, bucket: Bucket, tensors: Callable[[str], Any]) -> list[Any]:
        """The shards of a bucket, cut out of the whole variables' tensors."""
        return [shard.of(tensors(shard.whole.name)) for shard in (self.shards[v.name] for v in bucket.variables)]

    def agree(self) -> None:
        """Compare with the other ranks what this one is about to do.

        Raises:
            RankError: they differ; the message names the first difference.
        """
        mine = self._leases.offer(), secrets.token_hex(4)
        told = agree(self.backend, [*self.settings, *self.facts()], beside=mine)
        self._leases.offers, self.run = [offer for offer, _ in told], told[0][1]
        self.channel = self.averaging.backend = self._leases.take()
        if self.hierarchical:
            self.hierarchy = Hierarchy(self.backend, self.node_names())
        if self.hierarchical or self.channel is not self.backend:
            self._bind(self.channel)
        for bucket in self.buckets:
            bucket.compared = False
        for communicator in self.communicators:
            communicator.open(self)

    def node_names(self) -> list[str]:
        """Of the node of each rank; every rank must ask at the same moment."""
        if not self._nodes:
            self._nodes = self.backend.allgather_object(node_name())
        return self._nodes

    def node_groups(self, backend: Backend, leader: int) -> NodeGroups:
        """The nodes' ranks and their leaders over a backend; every rank must ask at the same moment."""
        key = (id(backend), leader)
        if key not in self._node_groups:
            self._node_groups[key] = node_groups(backend, self.node_names(), leader)
        return self._node_groups[key]

    def exchange_thread(self) -> ExchangeThread:
        """The thread that runs exchanges beside training; every rank asks for it first at the same moment."""
        if self._thread is None:
            backend = self._leases.take(another=True)
            self._thread = ExchangeThread(backend, lambda: self.computing(), self.check_places)
            self.backend.at_shutdown(self._thread.arrive)
        return self._thread

    def facts(self) -> list[tuple[str, str]]:
        """What all ranks must agree on."""
        facts = [*versions(self.backend), ("the seed", str(self.context.seed)), ("the choice", self.name)]
        facts += [(f"variable {v.name!r}", v.describe()) for v in self.variables]
        if any(communicator.compressor.bounded for communicator in self.communicators):  # sizes follow from it
            facts.append(("the place of gradients", "a device" if any(v.far for v in self.variables) else "the CPU"))
        order = [(f"in bucket {bucket.index}:", repr(v.name)) for bucket in self.buckets for v in bucket.variables]
        return [*facts, *order]

    # -- a step ----------------------------------------------------------------------------------------

    def start(self, bucket: Bucket, gradients: Sequence[Tensor], present: Sequence[bool]) -> Exchange:
        """Begin the exchange of one bucket. Buckets must be started in order, each once a step."""
        hierarchy = self.hierarchy_of(bucket.communicator)
        contribution = Contribution(bucket, gradients, present, self.stateful, self.traffic)
        exchange = (hierarchy or bucket.communicator).begin(contribution)
        exchange.lazy = hierarchy is None
        self._begun.append(exchange)
        return exchange

    def finish(self, outs: Callable[[Bucket], Sequence[Tensor | None]]) -> list[Outcome]:
        """Await all exchanges begun, in order, and end the step: commit state, or roll it back.

        Raises:
            PayloadError: what a rank sent cannot be decoded. State is as if the step had not been; this raises again
                until the step is discarded.
            StepError: the ranks are at different steps. The step is forgotten.
        """
        while any([exchange.advance() for exchange in self._begun]):
            pass
        outcomes = []
        try:
            for exchange in self._begun:
                given, hierarchy = outs(exchange.bucket), self.hierarchy_of(exchange.bucket.communicator)
                outcomes += hierarchy.finish(exchange, given) if hierarchy else exchange.finish(given)
            self.learn(self._begun)
        except PayloadError:
            self._roll_back()
            raise
        self.settle(outcomes)
        return outcomes

    def check_places(self, exchanges: Sequence[Exchange], backend: Backend) -> None:
        """Compare what the exchanges, which are done, learnt of where the ranks are; every rank comes here with the
        same ones.

        Raises:
            StepError: the ranks are at different steps, or their optimizers have different hyperparameters.
        """
        learn(exchanges)
        for exchange in exchanges:
            if exchange.unlike:
                raise StepError(first_difference(backend.allgather_object(list(self.hyperparameters())), *DRIFTED))
            if exchange.astray:
                raise StepError(exchange.astray)

    def due(self) -> list[Bucket]:
        """Those that are averaged after this step; none if it was asked before in this step."""
        if self.context.step == self._averaged_at:
            return []
        self._averaged_at = self.context.step
        return [b for b in self.averages if self.context.step % self.shards[b.variables[0].name].period == 0]

    def mean(self, bucket: Bucket, values: Sequence[Tensor]) -> list[Tensor]:
        """The mean over ranks of what a bucket's shards hold, in their own dtype; blocks."""
        bucket.communicator.context.step = self.context.step
        exchange = bucket.communicator.begin(Contribution(bucket, values, [True] * len(values), False, self.traffic))
        outcomes = exchange.finish([None] * len(values))
        self.check_places([exchange], self.channel)
        return [outcome.value for outcome in outcomes]

    def with_owed(self, outcomes: Sequence[Outcome]) -> None:
        """Add what a checkpoint's run still had to apply, and this one does not delay."""
        for outcome in outcomes if self.owed else ():
            if outcome.variable.name in self.owed:
                owed = self.owed.pop(outcome.variable.name)
                outcome.value = owed if outcome.value is None else add(outcome.value, owed)

    def pending(self) -> list[dict[str, Any]]:
        """Means that are still to be applied, by shard, of the oldest step first; waits until they are there."""
        steps: list[dict[str, Any]] = []
        for _, exchanges in self._delayed():
            steps = [*({} for _ in range(len(exchanges) - len(steps))), *steps]
            for step, pending in zip(steps[len(steps) - len(exchanges) :], exchanges, strict=True):
                step.update(pending.values(self.context.loss_scale))
        return [self.owed, *steps] if self.owed else steps

    def restore_pending(self, steps: Sequence[dict[str, Any]]) -> None:
        """Go on from what :meth:`pending` gave."""
        delayed: set[str] = set()
        for bucket, exchanges in self._delayed():
            delayed |= {variable.name for variable in bucket.variables}
            exchanges.clear()
            for step in steps:
                outcomes = [Outcome(v, step.get(v.name), False) for v in bucket.variables]
                exchanges.append(PendingExchange.over(outcomes, self.context.loss_scale))
        self.owed = {}
        for step in steps:
            for name, value in step.items():
                if name not in delayed:
                    self.owed[name] = add(self.owed[name], value) if name in self.owed else value

    def _delayed(self) -> list[tuple[Bucket, Any]]:
        """Buckets whose exchanges are delayed, and those that are under way."""
        delayed: list[Any] = [bucket for bucket in self.buckets if bucket.communicator.delayed]
        return [(b, b.communicator.pending_exchanges[b.variables[0].name]) for b in delayed]

    @property
    def begun(self) -> bool:
        """Whether exchanges were begun that are not finished."""
        return bool(self._begun)

    def under_way(self, bucket: Bucket) -> bool:
        """Whether the bucket's exchange was begun and not finished."""
        return any(exchange.bucket is bucket for exchange in self._begun)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """All exchanges begun are finished, and brought this: end the step.

        Raises:
            StepError: the ranks are at different steps. The step is forgotten.
        """
        self._check_begun()
        self.with_owed(outcomes)
        self._hand_over()
        self.end_step(outcomes)

    def _check_begun(self) -> None:
        try:
            self.check_places(self._begun, self.channel)
        except StepError:
            self.abandon()
            raise

    def _hand_over(self) -> None:
        """What is applied in later steps goes on its way, in one order, whatever ranks began first."""
        for exchange in sorted(self._begun, key=lambda exchange: exchange.bucket.index):
            exchange.hand_over()
        self._begun = []

    def end_step(self, outcomes: Sequence[Outcome], discarded: bool = False) -> None:
        """Commit the state that this step changed; roll it back if any variable overflowed on any rank.

        A variable that no rank had a gradient for keeps its state as well. A step that was discarded does not count."""
        keep = not discarded and not any([outcome.overflow for outcome in outcomes])
        missing = [outcome.variable.name for outcome in outcomes if outcome.value is None] if keep else []
        self.context.step += not discarded
        for component in self._stepping():
            for name in missing:
                component.state.rollback(name)
            if not (keep and self.waits_for_step):
                component.state.commit() if keep else component.state.rollback()
        self.waits_for_step = self.waits_for_step and keep  # what was rolled back is nobody's to commit
        self.traffic.step(self.numel, self.nbytes, self.backend.size)
        recorder.exchanged()

    def discard(self) -> None:
        """Complete the exchanges begun and forget them, state included. Raises StepError as :meth:`settle` does."""
        while any([exchange.advance() for exchange in self._begun]):
            pass
        for exchange in self._begun:
            if hierarchy := self.hierarchy_of(exchange.bucket.communicator):
                with contextlib.suppress(PayloadError):  # others of the node may not discard it, and share it
                    hierarchy.finish(exchange, [None] * len(exchange.bucket.variables))
            else:
                exchange.wait()
                exchange.glance()  # other ranks may raise what they learn, and so must all
        self._check_begun()
        self._hand_over()
        self.end_step([], discarded=True)

    def abandon(self) -> None:
        """Forget the exchanges begun, which the engine has given up, and what they changed."""
        for exchange in self._begun:
            exchange.forget()
        self._begun = []
        self.context.astray = ""
        self._roll_back()

    def _roll_back(self) -> None:
        for component in self._stepping():
            component.state.rollback()

    def claim(self) -> None:
        """Have the components for this runner alone.

        Raises:
            ConfigError: one of them serves another one.
        """
        for communicator in self.communicators:
            communicator.claim(self)

    def close(self) -> None:
        """The optimizer has ended: its components may serve another one."""
        for communicator in self.communicators:
            communicator.release(self)
        if self._thread is None or self._thread.drain(0):  # else that holds this runner until it is done
            self._leases.end()

    def _stepping(self) -> list[Component]:
        """The parts whose state is kept or not at the end of a step."""
        return [part for c in self.communicators if not c.delayed for part in self._keepers.of(c)]

    def share(self, root: int) -> None:
        """Give every rank the root's step counters, loss scale, and state of the parts whose state all ranks share."""
        shared = [part for _, part in self.components if part.shared_state]
        context, counted = self.context, ("step", "updates", "left_out", "settings", "loss_scale")
        mine = self.run, [getattr(context, name) for name in counted], [dict(part.state) for part in shared]
        answers = self.backend.allgather_object(mine if self.backend.rank == root else None)
        self.run, counts, states = answers[root]
        for name, count in zip(counted, counts, strict=True):
            setattr(context, name, count)
        for part, state in zip(shared, states, strict=True):
            part.state.clear()
            part.state.update(state)
            part.state.commit()

    def rescale(self, loss_scale: float) -> None:
        """The loss scale is now this: memories follow, and means that are still to be applied."""
        if loss_scale != self.context.loss_scale:
            factor = loss_scale / self.context.loss_scale
            for kind, component in self.components:
                if isinstance(component, Memory) and not kind.startswith("answer_memory"):  # it follows as it answers
                    component.rescale(factor)
            self.owed = {name: in_units(value, factor) for name, value in self.owed.items()}
            self.context.loss_scale = loss_scale

    def resumed(self) -> None:
        """Memories and means were loaded, in the units of the context's loss scale. Where no scaler is led they
        come into units of 1, at once."""
        loaded = self.context.loss_scale
        if not self.follows_scaler():
            self.rescale(1.0)
        for communicator in self.communicators:
            communicator.resumed(loaded)
