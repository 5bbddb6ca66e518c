"""The step runner: assigns the variables of one model to buckets, and runs a step's exchanges in one fixed order."""

import contextlib
import copy
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from grace.backends.topology import NodeGroups, node_groups, node_name
from grace.communicators import Allreduce, ReduceBroadcast
from grace.core.backend import Backend, Leases
from grace.core.communicator import Communicator
from grace.core.component import Component, ComponentOwner, is_ours
from grace.core.compressor import Tensor
from grace.core.context import STAMPED, Context, SubgroupContext
from grace.core.memory import Memory
from grace.core.state import Values
from grace.core.variable import Variable
from grace.core.weak_calls import WeakCall
from grace.errors import PayloadError, StepError
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.delayed import DelayedRoundTrip, ExchangeThread, Facts, RoundTripFuture
from grace.exchange.header import resolve_headers
from grace.exchange.round_trip import AnyRoundTrip, BucketProgram, RoundTrip, advance_all
from grace.exchange.sparse_rows import Gradient, add, in_units, values_of
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of
from grace.session.agreement import DRIFTED, ESTIMATED, compare_facts, first_difference
from grace.session.bucketing import make_buckets
from grace.session.hierarchy import HierarchicalRoundTrip, Hierarchy
from grace.session.outer_rounds import OuterRounds, TensorStore
from grace.session.sharding import Shard, hierarchical_shards, uncompressed
from grace.session.versions import versions


@dataclass
class SessionCallbacks:
    """Functions and texts of a session that its runner uses. The runner of a new plan takes them over.

    Attributes:
        hyperparameters: returns the hyperparameters of the last step, as facts; the context has their digest.
        drifted: the text around the first of these facts that differs between ranks.
        planned: returns the document of the planner's choice, for checkpoints; empty if the user chose.
        follows_scaler: returns True if :meth:`StepRunner.rescale` is called at each step, with the loss scale of a
            gradient scaler.
        computing: returns the context that delayed round trips compute in.
    """

    # The types return an empty tuple, an empty text, and False: a session without the thing.
    hyperparameters: Callable[[], Sequence[tuple[str, str]]] = tuple
    drifted: tuple[str, str] = DRIFTED
    planned: Callable[[], str] = str
    follows_scaler: Callable[[], bool] = bool
    computing: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


