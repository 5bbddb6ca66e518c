"""Index coding: how the positions of a sparsified payload travel.

Ascending positions below n are sent as whichever is smallest, by the sizes alone, so that every rank chooses alike:
int32, 16 bits where n <= 65536, or a bitmap of n bits. Of positions of which as many are known to be in each chunk of
elements, 16 bits are enough. The decoder tells them apart by dtype.
"""

from grace.errors import ConfigError
from grace.kernels.constants import ITEM_SIZE
from grace.kernels.reference import Kernels, Tensor

NARROW, TOO_MANY = 1 << 16, 1 << 31


def check_positions(n: int, whose: str = "a tensor", method: str = "the method", what: str = "elements") -> int:
    """Return n, if int32 positions tell so many elements apart.

    Raises:
        ConfigError: they do not; the message says what to do.
    """
    if n >= TOO_MANY:
        raise ConfigError(
            f"{whose} has {n} {what}, and {method} tells them apart by 32-bit positions, which are fewer than 2^31 = "
            f"{TOO_MANY}. Cut it into parts (a strategy with a partition: partitioned_all_reduce, partitioned_ps), "
            "or exchange it with the compressor none or cast"
        )
    return n


def encode(k: Kernels, indices: Tensor, n: int, fixed: bool, chunk: int = 0) -> Tensor:
    """Code ascending int32 positions below n; ``fixed`` if every rank sends equally many, in each chunk if there are
    chunks.

    >>> import numpy as np
    >>> from grace.kernels import NumpyKernels
    >>> encode(NumpyKernels(), np.int32([0, 3, 4, 6]), 7, fixed=True)
    array([89], dtype=uint8)
    """
    check_positions(n)
    dtype, _ = coded_as(n, indices.shape[0] if fixed else None, chunk)
    if dtype == "uint8":
        return k.bitmap(indices, n)
    return k.narrow(indices) if dtype == "int16" else indices


def decode(
    k: Kernels, coded: Tensor, n: int, count: int | None = None, chunks: tuple[int, int] | None = None
) -> Tensor:
    """Return the positions, int32, ascending. ``count``, if it is known, is their number, and ``chunks`` are a chunk's
    numbers of elements and of positions.

    >>> import numpy as np
    >>> from grace.kernels import NumpyKernels
    >>> decode(NumpyKernels(), np.uint8([89]), 7)
    array([0, 3, 4, 6], dtype=int32)
    """
    dtype = k.dtype(coded)
    if dtype == "uint8":
        return k.positions(coded, n, count)
    if dtype == "int16":
        return k.widen_chunks(coded, *chunks) if chunks else k.widen(coded)
    return coded


def coded_as(n: int, count: int | None = None, chunk: int = 0) -> tuple[str, int | None]:
    """Return the dtype and length of ``count`` positions below n as :func:`encode` codes them. The length is None if
    the data decide the count, which rules the bitmap out, because its size does not tell the count. ``chunk`` is of how
    many elements it is known how many positions they have, if it is.

    >>> coded_as(1000, 10), coded_as(1000, 500), coded_as(1_000_000)
    (('int16', 10), ('uint8', 125), ('int32', None))
    """
    dtype, bitmap = "int16" if min(n, chunk or n) <= NARROW else "int32", (n + 7) // 8
    if count is not None and bitmap < ITEM_SIZE[dtype] * count:
        return "uint8", bitmap
    return dtype, count
