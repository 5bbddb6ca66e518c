"""TensorFlow's tensors as NumPy arrays and back, without copies."""

import numpy as np
import tensorflow as tf
from numpy.typing import DTypeLike

ALIGNMENT = 64
"""TensorFlow ends the process when it meets memory that does not start at a multiple of this."""


class _Memory:
    """Memory of a tensor as a writable array: for read-only ones Numba would compile everything again."""

    def __init__(self, tensor: tf.Tensor):
        self.owner = np.asarray(tensor)
        interface = self.owner.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def as_array(tensor: tf.Tensor) -> np.ndarray:
    """Return a view of an eager tensor of a dtype that NumPy has, in host memory; it must not be changed."""
    if tensor.dtype == tf.bfloat16 and not tensor.shape.rank:
        return as_array(tf.reshape(tensor, [1])).reshape(())  # NumPy gets no array of a single bfloat16
    memory = _Memory(tensor)
    array = np.asarray(memory)
    return array if array.dtype == memory.owner.dtype else array.view(memory.owner.dtype)  # bfloat16


def as_tensor(value: np.ndarray | float) -> tf.Tensor | float:
    """Return an array as a tensor, without a copy if it is aligned; it must not be changed any more."""
    if isinstance(value, (bool, int, float)):
        return value
    if value.__array_interface__["data"][0] % ALIGNMENT or not value.flags.c_contiguous:
        value = aligned_copy(value)
    # NumPy's DLPack has no bfloat16.
    if value.dtype == tf.bfloat16.as_numpy_dtype:
        return tf.bitcast(as_tensor(value.view(np.int16)), tf.bfloat16)
    return tf.experimental.dlpack.from_dlpack(value.__dlpack__())


def aligned_empty(n: int, dtype: DTypeLike) -> np.ndarray:
    """Return a 1-d array that TensorFlow takes without a copy."""
    nbytes = n * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + nbytes].view(dtype)


def aligned_copy(array: np.ndarray) -> np.ndarray:
    """Return a copy of an array that TensorFlow takes as it is."""
    copy = aligned_empty(array.size, array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
