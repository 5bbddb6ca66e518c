"""Round trips that run while training continues, with bounded staleness or without a bound."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from grace.core.compressor import Tensor
from grace.errors import PayloadError
from grace.exchange.background import ExchangeThread, Facts, Pending
from grace.exchange.bucket import Bucket, Contribution, Outcome, Traffic
from grace.exchange.header import Header
from grace.exchange.program import BucketProgram
from grace.exchange.round_trip import RoundTrip
from grace.exchange.sparse_rows import add, values_of
from grace.kernels import kernels_of


class DelayedRoundTrip:
    """Round trip that encodes this step's payloads, and returns the mean of an earlier step.

    It has the methods of :class:`~grace.exchange.round_trip.RoundTrip`, and wraps one that a thread runs:

    1. To make it is to encode the gradients. State of memories and compressor is committed at once for finite
       gradients: the payload will be applied even if this step is discarded.
    2. :meth:`finish` returns the means in ``bucket.pending`` that this step applies, the oldest first.
    3. :meth:`enqueue`, at the end of the step, passes the encoded payloads to the thread. :meth:`cancel` drops them.

    Args:
        contribution: this rank's gradients.
        thread: runs the collectives, over a backend of its own.
        hyperparameters: the optimizer's hyperparameters that this step's stamp has a digest of.
    """

    error: PayloadError | None = None
    """None: the thread keeps the errors of its round trips, and :meth:`finish` raises them."""
    deferred = next_step = False
    """False, whatever the session wants: the thread reads the headers of its round trips itself."""

    def __init__(self, contribution: Contribution, thread: ExchangeThread, hyperparameters: Facts = ()):
        self.bucket, gradients, self.present, _, self.traffic = contribution
        self.communicator: Any = self.bucket.communicator
        self.kernels = kernels_of(values_of(gradients[0]))
        self.names, self.thread = self.bucket.names, thread
        inner = self._encode(contribution)
        # A header that stays empty: the thread fills in the inner round trip's while the step ends.
        self.header = Header(inner.program, self.present)
        self.describe_wait = inner.describe_wait
        self.pending = Pending(inner.loss_scale, inner, thread, hyperparameters, self.bucket.idle)
        self.bucket.pending.append(self.pending)
        self.compares = not self.bucket.compared and inner.program.sizes_unknown
        """True if this round trip compares the sizes of payloads. It does so for all later ones: if sizes differ the
        thread fails, and runs no other."""
        if self.compares:
            self.bucket.compared = True

    # -- encoding --------------------------------------------------------------------------------------

    def _encode(self, contribution: Contribution) -> RoundTrip:
        """Make the round trip that the thread will run, and commit the state of memories and the compressor.

        This rank sends nothing of variables that it has no gradient of, so their state must not change.
        """
        like = values_of(contribution.gradients[0])
        own = contribution._replace(bucket=self._bucket_of_thread(like), traffic=Traffic())
        # The thread updates, and commits, the memory of answers.
        kinds = self.communicator.stateful_parts.items()
        parts = [part for kind, part in kinds if not kind.startswith("answer_memory")]
        absent = [name for name, here in zip(self.names, self.present, strict=True) if not here]
        aside = [{name: part.state.pop(name) for name in absent if name in part.state} for part in parts]
        inner = RoundTrip(own, starts=False)
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
        # Attributes of users' parts may have changed since the last step.
        own.communicator = self.communicator.with_context(of_step, own.parts, former)
        own.communicator.backend = self.thread.backend
        own.compared = bucket.compared
        if own.program is None or not own.program.fits(like):
            own.program = BucketProgram(own, like)
            if own.program.sizes_unknown:
                self._share_layouts(own.program, like)
        return own

    def _share_layouts(self, program: BucketProgram, like: Tensor) -> None:
        """Hold the payloads of all copies of the bucket to the layouts of the first step."""
        first = self.bucket.program
        if first is not None and first.fits(like):
            program.share_layouts(first)
        else:
            self.bucket.program = program

    def _overflowed(self, in_range: Sequence[Any]) -> list[str]:
        """Return the variables whose gradients are not in range on this rank."""
        on_device = [ok for ok in in_range if not isinstance(ok, bool)]
        if on_device:  # read all of them in one copy
            (in_range,) = self.kernels.read([self.kernels.full(in_range, "float32", on_device[0])])
        return [name for name, ok in zip(self.names, in_range, strict=True) if not bool(ok)]

    # -- the thread ------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """Return False: the thread starts all collectives."""
        return False

    def read_step_stamps(self) -> None:
        """Do nothing: the thread compares the stamps."""

    def enqueue(self) -> None:
        """Enqueue the payloads for the thread at the end of the step, in the same order on all ranks."""
        self.thread.send(self.pending)

    def cancel(self) -> None:
        """Drop the payloads, which were not enqueued."""
        self.bucket.pending.remove(self.pending)
        self.pending.release()
        if self.compares:
            self.bucket.compared = False

    # -- receiving -------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Drop the mean, because the step is discarded. The payloads are still sent: other ranks await them."""
        self.pending.dropped = True

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Return the mean of ``staleness`` steps ago; without ``sync`` the sum of the means that have arrived,
        including the oldest if more than ``ahead`` would be under way.

        Raises:
            ExchangeError: the thread failed.
            PayloadError: a payload that a rank sent cannot be decoded.
            StepError: the ranks were not at one step.
        """
        collected = [self._collect(pending) for pending in self._pop_due()]
        collected = [outcomes for outcomes in collected if outcomes]
        if not collected:
            return [Outcome(variable, None, False, pending=True) for variable in self.bucket.variables]
        return [self._sum(of_variable) for of_variable in zip(*collected, strict=True)]

    def _pop_due(self) -> list[Pending]:
        """Remove from the bucket, and return, the round trips whose means this step applies."""
        pending, due = self.bucket.pending, []
        most = self.communicator.staleness if self.communicator.sync else self.communicator.ahead
        if not self.communicator.sync:
            while pending and pending[0].done.is_set():
                due.append(pending.popleft())
        while len(pending) > most:
            due.append(pending.popleft())
        return due

    def _collect(self, pending: Pending) -> list[Outcome]:
        """Wait for the outcomes of a round trip, count its traffic, and return the outcomes; empty if its step was
        discarded."""
        began = time.perf_counter()
        outcomes = pending.collect()
        self.traffic.wait_seconds += time.perf_counter() - began
        self.traffic.include(pending.traffic)
        if pending.dropped:
            return []
        values = pending.values(self.communicator.context.loss_scale)
        return [dataclasses.replace(outcome, value=values.get(outcome.variable.name)) for outcome in outcomes]

    def _sum(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Return the sum of one variable's means."""
        variable = outcomes[0].variable
        values = [outcome.value for outcome in outcomes if outcome.value is not None]
        if not values:  # no rank had a gradient then; this rank may have one now, which is not the mean
            return Outcome(variable, None, False, pending=True)
        total = values[0]
        for value in values[1:]:
            total = add(total, value)
        # An overflow is NaN in the mean, but it belongs to an earlier step: commit the state of this step.
        return Outcome(variable, total, False)
