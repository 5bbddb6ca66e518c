"""1-bit SGD: two values per tensor."""

import math
from dataclasses import dataclass

from grace.core.compressor import Accumulating, BucketCodecSpec, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of


@dataclass
class OneBit(Accumulating):
    """Sends one bit per element, x >= 0, and the means of the two sides.

        C(x) = mean{x_j : x_j >= 0} where x >= 0,    mean{x_j : x_j < 0} elsewhere

    No other two values leave a smaller ||x - C(x)|| for these bits. The error is large all the same, and the
    method depends on error feedback. Source: Seide et al., "1-bit stochastic gradient descent", Interspeech
    2014 (which keeps two means per column; here they are per tensor).

    >>> import numpy as np
    >>> onebit = OneBit()
    >>> onebit.decompress(*onebit.compress(np.float32([1, -4, 3, -2]), "w"))
    array([ 2., -3., 2., -3.], dtype=float32)
    """

    name = "onebit"
    traits = Traits(
        category="quantization",
        fixed_size="by shape",
        contraction=True,
        shardable=True,
        memory="residual",
        needs_memory=True,
    )

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        flat = k.flat(tensor)
        return [k.pack_signs(flat), k.side_means(flat)], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        bits, means = payload
        return k.reshape(k.add_table(k.flat(out), bits, 1, means, None, weight), ctx)

    def bucket_codec(self) -> BucketCodecSpec:
        return "signs", {"form": "sided"}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return [TensorSpec("uint8", ((math.prod(shape) + 7) // 8,)), TensorSpec("float32", (2,))]
