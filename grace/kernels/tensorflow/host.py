"""The compiled kernels for exchanges of TensorFlow's tensors that compute with NumPy arrays of their memory."""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from grace.kernels.tensorflow.interop import aligned_empty, as_array, as_tensor

NARROW = {"float16", "bfloat16"}


@functools.cache
def host_kernels() -> Any:
    """The kernels; they are made at the first call, since Numba may be missing."""
    from grace.kernels.fused.primitives import FusedKernels

    class HostKernels(FusedKernels):
        """The compiled kernels, with results that TensorFlow takes without a copy, and bfloat16."""

        empty = staticmethod(aligned_empty)

        def cast(self, x, dtype):
            if x.dtype.name == dtype or not {x.dtype.name, dtype} & NARROW:
                return super().cast(x, dtype)
            return as_array(tf.cast(as_tensor(x), dtype))  # which NumPy does one by one

        def add(self, out, x, weight=1.0):
            narrow = x.dtype.name in NARROW and out.dtype == np.float32
            return super().add(out, self.cast(x, "float32") if narrow else x, weight)

        def divide(self, out, x, by):
            if x.dtype.name not in NARROW:
                return super().divide(out, x, by)
            wide = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
            super().divide(wide, self.cast(x, "float32"), by)
            if out is not wide:
                out[...] = self.cast(wide, out.dtype.name)
            return out

        def join(self, tensors, out=None):
            if out is None:
                out = aligned_empty(sum(tensor.size for tensor in tensors), tensors[0].dtype)
            return np.concatenate(tensors, out=out)

        def host_buffer(self, n):
            return aligned_empty(n, np.uint8)

    return HostKernels()
