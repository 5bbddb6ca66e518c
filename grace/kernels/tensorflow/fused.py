"""The fused loops on TensorFlow's CPU tensors, without copies, and the choice between them and plain operations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from grace.kernels.fused.availability import LOOPS, missing
from grace.kernels.random import Stream
from grace.kernels.reference import Kernels
from grace.kernels.tensorflow.graph_numbers import length
from grace.kernels.tensorflow.host import host_kernels
from grace.kernels.tensorflow.interop import aligned_copy, as_array, as_tensor
from grace.kernels.tensorflow.primitives import TensorFlowKernels, words

Shapes = list[tuple[type, Any]]
GRAPH: dict[str, Callable[..., Shapes]] = {
    "mean_abs": lambda x: [(np.float32, 1)],
    "random_indices": lambda stream, n, k, like: [(np.int32, k)],
    "quantize": lambda x, levels, size, *_: [(np.uint8, length(x)), (np.float32, (length(x) + size - 1) // size)],
    "dequantize": lambda out, *_: [(np.float32, length(out))],
    "pack": lambda codes, bits: [(np.uint8, (length(codes) * bits + 7) // 8)],
    "unpack": lambda packed, bits, n: [(np.uint8, n)],
    "pack_signs": lambda x: [(np.uint8, (length(x) + 7) // 8)],
    "add_signs": lambda out, *_: [(np.float32, length(out))],
    "topk": lambda x, k: [(np.int32, k)],
    "topk_chunks": lambda x, chunk, k: [(np.int32, -(-k * length(x) // chunk))],
    "side_means": lambda x: [(np.float32, 2)],
    "clip_deviation": lambda x, factor: [(np.float32, length(x))],
    "round_powers": lambda x, stream: [(np.uint8, length(x))],
    "add_powers": lambda out, *_: [(np.float32, length(out))],
    "round_float8": lambda x, size, *_: [(np.uint8, length(x)), (np.float32, (length(x) + size - 1) // size)],
    "add_float8": lambda out, *_: [(np.float32, length(out))],
    "rotate": lambda x: [(np.float32, length(x))],
    "bucketize": lambda x, *_: [(np.uint8, length(x))],
    "add_table": lambda out, *_: [(np.float32, length(out))],
    "quantile_buckets": lambda x, buckets: [(np.uint8, length(x)), (np.float32, buckets)],
    "above": lambda x, threshold: [(np.int32, None)],
    "fixed_tags": lambda x, *_: [(np.uint8, length(x))],
    "where_code": lambda codes, code: [(np.int32, None)],
}
"""Kernels that graphs call too, with the types and sizes of their results."""
GRAPH_MINIMUM = 1 << 16
"""Number of elements from which a call of Python from a graph costs less than it saves."""


class FusedTensorFlowKernels(TensorFlowKernels):
    """CPU tensors: the fused kernels, on zero-copy NumPy views.

    Each method named in ``FUSED`` runs compiled when its tensors are of the dtypes that the fused loops take, and in
    plain TensorFlow otherwise. In a graph, those in :data:`GRAPH` do so by ``tf.numpy_function``.
    """

    name = "tensorflow-fused"
    FUSED = (*LOOPS, "uniform", "matmul", "matmul_add")
    WRITES = (
        "dequantize", "add_signs", "scatter_add", "add_powers", "add_float8", "add_table", "zero_at", "add_at",
        "matmul_add",
    )  # fmt: skip
    """Kernels that change their first argument, of which they get a copy."""
    DTYPES = frozenset({tf.float32, tf.uint8, tf.int32})
    VIEWED = DTYPES | {tf.float16, tf.float64, tf.int8, tf.int16, tf.int64}
    """Types that NumPy has; views of these cost less than TensorFlow's operations."""

    def flat(self, x):
        return self.reshape(x, (-1,)) if x.shape.rank != 1 and x.dtype in self.VIEWED else super().flat(x)

    def reshape(self, x, shape):
        if x.dtype not in self.VIEWED or not tf.executing_eagerly():
            return super().reshape(x, shape)
        return as_tensor(as_array(x).reshape(shape))

    def to_bytes(self, x):
        if x.dtype not in self.VIEWED or not tf.executing_eagerly():
            return super().to_bytes(x)
        return as_tensor(as_array(x).reshape(-1).view(np.uint8))

    def from_bytes(self, raw, dtype, shape):
        if tf.as_dtype(dtype) not in self.VIEWED or not tf.executing_eagerly():
            return super().from_bytes(raw, dtype, shape)
        return as_tensor(as_array(raw).view(dtype).reshape(shape))


