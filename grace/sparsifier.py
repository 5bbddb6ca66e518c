"""What sparsifiers that send values and coded indices have in common."""

from __future__ import annotations

import math

from grace.compressor import Compressor
from grace.kernels import kernels_of
from grace.kernels.index_coding import decode


class Sparsifier(Compressor):
    """A payload of [values, indices as :mod:`grace.kernels.index_coding` codes them]; ``ctx`` is the tensor's shape.

    >>> import numpy as np
    >>> Sparsifier().decompress([np.float32([5]), np.int16([1])], (3,))
    array([0., 5., 0.], dtype=float32)
    """

    sends_values = True
    by_position = True

    def decompress(self, payload, ctx):
        k = kernels_of(payload[0])
        return self.accumulate(payload, ctx, k.zeros(ctx, "float32", payload[0]))

    def accumulate(self, payload, ctx, out, weight=1.0):
        k = kernels_of(out)
        return k.reshape(k.scatter_add(k.flat(out), self.sent_indices(payload, ctx), payload[0], weight), ctx)

    def sent_indices(self, payload, ctx):
        return decode(kernels_of(payload[1]), payload[1], math.prod(ctx))
