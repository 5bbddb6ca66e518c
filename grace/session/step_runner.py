"""The runner: plans the buckets of one model, and runs a step's exchanges in one fixed order."""

import contextlib
import copy
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from grace.backends.topology import NodeGroups, node_groups, node_name
from grace.communicators import Allreduce, ReduceBroadcast
from grace.core.backend import Backend
from grace.core.channels import Leases
from grace.core.communicator import Communicator
from grace.core.component import Component
from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.core.memory import Memory
from grace.core.transactional_dict import is_ours
from grace.core.variable import Variable
from grace.errors import PayloadError, StepError
from grace.exchange.background import ExchangeThread, Pending
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.delayed import DelayedRoundTrip
from grace.exchange.header import resolve
from grace.exchange.program import BucketProgram
from grace.exchange.round_trip import RoundTrip, start_round_trip
from grace.exchange.sparse_rows import add, in_units
from grace.exchange.tracing import recorder
from grace.session.agreement import DRIFTED, agree, first_difference
from grace.session.hierarchy import HierarchicalRoundTrip, Hierarchy
from grace.session.sharding import Shard, bucketed, hierarchical, uncompressed
from grace.session.versions import versions

AnyRoundTrip = RoundTrip | DelayedRoundTrip | HierarchicalRoundTrip


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
        for delayed in (False, True):  # one bucket of a step has step stamps, and one beside training
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
        for communicator in self.communicators:
            communicator.uncompressed = uncompressed(communicator) if communicator.compress_after else None
        self.hierarchy: Hierarchy | None = None
        led = [shard.communicator for shard in shards if shard.hierarchical]
        self._led = {id(one) for communicator in led for one in (communicator, communicator.uncompressed)}
        self.run = ""
        """The same on all ranks, and another after each start and each load: what is saved at a step is known by it."""
        self._nodes: list[str] = []
        self._node_groups: dict[tuple[int, int], NodeGroups] = {}
        self._bind(backend)
        self.stateful = any(communicator.stateful for communicator in self.communicators)
        self.traffic = Traffic()
        self.settings: list[tuple[str, str]] = []
        self.compress_after = 0
        """Steps that are exchanged uncompressed first, where a strategy does not say it."""
        self.hyperparameters: Callable[[], Sequence[tuple[str, str]]] = lambda: ()
        """Those that the last step was made with, in words; the context has their digest."""
        recorder.begin(backend, shards)
        self.numel = sum(variable.numel for variable in self.variables)
        self.nbytes = sum(variable.nbytes for variable in self.variables)
        self._begun: list[AnyRoundTrip] = []
        self.resolve: Callable[[Sequence[Any]], None] = resolve
        """Reads the headers of a step's round trips; CUDA graphs, of which nothing is read, put their own here."""
        self._averaged_at = 0
        self._committed_parts: list[Component] | None = None
        self.waits_for_step = False  # until somebody knows whether a step's means are used, and keeps what it changed
        self.owed: dict[str, Any] = {}
        self._thread: ExchangeThread | None = None
        self.computing: Callable[[], Any] = contextlib.nullcontext
        """The context that delayed round trips compute in."""
        self.told = False  # whether somebody was told that a state holds this rank's memories only
        self.planned: Callable[[], str] = lambda: ""
        """A document of how this was planned, for checkpoints; empty where the user chose."""
        self.follows_scaler: Callable[[], bool] = lambda: False
        """Whether somebody calls :meth:`rescale` at each step, with a scaler's loss scale."""

    def _bind(self, backend: Backend) -> None:
        """Who the communicators exchange with."""
        self.context.rank, self.context.size = backend.rank, backend.size
        for communicator in self._carriers():
            if hierarchy := self.hierarchy_of(communicator):
                communicator.use_leaders(hierarchy.node_groups.leader_of)
                communicator.bind(hierarchy.context(self.context), hierarchy.backend)
            else:
                communicator.bind(self.context, backend)

    def _carriers(self) -> list[Communicator]:
        """Return the communicators, and those that carry their variables before they compress."""
        plain = [communicator.uncompressed for communicator in self.communicators]
        return [*self.communicators, *(communicator for communicator in plain if communicator is not None)]

    def hierarchy_of(self, communicator: Any) -> Hierarchy | None:
        """What is around its exchanges, once the ranks have agreed; None if all ranks take part in them."""
        return self.hierarchy if id(communicator) in self._led else None

    @property
    def components(self) -> list[tuple[str, Component]]:
        """The parts that keep state, with what they are: "compressor", "memory", ..."""
        found = [item for communicator in self.communicators for item in communicator.stateful_parts.items()]
        return list({id(part.state): (kind, part) for kind, part in reversed(found)}.values())[::-1]

    def state(self) -> dict[str, dict[str, Any]]:
        """Copies of what the components remember, as of the last step that was kept: by kind and shard's name."""
        merged: dict[str, dict[str, Any]] = {}
        for kind, component in self.components:
            merged.setdefault(kind, {}).update(component.state.committed)
        return copy.deepcopy(merged)

    def views(self, bucket: Bucket, tensors: Callable[[str], Any]) -> list[Any]:
        """The shards of a bucket, cut out of the whole variables' tensors."""
        return [shard.of(tensors(shard.whole.name)) for shard in (self.shards[v.name] for v in bucket.variables)]

    def agree(self) -> None:
        """Compare with the other ranks what this one is about to do.

        Raises:
            RankError: they differ; the message names the first difference.
        """
        mine = self._leases.free_channels(), secrets.token_hex(4)
        told = agree(self.backend, [*self.settings, *self.facts()], beside=mine)
        self._leases.free, self.run = [offer for offer, _ in told], told[0][1]
        self.channel = self.averaging.backend = self._leases.acquire()
        if self.hierarchical:
            self.hierarchy = Hierarchy(self.backend, self.node_names())
        if self.hierarchical or self.channel is not self.backend:
            self._bind(self.channel)
        for bucket in self.buckets:
            bucket.compared = False
        for communicator in self._carriers():
            self._equip(communicator)

    def _equip(self, communicator: Communicator) -> None:
        """Give a communicator what it needs beside its backend; every rank comes here at the same moment.

        Raises:
            ConfigError: the engine cannot replicate.
        """
        if communicator.delayed:
            self.exchange_thread()
        # with a hierarchy one rank of each node takes part, so that nothing is left to replicate
        alone = self.backend.size == 1 or self.hierarchy_of(communicator) is not None
        if isinstance(communicator, ReduceBroadcast) and communicator.local_replication and not alone:
            backend = self.exchange_thread().backend if communicator.delayed else self.backend
            if backend.pairs_by_name and backend.framework == "tensorflow":
                raise communicator.refuse("local_replication is not for Horovod with TensorFlow: use MPI")
            communicator.node_groups = self.node_groups(backend, communicator.root)

    def node_names(self) -> list[str]:
        """Return the name of the node of each rank; every rank must ask at the same moment."""
        if not self._nodes:
            self._nodes = self.backend.allgather_object(node_name())
        return self._nodes

    def node_groups(self, backend: Backend, leader: int) -> NodeGroups:
        """Return backends over this rank's node and over the nodes' leaders; every rank must ask at the same moment."""
        key = (id(backend), leader)
        if key not in self._node_groups:
            self._node_groups[key] = node_groups(backend, self.node_names(), leader)
        return self._node_groups[key]

    def exchange_thread(self) -> ExchangeThread:
        """Return the thread that runs delayed round trips; every rank asks for it first at the same moment."""
        if self._thread is None:
            backend = self._leases.acquire(another=True)
            self._thread = ExchangeThread(backend, lambda: self.computing(), self.check_step_stamps)
            self.backend.at_shutdown(self._thread.arrive)
        return self._thread

    def facts(self) -> list[tuple[str, str]]:
        """What all ranks must agree on."""
        facts = [*versions(self.backend), ("the seed", str(self.context.seed)), ("the choice", self.name)]
        facts += [(f"variable {v.name!r}", v.describe()) for v in self.variables]
        if any(communicator.compressor.bounded for communicator in self.communicators):  # sizes follow from it
            facts.append(
                ("the place of gradients", "a device" if any(v.on_device for v in self.variables) else "the CPU")
            )
        order = [(f"in bucket {bucket.index}:", repr(v.name)) for bucket in self.buckets for v in bucket.variables]
        return [*facts, *order]

    # -- a step ----------------------------------------------------------------------------------------

    def prepare(self, bucket: Bucket, like: Tensor) -> None:
        """Make a bucket's program before its first step, for gradients like this tensor.

        Round trips that are delayed or of a hierarchy make their own."""
        if not bucket.communicator.delayed and self.hierarchy is None:
            bucket.program = BucketProgram(bucket, like)

    def start(self, bucket: Bucket, gradients: Sequence[Tensor], present: Sequence[bool]) -> AnyRoundTrip:
        """Begin the round trip of one bucket. Buckets must be started in order, each once a step."""
        if self.context.step < bucket.communicator.compress_after:
            bucket = bucket.at_step(self.context.step)
        contribution = Contribution(bucket, gradients, present, self.stateful, self.traffic)
        trip: AnyRoundTrip
        if self.hierarchy is not None and id(bucket.communicator) in self._led:
            trip = HierarchicalRoundTrip(contribution, self.hierarchy)
        elif bucket.communicator.delayed:
            trip = DelayedRoundTrip(contribution, self.exchange_thread())
        else:
            trip = start_round_trip(contribution)
        trip.deferred = True  # finish() resolves the headers of all round trips at once
        self._begun.append(trip)
        return trip

    def finish(self, outs: Callable[[Bucket], Sequence[Tensor | None]]) -> list[Outcome]:
        """Finish all round trips begun, in order, and end the step: commit state, or roll it back.

        Raises:
            PayloadError: what a rank sent cannot be decoded. State is as if the step had not been; this raises again
                until the step is discarded.
            StepError: the ranks are at different steps. The step is forgotten.
        """
        self._advance_all()
        outcomes: list[Outcome] = []
        try:
            for trip in self._begun:
                outcomes += trip.finish(outs(trip.bucket))
            self.resolve(self._begun)
        except PayloadError:
            self._roll_back()
            raise
        self.settle(outcomes)
        return outcomes

    def _advance_all(self) -> None:
        """Start what is left of the legs of all round trips: the second of each, then the third of each, ..."""
        while any([trip.advance() for trip in self._begun]):  # a list: each advances, whatever another one says
            pass

    def check_step_stamps(self, trips: Sequence[AnyRoundTrip], backend: Backend) -> None:
        """Raise what the headers of round trips, which are done, say of where the ranks are; every rank comes here with
        the same round trips.

        Raises:
            StepError: the ranks are at different steps, or their optimizers have different hyperparameters.
        """
        resolve(trips)
        for trip in trips:
            if trip.header.hyperparameters_differ:
                raise StepError(first_difference(backend.allgather_object(list(self.hyperparameters())), *DRIFTED))
            if trip.header.out_of_step:
                raise StepError(trip.header.out_of_step)

    def due(self) -> list[Bucket]:
        """Return the buckets that are averaged after this step; none if this was asked before in this step."""
        if self.context.step == self._averaged_at:
            return []
        self._averaged_at = self.context.step
        return [b for b in self.averages if self.context.step % self.shards[b.variables[0].name].period == 0]

    def mean(self, bucket: Bucket, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over ranks of tensors, one for each shard of a bucket, in their own dtype; blocks."""
        bucket.communicator.context.step = self.context.step
        trip = RoundTrip(Contribution(bucket, values, [True] * len(values), False, self.traffic))
        outcomes = trip.finish([None] * len(values))
        self.check_step_stamps([trip], self.channel)
        return [outcome.value for outcome in outcomes]

    def with_owed(self, outcomes: Sequence[Outcome]) -> None:
        """Add the means that a checkpoint's run still had to apply, where this run does not delay."""
        for outcome in outcomes:
            if outcome.variable.name in self.owed:
                owed = self.owed.pop(outcome.variable.name)
                outcome.value = owed if outcome.value is None else add(outcome.value, owed)

    def pending(self) -> list[dict[str, Any]]:
        """Return the means that are still to be applied, by shard, of the oldest step first; wait for them."""
        steps: list[dict[str, Any]] = []
        for bucket in self._delayed():
            # buckets may have unequal numbers under way: the newest of each is of the newest step
            steps = [*({} for _ in range(len(bucket.pending) - len(steps))), *steps]
            for step, pending in zip(steps[len(steps) - len(bucket.pending) :], bucket.pending, strict=True):
                step.update(pending.values(self.context.loss_scale))
        return [self.owed, *steps] if self.owed else steps

    def restore_pending(self, steps: Sequence[dict[str, Any]]) -> None:
        """Apply these means in the next steps; they are what :meth:`pending` returned."""
        delayed: set[str] = set()
        for bucket in self._delayed():
            delayed |= set(bucket.names)
            bucket.pending.clear()
            for step in steps:
                outcomes = [Outcome(v, step.get(v.name), False) for v in bucket.variables]
                bucket.pending.append(Pending.loaded(outcomes, self.context.loss_scale))
        self.owed = {}
        for step in steps:
            for name, value in step.items():
                if name not in delayed:
                    self.owed[name] = add(self.owed[name], value) if name in self.owed else value

    def _delayed(self) -> list[Bucket]:
        """Return the buckets whose means are applied in later steps."""
        return [bucket for bucket in self.buckets if bucket.communicator.delayed]

    @property
    def begun(self) -> bool:
        """True if round trips were begun that are not finished."""
        return bool(self._begun)

    def under_way(self, bucket: Bucket) -> bool:
        """Return True if the bucket's round trip was begun and is not finished."""
        return any(trip.bucket is bucket for trip in self._begun)

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """End the step whose round trips, all finished, brought these outcomes.

        Raises:
            StepError: the ranks are at different steps. The step is forgotten.
        """
        self._end_round_trips()
        if self.owed:
            self.with_owed(outcomes)
        self.end_step(outcomes)

    def _end_round_trips(self) -> None:
        """Compare step stamps, and start the collectives of delayed means: in one order, whatever ranks began first.

        Raises:
            StepError: the ranks are at different steps. The step is forgotten.
        """
        try:
            self.check_step_stamps(self._begun, self.channel)
        except StepError:
            self.abandon()
            raise
        delayed = [trip for trip in self._begun if isinstance(trip, DelayedRoundTrip)]
        for trip in sorted(delayed, key=lambda trip: trip.bucket.index):
            trip.enqueue()
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
        if recorder.run is not None:
            recorder.run.exchanged()

    def discard(self) -> None:
        """Complete the round trips begun and forget them, state included. Raises StepError as :meth:`settle` does."""
        self._advance_all()
        for trip in self._begun:
            trip.wait()
            trip.look_at_stamps()  # other ranks may raise what these say, and so must all
        self._end_round_trips()
        self.end_step([], discarded=True)

    def abandon(self) -> None:
        """Forget the round trips begun, which the engine has given up, and what they changed."""
        for trip in self._begun:
            if isinstance(trip, DelayedRoundTrip):
                trip.cancel()
        self._begun = []
        self.context.out_of_step = ""
        self._roll_back()

    def _roll_back(self) -> None:
        for component in self._stepping():
            component.state.rollback()

    def claim_components(self) -> None:
        """Have the components for this runner alone.

        Raises:
            ConfigError: one of them serves another one.
        """
        for communicator in self.communicators:
            communicator.set_owner(self)

    def close(self) -> None:
        """The optimizer has ended: its components may serve another one."""
        for communicator in self.communicators:
            communicator.release(self)
            communicator.compress_after = 0
        if self._thread is None or self._thread.drain(0):  # else that holds this runner until it is done
            self._leases.release()

    def _stepping(self) -> list[Component]:
        """Return the parts whose state is committed or rolled back at the end of a step."""
        if self._committed_parts is not None:
            return self._committed_parts
        parts = [part for c in self.communicators if not c.delayed for part in c.stateful_parts.values()]
        if all(is_ours(type(part)) for part in parts):  # a user's part may get others from step to step
            self._committed_parts = parts
        return parts

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
            communicator.on_resume(loaded)
