"""Compression of pieces of tensors, for communicators whose ranks each own, and average, a piece of every variable."""

from typing import Any

from grace.core.compressor import Compressor, Payload, Tensor
from grace.core.variable import equal_bounds
from grace.errors import PayloadError, payload_of
from grace.kernels import kernels_of


class PiecewiseCompressor(Compressor):
    """Compressor applied piece by piece: piece j of n elements is ``equal_bounds(n, owners)[j]`` of the flat tensor.

    A payload is a list of payloads, one for each owner; a ctx is the pair of bounds and the pieces' ctxs. Memories are
    updated with this compressor, and so with the errors of all pieces together.

    Args:
        inner: the compressor of a piece.
        owners: number of pieces of each tensor.
    """

    def __init__(self, inner: Compressor, owners: int):
        self.inner = inner
        self.owners = owners
        self.traits = inner.traits

    def compress_pieces(self, tensor: Tensor, name: str) -> tuple[list[Payload], Any]:
        """Return a payload for each owner, and the ctx that decodes them."""
        flat = kernels_of(tensor).flat(tensor)
        cuts = equal_bounds(flat.shape[0], self.owners)
        coded = [self.inner.compress(flat[a:b], f"{name}/shard_{j}") for j, (a, b) in enumerate(cuts)]
        return [payload for payload, _ in coded], (cuts, [ctx for _, ctx in coded])

    def decompress(self, payload: Payload, ctx: Any) -> Tensor:
        cuts = ctx[0]
        k = kernels_of(payload[0][0])
        return self.accumulate(payload, ctx, k.zeros((cuts[-1][1],), "float32", payload[0][0]))

    def accumulate(self, payload: Payload, ctx: Any, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        flat, pieces = k.flat(out), []
        for owner, ((a, b), piece, inner_ctx) in enumerate(zip(ctx[0], payload, ctx[1], strict=True)):
            with payload_of(owner):
                pieces.append(self.inner.accumulate(piece, inner_ctx, flat[a:b], weight))
        return out if k.mutable else k.reshape(k.join(pieces), tuple(out.shape))

    def join(self, means: Payload, ctx: Any, out: Tensor) -> Tensor:
        """Return the tensor made of the means of its pieces. Each payload is aggregated alone, so that a vote stays a
        vote."""
        k = kernels_of(out)
        flat, pieces = k.flat(out), []
        for owner, ((a, b), piece, inner_ctx) in enumerate(zip(ctx[0], means, ctx[1], strict=True)):
            try:
                pieces.append(self.inner.aggregate([piece], inner_ctx, flat[a:b], 1))
            except PayloadError as error:
                error.place = owner  # aggregate() has set the index among its single payload: replace it by the rank
                raise
        return out if k.mutable else k.reshape(k.join(pieces), tuple(out.shape))
