"""Top-k sparsification."""

import math
from dataclasses import dataclass
from typing import Any

from grace.core.compressor import Payload, Sparsifier, Tensor, Traits
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions, decode, encode, index_bits

CHUNKS = (0, *(1 << bits for bits in range(5, 13)))


def kept(ratio: float, n: int) -> int:
    """How many of n elements a ratio keeps: max(1, ratio n), rounded; none of an empty tensor.

    >>> kept(0.01, 250), kept(0.01, 3), kept(0.01, 0)
    (2, 1, 0)
    """
    return min(n, max(1, round(ratio * n)))


@dataclass
class TopK(Sparsifier):
    """Sends the k = max(1, ratio n) entries of largest magnitude, with their indices, coded as
    their number makes smallest (int32, 16 bits or a bitmap).

    Exact; of equal magnitudes the lower index is kept. ||x - C(x)||^2 <= (1 - k/n) ||x||^2, and error
    feedback makes it converge.

    With ``chunk`` it sends the c = max(1, ratio chunk) largest of each ``chunk`` elements, one after the other, and of
    the m < chunk that are left at the end the ceil(c m / chunk) largest: k = ceil(c n / chunk) in all. The same bound
    holds; a little less of ||x||^2 travels than in as many of the largest of all, 1 % less of Gaussian elements with
    1024 a chunk. In return x is read once, on GPUs too, and an index takes 16 bits however large the tensor is.
    Sources: Aji and Heafield, EMNLP 2017, arXiv 1704.05021; Stich et al., "Sparsified SGD with memory", NeurIPS 2018,
    arXiv 1809.07599.

    Args:
        ratio: the part of the elements that is sent, in (0, 1].
        chunk: how many elements each choose their largest, a power of two
            from 32 to 4096; 0: all together.

    >>> import numpy as np
    >>> topk = TopK(ratio=0.5)
    >>> topk.decompress(*topk.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0., -4., 3., 0.], dtype=float32)
    """

    ratio: float = 0.01
    chunk: int = 0

    name = "topk"
    traits = Traits(category="sparsification", fixed_size=True, contraction=True, memory="residual")

    def __post_init__(self) -> None:
        self.check_number("ratio", 0, 1, low_open=True)
        self.check_integer("chunk", 0)
        self.check_choice("chunk", CHUNKS)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Any]:
        k = kernels_of(tensor)
        n = check_positions(math.prod(tensor.shape))
        flat = k.flat(tensor)
        indices = k.topk_chunks(flat, *self._chunks) if self._chunks else k.topk(flat, kept(self.ratio, n))
        coded = encode(k, indices, n, fixed=True, chunk=self.chunk)
        return [k.gather(flat, indices), coded], tuple(tensor.shape)

    def sent_indices(self, payload: Payload, ctx: Any) -> Tensor | None:
        coded, n = payload[1], math.prod(ctx)
        return decode(kernels_of(coded), coded, n, payload[0].shape[0], self._chunks)

    @property
    def _chunks(self) -> tuple[int, int] | None:
        """The elements of a chunk, and how many of them are sent."""
        return (self.chunk, kept(self.ratio, self.chunk)) if self.chunk else None

    def count(self, shape: tuple[int, ...]) -> int:
        n = math.prod(shape)
        if not self.chunk:
            return kept(self.ratio, n)
        return -(-kept(self.ratio, self.chunk) * n // self.chunk)

    def bucket_codec(self) -> tuple[str, dict[str, Any]]:
        if self._chunks is None:
            return "largest", {}
        return "largest of chunks", {"chunk": self.chunk, "kept": self._chunks[1]}

    def wire_bits(self, shape: tuple[int, ...]) -> float | None:
        n = max(1, math.prod(shape))
        count = self.count((n,))
        return (32 * count + index_bits(n, count, self.chunk)) / n
