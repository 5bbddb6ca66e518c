"""What an exchange does with payloads that do not decode: all ranks give up together, and say why."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from grace.core.compressor import Tensor
from grace.errors import PayloadError, payload_of
from grace.exchange.wire import REFUSED, Wire

MOST_BYTES, MOST_BYTES_PER_ELEMENT = 1 << 20, 64
"""What a payload may take, whatever the method: sizes that come off the wire may be anything."""
VARIES = (
    "Where that depends on the data the compressor must say so: traits = Traits(..., fixed_size=False), or "
    "tensors_size_are_same=False"
)


class Refusing:
    """A part of :class:`grace.exchange.base.Exchange`.

    Payloads that all ranks receive are refused by all of them. Where one rank decodes for the others, which wait for
    its answer, the answer says that there is none. What is found between two collectives waits for the end of the
    exchange, so that every rank takes part in the same collectives.
    """

    communicator: Any
    compressor: Any
    bucket: Any
    kernels: Any
    names: list[str]
    wire: Any
    handle: Any
    sizing: bool
    comparing: bool
    _go: Callable[[], None]
    refusal: PayloadError | None = None
    """Why nothing can come of this any more."""
    refused: str | None = None
    """The variable whose payloads this rank could not decode while the others wait for its answer."""
    withheld: PayloadError | None = None
    """Why this rank sends no payload of a variable, which all ranks learn by its status."""

    def decoding(self, decode: Callable[..., Any], sender: int | None = None) -> Callable[..., Any]:
        """``decode``, whose last argument is a variable's name, with errors that say whose payload it was: the
        ``sender``'s, if there is only one."""

        def run(*args: Any) -> Any:
            try:
                return decode(*args)
            except PayloadError as error:
                error.place = error.place if sender is None else sender
                raise self.undecoded(error, args[-1]) from error

        return run

    def undecoded(self, error: PayloadError, name: str) -> PayloadError:
        """The error of a payload that cannot be decoded."""
        context, sender = self.communicator.context, "another rank" if error.place is None else f"rank {error.place}"
        return PayloadError(
            f"rank {context.rank} of {context.size}: what {sender} sent of {name!r} at step {context.step} is no "
            f"payload of {self.compressor.spec}: {error}. It was damaged on its way, or that rank runs other code"
        )

    def refuse(self, error: PayloadError, name: str) -> None:
        """Payloads of a variable cannot be decoded, and the others wait for an answer: they are told in it."""
        if self.refusal is None:
            self.refused, self.refusal = name, self.undecoded(error, name)

    def check_refused(self, statuses: Sequence[Sequence[float]], first: int = 0) -> None:
        """Give up if an answer says that its sender could not decode what it got; ``statuses`` are those of the
        answers, that of rank ``first`` first."""
        if why := self.refusal or self.withheld:
            raise why
        context = self.communicator.context
        for rank, told in enumerate(statuses, first):
            if REFUSED in told:
                raise PayloadError(
                    f"rank {context.rank} of {context.size}: rank {rank} could not decode what it was sent of "
                    f"{self.names[list(told).index(REFUSED)]!r} at step {context.step}; its own error says more"
                )

    def _withhold(self, payloads: Sequence[Any], marks: list[Any]) -> tuple[Sequence[Any], list[Any]]:
        """What to send: payloads that are laid out otherwise than at the first step have no room in the wire. Zeros
        travel in place of all of them then, and a status that all ranks give up by."""
        before = iter(zip(self.bucket.wire.lengths, self.names, payloads, strict=True))
        shapes = iter(self.bucket.wire.shapes)
        for i, (length, name, payload) in enumerate(before):
            was, now = [next(shapes) for _ in range(length)], [tuple(tensor.shape) for tensor in payload]
            if was != now:
                context = self.communicator.context
                self.withheld = PayloadError(
                    f"rank {context.rank} of {context.size}: {self.compressor.spec}: the payload of {name!r} has the "
                    f"shapes {now} at step {context.step}, and had {was} at the first. {VARIES}"
                )
                mark = math.nan if self.communicator.sums else REFUSED
                return self.bucket.wire.zeros(self.bucket.buffer), [*marks[:i], mark, *marks[i + 1 :]]
        return payloads, marks

    def check_withheld(self, ranks: Sequence[Sequence[float]]) -> None:
        """Give up if a rank's statuses, or the sum of all ranks', say that it sent no payload."""
        for rank, told in enumerate(ranks):
            for name, status in zip(self.names, told, strict=True):
                if status == REFUSED if not self.communicator.sums else math.isnan(status):
                    raise self.withheld or self.withheld_by("another rank" if self.communicator.sums else rank, name)

    def withheld_by(self, rank: Any, name: str) -> PayloadError:
        """The error about a payload that a rank did not send."""
        context, who = self.communicator.context, rank if isinstance(rank, str) else f"rank {rank}"
        return PayloadError(
            f"rank {context.rank} of {context.size}: {who} has not sent its payload of {name!r} at step "
            f"{context.step}, which is laid out otherwise than at the first; its own error says more"
        )

    def _send_compared(self) -> bool:
        """All ranks have told how their payloads are laid out: send them if that is alike; False if not, which all
        ranks see."""
        told = [self.kernels.to_list(marks) for marks in self.handle.result()]
        self.sizing = self.comparing = False
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                i = next(i for i, (a, b) in enumerate(zip(told[0], theirs, strict=True)) if a != b) // 2
                first, other = told[0][2 * i], theirs[2 * i]
                sizes = "other shapes" if first == other else f"{first:.0f} bytes on rank 0, and {other:.0f}"
                self.bucket.wire = None
                self.refusal = PayloadError(
                    f"{self.compressor.spec}: the payload of {self.names[i]!r} has {sizes} on rank {rank}. {VARIES}"
                )
                return False
        self.bucket.compared = True
        self._go()
        return True

    def _layout(self, rank: int, sizes: Tensor) -> Wire:
        """The layout of a rank's wire, by the sizes that it sent."""
        most = sum(MOST_BYTES + MOST_BYTES_PER_ELEMENT * variable.numel for variable in self.bucket.variables)
        try:
            with payload_of(rank):
                return self.wire.resized(self.kernels.to_list(sizes), most)
        except PayloadError as error:
            raise self.undecoded(error, self.bucket.ends) from error
