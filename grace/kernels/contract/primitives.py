"""The primitive operations that compressors are written in."""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from grace.errors import ConfigError
from grace.kernels.contract.quantization import ValueKernels
from grace.kernels.contract.sparsification import SparseKernels
from grace.kernels.random import Stream

Tensor = Any
FLOATS = ("float16", "bfloat16", "float32", "float64")
LARGEST_FACTOR = 2.0**40
NARROW = 8
"""Columns of a matrix whose products with wide ones are bound by memory: those of more are left to BLAS."""


def bucket_within(bucket_size: int, n: int) -> int:
    """The elements of a bucket of a tensor of n: no more than it has, so that none are made room for in vain.

    >>> bucket_within(512, 1000), bucket_within(512, 7), bucket_within(512, 0)
    (512, 7, 1)
    """
    return max(1, min(bucket_size, n))


class Placed(NamedTuple):
    """Where one tensor of a payload stands in the buffer that travels: its byte offset, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: str


class Kernels(ValueKernels, SparseKernels):
    """One implementation per framework and device; :class:`~grace.kernels.reference.primitives.NumpyKernels` is the
    reference that every other must equal: bit for bit for integers, packing, indices and random numbers, to
    float32 rounding for the rest.

    Unless it says otherwise a method takes and returns 1-d contiguous tensors: float32 values, uint8 codes,
    int32 indices. Methods with ``out`` change it in place where the framework can, and always return it.

    Those that decode (``unpack`` and all with ``out`` but plain arithmetic) take what other ranks sent: where
    positions, codes or numbers of elements do not fit they raise :class:`~grace.errors.PayloadError`, and ``out`` may
    be half written. They never write outside it.
    """

    name: str
    mutable: ClassVar[bool] = True
    """Whether methods with ``out`` change it in place, so that a view of a tensor changes the tensor."""

    # -- plumbing --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def flat(self, x: Tensor) -> Tensor:
        """``x`` as 1-d, a view where possible."""

    @abc.abstractmethod
    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """``x`` in another shape, a view where possible."""

    @abc.abstractmethod
    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """``x`` as "float32", "float16", "bfloat16" or "float64"; round to nearest even, overflow to Inf."""

    def given(self, x: Tensor) -> Tensor:
        """A tensor of a user's, without what it remembers of how it was computed (autograd's graph).

        Raises:
            ConfigError: its elements are no floating point numbers in one dense block of memory.
        """
        if self.dtype(x) not in FLOATS:
            raise ConfigError(f"it is of dtype {self.dtype(x)}; Grace exchanges {', '.join(FLOATS)}")
        return self.cast(x, self.dtype(x))

    def eagerly(self, function: Callable[[list[Tensor]], list[Tensor]], tensors: list[Tensor]) -> list[Tensor]:
        """``function(tensors)``, which returns as many tensors of the same shapes and dtypes; in a graph, when that
        runs."""
        return function(tensors)

    codecs: ClassVar[str] = ""
    """The module whose ``CODECS`` are codecs of whole buckets, which compute with memory at :meth:`addresses`."""

    def addresses(self, tensors: Sequence[Tensor], dtype: str = "float32") -> list[int] | None:
        """Where tensors lie in the memory that codecs compute with; None if one does not, is not contiguous or of
        another dtype."""
        return None

    def memory(self, x: Tensor) -> np.ndarray:
        """The bytes (uint8) of a contiguous 1-d tensor whose address is known, to be read and written."""
        raise NotImplementedError

    def on_device(self, x: Tensor) -> bool:
        """Whether to read a number of this tensor is to wait for a device."""
        return False

    def read(self, tensors: Sequence[Tensor]) -> list[list[float]]:
        """The elements of small tensors of any dtypes; of all those on one device in one copy, with one wait."""
        return [self.to_list(self.flat(x)) for x in tensors]

    @abc.abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        """Zeros on the device of ``like``."""

    def blank(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        """What will be written to, on the device of ``like``."""
        return self.zeros(shape, dtype, like)

    @abc.abstractmethod
    def full(self, values: Sequence[Any], dtype: str, like: Tensor) -> Tensor:
        """A 1-d tensor of these numbers (or 0-d tensors) on the device of ``like``."""

    @abc.abstractmethod
    def to_list(self, x: Tensor) -> list[float]:
        """The elements of a 1-d tensor as Python numbers."""

    @abc.abstractmethod
    def zero(self, out: Tensor) -> Tensor:
        """Fill any tensor with zeros."""

    @abc.abstractmethod
    def join(self, tensors: list[Tensor], out: Tensor | None = None) -> Tensor:
        """Concatenate 1-d tensors of one dtype, into ``out`` if given."""

    @abc.abstractmethod
    def concat(self, tensors: list[Tensor], axis: int) -> Tensor:
        """A new tensor of several of one dtype, one behind the other along an axis."""

    @abc.abstractmethod
    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """A 1-d tensor in parts of these sizes, which add up to its own; views where possible."""

    @abc.abstractmethod
    def to_bytes(self, x: Tensor) -> Tensor:
        """The memory of any contiguous tensor as uint8."""

    @abc.abstractmethod
    def from_bytes(self, raw: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """The inverse of :meth:`to_bytes`; ``raw`` starts at a multiple of the item size."""

    @abc.abstractmethod
    def host_buffer(self, n: int) -> np.ndarray:
        """``n`` bytes of host memory (uint8), not initialized, that :meth:`adopt` can take as they are."""

    @abc.abstractmethod
    def adopt(self, array: np.ndarray, dtype: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Bytes in host memory (uint8) as a tensor on the device of ``like``, without a copy where possible;
        nobody may change the array any more."""

    @abc.abstractmethod
    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """``x[rows]`` along the first dimension of a tensor of any shape; ``rows`` of any integer dtype."""

    @abc.abstractmethod
    def put_rows(self, out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """``out[rows] = values`` along the first dimension, for distinct rows."""

    @abc.abstractmethod
    def add_rows(self, out: Tensor, rows: Tensor, values: Tensor, weight: float) -> Tensor:
        """``out[rows] += weight values`` along the first dimension; a row that comes twice adds twice."""

    @abc.abstractmethod
    def distinct(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The distinct numbers in ``rows``, ascending, and the place in them of every element of ``rows``."""

    @abc.abstractmethod
    def nbytes(self, x: Tensor) -> int:
        """Size in bytes."""

    @abc.abstractmethod
    def dtype(self, x: Tensor) -> str:
        """Name of the element type, as NumPy spells it ("bfloat16" too)."""

    # -- arithmetic ------------------------------------------------------------------------------------

    @abc.abstractmethod
    def all_finite(self, x: Tensor, most: float = math.inf) -> Any:
        """Whether no element is NaN, Inf, or larger in magnitude than ``most`` (as float32): a bool, or 1.0 or 0.0 in a
        0-d tensor where reading would wait."""

    @abc.abstractmethod
    def combine(self, a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
        """A new tensor ``a x + b y`` in float32, in the shape of ``x``."""

    @abc.abstractmethod
    def add(self, out: Tensor, x: Tensor, weight: float = 1.0) -> Tensor:
        """``out += weight x``; any shape, ``x`` may be narrower than ``out``."""

    @abc.abstractmethod
    def divide(self, out: Tensor, x: Tensor, by: float) -> Tensor:
        """``out = x / by``, any shape; divided, not multiplied by 1/by, in the wider of the two dtypes."""

    @abc.abstractmethod
    def mean_abs(self, x: Tensor) -> Tensor:
        """Mean magnitude, accumulated in float64, as float32 of shape (1,); 0 of an empty tensor."""

    @abc.abstractmethod
    def signs(self, x: Tensor) -> Tensor:
        """A new tensor with +1 where x >= 0 and -1 elsewhere, any shape."""

    @abc.abstractmethod
    def matmul(self, a: Tensor, b: Tensor, transpose: bool = False) -> Tensor:
        """Matrix product ``a b``, or ``a^T b``; of each two of two batches of matrices (b, m, n) too."""

    @abc.abstractmethod
    def matmul_add(self, out: Tensor, a: Tensor, b: Tensor, weight: float, keep: float = 1.0) -> Tensor:
        """``out = keep out + weight a b^T`` for matrices; ``out`` may be a flat or n-d tensor of that many elements.
        Where ``keep`` is 0 it does not matter what it held, not even if that was NaN."""

    @abc.abstractmethod
    def orthonormalize(self, x: Tensor) -> Tensor:
        """Orthonormal columns that span the columns of the matrix ``x`` (rows >= columns), or of each of a batch;
        finite, and orthonormal, also for rank-deficient and all-zero matrices."""

    @abc.abstractmethod
    def fill_zero_columns(self, x: Tensor, other: Tensor) -> Tensor:
        """``x`` with each column replaced by that of ``other`` that is all zero, or has elements beyond
        :data:`LARGEST_FACTOR`, which products overflow with (matrices)."""

    def random_matrix(self, stream: Stream, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Numbers in [-1, 1): 2 u - 1, of :meth:`uniform`."""
        found = self.combine(2.0, self.uniform(stream, math.prod(shape), like), -1.0, self.full([1.0], "float32", like))
        return self.reshape(found, shape)

    def renew_columns(self, x: Tensor, stream: Stream) -> Tensor:
        """:meth:`fill_zero_columns`, from a :meth:`random_matrix`."""
        return self.fill_zero_columns(x, self.random_matrix(stream, tuple(x.shape), x))

    @abc.abstractmethod
    def zero_columns(self, matrices: Sequence[Tensor]) -> bool:
        """Whether :meth:`fill_zero_columns` may change one of these matrices; True where telling would wait, on GPUs
        and in graphs."""

    # -- random numbers --------------------------------------------------------------------------------

    @abc.abstractmethod
    def random_bits(self, stream: Stream, n: int, like: Tensor) -> Tensor:
        """The first n 32-bit numbers of a stream, in any integer dtype that holds them."""

    @abc.abstractmethod
    def uniform(self, stream: Stream, n: int, like: Tensor) -> Tensor:
        """The upper 24 bits of :meth:`random_bits` times 2**-24: exact multiples, in [0, 1)."""

    @abc.abstractmethod
    def random_indices(self, stream: Stream, n: int, k: int, like: Tensor) -> Tensor:
        """k distinct indices below n (int32): the images of 0 .. k-1 under a keyed Feistel permutation of
        [0, n), by cycle walking (Black and Rogaway 2002)."""

    # -- quantization ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def quantize(
        self, x: Tensor, levels: float, bucket_size: int, norm: str, stream: Stream | None
    ) -> tuple[Tensor, Tensor]:
        """Rounding to multiples of a scale per bucket: s = l2 or max norm of the bucket, or with "rms" its root mean
        square times :func:`~grace.kernels.contract.quantization.gaussian_reach` (accumulated in float64, at most the
        largest float32); code = sign(x) min(levels, floor(abs(x)/s levels + u)), stored as code + levels. Without a
        stream u is 0.5, which rounds to the nearest level.

        With levels of n + 1/2, as "rms" has them and which take no stream, there is no zero:
        code = sign(x) (min(n, floor(abs(x)/s levels)) + 1/2), where the sign of 0 is 1.

        Returns the codes (uint8, n) and the scales (float32, ceil(n / bucket_size))."""

    @abc.abstractmethod
    def dequantize(
        self, out: Tensor, codes: Tensor, scales: Tensor, levels: float, bucket_size: int, weight: float
    ) -> Tensor:
        """``out += weight s code / levels``."""

    @abc.abstractmethod
    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Codes below 2**bits as one little-endian bit stream: code i at bits [i bits, (i + 1) bits).

        1 <= bits <= 8; returns ceil(n bits / 8) uint8, the unused bits zero."""

    @abc.abstractmethod
    def unpack(self, packed: Tensor, bits: int, n: int) -> Tensor:
        """The inverse of :meth:`pack`."""

    @abc.abstractmethod
    def pack_signs(self, x: Tensor) -> Tensor:
        """``pack(x >= 0, 1)``."""

    @abc.abstractmethod
    def add_signs(self, out: Tensor, packed: Tensor, scale: Tensor | None, weight: float) -> Tensor:
        """``out += weight scale`` where the bit is set, ``-=`` elsewhere; ``scale`` of shape (1,), None is 1."""

    # -- sparsification --------------------------------------------------------------------------------

    @abc.abstractmethod
    def topk(self, x: Tensor, k: int) -> Tensor:
        """Indices of the k largest magnitudes, ascending; of equal ones the lower index wins, and NaN is
        larger than Inf."""

    @abc.abstractmethod
    def bitmap(self, indices: Tensor, n: int) -> Tensor:
        """One bit per position below n, set at ascending ``indices``, packed as by :meth:`pack`."""

    @abc.abstractmethod
    def positions(self, bitmap: Tensor, n: int, count: int | None = None) -> Tensor:
        """The inverse of :meth:`bitmap`: ascending int32 indices. ``count``, if it is known, is how many there must be:
        so nothing needs to be read back from a device, where -1 stands for those that are missing."""

    @abc.abstractmethod
    def narrow(self, indices: Tensor) -> Tensor:
        """The lower 16 bits of indices (int16)."""

    @abc.abstractmethod
    def widen(self, narrow: Tensor) -> Tensor:
        """The inverse of :meth:`narrow`, for indices below 65536."""

    @abc.abstractmethod
    def check_indices(self, indices: Tensor, n: int) -> None:
        """Raise PayloadError unless all are in [0, n). Does nothing where reading them would wait, on GPUs and in
        graphs: there the operations that use them have checks of their own."""

    @abc.abstractmethod
    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        """``x[indices]``."""

    @abc.abstractmethod
    def scatter_add(self, out: Tensor, indices: Tensor, values: Tensor, weight: float) -> Tensor:
        """``out[indices] += weight values`` for distinct indices."""
