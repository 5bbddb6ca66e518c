"""Round trips that run while training continues, with bounded staleness or without a bound: what a step sees of one,
the thread that runs them, and the futures of pending ones."""

import dataclasses
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

from grace.core.at_exit import call_at_exit, cancel_at_exit
from grace.core.backend import Backend
from grace.core.compressor import Tensor
from grace.core.memory import Memory
from grace.core.waits import waiting
from grace.errors import ExchangeError, PayloadError, StepError
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.header import Flag, Header
from grace.exchange.round_trip import AnyRoundTrip, BucketProgram, RoundTrip, advance_all
from grace.exchange.sparse_rows import Gradient, add, in_units, values_of
from grace.exchange.tracing import recorder
from grace.kernels import kernels_of

PATIENCE = 60.0
"""Seconds to wait at the end for other ranks that are behind."""
PATIENCE_AT_EXIT = 5.0
"""Seconds to wait for them in a script that failed."""
NEVER = "it has not come back. All ranks must make as many steps"

Facts = Sequence[tuple[str, str]]
"""Names and values that are equal on all ranks; see :func:`grace.session.agreement.compare_facts`."""
Check = Callable[[Sequence[AnyRoundTrip], Backend, Facts], None]
"""Function that raises an error if the ranks of completed round trips were not at one step. Its arguments are the round
trips, their backend, and the hyperparameters of their step."""


class ExchangeThread:
    """Thread that runs round trips one after the other, over a backend of its own.

    Every rank sends it the same round trips in the same order, so that their collectives pair.

    Args:
        backend: see :meth:`grace.core.backend.Backend.duplicate`.
        computing: returns the context that a round trip computes in.
        check: see :data:`Check`.
        engine: the backend that the other one is a duplicate of.
    """

    def __init__(
        self,
        backend: Backend,
        computing: Callable[[], AbstractContextManager[object]],
        check: Check,
        engine: Backend,
    ):
        self.backend = backend
        self.engine = engine
        self.computing = computing
        self.check = check
        self.todo: queue.SimpleQueue[RoundTripFuture | None] = queue.SimpleQueue()
        self.under_way: deque[RoundTripFuture] = deque()
        self.failure: Exception | None = None
        self.failure_raised = False
        """True once the training thread has raised the failure."""
        # Other ranks may need this rank for round trips under way, so the engine ends after them.
        engine.at_shutdown(self.arrive)
        # Programs need not call grace.shutdown(), and the last round trips would be lost.
        call_at_exit(self.exit)
        # A daemon, since a round trip may wait for a rank that never comes, and must not keep the process alive.
        threading.Thread(target=self._run, name="grace exchanges", daemon=True).start()

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Wait until all round trips are done, because other ranks need this rank for theirs, and end the thread.

        Returns:
            True if all are.
        """
        deadline = time.monotonic() + seconds
        while self.under_way and self.failure is None and time.monotonic() < deadline:
            self.under_way[0].done.wait(0.05)
            self._remove_done()
        self.todo.put(None)
        return all(future.done.is_set() for future in self.under_way)

    def arrive(self) -> None:
        """End the thread before the ranks part.

        Raises:
            ExchangeError: a round trip is not done. Another rank has made fewer steps, so its weights differ.
        """
        done = self.drain()
        if self.failure_raised or sys.exc_info()[0] is not None:
            return
        if self.failure is not None or not done:
            self.failure_raised = True
            raise self.reason(self.under_way[0].round_trip if self.under_way else None)

    def reason(self, round_trip: RoundTrip | None) -> Exception:
        """Return the error that explains why a round trip has no outcomes."""
        if isinstance(self.failure, ExchangeError):
            return self.failure
        failure = self.failure or ExchangeError(NEVER)
        return failure if round_trip is None else round_trip.failure(failure)

    def exit(self) -> None:
        """End the thread in a program that ends without ``grace.shutdown()``. An error raised at exit would not change
        the program's exit status, so this function sets it."""
        if self.failure_raised or hasattr(sys, "last_value"):  # the program failed: do not wait long for other ranks
            self.drain(0 if self.failure_raised else PATIENCE_AT_EXIT)
            return
        try:
            self.arrive()
        except ExchangeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def send(self, future: "RoundTripFuture") -> None:
        """Enqueue the next round trip for the thread."""
        self._remove_done()
        self.under_way.append(future)
        self.todo.put(future)

    def _remove_done(self) -> None:
        while self.under_way and self.under_way[0].done.is_set():
            self.under_way.popleft()

    def _run(self) -> None:
        while (future := self.todo.get()) is not None:
            try:
                if self.failure is None:
                    with self.computing():
                        future.run(self.check)
            except Exception as error:  # the training thread raises it
                self.failure = error
            future.done.set()
        if self.failure is None:  # else the error is still to be raised, at the latest when the program ends
            self.engine.cancel_at_shutdown(self.arrive)
            cancel_at_exit(self.exit)


