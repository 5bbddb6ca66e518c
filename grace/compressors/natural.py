"""Natural compression: powers of two."""

import math
from dataclasses import dataclass

from grace.core.compressor import Accumulating, BucketCodecSpec, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of


@dataclass
class Natural(Accumulating):
    """Rounds each element stochastically to one of the two powers of two around it; one byte per element.

    With 2^e <= |x| < 2^(e+1):

        C(x) = sign(x) 2^(e+1) with probability |x| / 2^e - 1, else sign(x) 2^e,    C(0) = 0

    so E[C(x)] = x and E(C(x) - x)^2 <= x^2 / 8. A code is the sign and 7 bits: zero, or an exponent from -94 to
    32, which others are clipped to (2^-94 = 5e-29, 2^32 = 4e9); unbiased within that range. Source: Horvath et
    al., "Natural compression for distributed deep learning", arXiv 1905.10988.

    >>> import numpy as np
    >>> natural = Natural()
    >>> natural.decompress(*natural.compress(np.float32([0, -0.25, 8]), "w"))
    array([ 0. , -0.25, 8. ], dtype=float32)
    """

    name = "natural"
    traits = Traits(category="quantization", fixed_size="by shape", unbiased=True, shardable=True)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        return [k.round_powers(k.flat(tensor), self.context.stream(name))], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        return k.reshape(k.add_powers(k.flat(out), payload[0], weight), ctx)

    def variance(self, n: int) -> float | None:
        return 1 / 8

    def bucket_codec(self) -> BucketCodecSpec:
        return "powers", {}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return [TensorSpec("uint8", (math.prod(shape),))]
