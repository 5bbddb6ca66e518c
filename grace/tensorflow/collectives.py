"""Horovod's operations on TensorFlow's tensors, eagerly and in graphs, uncompressed: ranks compare their calls before
one begins."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from grace.backends.object_collectives import chosen_root, compared, engine_for, named
from grace.core.arguments import do_not_convert
from grace.core.backend import Backend
from grace.errors import ConfigError
from grace.kernels import kernels_of
from grace.session.settings import reduction
from grace.tensorflow.reductions import run_eagerly
from grace.tensorflow.variables import AnyVariable, value_of

Function = Callable[[tf.Tensor], tf.Tensor]
SUMMED = (tf.float32, tf.float64, tf.int32, tf.int64)
"""Dtypes that every engine sums; tensors of other dtypes are widened."""


@do_not_convert
def allreduce(
    tensor: "tf.Tensor | AnyVariable",
    average: bool | None = None,
    name: str | None = None,
    *,
    op: str | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Average, or sum, a tensor over all ranks. Every rank must call it.

    Args:
        tensor: a tensor or variable of any shape, of floats or whole numbers; the same shape and dtype on every rank.
        average: Horovod's older spelling of ``op``.
        name: for messages; the same on every rank.
        op: ``grace.Average``, the default, or ``grace.Sum`` (or Horovod's constants).
        prescale_factor, postscale_factor: factors of the tensor, and of the result.

    Returns:
        A tensor of that shape and dtype, the same bits on every rank. 16-bit floats are summed in float32. Averages of
        whole numbers are rounded down. Gradients flow through it.

    Raises:
        ConfigError: the tensor, or ``op``, cannot work.
        RankError: other ranks call something else, or with another shape or dtype; nothing was exchanged.

    >>> import grace
    >>> backend = grace.init("local")
    >>> grace.allreduce(tf.constant([1.0, 2.0]), op=grace.Sum).numpy()
    array([1., 2.], dtype=float32)
    >>> grace.shutdown()
    """
    backend = engine_for("tensorflow")

    def run(x: tf.Tensor) -> tf.Tensor:
        with compared(backend, "allreduce", lambda: f"{_described_sum(x, name)} ({reduction(op, average)})", True):
            return _scaled(_reduced(_scaled(x, prescale_factor), reduction(op, average), backend), postscale_factor)

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        return run_eagerly(run, [dy], dy.dtype, dy.shape)

    return _differentiable(run, gradient, tensor)


