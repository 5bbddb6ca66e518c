"""Outer rounds (local SGD, DiLoCo): ranks train alone, and exchange now and then how far they have drifted from an
anchor that all share.

With the anchor a, rank i's parameters x_i and the outer optimizer's step, a round of a fragment is

    send     y_i = beta e_i + (a - x_i),  c_i = C(y_i),  e_i = y_i - D(c_i);   d = mean over ranks of D(c_i)
    apply    a = step(a, d),  x_i = a + merge (x_i - a)

C, its memory e and the route are the variable's own communicator's, which other variables' gradients take in every
step. Anchors and momenta have the same bits on all ranks. If the drift of a rank is not finite, the round is dropped on
all ranks: anchors, momenta and memories stay, and that rank starts anew from the anchor.
"""

import contextlib
import dataclasses
import itertools
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.core.communicator import Communicator
from grace.core.component import Component
from grace.core.compressor import Tensor
from grace.core.context import Context
from grace.core.outer import Outer, OuterOptimizer
from grace.core.registry import make
from grace.core.state import Value
from grace.core.user_parts import check_shape
from grace.errors import ConfigError, ExchangeError, PayloadError, StepError, warn
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.delayed import RoundTripFuture
from grace.exchange.header import ADVICE
from grace.exchange.round_trip import RoundTrip
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of
from grace.session.agreement import gather_or_raise
from grace.session.bucketing import make_buckets
from grace.session.sharding import Shard
from grace.session.state_schema import checksum


