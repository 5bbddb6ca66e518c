"""Sparsification by a fixed threshold."""

import math
from dataclasses import dataclass

from grace.compressors.topk import kept_count
from grace.core.compressor import BucketCodecSpec, Payload, PayloadSpec, Shape, Sparsifier, Tensor, Traits
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions, encode

FLOAT32_MAX = 3.4028234663852886e38


@dataclass
class Threshold(Sparsifier):
    """Sends the entries of magnitude above a fixed value, with their indices.

        C(x)_i = x_i where |x_i| > value, else 0

    How many those are depends on the data and differs by rank; what stays below waits in the residual. On a GPU, where
    finding out would make the host wait, payloads are of one size: there is room for capacity n entries, of more the
    largest are sent, and the rest waits as well (without a memory it is lost); what room is left travels as zeros.
    Source: Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.

    Args:
        value: the threshold, at least 0, in the units of the gradient (a loss scale is accounted for).
        capacity: on GPUs, the part of the elements that payloads have room for, and always take, in (0, 1].

    >>> import numpy as np
    >>> threshold = Threshold(value=2.5)
    >>> threshold.decompress(*threshold.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0., -4., 3., 0.], dtype=float32)
    """

    value: float = 0.01
    capacity: float = 0.05

    name = "threshold"
    bounded = True
    traits = Traits(category="sparsification", fixed_size="by data", memory="residual")

    def __post_init__(self) -> None:
        self.check_number("value", 0, FLOAT32_MAX)
        self.check_number("capacity", 0, 1, low_open=True)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Shape]:
        k = kernels_of(tensor)
        n = check_positions(math.prod(tensor.shape))
        flat = k.flat(tensor)
        if self.bounded and k.on_device(flat):
            return self.padded_payload(flat, self._least(), kept_count(self.capacity, n)), tuple(tensor.shape)
        indices = k.above(flat, self._least())
        coded = encode(k, indices, n, fixed=False)
        return [k.gather(flat, indices), coded], tuple(tensor.shape)

    def _least(self) -> float:
        """Return the magnitude that sent entries exceed, in units of the tensor that is compressed."""
        # abs: kernels compare bits, and those of -0 are not those of a magnitude
        return min(abs(self.value) * self.context.loss_scale, FLOAT32_MAX)

    def bucket_codec(self) -> BucketCodecSpec:
        return "largest above", {"least": self._least}

    def device_spec(self, shape: Shape, step: int) -> PayloadSpec | None:
        return self.padded_spec(shape, kept_count(self.capacity, math.prod(shape)))
