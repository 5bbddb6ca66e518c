"""What an exchange does for methods of several dependent reductions."""

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from grace.core.compressor import Tensor
from grace.exchange.bucket import Outcome
from grace.exchange.rounds_at_once import RoundsCodec
from grace.exchange.tracing import recorder
from grace.exchange.wire import Wire, in_range


class Rounds:
    """A part of :class:`grace.exchange.base.Exchange`: the variables of a bucket go through the rounds together."""

    bucket: Any
    codec: Any
    communicator: Any
    compressor: Any
    encoded: list[tuple[Any, Any]]
    kernels: Any
    names: list[str]
    own_place: Any
    present: list[bool]
    round: int
    spoilt: list[bool]
    traits: Any
    wire: Wire
    _compensated: Callable[[Tensor, str], Tensor]
    _leave: Callable[[Tensor, float], None]
    _mean: Callable[[], list[Any]]
    _send: Callable[[list[Any], list[Tensor] | None, float], None]
    _statuses_of_round: Callable[[], Any]
    inputs: list[Tensor]
    """What is compressed: the gradients, and what the memory adds to them."""
    ranged: list[Any]
    """Whether these are in range, as far as somebody has to know."""
    rounds: Generator[list[Any], list[Any], list[tuple[Any, Any]]]
    wires_sent: list[Wire]
    """The layout of each round's payloads."""

    def _start_rounds(self, gradients: Sequence[Tensor], began: float) -> None:
        """Send the first payloads."""
        self.inputs, self.ranged = [], []
        self.encoded = [(None, None)] * len(self.names)
        tensors: Iterable[Tensor] = map(self._taken, gradients, self.names)
        if recorder.active is not None:  # then first all of the one, and then all of the other
            tensors = recorder.each("compensate", self.names, self._taken, gradients)
        self.rounds = self.compressor.exchange_all(tensors, self.names)
        first = recorder.shared("compress", self.bucket.variables, next, self.rounds)
        self._send(first, self.inputs, began)
        self.wires_sent = [self.wire]

    def _taken(self, gradient: Tensor, name: str) -> Tensor:
        """One variable's input, made when the method takes it; what is looked at at once is in the cache."""
        tensor = self._compensated(gradient, name)
        self.inputs.append(tensor)
        if not self.traits.carries_nonfinite:
            self.ranged.append(in_range(self.kernels, tensor, (), self.communicator.stateful))
        return tensor

    def _next_round(self, began: float) -> None:
        """Take the means that came, and send the payloads that follow."""
        with recorder.phase("unpack", bucket=self.bucket):
            self._statuses_of_round()
            means = self._mean() if self.codec is None else []
        self.round += 1
        if self.codec is not None:
            self.wire, self.bucket.buffer = self.codec.follow(self.present, self.own_place())
            self._leave(self.bucket.buffer, began)
            return
        payloads = recorder.shared("compress", self.bucket.variables, self.rounds.send, means)
        self._send(payloads, None, began)
        self.wires_sent.append(self.wire)

    def _codec_of_rounds(self) -> RoundsCodec | None:
        """A codec of the bucket, by the wires that were sent."""
        return RoundsCodec.of_rounds(self.bucket, self.kernels, self.wires_sent)

    def _returned(self, means: list[Any], ends: str) -> list[tuple[Any, Any]]:
        """What the method returns when it receives its last means."""
        try:
            self.rounds.send(means)
        except StopIteration as end:
            return end.value
        raise TypeError("a compressor's exchange() yielded more payloads than its traits.rounds")

    def _last(self, i: int, mean: Any, out: Tensor | None, name: str) -> Outcome:
        """The payloads of the last round are aggregated already: decode them."""
        payload, ctx = self.encoded[i]
        variable = self.bucket.variables[i]
        if out is None:
            out = self.kernels.zeros(variable.shape, "float32", self.bucket.buffer)
        return Outcome(variable, self.compressor.aggregate([payload], ctx, out, 1), False)