@dataclasses.dataclass(eq=False)
class RoundTripFuture:
    """Future of a round trip of an :class:`ExchangeThread`, from its encoding until its mean is applied.

    Attributes:
        loss_scale: the loss scale of its gradients, and so of its means.
        round_trip: the round trip; None once its outcomes were collected, which frees its buffers, and if it was
            loaded.
        thread: the thread that runs it; None if it was loaded.
        hyperparameters: the optimizer's hyperparameters that its step stamp has a digest of.
        idle: the list that takes the round trip's bucket when the next round trip may use it.
        outcomes: the outcomes; None until the thread has finished, and if it failed.
        done: event that is set when the thread has finished the round trip.
        traffic: the bytes that the round trip sent, once its outcomes were collected.
        dropped: names of variables whose means are never applied, because their step's gradients were discarded.
    """

    loss_scale: float
    round_trip: RoundTrip | None = None
    thread: ExchangeThread | None = None
    hyperparameters: Facts = ()
    idle: list[Bucket] = dataclasses.field(default_factory=list)
    outcomes: list[Outcome] | None = None
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    traffic: Traffic = dataclasses.field(default_factory=Traffic)
    dropped: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def loaded(cls, outcomes: list[Outcome], loss_scale: float) -> "RoundTripFuture":
        """Return a finished round trip with the outcomes that a checkpoint holds."""
        future = cls(loss_scale, outcomes=outcomes)
        future.done.set()
        return future

    def run(self, check: Check) -> None:
        """Run all collectives, and commit the state of the memory of means, which no later step may roll back."""
        round_trip = self.round_trip
        assert round_trip is not None
        of_means = round_trip.communicator.mean_compression
        states = [] if of_means is None else [part.state for part in of_means.memory.named_components().values()]
        try:
            advance_all([round_trip])
            self.outcomes = round_trip.finish([None] * len(round_trip.names))
            check([round_trip], round_trip.backend, self.hyperparameters)
        except (PayloadError, StepError):
            for state in states:
                state.rollback()
            raise
        for state in states:
            state.commit()

    def result(self) -> list[Outcome]:
        """Wait for the outcomes, and return them.

        Raises:
            ExchangeError, PayloadError, StepError: the thread failed.
        """
        if not self.done.is_set():
            assert self.round_trip is not None
            with waiting(self.round_trip.describe_wait), recorder.phase("wait", "wait", bucket=self.round_trip.bucket):
                self.done.wait()
        if self.outcomes is None:
            assert self.thread is not None
            self.thread.failure_raised = True
            raise self.thread.reason(self.round_trip) from self.thread.failure
        if self.round_trip is not None:
            self.traffic = self.round_trip.traffic
            self.release()
        return self.outcomes

    def release(self) -> None:
        """Let the next round trip use this one's bucket, whose buffers nobody reads any more."""
        assert self.round_trip is not None
        self.idle.append(self.round_trip.bucket)
        self.round_trip = None

    def means_in_units(self, loss_scale: float) -> dict[str, Gradient]:
        """Return the means that are applied, by the shards' names, in the units of a loss scale."""
        means = {outcome.variable.name: outcome.value for outcome in self.result()}
        found = {name: value for name, value in means.items() if value is not None and name not in self.dropped}
        factor = loss_scale / self.loss_scale
        return found if factor == 1 else {name: in_units(value, factor) for name, value in found.items()}


