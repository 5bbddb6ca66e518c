"""The thread that runs round trips beside training, and its pending round trips."""

import atexit
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grace.core.waits import waiting
from grace.errors import ExchangeError, PayloadError, StepError
from grace.exchange.bucket import Bucket, Outcome, Traffic
from grace.exchange.round_trip import RoundTrip
from grace.exchange.sparse_rows import in_units
from grace.exchange.tracing import recorder

PATIENCE = 60.0
"""Seconds to wait at the end for other ranks that are behind."""
PATIENCE_AT_EXIT = 5.0
"""Seconds to wait for them in a script that failed."""
NEVER = "it has not come back. All ranks must make as many steps"

Facts = Sequence[tuple[str, str]]
"""Names and values that are equal on all ranks; see :func:`grace.session.agreement.compare_facts`."""
Check = Callable[[Sequence[Any], Any, Facts], None]
"""Function that raises an error if the ranks of completed round trips were not at one step. Its arguments are the round
trips, their backend, and the hyperparameters of their step."""


class ExchangeThread:
    """Thread that runs round trips one after the other, over a backend of its own.

    Every rank sends it the same round trips in the same order, so that their collectives pair.

    Args:
        backend: see :meth:`grace.core.backend.Backend.duplicate`.
        computing: returns the context that a round trip computes in.
        check: see :data:`Check`.
    """

    def __init__(self, backend: Any, computing: Callable[[], Any], check: Check):
        self.backend = backend
        self.computing = computing
        self.check = check
        self.todo: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self.under_way: deque[Pending] = deque()
        self.failure: Exception | None = None
        self.failure_raised = False
        """True once the training thread has raised the failure."""
        atexit.register(self.exit)
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
        return all(pending.done.is_set() for pending in self.under_way)

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

    def send(self, pending: "Pending") -> None:
        """Enqueue the next round trip for the thread."""
        self._remove_done()
        self.under_way.append(pending)
        self.todo.put(pending)

    def _remove_done(self) -> None:
        while self.under_way and self.under_way[0].done.is_set():
            self.under_way.popleft()

    def _run(self) -> None:
        while (pending := self.todo.get()) is not None:
            try:
                if self.failure is None:
                    with self.computing():
                        pending.run(self.check)
            except Exception as error:  # the training thread raises it
                self.failure = error
            pending.done.set()


@dataclass(eq=False)
class Pending:
    """Round trip of an :class:`ExchangeThread`, from its encoding until its mean is applied.

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
        dropped: True if its step was discarded, so that its means are never applied.
    """

    loss_scale: float
    round_trip: RoundTrip | None = None
    thread: ExchangeThread | None = None
    hyperparameters: Facts = ()
    idle: list[Bucket] = field(default_factory=list)
    outcomes: list[Outcome] | None = None
    done: threading.Event = field(default_factory=threading.Event)
    traffic: Traffic = field(default_factory=Traffic)
    dropped: bool = False

    @classmethod
    def loaded(cls, outcomes: list[Outcome], loss_scale: float) -> "Pending":
        """Return a finished round trip with the outcomes that a checkpoint holds."""
        pending = cls(loss_scale, outcomes=outcomes)
        pending.done.set()
        return pending

    def run(self, check: Check) -> None:
        """Run all collectives, and commit the state of the second memory, which no later step may roll back."""
        round_trip = self.round_trip
        assert round_trip is not None
        second = round_trip.communicator.second
        states = [] if second is None else [part.state for part in second[1].named_components().values()]
        try:
            self.outcomes = round_trip.finish([None] * len(round_trip.names))
            check([round_trip], round_trip.backend, self.hyperparameters)
        except (PayloadError, StepError):
            for state in states:
                state.rollback()
            raise
        for state in states:
            state.commit()

    def collect(self) -> list[Outcome]:
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

    def values(self, loss_scale: float) -> dict[str, Any]:
        """Return the means by the shards' names, in the units of a loss scale; empty if the step was discarded."""
        outcomes = self.collect()
        if self.dropped:
            return {}
        found = {outcome.variable.name: outcome.value for outcome in outcomes if outcome.value is not None}
        factor = loss_scale / self.loss_scale
        return found if factor == 1 else {name: in_units(value, factor) for name, value in found.items()}
