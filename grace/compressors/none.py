"""No compression."""

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import BucketCodecSpec, Compressor, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of


@dataclass
class NoCompression(Compressor):
    """Sends the gradient as it is, in its own dtype: C(x) = x.

    With Allreduce it is the plain sum of the engine, divided by the number of ranks.

    >>> import numpy as np
    >>> none = NoCompression()
    >>> none.decompress(*none.compress(np.float32([1, 2]), "w"))
    array([1., 2.], dtype=float32)
    """

    name = "none"
    offered = ("none",)
    traits = Traits(
        category="none",
        fixed_size="by shape",
        unbiased=True,
        contraction=True,
        summable=True,
        carries_nonfinite=True,
        exact=True,
        shardable=True,
        communicator="allreduce",
    )

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, None]:
        return [tensor], None

    def decompress(self, payload: Payload, ctx: None) -> Tensor:
        return payload[0]

    def aggregate(self, payloads: Sequence[Payload], ctx: None, out: Tensor, count: float) -> Tensor:
        k = kernels_of(out)
        if len(payloads) == 1:  # the engine's sum
            return k.divide(out, payloads[0][0], count)
        # 16-bit gradients of several ranks are added in float32, and rounded once.
        wide = "float64" if k.dtype(out) == "float64" else "float32"
        total = super().aggregate(payloads, ctx, k.zeros(tuple(out.shape), wide, out), 1)
        return k.divide(out, total, count)

    def bucket_codec(self) -> BucketCodecSpec:
        return "numbers", {}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return [TensorSpec("float32", shape)]