class DelayedRoundTrip(AnyRoundTrip):
    """Round trip that encodes this step's payloads, and returns the mean of an earlier step. It wraps one that a thread
    runs, which keeps the errors, and reads the headers:

    1. :meth:`start` encodes the gradients. State of memories and compressor is committed at once for finite
       gradients: the payload will be applied even if this step is discarded.
    2. :meth:`finish` returns the means in ``bucket.pending`` that this step applies, the oldest first.
    3. :meth:`enqueue`, at the end of the step, passes the encoded payloads to the thread. :meth:`cancel` drops them.

    Args:
        contribution: this rank's gradients.
        thread: runs the collectives, over a backend of its own.
        hyperparameters: the optimizer's hyperparameters that this step's stamp has a digest of.
    """

    future: RoundTripFuture
    compares_sizes = False
    """True if this round trip compares the sizes of payloads. It does so for all later ones: if sizes differ the thread
    fails, and runs no other."""

    def __init__(self, contribution: Contribution, thread: ExchangeThread, hyperparameters: Facts = ()):
        super().__init__(contribution)
        self.kernels = kernels_of(values_of(self.gradients[0]))
        self.thread = thread
        self.hyperparameters = hyperparameters
        self.applied: dict[str, Gradient] = {}
        """The means that :meth:`finish` returned, by name."""

    # -- encoding --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Encode the gradients, commit the state of memories and the compressor, and queue up behind the bucket's
        pending round trips. No collective starts: that is for the thread to do."""
        inner = self._encode()
        # A header that stays empty: the thread fills in the inner round trip's while the step ends.
        self.header = Header(inner.program, self.present)
        self.future = RoundTripFuture(inner.loss_scale, inner, self.thread, self.hyperparameters, self.bucket.idle)
        self.bucket.pending.append(self.future)
        self.compares_sizes = not self.bucket.sizes_compared and inner.program.sizes_unknown
        if self.compares_sizes:
            self.bucket.sizes_compared = True

    def _encode(self) -> RoundTrip:
        """Return the round trip that the thread will run, encoded, and commit the state of memories and the compressor.

        This rank sends nothing of variables that it has no gradient of, so their state must not change.
        """
        like = values_of(self.gradients[0])
        own = Contribution(self._bucket_of_thread(like), self.gradients, self.present, self.finds_overflow, Traffic())
        self.gradients = ()
        # The thread updates, and commits, the memory of answers.
        kinds = self.communicator.stateful_parts.items()
        parts = [part for kind, part in kinds if not kind.startswith("answer_memory")]
        absent = [name for name, here in zip(self.names, self.present, strict=True) if not here]
        aside = [{name: part.state.pop(name) for name in absent if name in part.state} for part in parts]
        inner = RoundTrip(own)
        inner.start(sends=False)
        overflowed = self._overflowed(inner.header.in_range) if self.communicator.stateful else []
        for part, kept in zip(parts, aside, strict=True):
            for name in [*absent, *overflowed]:
                part.state.rollback(name)
            part.state.update(kept)
            part.state.commit()
        return inner

    def _bucket_of_thread(self, like: Tensor) -> Bucket:
        """Return a copy of the bucket over the thread's backend, for gradients like this one.

        Each round trip under way has a copy with a program of its own, because its buffers may still be in use when the
        next one encodes. The copy's context stays at this step: payloads must be decoded at the step at which they were
        encoded, whatever step this rank is at when all of them have arrived."""
        bucket, context = self.bucket, self.communicator.context
        own = bucket.idle.pop() if bucket.idle else dataclasses.replace(bucket)
        former, own.parts = own.parts, {}
        if former:
            vars(own.communicator.context).update(vars(context))  # its program reads this object
        of_step = own.communicator.context if former else dataclasses.replace(context)
        if any(memory.needs_lr for memory in self._memories()):
            # When the thread encodes means, a schedule may have set the learning rate of a later step.
            of_step.lr = {name: context.lr(name) for name in self.names}.__getitem__
        # Attributes of users' parts may have changed since the last step.
        own.communicator = self.communicator.with_context(of_step, own.parts, former)
        own.communicator.backend = self.thread.backend
        own.sizes_compared = bucket.sizes_compared
        if own.program is None or not own.program.fits(like):
            own.program = BucketProgram(own, like)
            if own.program.sizes_unknown:
                self._share_layouts(own.program, like)
        return own

    def _memories(self) -> list[Memory]:
        """Return the memory of gradients, and that of means if these are compressed."""
        of_means = self.communicator.mean_compression
        return [self.communicator.memory, *([] if of_means is None else [of_means.memory])]

    def _share_layouts(self, program: BucketProgram, like: Tensor) -> None:
        """Hold the payloads of all copies of the bucket to the layouts of the first step."""
        first = self.bucket.program
        if first is not None and first.fits(like):
            program.share_layouts(first)
        else:
            self.bucket.program = program

    def _overflowed(self, in_range: Sequence[Flag]) -> list[str]:
        """Return the variables whose gradients are not in range on this rank."""
        on_device = [ok for ok in in_range if not isinstance(ok, bool)]
        if on_device:  # read all of them in one copy
            (in_range,) = self.kernels.read([self.kernels.full(in_range, "float32", on_device[0])])
        return [name for name, ok in zip(self.names, in_range, strict=True) if not bool(ok)]

    # -- the thread ------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Return False: the thread starts all collectives."""
        return False

    def enqueue(self) -> None:
        """Enqueue the payloads for the thread at the end of the step, in the same order on all ranks."""
        self.thread.send(self.future)

    def cancel(self) -> None:
        """Drop the payloads, which were not enqueued."""
        self.bucket.pending.remove(self.future)
        self.future.release()
        if self.compares_sizes:
            self.bucket.sizes_compared = False

    def discard(self) -> None:
        """Drop the mean, because the step is discarded. The payloads are still sent, as other ranks await them, and the
        thread compares the step stamps."""
        self.future.dropped.update(self.names)

    def roll_back(self, names: Collection[str]) -> dict[str, Gradient]:
        """Drop this step's means of these variables, whose gradients were discarded after :meth:`finish`, and return
        the earlier means that it returned for them."""
        self.future.dropped.update(name for name in self.names if name in names)
        return {name: mean for name, mean in self.applied.items() if name in names}

    # -- receiving -------------------------------------------------------------------------------------

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Return the mean of ``staleness`` steps ago; without ``sync`` the sum of the means that have arrived,
        including the oldest if more than ``ahead`` would be under way.

        Raises:
            ExchangeError: the thread failed.
            PayloadError: a payload that a rank sent cannot be decoded.
            StepError: the ranks were not at one step.
        """
        collected = [self._collect(future) for future in self._pop_due()]
        if not collected:
            return [Outcome(variable, None, False, pending=True) for variable in self.bucket.variables]
        outcomes = [self._sum(of_variable) for of_variable in zip(*collected, strict=True)]
        self.applied = {outcome.variable.name: outcome.value for outcome in outcomes if outcome.value is not None}
        return outcomes

    def _pop_due(self) -> list[RoundTripFuture]:
        """Remove from the bucket, and return, the round trips whose means this step applies."""
        pending, due = self.bucket.pending, []
        most = self.communicator.staleness if self.communicator.sync else self.communicator.ahead
        if not self.communicator.sync:
            while pending and pending[0].done.is_set():
                due.append(pending.popleft())
        while len(pending) > most:
            due.append(pending.popleft())
        return due

    def _collect(self, future: RoundTripFuture) -> list[Outcome]:
        """Wait for the outcomes of a round trip, count its traffic, and return the outcomes, without dropped means."""
        began = time.perf_counter()
        outcomes = future.result()
        self.traffic.wait_seconds += time.perf_counter() - began
        self.traffic.include(future.traffic)
        values = future.means_in_units(self.communicator.context.loss_scale)
        return [dataclasses.replace(outcome, value=values.get(outcome.variable.name)) for outcome in outcomes]

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the sum of one variable's means."""
        variable = outcomes[0].variable
        used = [(outcome.value, outcome.overflow) for outcome in outcomes if outcome.value is not None]
        if not used:  # no rank had a gradient then; this rank may have one now, which is not the mean
            return Outcome(variable, None, False, pending=True)
        total = used[0][0]
        for value, _ in used[1:]:
            total = add(total, value)
        # Nobody uses a mean of NaN, nor the other means of the step that it comes to. With bounded staleness this is
        # one step on all ranks; without a bound they would roll back different steps, so that one is committed. A
        # loss scaler, which would skip that step on one rank alone, is refused there.
        return Outcome(variable, total, self.communicator.sync and any([overflow for _, overflow in used]))
