"""Sparsification by a fixed threshold."""

import math
from dataclasses import dataclass
from typing import Any

from grace.core.compressor import Payload, Sparsifier, Tensor, Traits
from grace.kernels import kernels_of
from grace.kernels.index_coding import check_positions, encode

FLOAT32_MAX = 3.4028234663852886e38


@dataclass
class Threshold(Sparsifier):
    """Sends the entries of magnitude above a fixed value, with their indices.

        C(x)_i = x_i where |x_i| > value, else 0

    How many those are depends on the data and differs by rank; what stays below waits in the residual. Source:
    Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.

    Args:
        value: the threshold, at least 0, in the units of the gradient (a loss scale is accounted for).

    >>> import numpy as np
    >>> threshold = Threshold(value=2.5)
    >>> threshold.decompress(*threshold.compress(np.float32([1, -4, 3, 2]), "w"))
    array([ 0., -4., 3., 0.], dtype=float32)
    """

    value: float = 0.01

    name = "threshold"
    traits = Traits(category="sparsification", fixed_size=False, memory="residual")

    def __post_init__(self) -> None:
        self.check_number("value", 0, FLOAT32_MAX)

    def compress(self, tensor: Tensor, name: str) -> tuple[Payload, Any]:
        k = kernels_of(tensor)
        n = check_positions(math.prod(tensor.shape))
        flat = k.flat(tensor)
        indices = k.above(flat, min(self.value * self.context.loss_scale, FLOAT32_MAX))
        coded = encode(k, indices, n, fixed=False)
        return [k.gather(flat, indices), coded], tuple(tensor.shape)
