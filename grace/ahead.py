"""Exchanges that run on while training goes ahead: bounded staleness, and none."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from grace import tracing
from grace.core.backend import Handle
from grace.core.compressor import Tensor
from grace.core.waiting import waiting
from grace.errors import ExchangeError, PayloadError, StepError
from grace.exchange import Exchange, Group, Outcome, Traffic
from grace.kernels import kernels_of

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
            with waiting(self.exchange.place), tracing.phase("wait", "wait", group=self.exchange.group):
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


@functools.cache
def launched_later(kind: type[Exchange]) -> type[Exchange]:
    """An exchange of this kind whose first collective the courier starts."""

    class Later(kind):  # type: ignore[misc, valid-type]
        """Starts nothing before ``take_off``."""

        first: Any = None

        def _launch(self, collective: Callable[[Tensor], Handle], tensor: Tensor) -> None:
            if self.first is None:
                self.first = (collective, tensor)
            else:
                super()._launch(collective, tensor)

        def take_off(self) -> None:
            """Start the first collective."""
            super()._launch(*self.first)

    return Later


class AheadExchange(Exchange):
    """Sends this step's payloads on their way, and brings the mean of an earlier step.

    What a memory or a compressor learnt by compressing is kept at once if the gradient was finite: the payload will be
    applied whatever becomes of this step.
    """

    def __init__(
        self,
        kind: type[Exchange],
        group: Group,
        gradients: Sequence[Tensor],
        present: Sequence[bool],
        guard: bool,
        traffic: Traffic,
    ):
        communicator: Any = group.communicator
        self.group, self.communicator, self.kernels = group, communicator, kernels_of(_values(gradients[0]))
        self.names = [variable.name for variable in group.variables]
        self.flights: deque[Flight] = communicator.flights[group.variables[0].name]
        # buffers of its own: those of the step before may still be under way
        own = dataclasses.replace(group, wire=None, buffer=None, communicator=communicator.aside())
        self.traffic, self.loss_scale = traffic, communicator.context.loss_scale
        with self._committing(present) as sound:
            inner = launched_later(kind)(own, gradients, present, guard, Traffic())  # type: ignore[arg-type]
            sound += inner.sound
        self.flight = Flight(inner, communicator.courier, self.loss_scale)
        self.flights.append(self.flight)
        self.handle = Handle(lambda: None)

    @contextlib.contextmanager
    def _committing(self, present: Sequence[bool]) -> Iterator[list[Any]]:
        """Keep what is learnt here. Where this rank has no gradient nothing is sent, so what it remembers stays."""
        keepers = self.communicator.keepers.items()
        parts = [part for kind, part in keepers if not kind.startswith("answer_memory")]
        absent = [name for name, here in zip(self.names, present, strict=True) if not here]
        held = [{name: part.state.pop(name) for name in absent if name in part.state} for part in parts]
        sound: list[Any] = []
        yield sound
        spoilt = [
            name for name, ok in zip(self.names, sound, strict=True) if self.communicator.stateful and not bool(ok)
        ]
        for part, kept in zip(parts, held, strict=True):
            for name in [*absent, *spoilt]:
                part.state.rollback(name)
            part.state.update(kept)
            part.state.commit()

    def advance(self) -> bool:
        """The courier does."""
        return False

    def glance(self) -> None:
        """The courier does."""

    def hand_over(self) -> None:
        """To the courier, which must get the same exchanges in the same order on all ranks."""
        communicator: Any = self.communicator
        communicator.courier.send(self.flight)

    def forget(self) -> None:
        """It will never fly."""
        self.flights.remove(self.flight)

    def wait(self) -> None:
        """Nothing that training has to wait for; the step is discarded, and what it brings will be dropped."""
        self.flight.dropped = True

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """The mean of ``staleness`` steps ago; without ``sync`` the sum of the means that have come, and of the oldest
        if there are too many."""
        communicator: Any = self.communicator
        most, due = communicator.staleness if communicator.sync else communicator.ahead, []
        while len(self.flights) > most or (not communicator.sync and self.flights and self.flights[0].landed.is_set()):
            due.append(self.flights.popleft())
        brought = [self._collected(flight) for flight in due]
        brought = [outcomes for outcomes in brought if outcomes]
        if not brought:
            return [Outcome(variable, None, False, pending=True) for variable in self.group.variables]
        return [self._sum(i, [outcomes[i] for outcomes in brought]) for i in range(len(self.names))]

    def _collected(self, flight: Flight) -> list[Outcome]:
        outcomes = flight.collect()
        counted, traffic = flight.traffic, self.traffic
        for name, nbytes in counted.payload_bytes.items():
            traffic.payload_bytes[name] = traffic.payload_bytes.get(name, 0) + nbytes
        traffic.header_bytes += counted.header_bytes
        traffic.sent_bytes += counted.sent_bytes
        traffic.codec_seconds += counted.codec_seconds
        values = flight.values(self.communicator.context.loss_scale)
        return [] if flight.dropped else [dataclasses.replace(o, value=values.get(o.variable.name)) for o in outcomes]

    def _sum(self, i: int, outcomes: list[Outcome]) -> Outcome:
        values = [outcome.value for outcome in outcomes if outcome.value is not None]
        if not values:  # no rank had a gradient then; this rank may have one now, which is not the mean
            return Outcome(self.group.variables[i], None, False, pending=True)
        total = values[0]
        for value in values[1:]:
            total = add(total, value)
        # an overflow shows as NaN, but it is an earlier step's: this one's state is kept
        return Outcome(self.group.variables[i], total, False)


def add(a: Any, b: Any) -> Any:
    """The sum of two means: tensors, or rows of sparse ones."""
    from grace.rows import Slices

    if isinstance(a, Slices):
        k = kernels_of(a.values)
        return Slices(k.concat([a.values, b.values], 0), k.concat([a.rows, b.rows], 0))
    return kernels_of(a).add(a, b)


def scaled(value: Any, factor: float) -> Any:
    """A mean in other units."""
    from grace.rows import Slices

    if isinstance(value, Slices):
        return Slices(scaled(value.values, factor), value.rows)
    return kernels_of(value).combine(factor, value, 0.0, value)


def _values(gradient: Any) -> Any:
    return getattr(gradient, "values", gradient) if isinstance(gradient, tuple) else gradient
