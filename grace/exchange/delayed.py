"""Exchanges that run on while training goes ahead: bounded staleness, and none."""

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

from grace.core.backend import Handle
from grace.core.compressor import Tensor
from grace.exchange.background import ExchangeThread, PendingExchange
from grace.exchange.base import Exchange
from grace.exchange.bucket import Carrier, Contribution, Outcome, Traffic
from grace.exchange.sparse_rows import add, values_of
from grace.kernels import kernels_of


class Delaying(Carrier, Protocol):
    """What a delayed round trip asks of its communicator besides.

    Attributes:
        staleness: how many steps later a mean is applied.
        sync: False to apply means as they come.
        ahead: how many may be under way then.
        pending_exchanges: by the first variable of a bucket.
        exchange_thread: runs them.
    """

    staleness: int
    sync: bool
    ahead: int
    pending_exchanges: dict[str, deque[PendingExchange]]
    exchange_thread: ExchangeThread

    def aside(self) -> Carrier: ...


@functools.cache
def launched_later(kind: type[Exchange]) -> type[Exchange]:
    """An exchange of this kind whose first collective the thread starts."""

    class Later(kind):  # type: ignore[misc, valid-type]
        """Starts nothing before ``launch``."""

        first: Any = None

        def _launch(self, collective: Callable[[Tensor], Handle], tensor: Tensor) -> None:
            if self.first is None:
                self.first = (collective, tensor)
            else:
                super()._launch(collective, tensor)

        def launch(self) -> None:
            """Start the first collective."""
            super()._launch(*self.first)

    return Later


class DelayedExchange(Exchange):
    """Sends this step's payloads on their way, and brings the mean of an earlier step.

    What a memory or a compressor learnt by compressing is kept at once if the gradient was finite: the payload will be
    applied whatever becomes of this step.
    """

    communicator: Delaying

    def __init__(self, kind: type[Exchange], contribution: Contribution):
        bucket, gradients, present, guard, traffic = contribution
        communicator = cast(Delaying, bucket.communicator)
        self.bucket, self.communicator, self.kernels = bucket, communicator, kernels_of(values_of(gradients[0]))
        self.names = [variable.name for variable in bucket.variables]
        self.pending_exchanges: deque[PendingExchange] = communicator.pending_exchanges[bucket.variables[0].name]
        # buffers of its own: those of the step before may still be under way
        own = dataclasses.replace(bucket, wire=None, buffer=None, communicator=communicator.aside())
        self.traffic, self.loss_scale = traffic, communicator.context.loss_scale
        with self._committing(present) as sound:
            mine = Contribution(own, gradients, present, guard, Traffic())
            inner = launched_later(kind)(mine)  # type: ignore[arg-type]
            sound += inner.sound
        self.pending = PendingExchange(inner, communicator.exchange_thread, self.loss_scale)
        self.pending_exchanges.append(self.pending)
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
        if tensors := [ok for ok in sound if not isinstance(ok, bool)]:  # on a device: read once for all
            (sound,) = self.kernels.read([self.kernels.full(sound, "float32", tensors[0])])
        spoilt = [
            name for name, ok in zip(self.names, sound, strict=True) if self.communicator.stateful and not bool(ok)
        ]
        for part, kept in zip(parts, held, strict=True):
            for name in [*absent, *spoilt]:
                part.state.rollback(name)
            part.state.update(kept)
            part.state.commit()

    def advance(self) -> bool:
        """The thread does."""
        return False

    def glance(self) -> None:
        """The thread does."""

    def hand_over(self) -> None:
        """To the thread, which must get the same exchanges in the same order on all ranks."""
        self.communicator.exchange_thread.send(self.pending)

    def forget(self) -> None:
        """It will never run."""
        self.pending_exchanges.remove(self.pending)

    def wait(self) -> None:
        """Nothing that training has to wait for; the step is discarded, and what it brings will be dropped."""
        self.pending.dropped = True

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        """The mean of ``staleness`` steps ago; without ``sync`` the sum of the means that have come, and of the oldest
        if there are too many."""
        communicator = self.communicator
        most, due = communicator.staleness if communicator.sync else communicator.ahead, []
        while len(self.pending_exchanges) > most or (
            not communicator.sync and self.pending_exchanges and self.pending_exchanges[0].done.is_set()
        ):
            due.append(self.pending_exchanges.popleft())
        brought = [self._collected(pending) for pending in due]
        brought = [outcomes for outcomes in brought if outcomes]
        if not brought:
            return [Outcome(variable, None, False, pending=True) for variable in self.bucket.variables]
        return [self._sum(i, [outcomes[i] for outcomes in brought]) for i in range(len(self.names))]

    def _collected(self, pending: PendingExchange) -> list[Outcome]:
        began = time.perf_counter()
        outcomes = pending.collect()
        counted, traffic = pending.traffic, self.traffic
        traffic.wait_seconds += time.perf_counter() - began
        for name, nbytes in counted.payload_bytes.items():
            traffic.payload_bytes[name] = traffic.payload_bytes.get(name, 0) + nbytes
        traffic.header_bytes += counted.header_bytes
        traffic.sent_bytes += counted.sent_bytes
        traffic.codec_seconds += counted.codec_seconds
        values = pending.values(self.communicator.context.loss_scale)
        return [] if pending.dropped else [dataclasses.replace(o, value=values.get(o.variable.name)) for o in outcomes]

    def _sum(self, i: int, outcomes: list[Outcome]) -> Outcome:
        values = [outcome.value for outcome in outcomes if outcome.value is not None]
        if not values:  # no rank had a gradient then; this rank may have one now, which is not the mean
            return Outcome(self.bucket.variables[i], None, False, pending=True)
        total = values[0]
        for value in values[1:]:
            total = add(total, value)
        # an overflow shows as NaN, but it is an earlier step's: this one's state is kept
        return Outcome(self.bucket.variables[i], total, False)
