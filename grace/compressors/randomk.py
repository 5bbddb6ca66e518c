"""Random-k sparsification with shared indices."""

import math
from dataclasses import dataclass, replace

from grace.compressors.topk import kept_count
from grace.core.compressor import BucketCodecSpec, Compressor, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions

DrawnIndices = tuple[Shape, Tensor, float]
"""Shape of a variable, the indices drawn at this step, and the factor of the values."""


@dataclass
class RandomK(Compressor):
    """Sends k = max(1, ratio n) entries at distinct indices that every rank draws alike, so that only the
    values travel and the engine can add them up.

    The indices come from the shared stream of (seed, variable, step). With ``unbiased`` the values are
    scaled by n/k, so that E[C(x)] = x; without it ||x - C(x)||^2 = (1 - k/n) ||x||^2 on average, for error
    feedback. Source: Stich et al., NeurIPS 2018, arXiv 1809.07599.

    Args:
        ratio: the part of the elements that is sent, in (0, 1].
        unbiased: scale by n/k (then use no memory).

    >>> import numpy as np
    >>> randomk = RandomK(ratio=0.5)
    >>> int((randomk.decompress(*randomk.compress(np.ones(10, np.float32), "w")) == 1).sum())
    5
    """

    ratio: float = 0.01
    unbiased: bool = False

    name = "randomk"
    sends_values = True
    by_position = True
    biased_traits = Traits(
        category="sparsification",
        fixed_size="by shape",
        contraction=True,
        summable=True,
        communicator="allreduce",
        memory="residual",
    )

    def __post_init__(self) -> None:
        self.check_number("ratio", 0, 1, low_open=True)
        self.check_choice("unbiased", (False, True))

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Traits of a biased contraction, or of an unbiased method."""
        if self.unbiased:
            return replace(self.biased_traits, unbiased=True, contraction=False, memory="none")
        return self.biased_traits

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, DrawnIndices]:
        k = kernels_of(tensor)
        check_positions(math.prod(tensor.shape))
        flat, ctx = k.flat(tensor), self.ctx_of(name, tuple(tensor.shape), tensor)
        return [k.gather(flat, ctx[1])], ctx

    def ctx_of(self, name: str, shape: Shape, like: Tensor) -> DrawnIndices:
        """Return the variable's shape, the indices of this step, and the factor of the values."""
        n, stream = math.prod(shape), self.context.stream(name, shared=True)
        count = kept_count(self.ratio, n)
        return shape, kernels_of(like).random_indices(stream, n, count, like), self._scale(n, count)

    def decompress(self, payload: Payload, ctx: DrawnIndices) -> Tensor:
        k = kernels_of(payload[0])
        return self.accumulate(payload, ctx, k.zeros(ctx[0], "float32", payload[0]))

    def accumulate(self, payload: Payload, ctx: DrawnIndices, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        shape, indices, scale = ctx
        return k.reshape(k.scatter_add(k.flat(out), indices, payload[0], weight * scale), shape)

    def _scale(self, n: int, count: int) -> float:
        # An empty tensor sends no entries.
        return n / count if self.unbiased and count else 1.0

    def sent_indices(self, payload: Payload, ctx: DrawnIndices) -> Tensor | None:
        return ctx[1]

    def bucket_codec(self) -> BucketCodecSpec:
        return "drawn", {"scaled": self.unbiased}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return [TensorSpec("float32", (kept_count(self.ratio, math.prod(shape)),))]
