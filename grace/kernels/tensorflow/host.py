"""The kernels of arrays that compute with the memory of TensorFlow's tensors."""

import functools

import numpy as np
import tensorflow as tf

from grace.kernels.reference import Kernels
from grace.kernels.tensorflow.interop import aligned_empty


@functools.cache
def host_kernels(compiled: bool = True) -> Kernels:
    """Return compiled kernels, or the reference, with bfloat16. They are made at the first call, since Numba may be
    missing."""
    base: type[Kernels] = Kernels
    if compiled:
        from grace.kernels.numba.primitives import NumbaKernels

        base = NumbaKernels

    class HostKernels(base):  # type: ignore[misc, valid-type]  # one of two bases
        """Kernels with results that TensorFlow takes without a copy."""

        empty = staticmethod(aligned_empty)

        half_types = {"float16": np.float16, "bfloat16": tf.bfloat16.as_numpy_dtype}

        def cast(self, x, dtype):
            if "bfloat16" not in (x.dtype.name, dtype) or (compiled and "float32" in (x.dtype.name, dtype)):
                return super().cast(x, dtype)
            return x.astype(tf.as_dtype(dtype).as_numpy_dtype, copy=False)

        def join(self, tensors, out=None):
            if out is None:
                out = aligned_empty(sum(tensor.size for tensor in tensors), tensors[0].dtype)
            return np.concatenate(tensors, out=out)

        def host_buffer(self, n):
            return aligned_empty(n, np.uint8)

    return HostKernels()
