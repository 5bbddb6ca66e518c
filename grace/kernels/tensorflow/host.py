"""The compiled kernels for exchanges of TensorFlow's tensors that compute with NumPy arrays of their memory."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from grace.kernels.tensorflow.interop import aligned_empty, as_array, as_tensor


@functools.cache
def host_kernels() -> Any:
    """Return the kernels. They are made at the first call, since Numba may be missing."""
    from grace.kernels.fused.halves import HALVES
    from grace.kernels.fused.primitives import FusedKernels

    class HostKernels(FusedKernels):
        """The compiled kernels, with results that TensorFlow takes without a copy, and bfloat16."""

        empty = staticmethod(aligned_empty)

        half_types = {"float16": np.float16, "bfloat16": tf.bfloat16.as_numpy_dtype}

        def cast(self, x, dtype):
            names = {x.dtype.name, dtype}
            if len(names) == 1 or "float32" in names or not names & HALVES.keys():
                return super().cast(x, dtype)
            return as_array(tf.cast(as_tensor(x), dtype))

        def join(self, tensors, out=None):
            if out is None:
                out = aligned_empty(sum(tensor.size for tensor in tensors), tensors[0].dtype)
            return np.concatenate(tensors, out=out)

        def host_buffer(self, n):
            return aligned_empty(n, np.uint8)

    return HostKernels()
