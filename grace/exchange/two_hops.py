"""Small sums in two hops, on engines whose own go round a ring."""

from collections.abc import Sequence
from typing import Any

from grace.core.compressor import Tensor
from grace.exchange.base import Exchange
from grace.exchange.bucket import Contribution, Outcome
from grace.kernels import kernels_of

FEWEST_RANKS = 4
MOST_BYTES = 1 << 18
"""Of a wire that is summed so: beyond, bytes matter and not hops."""


class TwoHopExchange(Exchange):
    """The sum of a wire as an all-to-all of W parts, each of which one rank adds up, and an all-gather of the sums.

    A ring sends as many bytes, 2 (W-1)/W of the wire, in 2 (W-1) messages that wait for each other. Parts are added in
    the order of ranks, in float32 (float64 for that) and rounded once, so that all ranks have the same bits.
    """

    by_codec = True
    halfway = False
    """Whether parts are on their way to those who add them up."""

    @classmethod
    def suits(cls, contribution: Contribution) -> bool:
        """Whether sums of this bucket are made so; the same on every rank."""
        bucket, gradient = contribution.bucket, contribution.gradients[0]
        backend, device = bucket.communicator.backend, getattr(gradient, "device", None)
        small = bucket.nbytes <= MOST_BYTES or not bucket.communicator.compressor.traits.exact
        return backend.by_ring and backend.size >= FEWEST_RANKS and small and getattr(device, "type", "cpu") == "cpu"

    def _go(self) -> None:
        k, size = self.kernels, self.communicator.context.size
        wire = k.to_bytes(self.bucket.buffer)
        if k.nbytes(wire) > MOST_BYTES or size < FEWEST_RANKS:
            super()._go()
            return
        item = k.nbytes(wire) // max(1, int(self.bucket.buffer.shape[0]))
        self.length, self.halfway = k.nbytes(wire), True
        rest = -self.length % (size * item)
        self._launch(self.communicator.backend.alltoall, k.join([wire, k.zeros((rest,), "uint8", wire)]))

    def advance(self) -> bool:
        """Start the next dependent collective; False if there is none (left)."""
        if not self.halfway:
            return super().advance()
        self.wait()
        k, dtype = self.kernels, self.kernels.dtype(self.bucket.buffer)
        parts = [_numbers(part, dtype) for part in self.handle.result()]
        total = k.zeros(tuple(parts[0].shape), "float64" if dtype == "float64" else "float32", parts[0])
        for part in parts:
            total = k.add(total, part)
        self.halfway, whole = False, list[Tensor]()

        def joined(sums: list[Tensor]) -> list[Tensor]:
            if not whole:
                whole.append(_numbers(k.join(list(sums))[: self.length], dtype))
            return whole

        mine = k.to_bytes(k.cast(total, dtype))
        self._launch(lambda wire: self.communicator.backend.allgather(wire).map(joined), mine)
        return True

    def finish(self, outs: Sequence[Tensor | None], wait: bool = True) -> list[Outcome]:
        if self.halfway:
            self.advance()
            wait = True
        return super().finish(outs, wait)


def _numbers(raw: Tensor, dtype: str) -> Any:
    """Bytes as the numbers that they are."""
    k = kernels_of(raw)
    one = k.nbytes(k.zeros((1,), dtype, raw))
    return k.from_bytes(raw, dtype, (k.nbytes(raw) // one,))
