"""Kernels for TensorFlow tensors: those of arrays, which compute on the host with the memory of tensors.

A graph calls them by ``tf.numpy_function`` when it runs. TensorFlow's own operations only move memory and look at it in
another way. Tensors are immutable, so whatever writes into ``out`` returns a new tensor.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from grace.kernels.numba.availability import missing
from grace.kernels.random import Stream
from grace.kernels.reference import Kernels
from grace.kernels.tensorflow.graph_numbers import check_not_xla, number
from grace.kernels.tensorflow.host import host_kernels
from grace.kernels.tensorflow.interop import aligned_copy, aligned_empty, as_array, as_tensor

FLOAT, CODE, INDEX = tf.float32, tf.uint8, tf.int32
WRITE = {
    "add", "divide", "matmul_add", "dequantize", "add_signs", "add_powers", "add_float8", "add_table", "scatter_add",
    "zero_at", "add_at",
}  # fmt: skip
"""Kernels that change their first argument, of which they get a copy."""
ALIKE = {*WRITE, "signs", "orthogonalize", "fill_zero_columns", "clip_deviation", "rotate", "clip_norm"}
"""Kernels whose result has the type and shape of their first argument."""
RESULTS: dict[str, Callable[..., list[tuple[tf.DType, list[int | None]]]]] = {
    "cast": lambda x, dtype: [(tf.as_dtype(dtype), [*x.shape])],
    "all_finite": lambda x, most=0: [(FLOAT, [])],
    "combine": lambda a, x, b, y: [(FLOAT, [*x.shape])],
    "mean_abs": lambda x: [(FLOAT, [1])],
    "matmul": lambda a, b, transpose=False: [(FLOAT, [*a.shape[:-2], a.shape[-1 if transpose else -2], b.shape[-1]])],
    "random_bits": lambda stream, n, like=None: [(tf.uint32, [n])],
    "uniform": lambda stream, n, like=None: [(FLOAT, [n])],
    "random_indices": lambda stream, n, k, like=None: [(INDEX, [k])],
    "sample_indices": lambda stream, n, k, like=None: [(INDEX, [k])],
    "quantize": lambda x, levels, size, norm, stream: [(CODE, [*x.shape]), (FLOAT, [_part(x, 1, size)])],
    "pack": lambda codes, bits: [(CODE, [_part(codes, bits, 8)])],
    "unpack": lambda packed, bits, n: [(CODE, [n])],
    "pack_signs": lambda x: [(CODE, [_part(x, 1, 8)])],
    "max_abs": lambda x: [(FLOAT, [1])],
    "side_means": lambda x: [(FLOAT, [2])],
    "round_powers": lambda x, stream: [(CODE, [*x.shape])],
    "round_float8": lambda x, size, stream: [(CODE, [*x.shape]), (FLOAT, [_part(x, 1, size)])],
    "bucketize": lambda x, scale, edges: [(CODE, [*x.shape])],
    "quantile_buckets": lambda x, buckets: [(CODE, [*x.shape]), (FLOAT, [buckets])],
    "topk": lambda x, k: [(INDEX, [k])],
    "topk_chunks": lambda x, chunk, k: [(INDEX, [_part(x, k, chunk)])],
    "bitmap": lambda indices, n: [(CODE, [-(-n // 8)])],
    "positions": lambda bitmap, n, count=None: [(INDEX, [count])],
    "narrow": lambda indices: [(tf.int16, [*indices.shape])],
    "widen": lambda narrow: [(INDEX, [*narrow.shape])],
    "widen_chunks": lambda narrow, chunk, k: [(INDEX, [*narrow.shape])],
    "above": lambda x, threshold: [(INDEX, [None])],
    "largest_above": lambda x, threshold, room, ratio=1.0: [(FLOAT, [room]), (INDEX, [room]), (INDEX, [1])],
    "kth_magnitude": lambda x, k: [(FLOAT, [])],
    "gather": lambda x, indices: [(x.dtype, [*indices.shape])],
    "one_side": lambda x, sign: [(FLOAT, [*x.shape]), (tf.int64, [])],
    "fixed_tags": lambda x, bound, top, step8, step16: [(CODE, [*x.shape])],
    "where_code": lambda codes, code: [(INDEX, [None])],
    "to_fixed": lambda x, step, dtype: [(tf.as_dtype(dtype), [*x.shape])],
    **dict.fromkeys(ALIKE, lambda out, *ignored: [(out.dtype, [*out.shape])]),
}
"""Types and shapes of the results of all kernels that compute on the host; None for what a graph does not know."""


def _part(x: tf.Tensor, many: int, of: int) -> int | None:
    """Return ceil(n many / of) for a tensor of n elements."""
    return None if x.shape[0] is None else -(-x.shape[0] * many // of)


class TensorFlowKernels(Kernels):
    """Kernels of TensorFlow's tensors, eager ones and in graphs.

    In a graph, numbers that the host would know eagerly are scalar tensors, and ``to_list`` is refused.

    Args:
        compiled: True to compute by compiled loops; False to compute by the reference.

    >>> k = TensorFlowKernels(compiled=False)
    >>> k.topk(tf.constant([1.0, -5.0, 3.0, 5.0]), 2).numpy()
    array([1, 3], dtype=int32)
    """

    mutable = False

    def __init__(self, compiled: bool):
        self.name = "tensorflow-fused" if compiled else "tensorflow"
        self.compiled = compiled

    def compute(self, method: str, args: list[Any]) -> Any:
        """Return the result of a kernel of arrays."""
        if method in WRITE:
            args = [aligned_copy(args[0]), *args[1:]]
        # NumPy warns of overflows that the contract makes Inf of.
        with np.errstate(all="ignore"):
            return getattr(host_kernels(self.compiled), method)(*args)

    def flat(self, x):
        return tf.convert_to_tensor(x) if x.shape.rank == 1 else tf.reshape(x, [-1])

    def reshape(self, x, shape):
        return tf.reshape(x, [-1 if n is None else n for n in shape])

    def eagerly(self, function, tensors):
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        if not any(map(tf.is_symbolic_tensor, tensors)):
            return function(tensors)
        check_not_xla()
        results = tf.py_function(lambda *eager: function(list(eager)), tensors, [tensor.dtype for tensor in tensors])
        for result, tensor in zip(results, tensors, strict=True):
            result.set_shape(tensor.shape)
        return results

    def zeros(self, shape, dtype, like):
        with _device_of(like):
            return tf.zeros(shape, dtype)

    def full(self, values, dtype, like):
        with _device_of(like):
            if any(isinstance(value, tf.Tensor) for value in values):
                return tf.cast(tf.stack([tf.cast(value, tf.float32) for value in values]), dtype)
            return tf.constant(np.array(values, tf.as_dtype(dtype).as_numpy_dtype))

    def to_list(self, x):
        if tf.is_symbolic_tensor(x):
            raise TypeError("a graph has no values while it is traced; read them eagerly, in tf.py_function")
        return np.asarray(x).astype(np.float64).tolist()

    def zero(self, out):
        return tf.zeros_like(out)

    def join(self, tensors, out=None):
        return tf.concat(tensors, 0)

    def concat(self, tensors, axis):
        return tf.concat(tensors, axis)

    def split(self, x, sizes):
        return tf.split(x, list(sizes)) if sizes else []  # one operation, where each slice would be one

    def to_bytes(self, x):
        return self.flat(tf.cast(x, tf.uint8) if x.dtype == tf.bool else tf.bitcast(x, tf.uint8))

    def from_bytes(self, raw, dtype, shape):
        if dtype == "bool":
            return self.reshape(tf.cast(raw, tf.bool), shape)
        size = tf.as_dtype(dtype).size
        return self.reshape(tf.bitcast(raw if size == 1 else tf.reshape(raw, [-1, size]), dtype), shape)

    def host_buffer(self, n):
        return aligned_empty(n, np.uint8)

    def adopt(self, array, dtype, shape, like):
        with _device_of(like):
            return self.from_bytes(as_tensor(array), dtype, shape)

    def take_rows(self, x, rows):
        return tf.gather(x, rows)

    def put_rows(self, out, rows, values):
        return tf.tensor_scatter_nd_update(out, rows[:, None], values)

    def add_rows(self, out, rows, values, weight):
        return tf.tensor_scatter_nd_add(out, rows[:, None], values * number(weight, values.dtype))

    def distinct(self, rows):
        # tf.unique keeps the order in which numbers come.
        ordered = tf.unique(tf.sort(rows)).y
        return ordered, tf.searchsorted(ordered, rows)

    def nbytes(self, x):
        n = x.shape.num_elements()
        return (tf.size(x) if n is None else n) * x.dtype.size

    def dtype(self, x):
        return x.dtype.name

    def zero_columns(self, matrices):
        if any(map(tf.is_symbolic_tensor, matrices)):
            return True
        return self.compute("zero_columns", [list(map(as_array, matrices))])

    def check_indices(self, indices, n):
        if not tf.is_symbolic_tensor(indices):
            self.compute("check_indices", [as_array(indices), n])


def _on_host(method: str) -> Callable[..., object]:
    """Return a method that computes on the host, at once or when a graph runs."""
    signature = inspect.signature(getattr(Kernels, method))

    def call(self: TensorFlowKernels, *args: object, **named: object) -> object:
        if named:
            args = signature.bind(self, *args, **named).args[1:]
        if not tf.executing_eagerly():
            return _in_graph(self, method, list(args))
        arrays = [_array(arg) for arg in args]
        found = self.compute(method, arrays)
        # A kernel may return its argument itself, as pack() does for 8 bits.
        if found is arrays[0]:
            return tf.convert_to_tensor(args[0])
        with _device_of(next((arg for arg in args if _is_tensor(arg)), None)) as moves:
            results = [
                tf.identity(as_tensor(one)) if moves else as_tensor(one)
                for one in (found if isinstance(found, tuple) else (found,))
            ]
        return tuple(results) if isinstance(found, tuple) else results[0]

    call.__name__, call.__doc__ = method, f"Computed on the host; see Kernels.{method}."
    return call


def _in_graph(k: TensorFlowKernels, method: str, args: list[Any]) -> object:
    """Return the results of a kernel that is called when the graph runs. Tensors, and a step that is one, are inputs of
    the call."""
    check_not_xla()
    args = [tf.convert_to_tensor(arg) if isinstance(arg, tf.Variable) else arg for arg in args]
    places = [i for i, arg in enumerate(args) if _is_tensor(arg)]
    drawn = [i for i, arg in enumerate(args) if isinstance(arg, Stream) and _is_tensor(arg.step)]
    inputs = [args[i] for i in places] + [tf.convert_to_tensor(args[i].step) for i in drawn]
    outputs = RESULTS[method](*args)

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        """Compute with the numbers of the inputs."""
        given = list(args)
        for i, array in zip(places, arrays, strict=False):
            given[i] = array if array.ndim else array[()]  # numbers, where tensors have no dimension
        for i, step in zip(drawn, arrays[len(places) :], strict=True):
            given[i] = replace(args[i], step=int(step))
        found = k.compute(method, given)
        several = found if isinstance(found, tuple) else (found,)
        return [np.asarray(one, kind.as_numpy_dtype) for one, (kind, _) in zip(several, outputs, strict=True)]

    results = tf.numpy_function(run, inputs, [kind for kind, _ in outputs], stateful=False)
    # tf.numpy_function knows no shapes.
    for result, (_, shape) in zip(results, outputs, strict=True):
        result.set_shape([n if isinstance(n, int) else None for n in shape])
    return tuple(results) if len(results) > 1 else results[0]


for _method in RESULTS:
    setattr(TensorFlowKernels, _method, _on_host(_method))


def _is_tensor(arg: object) -> bool:
    return isinstance(arg, (tf.Tensor, tf.Variable))


def _array(arg: object) -> object:
    """Return an argument as kernels of arrays take it: a tensor as a view, a step as a number."""
    if _is_tensor(arg):
        return as_array(arg)
    return replace(arg, step=int(arg.step)) if isinstance(arg, Stream) and _is_tensor(arg.step) else arg


@contextlib.contextmanager
def _device_of(like: tf.Tensor | None) -> Iterator[bool]:
    """Return a context that makes tensors on the device of another; its value is True if that is not the host."""
    device = "" if like is None else like.device
    # The host alone: there is no choice, and a context would cost time at every call.
    if "GPU" not in device and len(tf.config.list_logical_devices()) == 1:
        yield False
        return
    with tf.device(device or None):
        yield "GPU" in device


_PLAIN, _COMPILED = TensorFlowKernels(compiled=False), TensorFlowKernels(compiled=True)
_USE_FUSED = not missing()


def kernels_of_tensor(tensor: tf.Tensor) -> Kernels:
    """Return the kernels of TensorFlow's tensors: compiled ones if Numba is installed (and GRACE_FUSED is not 0)."""
    return _COMPILED if _USE_FUSED else _PLAIN