@do_not_convert
def allgather(tensor: "tf.Tensor | AnyVariable", name: str | None = None) -> tf.Tensor:
    """Concatenate all ranks' tensors along their first dimension. Every rank must call it.

    Args:
        tensor: a tensor or variable of any dtype but strings; ranks may differ in the first dimension alone. One number
            counts as a row.
        name: for messages; the same on every rank.

    Returns:
        A tensor of that dtype, whose rows are the ranks' in their order. Gradients flow through it.

    Raises:
        ConfigError: the tensor holds strings.
        RankError: other ranks call something else, or with other rows or another dtype; nothing was exchanged.

    >>> import grace
    >>> backend = grace.init("local")
    >>> grace.allgather(tf.constant([[1, 2]])).shape
    TensorShape([1, 2])
    >>> grace.shutdown()
    """
    backend = engine_for("tensorflow")

    def count(x: tf.Tensor) -> tf.Tensor:
        with compared(backend, "allgather", lambda: _described(x, name, rows=True), True):
            return tf.constant(backend.allgather_object(1 if x.shape.rank == 0 else int(x.shape[0])), tf.int64)

    def run(x: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        return _gathered(tf.reshape(x, [1]) if x.shape.rank == 0 else x, counts.numpy().tolist(), backend)

    def own_rows(dy: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        with compared(backend, "gradient of allgather", lambda: _described_sum(dy, name), True):
            mean = _reduced(dy, "average", backend)
        return tf.split(mean, counts)[backend.rank]

    @tf.custom_gradient
    def called(x: tf.Tensor) -> tuple[tf.Tensor, Function]:
        counts = run_eagerly(count, [x], tf.int64, [backend.size])  # a tensor: one traced call may run several times

        def gradient(dy: tf.Tensor) -> tf.Tensor:
            return tf.reshape(run_eagerly(own_rows, [dy, counts], dy.dtype, [None, *dy.shape[1:]]), tf.shape(x))

        return run_eagerly(run, [x, counts], x.dtype, [None, *(x.shape[1:] if x.shape.rank else [])]), gradient

    return called(tf.convert_to_tensor(value_of(tensor)))  # type: ignore[no-any-return]


@do_not_convert
def broadcast(tensor: "tf.Tensor | AnyVariable", root_rank: int, name: str | None = None) -> tf.Tensor:
    """Give every rank the root's tensor. Every rank must call it.

    Args:
        tensor: a tensor or variable of any shape, and of any dtype but strings; the same ones on every rank.
        root_rank: the rank whose values count.
        name: for messages; the same on every rank.

    Returns:
        A tensor of that shape and dtype. Gradients flow back to the root.

    Raises:
        ConfigError: the tensor holds strings, or ``root_rank`` is no rank.
        RankError: other ranks call something else, or with another shape, dtype or root; nothing was exchanged.

    >>> import grace
    >>> backend = grace.init("local")
    >>> int(grace.broadcast(tf.constant(3), root_rank=0))
    3
    >>> grace.shutdown()
    """
    backend = engine_for("tensorflow")

    def run(x: tf.Tensor) -> tf.Tensor:
        def describe() -> str:
            return f"{_described(x, name)} from rank {chosen_root(0, root_rank, backend.size)}"

        with compared(backend, "broadcast", describe, True):
            if not x.shape.num_elements():
                return x
            return _from_bytes(backend.broadcast(_to_bytes(x), root_rank).wait(), x.dtype, x.shape)

    def gradient_of_root(dy: tf.Tensor) -> tf.Tensor:
        with compared(backend, "gradient of broadcast", lambda: _described_sum(dy, name), True):
            mean = _reduced(dy, "average", backend)
        return mean if backend.rank == root_rank else tf.zeros_like(mean)

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        return run_eagerly(gradient_of_root, [dy], dy.dtype, dy.shape)

    return _differentiable(run, gradient, tensor)


def _differentiable(run: Function, gradient: Function, tensor: "tf.Tensor | AnyVariable") -> tf.Tensor:
    """Return ``run(tensor)``, of the same dtype and shape, through which gradients flow by ``gradient``."""

    @tf.custom_gradient
    def called(x: tf.Tensor) -> tuple[tf.Tensor, Function]:
        return run_eagerly(run, [x], x.dtype, x.shape), gradient

    return called(tf.convert_to_tensor(value_of(tensor)))


def _reduced(tensor: tf.Tensor, op: str, backend: Backend) -> tf.Tensor:
    integer = tensor.dtype.is_integer
    if tensor.dtype in SUMMED:
        dtype = tensor.dtype
    else:
        dtype = tf.int64 if integer else tf.float32
    total = tf.cast(tensor, dtype)
    if tensor.shape.num_elements():
        total = tf.reshape(backend.allreduce(tf.reshape(tf.identity(total), [-1])).wait(), tensor.shape)
    if op == "average" and backend.size > 1:
        size = tf.cast(backend.size, dtype)
        total = total // size if integer else total / size
    return tf.cast(total, tensor.dtype)


def _scaled(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return tensor if factor == 1 else tf.cast(tf.cast(tensor, tf.float64) * factor, tensor.dtype)


def _gathered(rows: tf.Tensor, counts: Sequence[int], backend: Backend) -> tf.Tensor:
    shape = [sum(counts), *rows.shape[1:]]
    length = rows.shape[1:].num_elements()
    if not sum(counts) or not length:
        return tf.zeros(shape, rows.dtype)
    padded = tf.pad(_as_sendable(rows), [[0, max(counts) - rows.shape[0]], *([0, 0] for _ in rows.shape[1:])])
    parts = backend.allgather(kernels_of(padded).to_bytes(padded)).wait()
    width = length * padded.dtype.size
    raw = tf.concat([part[: count * width] for part, count in zip(parts, counts, strict=True)], 0)
    return _from_bytes(raw, rows.dtype, shape)


def _as_sendable(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor


def _to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor's bytes: engines do not know every dtype."""
    return kernels_of(tensor).to_bytes(_as_sendable(tensor))


def _from_bytes(raw: tf.Tensor, dtype: tf.DType, shape: "tf.TensorShape | list[int]") -> tf.Tensor:
    if dtype == tf.bool:
        return tf.cast(tf.reshape(raw, shape), tf.bool)
    return kernels_of(raw).from_bytes(raw, dtype.name, tuple(shape))


def _described(tensor: tf.Tensor, name: str | None, rows: bool = False) -> str:
    """Return a tensor's dtype, shape and name, which must be the same on all ranks, for error messages.

    Args:
        rows: True if ranks may differ in the first dimension.

    Raises:
        ConfigError: the tensor cannot be sent.
    """
    if tensor.dtype == tf.string:
        raise ConfigError("it takes numbers, and this tensor holds strings: grace.allgather_object sends any object")
    shape = ["any number", *map(str, tensor.shape[1:])] if rows else list(map(str, tensor.shape))
    return f"of {tensor.dtype.name}[{', '.join(shape)}]{named(name)}"


def _described_sum(tensor: tf.Tensor, name: str | None) -> str:
    described = _described(tensor, name)
    if tensor.dtype == tf.bool or tensor.dtype.is_complex:
        raise ConfigError(f"it does not sum {tensor.dtype.name}: cast the tensor to whole numbers or floats first")
    return described
