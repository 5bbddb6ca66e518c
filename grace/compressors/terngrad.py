"""TernGrad: stochastic ternary codes."""

import math
from dataclasses import dataclass

from grace.core.compressor import Accumulating, BucketCodecSpec, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of


@dataclass
class TernGrad(Accumulating):
    """Sends -1, 0 or 1 per element, in 2 bits, and one scale.

    With sigma the standard deviation of the elements and s the largest magnitude after clipping:

        y = min(max(x, -clip sigma), clip sigma),    s = max |y|,    C(x) = s sign(y) b,    P(b = 1) = |y| / s

    E[C(x)] = y. Clipping keeps s, and so the variance, small; it shortens a tensor whose mean is large against
    sigma, and does not touch one whose elements are all equal (they have no spread). Source: Wen et al.,
    "TernGrad", NeurIPS 2017, arXiv 1705.07878.

    Args:
        clip: magnitudes are clipped to this many standard deviations.

    >>> import numpy as np
    >>> tern = TernGrad()
    >>> tern.decompress(*tern.compress(np.float32([-2, 0, 2]), "w"))
    array([-2., 0., 2.], dtype=float32)
    """

    clip: float = 2.5

    name = "terngrad"
    measured_loss = {"terngrad": {"adamw": 1.097, "sgd": 1.183}}
    traits = Traits(category="quantization", fixed_size="by shape", unbiased=True, shardable=True)

    def __post_init__(self) -> None:
        self.check_number("clip", 0, low_open=True)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k, n = kernels_of(tensor), math.prod(tensor.shape)
        clipped = k.clip_deviation(k.flat(tensor), self.clip)
        # One scale for the whole tensor, as in the paper; an empty tensor, too, needs a size to divide by.
        codes, scale = k.quantize(clipped, 1, max(1, n), "max", self.context.stream(name))
        return [k.pack(codes, 2), scale], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k, n = kernels_of(out), math.prod(ctx)
        packed, scale = payload
        codes = k.unpack(packed, 2, n)
        return k.reshape(k.dequantize(k.flat(out), codes, scale, 1, max(1, n), weight), ctx)

    def bucket_codec(self) -> BucketCodecSpec:
        return "ternary", {"clip": float(self.clip)}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        n = math.prod(shape)
        return [TensorSpec("uint8", ((n + 3) // 4,)), TensorSpec("float32", (min(n, 1),))]