class StepRunner:
    """Runner of the exchanges of one model, step by step.

    All ranks start bucket 0, 1, 2, ... in that order, whatever becomes ready first. Only over Horovod, which pairs
    collectives by name, a bucket may start as soon as it is ready.

    Args:
        variables: the variables in declaration order; names are unique.
        shards: the shards of these variables, in the same order.
        backend: the engine.
        context: the context that all components share.
        name: the choice for all variables: a communicator's description, or a strategy's id.
        owner: the owner of the communicators; a new one if left out.

    Raises:
        ConfigError: another run uses a communicator or an outer optimizer.

    Attributes:
        shards: shards by name.
        shards_of: shards by the name of the whole variable.
        buckets: buckets of shards whose gradients are exchanged.
        outer_rounds: the rounds of shards that ranks train alone.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        shards: Sequence[Shard],
        backend: Backend,
        context: Context,
        name: str = "",
        owner: ComponentOwner | None = None,
    ):
        # 1. Shards, and the buckets that the ranks exchange in every step.
        self.name = name
        self.variables = list(variables)
        self.numel = sum(variable.numel for variable in self.variables)
        self.nbytes = sum(variable.nbytes for variable in self.variables)
        self.shards = {shard.variable.name: shard for shard in shards}
        self.shards_of: dict[str, list[Shard]] = {variable.name: [] for variable in self.variables}
        for shard in shards:
            self.shards_of[shard.whole.name].append(shard)
        self.within_node = Allreduce("none")
        """Communicator of the gradients that only the ranks of a node average."""
        self.buckets = self._make_buckets(shards)
        self.delayed = bool(self._delayed())
        """True if means of gradients are applied in later steps."""
        # 2. The ranks, and the communicators that are bound to them now, and again when the ranks have agreed.
        self.backend = backend
        self.channel = backend
        """Backend that buckets are exchanged over: a process group of its own, once the ranks have agreed. Comparisons
        of all ranks go over ``backend``."""
        self._leases = Leases(backend)
        self.context = context
        self.averaging = Allreduce("none")
        self.outer_rounds = OuterRounds(self, [shard for shard in shards if shard.outer is not None])
        if self.outer_rounds:  # the backend must not keep the optimizer alive
            backend.at_shutdown(WeakCall(self.outer_rounds.warn_if_unequal))
        self.communicators = list({id(shard.communicator): shard.communicator for shard in shards}.values())
        self.owner = ComponentOwner() if owner is None else owner
        self.owner.claim([*self.communicators, *self.outer_rounds.optimizers])  # another run's must not be bound anew
        for communicator in self.communicators:
            communicator.uncompressed = uncompressed(communicator) if communicator.compress_after else None
        self.hierarchical = hierarchical_shards(shards)
        """True if nodes reduce all shards first; or the names of the shards that they do."""
        self.hierarchy: Hierarchy | None = None
        by_leaders = [shard.communicator for shard in shards if shard.hierarchical]
        self._hierarchical_ids = {id(one) for by in by_leaders for one in (by, by.uncompressed)}
        self._nodes: list[str] = []
        self._node_groups: dict[tuple[int, int], NodeGroups] = {}
        self._thread: ExchangeThread | None = None
        self._bind(backend)
        # 3. The step in progress.
        self.traffic = Traffic()
        self.in_flight: list[AnyRoundTrip] = []
        self._unused_trips: list[DelayedRoundTrip] = []
        """Delayed round trips of the last step, while its means may still be dropped."""
        self.waits_for_step = False
        """True while staged state waits for :meth:`commit_waiting`: the means are in ``p.grad``, and no ``step()`` has
        used them yet. Set by a caller before it finishes a step."""
        recorder.begin(backend, shards)
        # 4. State between steps.
        self.run_id = ""
        """Identifier of the run for saved states: equal on all ranks, and new after each start and each load."""
        self.stateful_communicators = any(communicator.stateful for communicator in self.communicators)
        """True if a communicator keeps state between steps."""
        self.stateful = self.stateful_communicators
        """True if the next step changes state that an overflow rolls back."""
        self._step_components: list[Component] | None = None
        self._carried_over_store = TensorStore(shared=False)
        """Store of :attr:`carried_over`, which steps commit or roll back as the state of other parts."""
        self.carried_over = self._carried_over_store.state
        """Delayed means that a checkpoint or the former plan had not applied yet, by shard. The next successful step
        adds them to its own means."""
        self.has_carried_over = False
        """True if there may be such means. Cheaper to read than the state, in every step."""
        self.warned_own_state = False
        """True if a warning said that a state holds this rank's memories only."""
        # 5. What a session sets after it has made this runner.
        self.settings: list[tuple[str, str]] = []
        self.compress_after = 0
        """Number of first steps that are exchanged uncompressed, unless a strategy sets it."""
        self.all_hierarchical = False
        """True if nodes reduce all variables first, whatever the strategy says."""
        self.shard_label = ""
        """Label of the parts that this rank has if parameters are sharded, for checkpoints."""
        self.callbacks = SessionCallbacks()
        self.resolve_headers: Callable[[Sequence[AnyRoundTrip]], None] = resolve_headers
        """Reads the headers of a step's round trips. CUDA graphs, which cannot read, replace it."""

    def _make_buckets(self, shards: Sequence[Shard]) -> list[Bucket]:
        """Return the buckets of gradients: of all ranks, then of the ranks of a node."""
        in_step = [shard for shard in shards if shard.outer is None]
        of_node = [
            replace(shard, communicator=self.within_node, outer=None)
            for shard in shards
            if shard.outer is not None and shard.outer.over == "nodes"
        ]
        buckets = make_buckets([*in_step, *of_node])
        # Ranks compare step stamps once a step, in the first bucket; delayed ones run on a thread of their own, in an
        # order of their own, and so have stamps of their own; so have those of a node.
        kinds = [(bucket.communicator.delayed, bucket.communicator is self.within_node) for bucket in buckets]
        for i, bucket in enumerate(buckets):
            bucket.carries_stamps = kinds.index(kinds[i]) == i
        return buckets

    def _bind(self, backend: Backend) -> None:
        """Bind all communicators to a backend; those of hierarchical reduction to the one over the leaders of nodes."""
        self.averaging.bind(Context(rank=backend.rank, size=backend.size), backend)
        for context in (self.context, self.outer_rounds.context):
            context.rank = backend.rank
            context.size = backend.size
        for communicator in self._all_communicators():
            hierarchy = self.hierarchy_of(communicator)
            context = self.outer_rounds.context if self.outer_rounds.exchanges_drifts_by(communicator) else self.context
            if hierarchy is not None:
                communicator.use_leaders(hierarchy.node_groups.leader_of)
                communicator.bind(hierarchy.context(context), hierarchy.backend)
            else:
                communicator.bind(context, backend)

    def _all_communicators(self) -> list[Communicator]:
        """Return the communicators, and those that exchange their variables uncompressed in the first steps."""
        plain = [communicator.uncompressed for communicator in self.communicators]
        return [*self.communicators, *(communicator for communicator in plain if communicator is not None)]

    def hierarchy_of(self, communicator: Communicator) -> Hierarchy | None:
        """Return the hierarchy of a communicator's exchanges, once the ranks have agreed; None if all ranks take
        part."""
        return self.hierarchy if id(communicator) in self._hierarchical_ids else None

    @property
    def components(self) -> list[tuple[str, Component]]:
        """Parts that may keep state, each once, with their kinds: "compressor", "memory", ..."""
        found = [item for communicator in self.communicators for item in communicator.stateful_parts.items()]
        found += self.outer_rounds.components()
        # Reversed twice: a part that several communicators share keeps its first name.
        return list({id(part.state): (kind, part) for kind, part in reversed(found)}.values())[::-1]

    def state(self) -> dict[str, Values]:
        """Return copies of the components' committed state, by kind and shard's name."""
        merged: dict[str, Values] = {}
        with self.outer_rounds.saving():
            for kind, component in self.components:
                merged.setdefault(kind, {}).update(component.state.committed)
            return copy.deepcopy(merged)  # here, because the context drops what it added to the state

    def stateful_parts(self, shard: Shard) -> dict[str, Component]:
        """Return the parts that may keep state of a shard, by the names that it is saved under."""
        return {**shard.communicator.stateful_parts, **self.outer_rounds.parts_of(shard)}

    def agree(self) -> None:
        """Compare settings, variables and buckets with the other ranks, then acquire what the exchanges need.

        Raises:
            RankError: they differ; the message names the first difference.
        """
        mine = self._leases.free_channels(), secrets.token_hex(4), node_name()
        received = compare_facts(self.backend, [*self.settings, *self.facts()], extra=mine)
        self._leases.free_of_ranks = [free for free, _, _ in received]
        self._nodes = self._nodes or [node for _, _, node in received]
        self.run_id = received[0][1]  # rank 0's, on all ranks
        self.channel = self._leases.acquire()
        if self.hierarchical:
            self.hierarchy = Hierarchy(self.channel, self.node_names())
            node = self.hierarchy.node_groups.node
            self.within_node.bind(SubgroupContext(self.context, node.rank, node.size), node)
        if self.hierarchical or self.channel is not self.backend:
            self._bind(self.channel)
        for bucket in [*self.buckets, *self.outer_rounds.buckets]:
            # Among other ranks payloads may have other sizes: the first exchange compares them.
            bucket.sizes_compared = False
        for communicator in self._all_communicators():
            self._prepare_communicator(communicator)
        if self.outer_rounds.delayed:
            self.exchange_thread()

    def rejoin(self) -> None:
        """Continue over the ranks that the backend has now."""
        self._bind(self.backend)
        for bucket in [*self.buckets, *self.outer_rounds.buckets]:
            bucket.program = None  # the sizes of wires follow from the number of ranks

    def _prepare_communicator(self, communicator: Communicator) -> None:
        """Start the exchange thread and open the node groups that a communicator needs. Every rank calls it at the
        same point of its program, because new backends are collectives.

        Raises:
            ConfigError: the engine cannot replicate.
        """
        if communicator.delayed:
            self.exchange_thread()
        # With a hierarchy one rank of each node takes part, so there is nothing to replicate.
        alone = self.backend.size == 1 or self.hierarchy_of(communicator) is not None
        if isinstance(communicator, ReduceBroadcast) and communicator.local_replication and not alone:
            backend = self.exchange_thread().backend if communicator.delayed else self.channel
            if backend.pairs_by_name and backend.framework == "tensorflow":
                raise communicator.error("local_replication is not for Horovod with TensorFlow: use MPI")
            communicator.node_groups = self.node_groups(backend, communicator.root)

    def node_names(self) -> list[str]:
        """Return the name of each rank's node. The first call is a collective."""
        if not self._nodes:
            self._nodes = self.backend.allgather_object(node_name())
        return self._nodes

    def node_groups(self, backend: Backend, leader: int) -> NodeGroups:
        """Return backends over this rank's node and over the nodes' leaders. The first call for a leader is a
        collective."""
        key = (id(backend), leader)
        if key not in self._node_groups:
            self._node_groups[key] = node_groups(backend, self.node_names(), leader)
        return self._node_groups[key]

    def exchange_thread(self) -> ExchangeThread:
        """Return the thread that runs delayed round trips. The first call is a collective."""
        if self._thread is None:
            backend = self._leases.acquire(another=True)
            # Read at each call, since a session sets it after it has made this runner.
            self._thread = ExchangeThread(
                backend, lambda: self.callbacks.computing(), self.check_step_stamps, self.backend
            )
        return self._thread

    def facts(self) -> list[tuple[str, str]]:
        """Return the facts that must be equal on all ranks."""
        facts = [*versions(self.backend), ("the seed", str(self.context.seed)), ("the choice", self.name)]
        facts += [(f"variable {v.name!r}", v.describe()) for v in self.variables]
        # Bounded methods pad payloads on devices only, so sizes would differ.
        if any(communicator.compressor.bounded for communicator in self.communicators):
            facts.append(
                ("the place of gradients", "a device" if any(v.on_device for v in self.variables) else "the CPU")
            )
        buckets = [*self.buckets, *self.outer_rounds.buckets]
        order = [(f"in bucket {bucket.index}:", repr(v.name)) for bucket in buckets for v in bucket.variables]
        return [*facts, *order]

    # -- a step ----------------------------------------------------------------------------------------

    def prepare(self, bucket: Bucket, like: Tensor) -> None:
        """Build a bucket's program before its first step, for gradients like this tensor.

        Delayed and hierarchical round trips build their programs themselves."""
        if not bucket.communicator.delayed and self.hierarchy is None:
            bucket.program = BucketProgram(bucket, like)

    def start_round_trip(self, bucket: Bucket, gradients: Sequence[Tensor], present: Sequence[bool]) -> AnyRoundTrip:
        """Start the round trip of one bucket. Each is started once a step, and in order unless the engine pairs
        collectives by name."""
        trip = self.make_round_trip(Contribution(bucket, gradients, present, self.stateful, self.traffic))
        trip.start()
        trip.defers_headers = True  # finish_step() resolves the headers of all round trips at once
        self.in_flight.append(trip)
        return trip

    def make_round_trip(self, contribution: Contribution) -> AnyRoundTrip:
        """Return a round trip, which is not started, of the kind that the bucket's communicator needs."""
        bucket = contribution.bucket
        if self.context.step < bucket.communicator.compress_after:  # exchange it uncompressed in the first steps
            bucket = bucket.at_step(self.context.step)
            contribution = contribution._replace(bucket=bucket)
        if self.hierarchy is not None and id(bucket.communicator) in self._hierarchical_ids:
            return HierarchicalRoundTrip(contribution, self.hierarchy)
        if bucket.communicator.delayed:
            # When ranks compare this step's stamps, the optimizer may have stepped on.
            facts = list(self.callbacks.hyperparameters()) if bucket.carries_stamps else ()
            return DelayedRoundTrip(contribution, self.exchange_thread(), facts)
        trip: RoundTrip = (bucket.communicator.begin or RoundTrip)(contribution)  # ``begin`` makes a user's own
        return trip

    def finish_step(self, outs: Callable[[Bucket], Sequence[Tensor | None]]) -> list[Outcome]:
        """Finish all round trips under way, in order, and end the step: commit state, or roll it back.

        Raises:
            PayloadError: a payload cannot be decoded. State is rolled back; the error is raised again until the step is
                discarded.
            StepError: the ranks are at different steps. The step is dropped.
        """
        # All legs of all buckets start before any payload is decoded: a rank that cannot decode has started as many.
        advance_all(self.in_flight)
        outcomes: list[Outcome] = []
        try:
            for trip in self.in_flight:
                outcomes += trip.finish(outs(trip.bucket))
            self.resolve_headers(self.in_flight)
        except PayloadError:
            # The round trips stay under way: the error is raised again until the caller discards the step.
            self._roll_back()
            raise
        self.end_step(outcomes)
        return outcomes

    def check_step_stamps(
        self, trips: Sequence[AnyRoundTrip], backend: Backend, hyperparameters: Facts | None = None
    ) -> None:
        """Raise StepError (desync) if the headers of completed round trips, which were read, say that ranks are out of
        step. Every rank calls it with the same round trips.

        Args:
            trips: the round trips.
            backend: their backend.
            hyperparameters: the hyperparameters of their step; those of the last step if left out.

        Raises:
            StepError: the ranks are at different steps, or their optimizers have different hyperparameters.
        """
        for trip in trips:
            if trip.header.hyperparameters_differ:
                mine = self.callbacks.hyperparameters() if hyperparameters is None else hyperparameters
                # All ranks have read the same headers, so all of them run this collective.
                facts = backend.allgather_object(list(mine))
                begin, advice = self.callbacks.drifted
                if self.outer_rounds:
                    advice = f"{advice}. {ESTIMATED}"
                raise StepError(first_difference(facts, begin, advice, number_of=backend.number_of))
            if trip.header.out_of_step:
                raise StepError(trip.header.out_of_step)

    def round_trips(self, contributions: Sequence[Contribution]) -> list[Outcome]:
        """Run round trips between two steps, and return their outcomes; blocks. The caller commits state.

        Raises:
            PayloadError: a payload cannot be decoded.
            StepError: the ranks are at different steps.
        """
        trips = [self.make_round_trip(contribution) for contribution in contributions]
        for trip in trips:
            trip.start()
        advance_all(trips)
        outcomes = [outcome for trip in trips for outcome in trip.finish([None] * len(trip.names))]
        self.check_step_stamps(trips, self.channel)
        return outcomes

    def mean(self, bucket: Bucket, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the mean over ranks of tensors, one for each shard of a bucket, in their own dtype; blocks."""
        # The averaging communicator has a context of its own, whose step goes into its stamps.
        bucket.communicator.context.step = self.context.step
        outcomes = self.round_trips([Contribution(bucket, values, [True] * len(values), False, self.traffic)])
        return [outcome.value for outcome in outcomes]

    def add_carried_over(self, outcomes: Sequence[Outcome]) -> None:
        """Add to outcomes the means that an earlier run or plan still had to apply. A rollback of the step brings them
        back."""
        for outcome in outcomes:
            mean = self.carried_over.pop(outcome.variable.name, None)
            if mean is not None:
                outcome.value = mean if outcome.value is None else add(outcome.value, mean)

    def pending_means(self) -> list[dict[str, Gradient]]:
        """Wait for the means that are still to be applied, and return them by shard, oldest step first."""
        steps: list[dict[str, Gradient]] = []
        for bucket in self._delayed():
            # Buckets may have unequal numbers of pending means: align them at the newest step.
            steps = [*({} for _ in range(len(bucket.pending) - len(steps))), *steps]
            for step, future in zip(steps[len(steps) - len(bucket.pending) :], bucket.pending, strict=True):
                step.update(future.means_in_units(self.context.loss_scale))
        return [dict(self.carried_over), *steps] if self.carried_over else steps

    def restore_pending_means(self, steps: Sequence[dict[str, Gradient]]) -> None:
        """Apply means, which :meth:`pending_means` returned, in the next steps."""
        delayed: set[str] = set()
        for bucket in self._delayed():
            delayed |= set(bucket.names)
            bucket.pending.clear()
            for step in steps:
                means = [step.get(name) for name in bucket.names]
                outcomes = [
                    Outcome(v, mean, _overflowed(mean)) for v, mean in zip(bucket.variables, means, strict=True)
                ]
                bucket.pending.append(RoundTripFuture.loaded(outcomes, self.context.loss_scale))
        # Variables that this run does not delay get the sum of their means in the next step.
        self.carried_over.clear()
        self.carried_over.commit()
        for step in steps:
            if self.callbacks.follows_scaler() and any(map(_overflowed, step.values())):
                continue  # it would skip all of this step
            self.carry_over({name: value for name, value in step.items() if name not in delayed})

    def carry_over(self, means: Mapping[str, Gradient]) -> None:
        """Add means, by shard, to the outcomes of the next step that succeeds."""
        for name, value in means.items():
            before = self.carried_over.get(name)
            self.carried_over[name] = value if before is None else add(before, value)
        self.carried_over.commit()
        self._update_has_carried_over()

    def _update_has_carried_over(self) -> None:
        self.has_carried_over = self.carried_over.in_use
        self.stateful = self.stateful_communicators or self.has_carried_over

    def _delayed(self) -> list[Bucket]:
        """Return the buckets whose means are applied in later steps."""
        return [bucket for bucket in self.buckets if bucket.communicator.delayed]

    @property
    def in_progress(self) -> bool:
        """True if round trips are under way, or their means may still be dropped."""
        return bool(self.in_flight) or self.waits_for_step

    def under_way(self, bucket: Bucket) -> bool:
        """Return True if the bucket's round trip is under way."""
        return any(trip.bucket is bucket for trip in self.in_flight)

    def end_step(self, outcomes: Sequence[Outcome], discarded: bool = False) -> None:
        """End the step with the outcomes of its round trips, all of which are finished: compare step stamps, start
        delayed round trips, and commit state or roll it back.

        Raises:
            StepError: the ranks are at different steps. The step is forgotten.
        """
        try:
            self.check_step_stamps(self.in_flight, self.channel)
        except StepError:
            self.abort()
            raise
        # Ranks may have begun buckets in different orders: the thread must get them in one.
        delayed = [trip for trip in self.in_flight if isinstance(trip, DelayedRoundTrip)]
        for trip in sorted(delayed, key=lambda trip: trip.bucket.index):
            trip.enqueue()
        self.in_flight = []
        self._unused_trips = delayed if self.waits_for_step else []
        # A loss scaler skips a step that overflowed. Without one, its means would be added twice.
        if self.has_carried_over and not any([outcome.overflow for outcome in outcomes]):
            self.add_carried_over(outcomes)
        self.commit_or_roll_back(outcomes, discarded)

    # -- commit or roll back ---------------------------------------------------------------------------

    def commit_or_roll_back(self, outcomes: Sequence[Outcome], discarded: bool = False) -> None:
        """Commit the state that this step changed, such as residuals, or roll it back (after Inf or NaN). All ranks do
        the same. A GradScaler skips the optimizer's step then, because it finds NaN in the means.

        1. Codecs write state when they encode, or when they decode, and :class:`~grace.core.state.State` stages it:
           the step reads it, and what was committed stays as it was. A fused codec stages the buffer that its kernels
           wrote (``DoubleBuffer.store``); what was committed is in the other buffer.
        2. When all round trips are finished and their headers are read, all ranks know the same of each variable:
           whether one overflowed, and whether any had a gradient. Only then this method is called, by
           :meth:`end_step`, or by hooks of DDP and FSDP when they close a step.
        3. If a variable overflowed, or the step is discarded, all state is rolled back, as if the step had not been.
        4. Otherwise the state of variables that no rank had a gradient of is rolled back, and all other is committed,
        5. unless the caller waits for the optimizer's step, which may never use the means that ``synchronize()``
           wrote. Then state stays staged until :meth:`commit_waiting`.

        An error rolls back instead (:meth:`abort`). State that lives longer than a step has owners of its own: that
        of delayed round trips is committed when they encode, because nothing can stop their payloads
        (:mod:`grace.exchange.delayed`); that of outer rounds when a round ends (:mod:`grace.session.outer_rounds`); and
        FSDP's reduce-scatter closes its own steps (``grace.torch.fsdp_reduce_scatter``).
        """
        keep = not discarded and not any([outcome.overflow for outcome in outcomes])
        # There is nothing to wait with after a rollback, or if nothing was exchanged.
        self.waits_for_step = self.waits_for_step and keep and bool(outcomes)
        missing = [outcome.variable.name for outcome in outcomes if outcome.value is None] if keep else []
        if not discarded:
            self.context.step += 1
        for component in self.step_components():
            if not keep:
                component.state.rollback()
                continue
            for name in missing:
                component.state.rollback(name)
            if not self.waits_for_step:
                component.state.commit()
        if self.has_carried_over:
            self._update_has_carried_over()
        self.traffic.step(self.numel, self.nbytes, self.backend.size)
        if recorder.run is not None:
            recorder.run.exchanged()

    def commit_waiting(self, discarded: Iterable[str]) -> None:
        """Commit the state that waits for the optimizer's step; roll it back for variables whose means were discarded.

        Args:
            discarded: names of whole variables.
        """
        shards = [shard.variable.name for name in discarded for shard in self.shards_of[name]]
        for component in self.step_components():
            for name in shards:
                component.state.rollback(name)
            component.state.commit()
        self.waits_for_step = False
        self._roll_back_delayed(shards)

    def _roll_back_delayed(self, discarded: Collection[str]) -> None:
        """Apply the earlier means that the last step returned in a later one, and drop the last step's own means, of
        shards whose gradients were discarded; keep those of all others."""
        trips = self._unused_trips
        self._unused_trips = []
        if not discarded:
            return
        earlier = [mean for trip in trips for mean in trip.applied.values()]
        # The step of these means overflowed, and a loss scaler skipped it only now: the last step is to be applied.
        if any(map(_overflowed, earlier)):
            return
        for trip in trips:
            self.carry_over(trip.roll_back(discarded))

    def _roll_back(self) -> None:
        self.waits_for_step = False
        for component in self.step_components():
            component.state.rollback()

    def step_components(self) -> list[Component]:
        """Return the parts whose state is committed or rolled back at the end of a step."""
        if self._step_components is not None:
            return self._step_components
        own = [c for c in self.communicators if not (c.delayed or self.outer_rounds.exchanges_drifts_by(c))]
        parts = [self._carried_over_store, *(part for c in own for part in c.stateful_parts.values())]
        # a user's part may create others in any step: do not cache those
        if all(is_ours(type(part)) for part in parts):
            self._step_components = parts
        return parts

    # -- steps that are given up -----------------------------------------------------------------------

    def discard(self) -> None:
        """Complete the round trips under way, and drop their outcomes and state.

        Raises:
            StepError: the ranks are at different steps.
        """
        advance_all(self.in_flight)
        for trip in self.in_flight:
            trip.discard()
        resolve_headers(self.in_flight)
        self.end_step([], discarded=True)

    def abort(self) -> None:
        """Drop the round trips under way, which the engine has given up, and roll back their state."""
        for trip in self.in_flight:
            if isinstance(trip, DelayedRoundTrip):
                trip.cancel()
        self.in_flight = []
        # Set by a node whose ranks differ: the next step may succeed.
        self.context.out_of_step = ""
        self._roll_back()

    # -- the end, and a new beginning -------------------------------------------------------------------

    def close(self) -> None:
        """Release the components and channels, so that another runner may use them."""
        self.outer_rounds.warn_if_unequal()
        self.owner.release()
        # a busy thread keeps this runner, and its channels, until it ends
        if self._thread is None or self._thread.drain(0):
            self._leases.release()

    def broadcast_state(self, root: int) -> None:
        """Broadcast the root's step counters, loss scale, and state of the parts whose state is equal on all ranks."""
        shared = [part for _, part in self.components if part.shared_state]
        # Stamps must agree after the broadcast, or the first step would be refused.
        context, counted = self.context, (*STAMPED, "loss_scale")
        mine = self.run_id, [getattr(context, name) for name in counted], [dict(part.state) for part in shared]
        answers = self.backend.allgather_object(mine if self.backend.rank == root else None)
        self.run_id, counts, states = answers[root]
        for name, count in zip(counted, counts, strict=True):
            setattr(context, name, count)
        for part, state in zip(shared, states, strict=True):
            part.state.clear()
            part.state.update(state)
            part.state.commit()

    def rescale(self, loss_scale: float) -> None:
        """Convert memories, and means that are still to be applied, to a new loss scale."""
        if loss_scale != self.context.loss_scale:
            factor = loss_scale / self.context.loss_scale
            alone = {id(part) for c in self.outer_rounds.communicators for part in c.stateful_parts.values()}
            for kind, component in self.components:
                if id(component) in alone:  # drifts are in the units of parameters
                    continue
                # A destination rescales the memory of its answers when it compresses the next ones.
                if isinstance(component, Memory) and not kind.startswith("answer_memory"):
                    component.rescale(factor)
            self.carried_over.map(lambda mean: in_units(mean, factor))
            self.context.loss_scale = loss_scale

    def on_resume(self) -> None:
        """Prepare for the next step after state was loaded, in the units of the context's loss scale. Without a
        gradient scaler it is rescaled to a loss scale of 1."""
        loaded = self.context.loss_scale
        if not self.callbacks.follows_scaler():
            self.rescale(1.0)
        for communicator in self.communicators:
            communicator.on_resume(1.0 if self.outer_rounds.exchanges_drifts_by(communicator) else loaded)
        self.outer_rounds.restore()


def _overflowed(mean: Gradient | None) -> bool:
    """Return True if a mean has values that are not finite."""
    return mean is not None and not bool(kernels_of(values_of(mean)).all_finite(values_of(mean)))
