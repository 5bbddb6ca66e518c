"""Sixteen-bit floating point."""

from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import BucketCodecSpec, Compressor, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "float16": "float16", "bfloat16": "bfloat16"}


@dataclass
class Cast(Compressor):
    """Rounds to 16 bits (nearest even), C(x) = fp16(x) or bf16(x), and sums in 16 bits under Allreduce.

    A value beyond the range of the dtype becomes Inf and is seen by every rank, as in Horovod's and DDP's
    fp16 compression. ``fp16`` and ``bf16`` are short names for the two choices.

    Args:
        dtype: "fp16" or "bf16".

    >>> import numpy as np
    >>> cast = Cast()
    >>> cast.decompress(*cast.compress(np.float32([1, 0.1, 1e5]), "w"))
    array([1.        , 0.09997559,        inf], dtype=float32)
    """

    dtype: str = "fp16"

    name = "cast"
    offered = ("fp16",)
    measured_loss = {"cast": {"sgd": 1.001}}
    traits = Traits(
        category="quantization",
        fixed_size="by shape",
        contraction=True,
        summable=True,
        carries_nonfinite=True,
        shardable=True,
        communicator="allreduce",
    )

    def __post_init__(self) -> None:
        self.check_choice("dtype", tuple(DTYPES))

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, None]:
        return [kernels_of(tensor).cast(tensor, DTYPES[self.dtype])], None

    def decompress(self, payload: Payload, ctx: None) -> Tensor:
        return kernels_of(payload[0]).cast(payload[0], "float32")

    def accumulate(self, payload: Payload, ctx: None, out: Tensor, weight: float = 1.0) -> Tensor:
        return kernels_of(out).add(out, payload[0], weight)

    def aggregate(self, payloads: Sequence[Payload], ctx: None, out: Tensor, count: float) -> Tensor:
        if len(payloads) == 1:  # the engine's sum
            return kernels_of(out).divide(out, payloads[0][0], count)
        return super().aggregate(payloads, ctx, out, count)

    def bucket_codec(self) -> BucketCodecSpec:
        return "numbers", {}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return [TensorSpec(DTYPES[self.dtype], shape)]


ALIASES = {"fp16": {"name": "cast", "dtype": "fp16"}, "bf16": {"name": "cast", "dtype": "bf16"}}
