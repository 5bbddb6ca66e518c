"""Round trips that run on while training goes ahead: bounded staleness, and none."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from grace.core.compressor import Tensor
from grace.errors import PayloadError
from grace.exchange.background import ExchangeThread, Pending
from grace.exchange.bucket import Contribution, Outcome, Traffic
from grace.exchange.header import Header
from grace.exchange.round_trip import RoundTrip
from grace.exchange.sparse_rows import add, values_of
from grace.kernels import kernels_of


class DelayedRoundTrip:
    """Sends this step's payloads on their way, and brings the mean of an earlier step.

    It has the methods of :class:`~grace.exchange.round_trip.RoundTrip`, around one that a thread runs:

    1. To make it is to encode the gradients. The memories' and the compressor's changes are committed at once where the
       gradient is finite: the payload will be applied whatever becomes of this step.
    2. :meth:`finish` brings the means that are due of those in ``bucket.pending``, the oldest first.
    3. :meth:`enqueue`, at the end of the step, hands the encoded payloads to the thread. :meth:`cancel` forgets them.

    Args:
        contribution: this rank's gradients.
        thread: runs the collectives, over a backend of its own.
    """

    error: PayloadError | None = None
    """None: the thread keeps the errors of its round trips, and :meth:`finish` raises them."""
    deferred = next_step = False
    """No matter here: the thread reads the headers of its round trips itself."""

    def __init__(self, contribution: Contribution, thread: ExchangeThread):
        self.bucket, gradients, self.present, _, self.traffic = contribution
        self.communicator: Any = self.bucket.communicator
        self.kernels = kernels_of(values_of(gradients[0]))
        self.names, self.thread = self.bucket.names, thread
        inner = self._encode(contribution)
        # one that stays empty: the thread fills in the inner one's while the step ends
        self.header = Header(inner.program, self.present)
        self.place = inner.place
        self.pending = Pending(inner, thread, self.communicator.context.loss_scale)
        self.bucket.pending.append(self.pending)

    # -- encoding --------------------------------------------------------------------------------------

    def _encode(self, contribution: Contribution) -> RoundTrip:
        """Make the round trip that the thread will run, and commit what memories and the compressor learn by that.

        This rank sends nothing of variables that it has no gradient of, so that their state stays as it is.
        """
        own = contribution._replace(bucket=self._bucket_of_thread(), traffic=Traffic())
        # the second memory learns in the thread, which commits it
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

    def _bucket_of_thread(self) -> Any:
        """Return the bucket for the thread's backend and for this step: whatever step this rank is at when all payloads
        are there, they are decoded as they were encoded.

        Its codec is its own as well, since the buffers of the step before may still be under way.
        """
        communicator = self.communicator.with_context(dataclasses.replace(self.communicator.context))
        communicator.backend = self.thread.backend
        return dataclasses.replace(self.bucket, communicator=communicator)

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

    def look_at_stamps(self) -> None:
        """Do nothing: the thread compares the stamps."""

    def enqueue(self) -> None:
        """Hand the payloads to the thread at the end of the step, in the same order on all ranks."""
        self.thread.send(self.pending)

    def cancel(self) -> None:
        """Forget the payloads, which were not enqueued."""
        self.bucket.pending.remove(self.pending)

    # -- receiving -------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Drop the mean, since the step is discarded. The payloads travel all the same: other ranks await them."""
        self.pending.dropped = True

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """Return the mean of ``staleness`` steps ago; without ``sync`` the sum of the means that have come, and of the
        oldest if more than ``ahead`` would be under way.

        Raises:
            ExchangeError: the thread failed.
            PayloadError: a payload that a rank sent cannot be decoded.
            StepError: the ranks were not at one step.
        """
        brought = [self._collect(pending) for pending in self._due()]
        brought = [outcomes for outcomes in brought if outcomes]
        if not brought:
            return [Outcome(variable, None, False, pending=True) for variable in self.bucket.variables]
        return [self._sum(of_variable) for of_variable in zip(*brought, strict=True)]

    def _due(self) -> list[Pending]:
        """Take out of the bucket the round trips whose means this step applies."""
        pending, due = self.bucket.pending, []
        most = self.communicator.staleness if self.communicator.sync else self.communicator.ahead
        if not self.communicator.sync:
            while pending and pending[0].done.is_set():
                due.append(pending.popleft())
        while len(pending) > most:
            due.append(pending.popleft())
        return due

    def _collect(self, pending: Pending) -> list[Outcome]:
        """Wait for the outcomes of a round trip, and count what it sent; empty if its step was discarded."""
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
        # an overflow shows as NaN, but it is an earlier step's: the state of this step is kept
        return Outcome(variable, total, False)