def _fused(method: str):
    plain, writes = getattr(TensorFlowKernels, method), method in FusedTensorFlowKernels.WRITES

    def compute(args):
        return getattr(host_kernels(), method)(aligned_copy(args[0]) if writes else args[0], *args[1:])

    def call(self, *args):
        tensors = [arg for arg in args if isinstance(arg, (tf.Tensor, tf.Variable))]
        if not all(tensor.dtype in self.DTYPES for tensor in tensors):
            return plain(self, *args)
        if not tf.executing_eagerly():
            return _in_graph(method, compute, args) if _pays(method, args) else plain(self, *args)
        arrays = [_array(arg) for arg in args]
        result = compute(arrays)
        if result is arrays[0]:
            return args[0]
        return tuple(map(as_tensor, result)) if isinstance(result, tuple) else as_tensor(result)

    call.__name__, call.__doc__ = method, f"Compiled; see Kernels.{method}."
    return call


for _method in FusedTensorFlowKernels.FUSED:
    setattr(FusedTensorFlowKernels, _method, _fused(_method))


def _pays(method: str, args: tuple[Any, ...]) -> bool:
    if method not in GRAPH or (method in ("pack", "unpack") and args[1] == 8):
        return False
    n = args[2] if method == "random_indices" else length(args[0])
    return not isinstance(n, int) or n >= GRAPH_MINIMUM


def _in_graph(method: str, compute: Callable[[list[Any]], Any], args: tuple[Any, ...]) -> Any:
    """Return the results of a kernel that is called when the graph runs. Tensors, and a step that is one, are inputs of
    the call."""
    args = tuple(_settled(arg) for arg in args)
    places = [i for i, arg in enumerate(args) if isinstance(arg, (tf.Tensor, tf.Variable))]
    streams = [i for i, arg in enumerate(args) if isinstance(arg, Stream)]
    inputs = [args[i] for i in places] + [words(args[i])[2] for i in streams]

    def run(*arrays):
        given = list(args)
        for i, array in zip(places, arrays, strict=False):
            given[i] = array if array.ndim else array[()]
        for i, step in zip(streams, arrays[len(places) :], strict=True):
            given[i] = replace(args[i], step=int(step))
        return compute(given)

    outputs = GRAPH[method](*args)
    results = tf.numpy_function(run, inputs, [dtype for dtype, _ in outputs], stateful=False)
    for result, (_, n) in zip(results, outputs, strict=True):
        result.set_shape([n if isinstance(n, int) else None])
    return tuple(results) if len(results) > 1 else results[0]


def _settled(arg: Any) -> Any:
    return tf.convert_to_tensor(arg) if isinstance(arg, tf.Variable) else arg


def _array(arg: Any) -> Any:
    """Return an argument as compiled kernels take it: a tensor as a view, a step as a number."""
    if isinstance(arg, (tf.Tensor, tf.Variable)):
        return as_array(arg)
    if isinstance(arg, Stream) and isinstance(arg.step, (tf.Tensor, tf.Variable)):
        return replace(arg, step=int(arg.step))
    return arg


_PLAIN, _FUSED = TensorFlowKernels(), FusedTensorFlowKernels()
_USE_FUSED = not missing()


def kernels_of_tensor(tensor: tf.Tensor) -> Kernels:
    """Return fused kernels for CPU tensors if Numba is installed (and GRACE_FUSED is not 0), else plain ones."""
    return _FUSED if _USE_FUSED and _on_cpu(tensor) else _PLAIN


def _on_cpu(tensor: tf.Tensor) -> bool:
    """Return True if a tensor is on the CPU. In a graph it may have no device yet: it is on the GPU if there is one."""
    if tf.is_symbolic_tensor(tensor):
        return "CPU" in tensor.device or not tf.config.list_logical_devices("GPU")
    return "CPU" in tensor.device
