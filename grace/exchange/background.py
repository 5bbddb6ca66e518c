"""Exchanges that run beside training, in a thread of their own."""

import atexit
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.waiting import waiting
from grace.errors import ExchangeError, PayloadError, StepError
from grace.exchange.bucket import Outcome, Traffic
from grace.exchange.sparse_rows import in_units
from grace.exchange.tracing import recorder

PATIENCE, PATIENCE_AT_EXIT = 60.0, 5.0
"""Seconds to wait at the end for other ranks that are behind, and in a script that failed."""
NEVER = "it has not come back. All ranks must make as many steps"


class ExchangeThread:
    """A thread that runs exchanges one after the other, over a backend of its own.

    Every rank hands over the same exchanges in the same order, so that theirs are the same at every moment.

    Args:
        backend: see :meth:`grace.core.backend.Backend.duplicate`.
        computing: the context that an exchange computes in.
        check: raises if the ranks of an exchange were not at one step, over its backend.
    """

    def __init__(self, backend: Any, computing: Callable[[], Any], check: Callable[[Sequence[Any], Any], None]):
        self.backend, self.computing, self.check = backend, computing, check
        self.todo: queue.SimpleQueue[PendingExchange | None] = queue.SimpleQueue()
        self.under_way: deque[PendingExchange] = deque()
        self.failure: Exception | None = None
        self.told = False
        """Whether the failure was raised."""
        atexit.register(self.exit)
        threading.Thread(target=self._run, name="grace exchanges", daemon=True).start()

    def drain(self, seconds: float = PATIENCE) -> bool:
        """Wait until all that was handed over is done (other ranks may need this one for theirs), and end.

        Returns:
            whether all is.
        """
        deadline = time.monotonic() + seconds
        while self.under_way and self.failure is None and time.monotonic() < deadline:
            self.under_way[0].done.wait(0.05)
            while self.under_way and self.under_way[0].done.is_set():
                self.under_way.popleft()
        self.todo.put(None)
        return all(pending.done.is_set() for pending in self.under_way)

    def arrive(self) -> None:
        """The ranks part: let all that was handed over be done.

        Raises:
            ExchangeError: it is not. Another rank has made fewer steps, and its weights are others.
        """
        done = self.drain()
        if self.told or sys.exc_info()[0] is not None:
            return
        if self.failure is not None or not done:
            self.told = True
            raise self.reason(self.under_way[0].exchange if self.under_way else None)

    def reason(self, exchange: Any) -> Exception:
        """Why an exchange brought nothing."""
        failure = self.failure
        if isinstance(failure, ExchangeError) or exchange is None:
            return failure or ExchangeError(NEVER)
        return exchange.failure(failure or ExchangeError(NEVER))

    def exit(self) -> None:
        """The program ends without ``grace.shutdown()``; what is raised now does not change its status."""
        if self.told or hasattr(sys, "last_value"):  # it fails: others need not be waited for
            self.drain(0 if self.told else PATIENCE_AT_EXIT)
            return
        try:
            self.arrive()
        except ExchangeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def send(self, pending: "PendingExchange") -> None:
        """Hand over the next exchange."""
        while self.under_way and self.under_way[0].done.is_set():
            self.under_way.popleft()
        self.under_way.append(pending)
        self.todo.put(pending)

    def _run(self) -> None:
        while (pending := self.todo.get()) is not None:
            try:
                if self.failure is None:
                    with self.computing():
                        pending.run(self.check)
            except Exception as error:  # the training thread raises it
                self.failure = error
            pending.done.set()


class PendingExchange:
    """One exchange, from the moment it was handed to the thread until its mean is applied."""

    def __init__(self, exchange: Any, exchange_thread: ExchangeThread | None, loss_scale: float):
        self.exchange, self.exchange_thread, self.loss_scale = exchange, exchange_thread, loss_scale
        self.done = threading.Event()
        self.outcomes: list[Outcome] | None = None
        self.traffic = Traffic()
        self.dropped = False

    @classmethod
    def over(cls, outcomes: list[Outcome], loss_scale: float) -> "PendingExchange":
        """One of a checkpoint, which has brought this."""
        pending = cls(None, None, loss_scale)
        pending.outcomes = outcomes
        pending.done.set()
        return pending

    def run(self, check: Callable[[Sequence[Any], Any], None]) -> None:
        """Run all its collectives, and keep what the destination's memory learnt; ``check`` raises if the ranks are not
        at one step."""
        exchange = self.exchange
        exchange.launch()
        while exchange.advance():
            pass
        exchange.wait()
        memory = getattr(exchange.communicator, "answer_memory", None)
        states = [] if memory is None else [part.state for part in memory.whole().values()]
        try:
            self.outcomes = exchange.finish([None] * len(exchange.names), wait=False)
            check([exchange], exchange.communicator.backend)
        except (PayloadError, StepError):
            for state in states:
                state.rollback()
            raise
        for state in states:
            state.commit()

    def collect(self) -> list[Outcome]:
        """What it brought; blocks until it is there."""
        if not self.done.is_set():
            with waiting(self.exchange.place), recorder.phase("wait", "wait", bucket=self.exchange.bucket):
                self.done.wait()
        if self.outcomes is None:
            assert self.exchange_thread is not None
            self.exchange_thread.told = True
            raise self.exchange_thread.reason(self.exchange) from self.exchange_thread.failure
        if self.exchange is not None:
            self.traffic, self.exchange = self.exchange.traffic, None
        return self.outcomes

    def values(self, loss_scale: float) -> dict[str, Any]:
        """What it brought, by the shards' names, in the units of this loss scale; empty if it was dropped."""
        outcomes = self.collect()
        found = {o.variable.name: o.value for o in outcomes if o.value is not None and not self.dropped}
        scale = loss_scale / self.loss_scale
        return found if scale == 1 else {name: in_units(value, scale) for name, value in found.items()}
