"""Top-k sparsification."""

import math
from dataclasses import dataclass
from typing import Any

from grace.core.compressor import Payload, Sparsifier, Tensor, Traits
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions, encode, index_bits


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
    feedback makes it converge. Sources: Aji and Heafield, EMNLP 2017, arXiv 1704.05021; Stich et al.,
    "Sparsified SGD with memory", NeurIPS 2018, arXiv 1809.07599.

    Args:
        ratio: the part of the elements that is sent, in (0, 1].

    >>> import numpy as np
    >>> topk = TopK(ratio=0.5)
    >>> topk.decompress(*topk.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0., -4., 3., 0.], dtype=float32)
    """

    ratio: float = 0.01

    name = "topk"
    traits = Traits(category="sparsification", fixed_size=True, contraction=True, memory="residual")

    def __post_init__(self) -> None:
        self.check_number("ratio", 0, 1, low_open=True)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Any]:
        k = kernels_of(tensor)
        n = check_positions(math.prod(tensor.shape))
        flat = k.flat(tensor)
        indices = k.topk(flat, kept(self.ratio, n))
        coded = encode(k, indices, n, fixed=True)
        return [k.gather(flat, indices), coded], tuple(tensor.shape)

    def count(self, shape: tuple[int, ...]) -> int | None:
        return kept(self.ratio, math.prod(shape))

    def bucket_codec(self) -> tuple[str, dict[str, Any]]:
        return "largest", {}

    def wire_bits(self, shape: tuple[int, ...]) -> float | None:
        n = max(1, math.prod(shape))
        count = kept(self.ratio, n)
        return (32 * count + index_bits(n, count)) / n