class TensorStore(Component):
    """Store of tensors by shard, or by buffer of the model, beside the state of compressors and memories."""

    kind = "outer"
    stateful = True

    def __init__(self, shared: bool):
        self.shared_state = shared  # type: ignore[misc]

    def keeps(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape


class LocalModel:
    """Model that a rank trains alone, as outer rounds read and change it. Sessions of frameworks derive theirs."""

    def read(self, shard: Shard) -> Tensor:
        """Return this rank's parameters of a shard."""
        raise NotImplementedError

    def write(self, shard: Shard, value: Tensor) -> None:
        """Overwrite this rank's parameters of a shard."""
        raise NotImplementedError

    def clear_optimizer(self, shard: Shard) -> None:
        """Clear the inner optimizer's state of a shard whose parameters were not finite."""

    def read_buffers(self) -> Mapping[str, Tensor]:
        """Return the model's buffers by name."""
        return {}

    def write_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Overwrite the model's buffers that are named."""

    def average_buffers(self) -> None:
        """Average the model's buffers over ranks. Called after a round of the last fragment."""

    def any_overflow(self, own: bool) -> bool:
        """Return True if a drift is not finite on this rank, as ``own`` says, or on one that has other parts of the
        same parameters."""
        return own


@dataclass(eq=False)
class Fragment:
    """Shards whose drifts travel together.

    Attributes:
        outer: the settings.
        number: p, from 0.
        optimizer: the outer optimizer, which all fragments of equal settings share.
        shards, buckets: the shards, and the buckets in which their drifts travel.
        applied_at: the iteration after which parameters were the anchors; -1 if it is unknown.
        sent_at: the iteration at which the round under way was sent.
        under_way: the round trips that travel while training goes on.
        coming: means that are still to be applied, by shard; None if no round is under way or has arrived.
        sent_bytes: bytes that this rank sent in the last round.
    """

    outer: Outer
    number: int
    optimizer: OuterOptimizer
    shards: list[Shard]
    buckets: list[Bucket]
    applied_at: int = 0
    sent_at: int = 0
    under_way: list[RoundTripFuture] = field(default_factory=list)
    coming: dict[str, Tensor] | None = None
    sent_bytes: int = 0

    def arrives(self, t: int) -> bool:
        """Return True if a round is applied after iteration t, or would be if it had not been dropped: its end averages
        buffers, also of a resumed run, whose checkpoint does not tell a dropped round."""
        delay = self.outer.delay
        by_schedule = 0 < delay < t and self.until_sent(t - delay) == 0
        return by_schedule or (self.travels and self.sent_at + delay == t)

    def until_sent(self, t: int) -> int:
        """Return the number of iterations from t to the next one after which the fragment is sent; 0 if that is t."""
        outer = self.outer
        due: int = ((self.number + 1) * (outer.period // outer.fragments) - outer.delay - t) % outer.period
        return due

    @property
    def travels(self) -> bool:
        """True if a round is under way, or its means are still to be applied."""
        return bool(self.under_way) or self.coming is not None


class OuterRounds:
    """Rounds of the shards that ranks train alone; empty (and False) if there are none.

    Args:
        runner: the runner of the other shards, whose channel, thread and counters are used.
        shards: the shards.

    Attributes:
        context: the context of the communicators. Drifts are in the units of parameters, whatever the loss scale.
        anchors: the anchors, by shard.
        shared_buffers: the model's buffers after the last round.
        at: the number of iterations after which rounds were run.
        model: the model that this rank trains, set by its session.
    """

    def __init__(self, runner: Any, shards: Sequence[Shard]):
        self.runner = weakref.proxy(runner)  # which has these rounds: no circle, so that both end with the optimizer
        self.context = Context(seed=runner.context.seed, predivide=runner.context.predivide)
        self.context.api_names = runner.context.api_names
        self.fragments: list[Fragment] = []
        for outer in dict.fromkeys(shard.outer for shard in shards):
            assert outer is not None
            self.fragments += deal(outer, [shard for shard in shards if shard.outer == outer])
        for i, fragment in enumerate(self.fragments):
            for bucket in fragment.buckets:
                bucket.carries_stamps = bucket is fragment.buckets[0]
                bucket.label = f"grace.outer.{i}.{bucket.index}"
        self.fragment_of = {shard.variable.name: f for f in self.fragments for shard in f.shards}
        self.shards = [shard for fragment in self.fragments for shard in fragment.shards]
        self.communicators = list({id(shard.communicator): shard.communicator for shard in shards}.values())
        self._carried = {id(communicator) for communicator in self.communicators}
        self.optimizers = list({id(f.optimizer): f.optimizer for f in self.fragments}.values())
        self.delayed = any(fragment.outer.delay for fragment in self.fragments)
        """True if rounds travel while training goes on."""
        self.anchors = TensorStore(shared=True)
        self._local = TensorStore(shared=False)
        self._coming = TensorStore(shared=True)
        self.shared_buffers = TensorStore(shared=True)
        self._local_buffers = TensorStore(shared=False)
        self.at = 0
        self.has_anchors = False
        """True if there are anchors."""
        self.shares_anchors = True
        """True until all ranks have compared their anchors, in the first round after they were taken."""
        backend = runner.backend
        self.warns_if_unequal = backend.size > 1 and backend.number_of(backend.rank) == 0
        """True if :meth:`warn_if_unequal` is to print a line: on rank 0, until it has, or until the program has asked
        for the parameters that all ranks share, by :meth:`at_anchor` or :meth:`flush`."""
        self._own: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
        """The parameters and buffers of this rank while it has the anchors for parameters."""
        self.model = LocalModel()

    def __bool__(self) -> bool:
        return bool(self.fragments)

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets of all fragments."""
        return [bucket for fragment in self.fragments for bucket in fragment.buckets]

    def exchanges_drifts_by(self, communicator: Communicator) -> bool:
        """Return True if a communicator carries drifts; that of gradients if not."""
        plain = id(communicator) in self._carried
        return plain or any(communicator is other.uncompressed for other in self.communicators)

    # -- state -----------------------------------------------------------------------------------------

    def components(self) -> list[tuple[str, Component]]:
        """Return the parts that keep state of some shard, with the names that it is saved under."""
        of_shards = [item for fragment in self.fragments for item in self.parts_of(fragment.shards[0]).items()]
        return [*of_shards, *self.buffer_parts.items()] if self.fragments else []

    @property
    def buffer_parts(self) -> dict[str, Component]:
        """Parts that keep buffers of the model, by the names that they are saved under."""
        return {"shared_buffer": self.shared_buffers, "local_buffer": self._local_buffers}

    def parts_of(self, shard: Shard) -> dict[str, Component]:
        """Return the parts that keep state of a shard, by the names that it is saved under."""
        fragment = self.fragment_of.get(shard.variable.name)
        if fragment is None:
            return {}
        parts = fragment.optimizer.named_components().items()
        optimizer = {f"outer.{name}" if name else "outer": part for name, part in parts}
        return {"anchor": self.anchors, "local": self._local, "coming": self._coming, **optimizer}

    def needs_anchors(self) -> bool:
        """Return True if there are no anchors yet. Called before each update.

        Raises:
            ExchangeError: parameters are the anchors now.
        """
        if self.anchored:
            raise ExchangeError("a step under `with optimizer.anchor():` would be undone: step outside of it")
        return not self.has_anchors

    def take_anchors(self, anew: bool = False) -> None:
        """Take the parameters for anchors, before the first step changes them, where none were loaded.

        Args:
            anew: True to replace the anchors that there are by parameters that all ranks have equal.
        """
        for shard in self.shards:
            if anew or shard.variable.name not in self.anchors.state:
                self._keep(shard, _copy(self.model.read(shard), _wide(shard)))
        self.anchors.state.commit()
        self.has_anchors = True

    def _keep(self, shard: Shard, anchor: Tensor) -> None:
        fragment = self.fragment_of[shard.variable.name]
        k = kernels_of(anchor)
        kept = k.to_host([anchor])[0] if fragment.optimizer.offload else k.to_device_of(anchor, self.model.read(shard))
        self.anchors.state[shard.variable.name] = kept

    def _anchor(self, shard: Shard, like: Tensor) -> Tensor:
        """Return a shard's anchor on the device of a tensor."""
        return kernels_of(like).to_device_of(self.anchors.state[shard.variable.name], like)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context in which the state has all that a resumed run needs: parameters of ranks that have left the
        anchors, and means that are still to be applied."""
        try:
            for fragment in self.fragments:
                self._collect(fragment)
                self._coming.state.update(fragment.coming or {})
                own = [(shard, self._own_values(shard)) for shard in fragment.shards if self.has_anchors]
                # A program may have set parameters since the last round, as clipping of weights does after a step.
                if self._moved(fragment) or not all(itertools.starmap(self._is_anchor, own)):
                    self._local.state.update({shard.variable.name: value for shard, value in own})
            shared = self.shared_buffers.state
            for name, own in (self.model.read_buffers() if self._own is None else self._own[1]).items():
                if self.has_anchors and not (name in shared and _equal(own, shared[name])):
                    self._local_buffers.state[name] = own
            for part in (self._local, self._coming, self._local_buffers):
                part.state.commit()
            yield
        finally:
            self._clear_saved()

    def _clear_saved(self) -> None:
        for part in (self._local, self._coming, self._local_buffers):
            part.state.clear()
            part.state.commit()

    def restore(self) -> None:
        """Continue from the state that was loaded: parameters become those of this rank, or else the anchors."""
        self.at = self.runner.context.step
        self._own = None
        self.has_anchors = bool(self.shards) and all(shard.variable.name in self.anchors.state for shard in self.shards)
        # Of one save anchors are equal, unless they were taken anew on each rank, and no round has compared them.
        self.shares_anchors = not self.has_anchors or self.at < self._first_round
        for fragment in self.fragments:
            names = [shard.variable.name for shard in fragment.shards]
            fragment.applied_at = -1 if any(name in self._local.state for name in names) else self.at
            # The period says when the round that the saved run had under way was sent. If that run had another period
            # or delay, its means are applied after the next iteration: the next round would replace them.
            sent_at = self.at - (self.at - fragment.until_sent(0)) % fragment.outer.period
            fragment.sent_at = max(sent_at, self.at + 1 - fragment.outer.delay)
            fragment.under_way = []
            fragment.coming = {n: self._coming.state[n] for n in names if n in self._coming.state} or None
            for shard in fragment.shards if self.has_anchors else ():
                self._restore_shard(shard, fragment.optimizer)
        self.model.write_buffers({**self.shared_buffers.state, **self._local_buffers.state})
        self._clear_saved()

    def _restore_shard(self, shard: Shard, optimizer: OuterOptimizer) -> None:
        name = shard.variable.name
        self._keep(shard, self.anchors.state[name])
        for part in optimizer.named_components().values():
            if name in part.state:
                part.state[name] = _beside(self.anchors.state[name], part.state[name])
            part.state.commit()
        self.anchors.state.commit()
        own = self._local.state.get(name)
        self.model.write(shard, self._anchor(shard, self.model.read(shard)) if own is None else own)

    @contextlib.contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Return a context in which parameters are the anchors, and buffers those of the last round, which all ranks
        share."""
        self.warns_if_unequal = False
        # Copies: an evaluation changes buffers.
        buffers = {name: _copy(buffer) for name, buffer in self.model.read_buffers().items()}
        # Contexts may be nested; before the first step nothing has moved.
        outermost = self.has_anchors and self._own is None
        if outermost:
            self._own = {shard.variable.name: _copy(self.model.read(shard)) for shard in self.shards}, buffers
        own, held = self._own, self.has_anchors
        try:
            if outermost:
                for shard in self.shards:
                    self.model.write(shard, self._anchor(shard, self.model.read(shard)))
                self.model.write_buffers(self.shared_buffers.state)
            yield
        finally:
            # A last round, or a state that was loaded meanwhile, has ended the context.
            if self._own is own and self.has_anchors == held:
                if outermost:
                    self.restore_own_parameters()
                else:
                    self.model.write_buffers(buffers)

    def restore_own_parameters(self) -> None:
        """Return to this rank's own parameters and buffers, if it has the anchors for parameters."""
        if self._own is None:
            return
        (own, buffers), self._own = self._own, None
        for shard in self.shards:
            self.model.write(shard, own[shard.variable.name])
        self.model.write_buffers(buffers)

    def changed_at_anchor(self) -> list[str]:
        """Return the names of shards that are not the anchors any more, in the context of :meth:`at_anchor`, whose end
        will undo the change."""
        return [shard.variable.name for shard in self.shards if self.anchored and not self._at_anchor(shard)]

    @property
    def anchored(self) -> bool:
        """True in the context of :meth:`at_anchor`."""
        return self._own is not None

    # -- rounds ----------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """True if a fragment is to be sent or applied after the last iteration."""
        span = range(self.at + 1, self.runner.context.step + 1)
        return any(fragment.until_sent(t) == 0 or fragment.arrives(t) for fragment in self.fragments for t in span)

    def run_due(self) -> None:
        """Send and apply the fragments that are due. Called after each iteration; a second call does nothing.

        Raises:
            PayloadError: a payload cannot be decoded. The round is dropped.
            StepError: ranks have made other numbers of iterations.
        """
        if not self.has_anchors:  # this rank has skipped all updates
            self.take_anchors()
        while self.at < self.runner.context.step:
            self.at += 1
            if self.shares_anchors and any(fragment.until_sent(self.at) == 0 for fragment in self.fragments):
                self._share_anchors()
            for fragment in self.fragments:
                # Applied before it is sent again: its delay is shorter than its period.
                if fragment.arrives(self.at):
                    self._apply_outer_step(fragment, fragment.outer.merge)
                if fragment.until_sent(self.at) == 0:
                    self._send(fragment, later=fragment.outer.delay > 0)
                    if fragment.outer.delay == 0:
                        self._apply_outer_step(fragment, fragment.outer.merge)

    @property
    def _first_round(self) -> int:
        """Iteration after which the first fragment is sent for the first time; 0 without any."""
        return min((fragment.until_sent(1) + 1 for fragment in self.fragments), default=0)

    def _share_anchors(self) -> None:
        """Give all ranks rank 0's anchors, if those of ranks differ: a forward pass before the first update may change
        parameters by this rank's data, as ``Embedding(max_norm=...)`` and initialization by the first batch do.

        Raises:
            StepError: ranks have made other numbers of iterations.
        """
        self.shares_anchors = self.at < self._first_round
        backend, anchors, step = self.runner.backend, self.anchors.state, self.runner.context.step
        found = gather_or_raise(backend, "a first outer round", (step, checksum(dict(anchors))))
        steps = [of_rank for of_rank, _ in found]
        if len(set(steps)) > 1:
            ranks = [backend.number_of(steps.index(end(steps))) for end in (min, max)]
            raise StepError(
                f"rank {ranks[0]} is at step {min(steps)}, rank {ranks[1]} is at step {max(steps)}: rank {ranks[0]} "
                f"left out {self.context.api_names.step}. {ADVICE}"
            )
        if step == 0 or len(set(found)) == 1:
            return
        values = backend.allgather_object(dict(anchors) if backend.rank == 0 else None)[0]
        for shard in self.shards:
            self._keep(shard, values[shard.variable.name])
        anchors.commit()

    def flush(self) -> None:
        """Run a last round of all fragments, so that all ranks have the anchors for parameters. Every rank must call
        it, after as many iterations.

        Raises:
            StepError: ranks have made other numbers of iterations.
        """
        self.warns_if_unequal = False
        if not self:
            return
        moved = self.runner.context.step > 0
        if moved:
            self.restore_own_parameters()
            self.take_anchors()
        if self.shares_anchors:  # also of a rank that has made no iteration: the others would wait for it
            self._share_anchors()
        if not moved:
            return
        for fragment in self.fragments:
            if fragment.travels:
                self._apply_outer_step(fragment, fragment.outer.merge)
            # A program may have set parameters since the last round, as an average of weights does at the end.
            if not all(map(self._at_anchor, fragment.shards)):
                fragment.applied_at = -1
        # A rank with more iterations may wait in the round that is due next: the order lets both find that out.
        for fragment in sorted(self.fragments, key=lambda fragment: fragment.until_sent(self.at)):
            # After a dropped round a rank that was not finite has the anchors, so that a second one succeeds.
            if not (self._send(fragment, later=False) or self._send(fragment, later=False)):
                fragment.coming = None
                raise PayloadError(
                    f"the last round was dropped: drifts of {fragment.buckets[0].describe()} are finite and their "
                    "payloads are not. Ranks keep parameters of their own: choose a compressor of a wider range"
                )
            self._apply_outer_step(fragment, 0.0)

    def warn_if_unequal(self) -> None:
        """Print a line if ranks end with parameters of their own, and the program has never asked for those that all
        share. Called at the end of the optimizer, or of the run unless an error ends it."""
        if not self.warns_if_unequal or hasattr(sys, "last_value"):
            return
        self.warns_if_unequal = False
        if self.has_anchors and any(map(self._moved, self.fragments)):
            print(
                f"grace: training ended at iteration {self.runner.context.step}, between two outer rounds, so each "
                "rank has parameters of its own. Call optimizer.flush() on all ranks at the end, or evaluate and save "
                "in `with optimizer.anchor():`; in Keras's fit grace.tensorflow.AnchorCallback does both",
                file=sys.stderr,
                flush=True,
            )

    def _at_anchor(self, shard: Shard) -> bool:
        """Return True if a shard has the values of its anchor."""
        return self._is_anchor(shard, self.model.read(shard))

    def _is_anchor(self, shard: Shard, x: Tensor) -> bool:
        """Return True if x has the values that a shard's anchor has in the parameters' dtype, which may be narrower."""
        k = kernels_of(x)
        return _equal(x, k.cast(self._anchor(shard, x), k.dtype(x)))

    def _own_values(self, shard: Shard) -> Tensor:
        """Return this rank's parameters of a shard, also while it has the anchors for parameters."""
        return self.model.read(shard) if self._own is None else self._own[0][shard.variable.name]

    def _moved(self, fragment: Fragment) -> bool:
        """Return True if this rank may have left the anchors of a fragment."""
        return fragment.applied_at != self.runner.context.step

    def _send(self, fragment: Fragment, later: bool) -> bool:
        """Send the drifts of a fragment, and receive their means. Return False if the round was dropped.

        Args:
            later: True to let them travel while training goes on.
        """
        self.context.copy_stamped(self.runner.context)
        fragment.sent_at = self.at
        present = self._moved(fragment)
        contributions = []
        with recorder.phase("drift", "part"):
            for bucket in fragment.buckets:
                drifts = [self.drift(self.runner.shards[name]) for name in bucket.names]
                contributions.append(Contribution(bucket, drifts, [present] * len(drifts), True, self.runner.traffic))
        if later:
            fragment.under_way = [self._enqueue(contribution) for contribution in contributions]
            return True
        before = self.runner.traffic.sent_bytes
        try:
            outcomes = self.runner.round_trips(contributions)
        except BaseException:
            self._roll_back(fragment)
            raise
        fragment.sent_bytes = self.runner.traffic.sent_bytes - before
        return self._resolve(fragment, outcomes)

    def drift(self, shard: Shard) -> Tensor:
        """Return this rank's drift, the pseudogradient of DiLoCo: anchor minus parameters, in the parameters' dtype."""
        x = self.model.read(shard)
        k = kernels_of(x)
        # NumPy's sums of 0-d arrays are no arrays
        anchor, own = (k.reshape(one, _at_least_1d(x)) for one in (self._anchor(shard, x), k.cast(x, _wide(shard))))
        return k.reshape(k.cast(anchor - own, shard.variable.dtype), tuple(x.shape))

    def _enqueue(self, contribution: Contribution) -> RoundTripFuture:
        """Encode drifts, and let the exchange's thread send them. They are decoded at the step at which they were
        encoded."""
        thread = self.runner.exchange_thread()
        bucket = contribution.bucket.at_step(self.context.step)
        communicator = bucket.communicator.with_context(dataclasses.replace(self.context))
        communicator.backend = thread.backend
        own = dataclasses.replace(bucket, communicator=communicator)
        # Traffic of its own, which _collect() adds: two threads must not count in one.
        trip = RoundTrip(contribution._replace(bucket=own, traffic=Traffic()))
        trip.start(sends=False)
        future = RoundTripFuture(1.0, trip, thread)
        thread.send(future)
        return future

    def _collect(self, fragment: Fragment) -> None:
        """Wait for the means of the round under way, if there is one.

        Raises:
            ExchangeError, PayloadError, StepError: the thread failed.
        """
        if not fragment.under_way:  # its means are here, or a checkpoint's
            return
        outcomes: list[Outcome] = []
        fragment.sent_bytes = 0
        futures, fragment.under_way = fragment.under_way, []
        try:
            for future in futures:
                outcomes += future.result()
                self.runner.traffic.include(future.traffic)
                fragment.sent_bytes += future.traffic.sent_bytes
        except BaseException:
            self._roll_back(fragment)
            raise
        self._resolve(fragment, outcomes)

    def _resolve(self, fragment: Fragment, outcomes: Sequence[Outcome]) -> bool:
        """Commit the memories of a round and keep its means; drop both, and return False, if a drift was not finite on
        a rank."""
        fragment.coming = {}
        if self.model.any_overflow(any(outcome.overflow for outcome in outcomes)):
            self._roll_back(fragment)
            names = [outcome.variable.name for outcome in outcomes if outcome.overflow]
            if not self._return_to_anchors() and self.runner.backend.rank == 0:
                which = (names or fragment.buckets[0].names)[0]
                warn(
                    f"the round of {which!r} after iteration {self.at} was dropped: on a rank its drift, or what was "
                    "sent of it, was not finite. If no parameter was, choose a compressor of a wider range"
                )
            return False
        for part in self._parts(fragment):
            for outcome in outcomes:
                if outcome.value is None:
                    part.state.rollback(outcome.variable.name)
            part.state.commit()
        for outcome in outcomes:
            if outcome.value is not None:  # a view of a buffer, which the next round overwrites
                shard = self.runner.shards[outcome.variable.name]
                fragment.coming[outcome.variable.name] = _copy(outcome.value, _wide(shard))
        return True

    def _apply_outer_step(self, fragment: Fragment, merge: float) -> None:
        """Move the anchors of a fragment by the means of the last round, and the parameters with them."""
        self._collect(fragment)
        means, fragment.coming = fragment.coming or {}, None
        if fragment.optimizer.offload and means:  # the anchors' step is made by the host
            values = list(means.values())
            means = dict(zip(means, kernels_of(values[0]).to_host(values), strict=True))
        stateful = (self.anchors, *fragment.optimizer.named_components().values())
        moving = [shard for shard in fragment.shards if shard.variable.name in means]
        with recorder.phase("outer step", "part"):
            try:
                for shard in moving:
                    self._move_anchor(shard, fragment.optimizer, means[shard.variable.name])
            except BaseException:
                for part in stateful:
                    part.state.rollback()
                fragment.coming = means
                raise
            for shard in moving:
                x = self.model.read(shard)
                now = self._anchor(shard, x)
                if merge > 0:
                    k, some = kernels_of(x), _at_least_1d(x)
                    now, own = k.reshape(now, some), k.reshape(k.cast(x, _wide(shard)), some)
                    now = k.reshape(now + merge * (own - now), tuple(x.shape))
                self.model.write(shard, now)
            for part in stateful:
                part.state.commit()
        if means:
            # With merge > 0 parameters keep a part of their drift, so they are not the anchors. Of a checkpoint with
            # other fragments some have no mean.
            everywhere = merge == 0 and len(means) == len(fragment.shards)
            fragment.applied_at = self.runner.context.step if everywhere else -1
        if fragment.number == fragment.outer.fragments - 1:
            self.model.average_buffers()

    def _move_anchor(self, shard: Shard, optimizer: OuterOptimizer, mean: Tensor) -> None:
        """Move the anchor of a shard by the mean drift."""
        name = shard.variable.name
        before = self.anchors.state[name]
        k, some = kernels_of(before), _at_least_1d(before)
        anchor = k.reshape(before, some)
        mean = k.to_device_of(k.reshape(mean, some), anchor)
        self._keep(shard, k.reshape(_next_anchor(optimizer, anchor, mean, name), tuple(before.shape)))

    def _parts(self, fragment: Fragment) -> list[Component]:
        """Return the parts that a round of a fragment changes."""
        communicators = {id(bucket.communicator): bucket.communicator for bucket in fragment.buckets}.values()
        return [part for communicator in communicators for part in communicator.stateful_parts.values()]

    def _roll_back(self, fragment: Fragment) -> None:
        self.context.out_of_step = ""
        for part in self._parts(fragment):
            part.state.rollback()

    def _return_to_anchors(self) -> bool:
        """Let this rank start anew from the anchors where its parameters are not finite; return True if some are not.
        Other ranks keep their drifts for the next round."""
        # Of all fragments: with one that is still lost, the next forward pass would spoil the others again.
        lost = [shard for shard in self.shards if not _finite(self.model.read(shard))]
        for shard in lost:
            self.model.write(shard, self._anchor(shard, self.model.read(shard)))
            self.model.clear_optimizer(shard)
        if lost:
            backend = self.runner.backend
            warn(
                f"{lost[0].variable.name!r} was not finite on rank {backend.number_of(backend.rank)} after iteration "
                f"{self.at}: the round was dropped, and this rank starts anew from the parameters of the last one"
            )
        return bool(lost)

    # -- numbers ---------------------------------------------------------------------------------------

    def drifts(self) -> list[Tensor]:
        """Return this rank's drifts from the anchors; none if parameters are the anchors."""
        return [self.drift(shard) for shard in self.shards] if self.has_anchors and not self.anchored else []

    @property
    def bytes_round(self) -> int:
        """Bytes that this rank sent in the last round of each fragment."""
        return sum(fragment.sent_bytes for fragment in self.fragments)


def deal(outer: Outer, shards: Sequence[Shard]) -> list[Fragment]:
    """Return the fragments of shards with equal settings: runs of shards, in declaration order, with about as many
    elements each.

    Raises:
        ConfigError: there are fewer variables than fragments; or a setting cannot work.
    """
    outer.check()
    for shard in shards:
        if shard.communicator.delayed:
            what = shard.communicator.choice
            raise ConfigError(f"{what} applies means in later steps: with outer, choose outer's delay instead")
        if (shard.hierarchical and outer.delay) or (shard.whole.sparse and outer.over == "nodes"):
            why = "has outer's delay" if outer.delay else "is sparse"
            better = "leave out the delay" if outer.delay else "give sparse_as_dense=True"
            raise ConfigError(f"variable {shard.whole.name!r} {why}, which is not possible over nodes: {better}")
    if len(shards) < outer.fragments:
        raise ConfigError(
            f"outer, fragments: {len(shards)} variables (or parts) cannot be dealt to {outer.fragments} fragments: "
            f"give fragments={len(shards)} or less"
        )
    optimizer: OuterOptimizer = make("outer", outer.optimizer)
    total = sum(shard.variable.numel for shard in shards)
    dealt: list[list[Shard]] = [[]]
    before = 0
    for i, shard in enumerate(shards):
        open_fragments = outer.fragments - len(dealt)
        full = before * outer.fragments >= len(dealt) * total and dealt[-1]
        # As many shards are left as fragments: each gets one.
        if open_fragments and (full or len(shards) - i <= open_fragments) and dealt[-1]:
            dealt.append([])
        dealt[-1].append(shard)
        before += shard.variable.numel
    return [Fragment(outer, p, optimizer, own, make_buckets(own)) for p, own in enumerate(dealt)]


def _next_anchor(optimizer: OuterOptimizer, anchor: Tensor, drift: Tensor, name: str) -> Tensor:
    """Return the anchor after the outer optimizer's step.

    Raises:
        ConfigError: a user's ``step()`` returned no tensor of the anchor's shape and dtype.
    """
    moved = optimizer.step(anchor, drift, name)
    k = kernels_of(anchor)
    try:
        check_shape(moved, anchor, "step()")
    except PayloadError as error:
        raise optimizer.error(f"{error}: return the next anchor of {name!r}") from None
    if k.dtype(moved) != k.dtype(anchor):
        raise optimizer.error(f"step() gave {k.dtype(moved)} for the anchor of {name!r}, which is {k.dtype(anchor)}")
    return moved


def _wide(shard: Shard) -> str:
    """Return the dtype of a shard's anchor."""
    return "float64" if shard.variable.dtype == "float64" else "float32"


def _at_least_1d(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape) or (1,)


def _beside(anchor: Tensor, value: Value) -> Value:
    """Return a value of an outer optimizer's state with its tensors on an anchor's device."""
    if isinstance(value, dict):
        return {key: _beside(anchor, item) for key, item in value.items()}
    return kernels_of(anchor).to_device_of(value, anchor) if hasattr(value, "shape") else value


def _copy(x: Tensor, dtype: str | None = None) -> Tensor:
    k = kernels_of(x)
    copied = k.reshape(k.join([k.flat(x)]), tuple(x.shape))
    return copied if dtype is None else k.cast(copied, dtype)


def _equal(x: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one shape have equal elements; not if one of them is NaN."""
    return bool((x == kernels_of(x).to_device_of(other, x)).all())


def _finite(x: Tensor) -> bool:
    return bool(kernels_of(x).all_finite(x))
