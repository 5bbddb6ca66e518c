"""SignSGD with majority vote."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grace.core.compressor import Accumulating, BucketCodecSpec, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of


@dataclass
class SignSGD(Accumulating):
    """Sends one bit per element, x >= 0; the aggregate is the majority's sign, +1 or -1.

        C(x) = sign(x),    aggregate = sign(sum_i sign(x_i)),    a tie is +1 on every rank

    The result is a direction, not a mean: the learning rate is the step per element (start 10 to 100 times
    below SGD's). Source: Bernstein et al., "signSGD with majority vote", arXiv 1802.04434, 1810.05291.

    >>> import numpy as np
    >>> sign = SignSGD()
    >>> sign.decompress(*sign.compress(np.float32([0.3, -2, 0]), "w"))
    array([ 1., -1., 1.], dtype=float32)
    """

    name = "signsgd"
    votes = True
    traits = Traits(category="quantization", fixed_size="by shape", shardable=True)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        return [k.pack_signs(k.flat(tensor))], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        return k.reshape(k.add_signs(k.flat(out), payload[0], None, weight), ctx)

    def aggregate(self, payloads: Sequence[Payload], ctx: Shape, out: Tensor, count: float) -> Tensor:
        # votes are counted in whole numbers; the loss scale is undone later, and a direction has none
        k = kernels_of(out)
        votes = super().aggregate(payloads, ctx, out, 1)
        return k.divide(out, k.signs(votes), 1 / self.context.loss_scale)

    def combined(self, tensors: Sequence[Tensor]) -> Tensor:
        total = sum(tensors)
        return kernels_of(total).signs(total)

    def bucket_codec(self) -> BucketCodecSpec:
        return "signs", {"form": "voted"}

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return [TensorSpec("uint8", ((math.prod(shape) + 7) // 8,))]
