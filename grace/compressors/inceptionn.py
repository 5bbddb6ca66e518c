"""INCEPTIONN: as many bits per element as its magnitude needs for a bounded error."""

import math
from dataclasses import dataclass

from grace.core.compressor import Accumulating, Payload, PayloadSpec, Shape, Tensor, TensorSpec, Traits
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions


@dataclass
class Inceptionn(Accumulating):
    """Rounds each element to 0, 8, 16 or 32 bits by its magnitude, so that |x - C(x)| <= error_bound for |x| <= 1;
    larger ones are exact.

    The first fitting row of this table is the element's format, and its tag in a stream of 2-bit tags. With
    2^(e-1) <= error_bound < 2^e, the steps are s8 = 2^e and s16 = min(2^e, 2^-15):

        tag 0   nothing              |x| <= error_bound
        tag 1   int8,  x = code s8   |x| <= 1 and |code| <= 127
        tag 2   int16, x = code s16  |x| <= 1 and |code| <= 32767
        tag 3   float32, exact       the rest, NaN and Inf too

    Codes are rounded to nearest: the error is at most s/2 <= 2^(e-1) <= error_bound, and the steps are powers of
    two, so no other rounding adds to it. Under a loss scale, the largest power of two in it takes the place of 1.
    This is plain fixed point where the paper shifts and truncates mantissas. Source: Li et al., "A network-centric
    hardware/algorithm co-design to accelerate distributed training of deep neural networks", MICRO 2018.

    Args:
        error_bound: the largest absolute error, in [1e-30, 1].

    >>> import numpy as np
    >>> inceptionn = Inceptionn(error_bound=0.25)
    >>> inceptionn.decompress(*inceptionn.compress(np.float32([0.2, -0.6, 1.3]), "w"))
    array([ 0. , -0.5, 1.3], dtype=float32)
    """

    error_bound: float = 1e-3

    name = "inceptionn"
    by_position = True
    traits = Traits(category="quantization", fixed_size="by data", carries_nonfinite=True)

    def __post_init__(self) -> None:
        self.check_number("error_bound", 1e-30, 1)

    @property
    def units(self) -> tuple[float, float, float]:
        """Value of 1 in the gradient, and the steps of 8-bit and 16-bit codes."""
        one = 2.0 ** (math.frexp(self.context.loss_scale)[1] - 1)
        step = 2.0 ** math.frexp(self.error_bound)[1]
        return one, one * step, one * min(step, 2.0**-15)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        check_positions(math.prod(tensor.shape))
        flat = k.flat(tensor)
        one, step8, step16 = self.units
        tags = k.fixed_tags(flat, self.error_bound * one, one, step8, step16)
        small, medium, exact = (k.gather(flat, k.where_code(tags, tag)) for tag in (1, 2, 3))
        codes = [k.to_fixed(small, step8, "int8"), k.to_fixed(medium, step16, "int16")]
        return [k.pack(tags, 2), *codes, exact], tuple(tensor.shape)

    def accumulate(self, payload: Payload, ctx: Shape, out: Tensor, weight: float = 1.0) -> Tensor:
        k = kernels_of(out)
        # Values travel without positions: these are where the tags say so, in order.
        flat, tags = k.flat(out), k.unpack(payload[0], 2, math.prod(ctx))
        for tag, values, step in zip((1, 2, 3), payload[1:], (*self.units[1:], 1.0), strict=True):
            flat = k.scatter_add(flat, k.where_code(tags, tag), k.cast(values, "float32"), weight * step)
        return k.reshape(flat, ctx)

    def payload_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        codes = [TensorSpec(dtype, (None,)) for dtype in ("int8", "int16", "float32")]
        return [TensorSpec("uint8", ((math.prod(shape) + 3) // 4,)), *codes]
