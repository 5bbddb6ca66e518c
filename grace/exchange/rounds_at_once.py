"""Whole buckets of methods of several rounds: a codec writes each round's wire, and takes the sums that come."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grace.core.compressor import Compressor, Tensor
from grace.exchange.at_once import BucketCodec, Turns, codec_of
from grace.exchange.bucket import Bucket
from grace.exchange.wire import Wire, mark
from grace.kernels import Kernels


class Started:
    """What a method kept for its next step's start, as a memory tells of residuals."""

    def __init__(self, compressor: Any):
        self.compressor = compressor

    @property
    def state(self) -> Any:
        return self.compressor.state

    def recall(self, name: str) -> tuple[float, Tensor | None, float]:
        return 1.0, self.state.get(name), 1.0

    def keep(self, name: str, value: Tensor) -> None:
        if self.compressor.warm_start:
            self.state[name] = value


class RoundsCodec(BucketCodec):
    """The codec of a bucket whose payloads are summed twice, with a wire for each round.

    What the last sum comes to is kept as residuals are, in two buffers that take turns; both are only when all is
    decoded.
    """

    def __init__(self, codec: Any, bucket: Bucket, kernels: Kernels, wires: Sequence[Wire]):
        super().__init__(codec, bucket, kernels, [None] * len(bucket.names))
        self.wires, (self.wire, second) = list(wires), wires
        shapes = [placed.shape for (placed,) in second.placed()]
        self.started = Turns(Started(bucket.communicator.compressor), kernels, self.names, shapes)
        self.buffers = [kernels.zeros((wire.length,), wire.dtype, bucket.buffer) for wire in wires]
        self.round = 1

    @classmethod
    def of_rounds(cls, bucket: Bucket, kernels: Kernels, wires: Sequence[Wire]) -> "RoundsCodec | None":
        """The codec of a bucket that has been exchanged once, by these wires; None if there is none."""
        compressor, memory = bucket.communicator.compressor, bucket.communicator.memory
        found = codec_of(compressor, [memory], kernels, bucket, bucket.buffer)
        if found is None or not memory.stateful or not all(wire.sums and wire.body for wire in wires):
            return None
        kind, chosen = found
        payloads = [[*one, *other] for one, other in zip(*(wire.placed() for wire in wires), strict=True)]
        if not kind.takes(payloads):
            return None
        codec = kind([variable.numel for variable in bucket.variables], payloads, **chosen)
        return cls(codec, bucket, kernels, wires)

    def fits(self, exchange: Any) -> bool:
        now = exchange.kernels, exchange.room
        return now == (self.kernels, self.wire.header - len(self.names))

    def encode(
        self,
        gradients: Sequence[Tensor],
        compressor: Compressor,
        wire: Tensor,
        kept: bool,
        present: Sequence[bool],
        places: Sequence[int],
    ) -> Any:
        if not self.started.turn(gradients[0]):
            return None
        self.round = 1
        self.codec.start_from(self.started.rows[:, 1], self.started.rows[:, 2])
        return super().encode(gradients, compressor, self.buffers[0], kept, present, places)

    def receive(self, total: Tensor, count: float) -> Tensor:
        """Take a round's sum; of each variable 1.0 if it is finite, else 0.0, on the device."""
        found: Tensor = self.codec.receive(total, count, self.round == len(self.wires))
        return found

    def follow(self, present: Sequence[bool], places: Sequence[int]) -> tuple[Wire, Tensor]:
        """The next round's layout and wire."""
        wire, buffer = self.wires[self.round], self.buffers[self.round]
        self.round += 1
        self.codec.follow(buffer, wire.end([mark(here, True, wire.sums) for here in present], places))
        return wire, buffer

    def keep(self) -> None:
        """Nothing yet: residuals are what the last round leaves out."""

    def decode(self, outs: Sequence[Tensor], wires: Sequence[Tensor], count: float, loss_scale: float) -> bool:
        k, given = self.kernels, outs
        places = k.addresses(outs)
        if places is None:
            given = [k.blank(tuple(out.shape), "float32", self.buffers[0]) for out in outs]
            places = k.addresses(given)
        self.codec.decode(np.array(places, np.uint64), (), count, loss_scale)
        for out, mean in zip(outs, given, strict=True):
            if out is not mean:
                k.divide(out, mean, 1)
        self.turns.keep()
        self.started.keep()
        return True
