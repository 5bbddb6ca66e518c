"""Quantile sketch: equal-count buckets."""

import math
from dataclasses import dataclass

from grace.core.compressor import Accumulating, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of


@dataclass
class Sketch(Accumulating):
    """Sends each element's quantile bucket, in ceil(log2(quantiles)) bits, and the buckets' means.

        C(x) = mean of the bucket that x is in;  the element of rank r among n is in bucket floor(r quantiles / n)

    Buckets are exact: the values are sorted once, sizes differ by at most one, and of equal elements the lower
    index ranks lower. A tensor of fewer elements than quantiles has one bucket for each. Source: Jiang et
    al., "SketchML", SIGMOD 2018 (which approximates the quantiles by a sketch of the stream).

    Args:
        quantiles: number of buckets, 2 to 256.

    >>> import numpy as np
    >>> sketch = Sketch(quantiles=2)
    >>> sketch.decompress(*sketch.compress(np.float32([1, -4, 3, -2]), "w"))
    array([ 2., -3., 2., -3.], dtype=float32)
    """

    quantiles: int = 64

    name = "sketch"
    traits = Traits(category="quantization", fixed_size="by shape", contraction=True, memory="residual")

    def __post_init__(self) -> None:
        self.check_integer("quantiles", 2, 256)

    def _buckets(self, shape: Shape) -> tuple[int, int]:
        """Return the number of buckets of a tensor of this shape, and the bits of a bucket's number."""
        buckets = max(1, min(self.quantiles, math.prod(shape)))
        # A single bucket's numbers would need no bits, and kernels pack at least one.
        return buckets, max(1, (buckets - 1).bit_length())

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k, shape = kernels_of(tensor), tuple(tensor.shape)
        buckets, bits = self._buckets(shape)
        numbers, means = k.quantile_buckets(k.flat(tensor), buckets)
        return [k.pack(numbers, bits), means], shape

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        packed, means = payload
        return k.reshape(k.add_table(k.flat(out), packed, self._buckets(ctx)[1], means, None, weight), ctx)

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        n, (buckets, bits) = math.prod(shape), self._buckets(shape)
        return [TensorSpec("uint8", ((n * bits + 7) // 8,)), TensorSpec("float32", (buckets,))]
