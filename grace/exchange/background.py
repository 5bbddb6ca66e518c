"""Exchanges that run beside training, in a thread of their own."""

from __future__ import annotations

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
from grace.exchange.sparse_rows import scaled
from grace.exchange.tracing import recorder

PATIENCE, PATIENCE_AT_EXIT = 60.0, 5.0
"""Seconds to wait at the end for other ranks that are behind, and in a script that failed."""


NEVER = "it has not come back. All ranks must make as many steps"


class Courier:
    """A thread that runs exchanges one after the other, over a backend of its own.

    Every rank hands over the same exchanges in the same order, so that theirs are the same at every moment.

    Args:
        backend: see :meth:`grace.core.backend.Backend.beside`.
        computing: the context that an exchange computes in.
        check: raises if the ranks of an exchange were not at one step, over its backend.
    """

    def __init__(self, backend: Any, computing: Callable[[], Any], check: Callable[[Sequence[Any], Any], None]):
        self.backend, self.computing, self.check = backend, computing, check
        self.todo: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self.under_way: deque[Flight] = deque()
        self.failure: Exception | None = None
        self.told = False
        """Whether the failure was raised."""
        atexit.register(self.exit)
        threading.Thread(target=self._run, name="grace courier", daemon=True).start()

    def land(self, seconds: float = PATIENCE) -> bool:
        """Wait until all that was handed over has landed (other ranks may need this one for theirs), and end.

        Returns:
            whether all has.
        """
        deadline = time.monotonic() + seconds
        while self.under_way and self.failure is None and time.monotonic() < deadline:
            self.under_way[0].landed.wait(0.05)
            while self.under_way and self.under_way[0].landed.is_set():
                self.under_way.popleft()
        self.todo.put(None)
        return all(flight.landed.is_set() for flight in self.under_way)

    def arrive(self) -> None:
        """The ranks part: let all that was handed over land.

        Raises:
            ExchangeError: it does not. Another rank has made fewer steps, and its weights are others.
        """
        landed = self.land()
        if self.told or sys.exc_info()[0] is not None:
            return
        if self.failure is not None or not landed:
            self.told = True
            raise self.reason(self.under_way[0].exchange if self.under_way else None)

    def reason(self, exchange: Any) -> Exception:
        """Why an exchange brought nothing."""
        failure = self.failure
        if isinstance(failure, ExchangeError) or exchange is None:
            return failure or ExchangeError(NEVER)
        return exchange.lost(failure or ExchangeError(NEVER))

    def exit(self) -> None:
        """The program ends without ``grace.shutdown()``; what is raised now does not change its status."""
        if self.told or hasattr(sys, "last_value"):  # it fails: others need not be waited for
            self.land(0 if self.told else PATIENCE_AT_EXIT)
            return
        try:
            self.arrive()
        except ExchangeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(1)

    def send(self, flight: Flight) -> None:
        """Hand over the next exchange."""
        while self.under_way and self.under_way[0].landed.is_set():
            self.under_way.popleft()
        self.under_way.append(flight)
        self.todo.put(flight)

    def _run(self) -> None:
        while (flight := self.todo.get()) is not None:
            try:
                if self.failure is None:
                    with self.computing():
                        flight.fly(self.check)
            except Exception as error:  # the training thread raises it
                self.failure = error
            flight.landed.set()


class Flight:
    """One exchange, from the moment it was handed to the courier until its mean is applied."""

    def __init__(self, exchange: Any, courier: Courier | None, loss_scale: float):
        self.exchange, self.courier, self.loss_scale = exchange, courier, loss_scale
        self.landed = threading.Event()
        self.outcomes: list[Outcome] | None = None
        self.traffic = Traffic()
        self.dropped = False

    @classmethod
    def over(cls, outcomes: list[Outcome], loss_scale: float) -> Flight:
        """One of a checkpoint, which has brought this."""
        flight = cls(None, None, loss_scale)
        flight.outcomes = outcomes
        flight.landed.set()
        return flight

    def fly(self, check: Callable[[Sequence[Any], Any], None]) -> None:
        """Run all its collectives, and keep what the destination's memory learnt; ``check`` raises if the ranks are not
        at one step."""
        exchange = self.exchange
        exchange.take_off()
        while exchange.advance():
            pass
        exchange.wait()
        memory = getattr(exchange.communicator, "answer_memory", None)
        try:
            self.outcomes = exchange.finish([None] * len(exchange.names), wait=False)
            check([exchange], exchange.communicator.backend)
        except (PayloadError, StepError):
            if memory is not None:
                memory.state.rollback()
            raise
        if memory is not None:
            memory.state.commit()

    def collect(self) -> list[Outcome]:
        """What it brought; blocks until it is there."""
        if not self.landed.is_set():
            with waiting(self.exchange.place), recorder.phase("wait", "wait", group=self.exchange.group):
                self.landed.wait()
        if self.outcomes is None:
            assert self.courier is not None
            self.courier.told = True
            raise self.courier.reason(self.exchange) from self.courier.failure
        if self.exchange is not None:
            self.traffic, self.exchange = self.exchange.traffic, None
        return self.outcomes

    def values(self, loss_scale: float) -> dict[str, Any]:
        """What it brought, by the pieces' names, in the units of this loss scale; empty if it was dropped."""
        outcomes = self.collect()
        found = {o.variable.name: o.value for o in outcomes if o.value is not None and not self.dropped}
        scale = loss_scale / self.loss_scale
        return found if scale == 1 else {name: scaled(value, scale) for name, value in found.items()}
