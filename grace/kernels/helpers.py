"""The helpers that compressors are made of, each a function of any framework's tensors: NumPy, torch, TensorFlow.

They call the kernels of its framework and device (:func:`grace.kernels_of`), which have more, and refuse wrong
arguments by name. Payloads of other ranks are checked: ones that do not fit raise
:class:`~grace.errors.PayloadError`.
"""

import math

from grace.errors import ConfigError
from grace.kernels.dispatch import kernels_of
from grace.kernels.index_coding import check_positions
from grace.kernels.random import Stream
from grace.kernels.reference import Kernels, Tensor
from grace.kernels.wire_checks import check_count, check_packed

NORMS = ("l2", "max")


def quantize(
    tensor: Tensor, levels: int, stream: Stream, bucket_size: int = 512, norm: str = "l2"
) -> tuple[Tensor, Tensor]:
    """Round stochastically, as QSGD does: each element to one of ``levels`` multiples of its bucket's scale, or the
    negatives.

        s = ||bucket||;  code = levels + sign(x) floor(|x| / s levels + u),  u uniform in [0, 1)

    Args:
        tensor: of any shape; its elements count as float32.
        levels: number of levels above zero, 1 to 127.
        stream: of the random numbers; ``self.context.stream(name)`` in a compressor.
        bucket_size: number of elements that share a scale.
        norm: "l2", or "max", whose error is smaller.

    Returns:
        the codes, uint8 below 2 levels + 1, one for each of n elements; and the scales, float32, one for each of
        ceil(n / bucket_size) buckets.

    Raises:
        ConfigError: the tensor or a number is none that the method takes.

    >>> import numpy as np
    >>> codes, scales = quantize(np.float32([[-2, 0], [2, 1]]), levels=2, stream=Stream(0), norm="max")
    >>> codes, scales
    (array([0, 2, 4, 3], dtype=uint8), array([2.], dtype=float32))
    """
    _check("levels", levels, 1, 127)
    _check("bucket_size", bucket_size, 1)
    if norm not in NORMS:
        raise ConfigError(f"norm must be one of {', '.join(map(repr, NORMS))}, not {norm!r}")
    return kernels_of(tensor).quantize(_flat(tensor), levels, bucket_size, norm, stream)


def dequantize(codes: Tensor, scales: Tensor, levels: int, shape: tuple[int, ...], bucket_size: int = 512) -> Tensor:
    """Decode what :func:`quantize` encoded: s (code - levels) / levels, float32, in a shape.

    Raises:
        PayloadError: there are not as many codes or scales as such a tensor has, or a code is too large.
        ConfigError: the codes are no uint8, or a number is out of range.

    >>> import numpy as np
    >>> dequantize(np.uint8([0, 2, 4, 3]), np.float32([2]), levels=2, shape=(2, 2))
    array([[-2., 0.],
           [ 2., 1.]], dtype=float32)
    """
    _check("levels", levels, 1, 127)
    _check("bucket_size", bucket_size, 1)
    k = _typed("codes", codes, "uint8")
    dense = k.zeros((math.prod(shape),), "float32", codes)
    scales = k.flat(k.cast(scales, "float32"))
    return k.reshape(k.dequantize(dense, k.flat(codes), scales, levels, bucket_size, 1.0), tuple(shape))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes below 2^bits (1-d, uint8) into one little-endian stream: code i at bits i bits to (i + 1) bits.

    Returns:
        ceil(n bits / 8) bytes, uint8; unused bits of the last one are zero.

    Raises:
        ConfigError: the codes are no uint8, or ``bits`` is not 1 to 8.

    >>> import numpy as np
    >>> pack(np.uint8([1, 2, 3, 0]), bits=2)  # 00 11 10 01
    array([57], dtype=uint8)
    """
    _check("bits", bits, 1, 8)
    k = _typed("codes", codes, "uint8")
    return k.pack(k.flat(codes), bits)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the ``count`` codes that :func:`pack` joined, uint8.

    Raises:
        PayloadError: so many codes take another number of bytes.
        ConfigError: the stream is no uint8, or ``bits`` is not 1 to 8.

    >>> import numpy as np
    >>> unpack(np.uint8([57]), bits=2, count=4)
    array([1, 2, 3, 0], dtype=uint8)
    """
    _check("bits", bits, 1, 8)
    _check("count", count, 0)
    k = _typed("packed codes", packed, "uint8")
    packed = k.flat(packed)
    check_packed(packed.shape[0], bits, count)
    return k.unpack(packed, bits, count)


def sparsify(tensor: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Select the elements of largest magnitude; of equal ones those with the lower index.

    Args:
        tensor: of any shape; its elements count as float32.
        count: number of elements to select, at most all; for a ratio ``max(1, round(ratio n))``.

    Returns:
        the values, float32; and their positions in the flattened tensor, int32, ascending.

    Raises:
        ConfigError: the tensor, or ``count``, is none that the method takes.

    >>> import numpy as np
    >>> sparsify(np.float32([[1, -4], [3, 2]]), count=2)
    (array([-4., 3.], dtype=float32), array([1, 2], dtype=int32))
    """
    k, flat = kernels_of(tensor), _flat(tensor)
    n = flat.shape[0]  # which a graph may not know
    _check("count", count, 0, check_positions(n) if isinstance(n, int) else math.inf)
    indices = k.topk(flat, count)
    return k.gather(flat, indices), indices


def desparsify(values: Tensor, indices: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tensor of zeros, float32, with these values at these distinct positions in it, flattened.

    Raises:
        PayloadError: there are not as many values as positions, or a position is outside the tensor.
        ConfigError: the positions are no int32.

    >>> import numpy as np
    >>> desparsify(np.float32([-4, 3]), np.int32([1, 2]), shape=(2, 2))
    array([[ 0., -4.],
           [ 3., 0.]], dtype=float32)
    """
    k = _typed("indices", indices, "int32")
    indices, values = k.flat(indices), k.flat(k.cast(values, "float32"))
    check_count("values", values.shape[0], indices.shape[0])
    dense = k.zeros((math.prod(shape),), "float32", values)
    return k.reshape(k.scatter_add(dense, indices, values, 1.0), tuple(shape))


def _flat(tensor: Tensor) -> Tensor:
    k = kernels_of(tensor)
    return k.flat(k.cast(k.given(tensor), "float32"))


def _typed(what: str, tensor: Tensor, wanted: str) -> Kernels:
    """Return a tensor's kernels. Raise ConfigError unless its elements are of a type."""
    k = kernels_of(tensor)
    if k.dtype(tensor) != wanted:
        raise ConfigError(f"{what} must be of dtype {wanted}, not {k.dtype(tensor)}")
    return k


def _check(what: str, value: object, low: int, high: float = math.inf) -> None:
    """Raise ConfigError unless the value is a whole number in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        bounds = f"at least {low}" if high == math.inf else f"{low} to {high}"
        raise ConfigError(f"{what} must be a whole number, {bounds}, not {value!r}")
