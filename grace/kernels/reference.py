"""The primitive operations that compressors are written in, and their reference in plain NumPy, written to be read."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from grace.errors import ConfigError
from grace.kernels.constants import (
    FLOAT8,
    FLOAT32_MAX,
    FLOATS,
    LARGEST_FACTOR,
    LARGEST_FLOAT8,
    LOWEST_BIASED,
    POWER_OFFSET,
    ROOT,
    ROTATED,
    bucket_within,
    clip_factor,
    deviation_limit,
    gaussian_reach,
    rounded_down,
    table_factor,
)
from grace.kernels.random import FEISTEL_ROUNDS, Stream, feistel_bits, philox
from grace.kernels.wire_checks import check_count, check_packed, check_quantized, check_range, check_scale, check_table

Tensor = Any
LOW31 = np.uint32(0x7FFFFFFF)


class Kernels:
    """Primitive operations of one framework and device; this class's own are those of NumPy arrays.

    It is the reference that every subclass must equal: bit for bit for integers, packing, indices and random numbers,
    to float32 rounding for the rest. NumPy has no bfloat16; everything else is complete.

    Unless a docstring says otherwise, a method takes and returns 1-d contiguous tensors: float32 values, uint8 codes,
    int32 indices. Methods with ``out`` change it in place where the framework can, and always return it.

    Methods that decode (``unpack`` and all with ``out`` but plain arithmetic) take payloads of other ranks: where
    positions, codes or numbers of elements do not fit they raise :class:`~grace.errors.PayloadError`, and ``out`` may
    be half written. They never write outside it.

    Sizes that depend on the data are known to the host, so methods that return them wait for the device. A table or a
    list of edges may be a NumPy array in every framework: then it is a constant.

    >>> k = Kernels()
    >>> k.unpack(k.pack(np.uint8([1, 2, 3, 0, 1]), 2), 2, 5)
    array([1, 2, 3, 0, 1], dtype=uint8)
    >>> k.above(np.float32([1, -5, 3, 0]), 2.0)
    array([1, 2], dtype=int32)
    """

    name = "numpy"
    mutable: ClassVar[bool] = True
    """True if methods with ``out`` change it in place, so that a view of a tensor changes the tensor."""
    codecs: ClassVar[str] = ""
    """Module whose ``CODECS`` are codecs of whole buckets, which compute with memory at :meth:`addresses`."""

    # -- plumbing --------------------------------------------------------------------------------------

    def flat(self, x: Tensor) -> Tensor:
        """Return ``x`` as 1-d, a view where possible."""
        return np.ascontiguousarray(x).reshape(-1)

    def reshape(self, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return ``x`` in another shape, a view where possible."""
        return x.reshape(shape)

    def cast(self, x: Tensor, dtype: str) -> Tensor:
        """Return ``x`` as "float32", "float16", "bfloat16" or "float64", rounded to nearest even; overflow is Inf."""
        if dtype == "bfloat16":
            raise TypeError("NumPy has no bfloat16; use float16, or a framework's tensors")
        with np.errstate(over="ignore"):  # NumPy would warn of an overflow, which is Inf here
            return x.astype(dtype, copy=False)

    def given(self, x: Tensor) -> Tensor:
        """Return a user's tensor without the record of how it was computed (autograd's graph).

        Raises:
            ConfigError: its elements are no floating point numbers in one dense block of memory.
        """
        if self.dtype(x) not in FLOATS:
            raise ConfigError(f"it is of dtype {self.dtype(x)}; Grace exchanges {', '.join(FLOATS)}")
        return self.cast(x, self.dtype(x))

    def eagerly(self, function: Callable[[list[Tensor]], list[Tensor]], tensors: list[Tensor]) -> list[Tensor]:
        """Return ``function(tensors)``, which has as many tensors of the same shapes and dtypes. A graph calls it when
        it runs."""
        return function(tensors)

    def addresses(self, tensors: Sequence[Tensor], dtype: str = "float32") -> list[int] | None:
        """Return the addresses of tensors in the memory that codecs compute with; None if one does not lie there, is
        not contiguous or of another dtype."""
        return None

    def memory(self, x: Tensor) -> np.ndarray:
        """Return the bytes (uint8) of a contiguous 1-d tensor whose address is known, to be read and written."""
        raise NotImplementedError

    def on_device(self, x: Tensor) -> bool:
        """Return True if to read a number of this tensor is to wait for a device."""
        return False

    def read(self, tensors: Sequence[Tensor]) -> list[list[float]]:
        """Return the elements of small tensors of any dtypes. Those on one device take one copy, with one wait."""
        return [self.to_list(self.flat(x)) for x in tensors]

    def wait_for(self, x: Tensor) -> None:
        """Wait until a device has computed all that it was given before, which a tensor on it comes from."""
        if self.on_device(x):
            self.read([self.flat(x)[:1]])

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return tensors in the CPU's memory. Those on one device take one wait."""
        return list(tensors)

    def to_device_of(self, x: Tensor, like: Tensor) -> Tensor:
        """Return a tensor on the device of ``like``. The host does not wait for a copy from its memory."""
        return x

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        """Return zeros on the device of ``like``."""
        return np.zeros(shape, dtype)

    def blank(self, shape: tuple[int, ...], dtype: str, like: Tensor) -> Tensor:
        """Return a tensor to write to, whose elements may be anything, on the device of ``like``."""
        return self.zeros(shape, dtype, like)

    def full(self, values: Sequence[float | Tensor], dtype: str, like: Tensor) -> Tensor:
        """Return a 1-d tensor of these numbers (or 0-d tensors) on the device of ``like``."""
        return np.array(values, dtype)

    def to_list(self, x: Tensor) -> list[float]:
        """Return the elements of a 1-d tensor as Python numbers."""
        return x.astype(np.float64).tolist()

    def zero(self, out: Tensor) -> Tensor:
        """Fill any tensor with zeros."""
        out[...] = 0
        return out

    def join(self, tensors: list[Tensor], out: Tensor | None = None) -> Tensor:
        """Concatenate 1-d tensors of one dtype, into ``out`` if given."""
        return np.concatenate(tensors, out=out)

    def concat(self, tensors: list[Tensor], axis: int) -> Tensor:
        """Concatenate tensors of one dtype along an axis into a new one."""
        return np.concatenate(tensors, axis)

    def split(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return a 1-d tensor in parts of these sizes, which add up to its own; views where possible."""
        ends = list(itertools.accumulate(sizes))
        return [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def to_bytes(self, x: Tensor) -> Tensor:
        """Return the memory of any contiguous tensor as uint8."""
        return np.ascontiguousarray(x).reshape(-1).view(np.uint8)

    def from_bytes(self, raw: Tensor, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """Invert :meth:`to_bytes`; ``raw`` starts at a multiple of the item size."""
        # a byte other than 0 and 1 is no bool
        return (raw != 0 if dtype == "bool" else raw.view(dtype)).reshape(shape)

    def host_buffer(self, n: int) -> np.ndarray:
        """Return ``n`` bytes of host memory (uint8), not initialized, that :meth:`adopt` takes without a copy."""
        return np.empty(n, np.uint8)

    def adopt(self, array: np.ndarray, dtype: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return bytes in host memory (uint8) as a tensor on the device of ``like``, without a copy where possible.
        The array must not be changed any more."""
        return array.view(dtype).reshape(shape)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return ``x[rows]`` along the first dimension of a tensor of any shape; ``rows`` of any integer dtype."""
        return x[rows]

    def put_rows(self, out: Tensor, rows: Tensor, values: Tensor) -> Tensor:
        """Compute ``out[rows] = values`` along the first dimension, for distinct rows."""
        out[rows] = values
        return out

    def add_rows(self, out: Tensor, rows: Tensor, values: Tensor, weight: float) -> Tensor:
        """Compute ``out[rows] += weight values`` along the first dimension; a row that comes twice adds twice."""
        # Not out[rows] += ..., which adds only one of several equal rows.
        np.add.at(out, rows, np.asarray(weight, out.dtype) * values)
        return out

    def distinct(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct numbers in ``rows``, ascending, and the position in them of every element of ``rows``."""
        return np.unique(rows, return_inverse=True)

    def nbytes(self, x: Tensor) -> int:
        """Return the size in bytes."""
        return x.nbytes

    def dtype(self, x: Tensor) -> str:
        """Return the name of the element type, as NumPy spells it ("bfloat16" too)."""
        return x.dtype.name

    # -- arithmetic ------------------------------------------------------------------------------------

    def all_finite(self, x: Tensor, most: float = math.inf) -> bool | Tensor:
        """Return True if no element is NaN, Inf, or larger in magnitude than ``most`` (as float32); where reading would
        wait, a 0-d tensor of 1.0 or 0.0."""
        return bool((np.isfinite(x) if most == math.inf else np.abs(x.astype(np.float32)) <= most).all())

    def combine(self, a: float, x: Tensor, b: float, y: Tensor) -> Tensor:
        """Return a new tensor ``a x + b y`` in float32, in the shape of ``x``."""
        # asarray: NumPy makes scalars of 0-d results
        return np.asarray(np.float32(a) * x.astype(np.float32) + np.float32(b) * y.astype(np.float32))

    def add(self, out: Tensor, x: Tensor, weight: float = 1.0) -> Tensor:
        """Compute ``out += weight x``; any shape, ``x`` may be narrower than ``out``."""
        out += np.float32(weight) * x.astype(out.dtype, copy=False)
        return out

    def divide(self, out: Tensor, x: Tensor, by: float) -> Tensor:
        """Compute ``out = x / by``, any shape; divided, not multiplied by 1/by, in the wider of the two dtypes, or in
        float32 if both have 16 bits."""
        wide = np.result_type(x, out, np.float32)
        out[...] = x.reshape(out.shape).astype(wide, copy=False) / wide.type(by)
        return out

    def mean_abs(self, x: Tensor) -> Tensor:
        """Return the mean magnitude, accumulated in float64, as float32 of shape (1,); 0 of an empty tensor."""
        return np.array([np.abs(x).mean(dtype=np.float64) if x.size else 0.0], np.float32)

    def signs(self, x: Tensor) -> Tensor:
        """Return a new tensor with +1 where x >= 0 and -1 elsewhere, any shape."""
        return np.where(x >= 0, 1, -1).astype(x.dtype)

    def matmul(self, a: Tensor, b: Tensor, transpose: bool = False) -> Tensor:
        """Return the matrix product ``a b``, or ``a^T b``; for two batches (b, m, n), the product of each pair."""
        return (np.swapaxes(a, -1, -2) if transpose else a) @ b

    def matmul_add(self, out: Tensor, a: Tensor, b: Tensor, weight: float, keep: float = 1.0) -> Tensor:
        """Compute ``out = keep out + weight a b^T`` for matrices; ``out`` may be a flat or n-d tensor of that many
        elements. With ``keep`` 0 its old elements do not matter, not even NaN."""
        product = np.float32(weight) * (a @ b.T).reshape(out.shape)
        out[...] = product if keep == 0 else np.float32(keep) * out + product
        return out

    def orthogonalize(self, x: Tensor) -> Tensor:
        """Return orthonormal columns that span the columns of the matrix ``x`` (rows >= columns), or of each of a
        batch; finite, and orthonormal, also for rank-deficient and all-zero matrices."""
        return np.ascontiguousarray(np.linalg.qr(x)[0])

    def fill_zero_columns(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the matrix ``x`` with each column replaced by that of ``other`` that is all zero, or has elements
        beyond :data:`~grace.kernels.constants.LARGEST_FACTOR`, with which products overflow."""
        return np.where((x != 0).any(axis=0) & (np.abs(x) <= LARGEST_FACTOR).all(axis=0), x, other)

    def random_matrix(self, stream: Stream, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return numbers in [-1, 1): 2 u - 1, of :meth:`uniform`."""
        found = self.combine(2.0, self.uniform(stream, math.prod(shape), like), -1.0, self.full([1.0], "float32", like))
        return self.reshape(found, shape)

    def renew_columns(self, x: Tensor, stream: Stream) -> Tensor:
        """Return :meth:`fill_zero_columns` of ``x`` and a :meth:`random_matrix`."""
        return self.fill_zero_columns(x, self.random_matrix(stream, tuple(x.shape), x))

    def zero_columns(self, matrices: Sequence[Tensor]) -> bool:
        """Return True if :meth:`fill_zero_columns` may change one of these matrices; also where reading would wait, on
        GPUs and in graphs."""
        # A matrix may have no rows.
        largest = [np.abs(x).max(axis=0, initial=0) for x in matrices]
        return not all(((most > 0) & (most <= LARGEST_FACTOR)).all() for most in largest)

    # -- random numbers --------------------------------------------------------------------------------

    def random_bits(self, stream: Stream, n: int, like: Tensor = None) -> Tensor:
        """Return the first n 32-bit numbers of a stream, in any integer dtype that holds them."""
        key_low, key_high, step, draw = stream.words
        # A block has four numbers.
        block = np.arange((n + 3) // 4, dtype=np.uint64)
        low, high = (block & np.uint64(0xFFFFFFFF)).astype(np.uint32), (block >> np.uint64(32)).astype(np.uint32)
        counter = (low, high, np.full_like(low, step), np.full_like(low, draw))
        return np.stack(philox(counter, (key_low, key_high)), axis=1).reshape(-1)[:n]

    def uniform(self, stream: Stream, n: int, like: Tensor = None) -> Tensor:
        """Return the upper 24 bits of :meth:`random_bits` times 2**-24: exact multiples, in [0, 1)."""
        return (self.random_bits(stream, n) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)

    def random_indices(self, stream: Stream, n: int, k: int, like: Tensor = None) -> Tensor:
        """Return k distinct indices below n (int32): the images of 0 .. k-1 under a keyed Feistel permutation of
        [0, n), by cycle walking (Black and Rogaway 2002)."""
        # 1. walk each index through the permutation of the power-of-two domain until it lands below n
        index = _feistel(np.arange(k, dtype=np.uint32), n, stream)
        while (outside := index >= n).any():
            index[outside] = _feistel(index[outside], n, stream)
        return index.astype(np.int32)

    def sample_indices(self, stream: Stream, n: int, k: int, like: Tensor = None) -> Tensor:
        """Return k <= n distinct indices below n, ascending: one from each of k equal slices of [0, n).

        Slice j is [floor(j n / k), floor((j + 1) n / k)); its index is start + floor(width bits[j] / 2**32)."""
        # In 64 bits, since j n exceeds 32.
        starts = np.arange(k + 1, dtype=np.uint64) * np.uint64(n) // np.uint64(max(1, k))
        width = starts[1:] - starts[:-1]
        bits = self.random_bits(stream, k, like).astype(np.uint64)
        return (starts[:-1] + (width * bits >> np.uint64(32))).astype(np.int32)

    # -- quantization ----------------------------------------------------------------------------------

    def quantize(
        self, x: Tensor, levels: float, bucket_size: int, norm: str, stream: Stream | None
    ) -> tuple[Tensor, Tensor]:
        """Round to multiples of a scale per bucket: s = l2 or max norm of the bucket, or with "rms" its root mean
        square times :func:`~grace.kernels.constants.gaussian_reach` (accumulated in float64, at most the largest
        float32); code = sign(x) min(levels, floor(abs(x)/s levels + u)), stored as code + levels. Without a stream u
        is 0.5, which rounds to the nearest level.

        With levels of n + 1/2, which "rms" has and which take no stream, there is no zero:
        code = sign(x) (min(n, floor(abs(x)/s levels)) + 1/2), where the sign of 0 is 1.

        Returns:
            the codes (uint8, n) and the scales (float32, ceil(n / bucket_size)).
        """
        bucket_size = bucket_within(bucket_size, x.size)
        n, buckets = x.size, -(-x.size // bucket_size)
        # Zeros add nothing to a norm, and are no largest magnitude.
        padded = np.zeros(buckets * bucket_size, np.float32)
        padded[:n] = np.abs(x)
        magnitude = padded.reshape(buckets, bucket_size)
        if norm == "max":
            scales = magnitude.max(axis=1, initial=0)
        else:
            squares = np.square(magnitude, dtype=np.float64).sum(axis=1)
            sizes = np.minimum(bucket_size, n - bucket_size * np.arange(buckets))
            scales = np.sqrt(squares) if norm == "l2" else np.sqrt(squares / sizes) * gaussian_reach(levels)
        # The norm of float32s may be beyond their range.
        scales = np.minimum(scales, FLOAT32_MAX).astype(np.float32)
        # A bucket of zeros has the scale 0.
        divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
        exact = (magnitude / divisor * np.float32(levels)).reshape(-1)[:n]
        below, above = math.floor(levels), math.ceil(levels)  # of a code 0; they differ where there is no level 0
        offset = np.float32(0.5 if below == above else 0) if stream is None else self.uniform(stream, n)
        code = np.minimum(np.floor(exact + offset), below).astype(np.int32)
        return np.where(x >= 0, above + code, below - code).astype(np.uint8), scales

    def dequantize(
        self, out: Tensor, codes: Tensor, scales: Tensor, levels: float, bucket_size: int, weight: float
    ) -> Tensor:
        """Compute ``out += weight s code / levels``."""
        bucket_size = bucket_within(bucket_size, codes.size)
        check_quantized(codes.size, scales.size, out.size, bucket_size)
        # code / levels is at most 1, so that nothing overflows or vanishes that need not
        factor = np.repeat(scales * np.float32(weight), bucket_size)[: codes.size]
        out += factor * ((codes.astype(np.float32) - np.float32(levels)) / np.float32(levels))
        return out

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Pack codes below 2**bits into one little-endian bit stream: code i at bits [i bits, (i + 1) bits).

        1 <= bits <= 8; returns ceil(n bits / 8) uint8, the unused bits zero."""
        stream = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
        return np.packbits(stream.reshape(-1), bitorder="little")

    def unpack(self, packed: Tensor, bits: int, n: int) -> Tensor:
        """Invert :meth:`pack`."""
        check_packed(packed.size, bits, n)
        stream = np.unpackbits(packed, count=n * bits, bitorder="little").reshape(n, bits)
        return np.packbits(stream, axis=1, bitorder="little").reshape(-1)

    def pack_signs(self, x: Tensor) -> Tensor:
        """Return ``pack(x >= 0, 1)``."""
        return np.packbits(x >= 0, bitorder="little")

    def add_signs(self, out: Tensor, packed: Tensor, scale: Tensor | None, weight: float) -> Tensor:
        """Compute ``out += weight scale`` where the bit is set, ``-=`` elsewhere; ``scale`` of shape (1,), None is
        1."""
        check_scale(scale)
        check_packed(packed.size, 1, out.size)
        bits = np.unpackbits(packed, count=out.size, bitorder="little")
        amount = table_factor(scale, weight)
        out += np.where(bits == 1, amount, -amount)
        return out

    def max_abs(self, x: Tensor) -> Tensor:
        """Return the largest magnitude, at most the largest float32, of shape (1,); 0 of an empty tensor."""
        return np.minimum(np.abs(x).max(initial=0), FLOAT32_MAX).reshape(1)

    def side_means(self, x: Tensor) -> Tensor:
        """Return the mean of the negatives and the mean of the rest (x >= 0), accumulated in float64, as float32 of
        shape (2,); 0 for a side without elements."""
        upper = x >= 0
        sides = (x[~upper], x[upper])
        return np.array([side.mean(dtype=np.float64) if side.size else 0.0 for side in sides], np.float32)

    def clip_deviation(self, x: Tensor, factor: float) -> Tensor:
        """Return a new tensor: ``x`` clipped to [-factor s, factor s], s = sqrt(mean((x - mean(x))^2)) accumulated in
        float64. Elements that are equal to float32 rounding (s <= 2**-20 abs(mean)) have no spread to clip by, and are
        not clipped."""
        wide = x.astype(np.float64)
        mean = wide.mean() if x.size else 0.0
        deviation = np.sqrt(np.square(wide - mean).mean()) if x.size else 0.0
        limit = deviation_limit(mean, deviation, factor)
        return np.clip(x, -limit, limit)

    def round_powers(self, x: Tensor, stream: Stream) -> Tensor:
        """Round each element stochastically to one of the two powers of two around it, unbiased.

        With b the float32 bits of abs(x) and r the upper 23 bits of the element's random number, the exponent
        is (b + r) >> 23: the sum carries with probability mantissa / 2**23 exactly. Code 0 is zero; otherwise
        the lower 7 bits are the exponent, clipped to LOWEST_POWER .. HIGHEST_POWER, minus LOWEST_POWER, plus 1,
        and the top bit is the sign."""
        bits = x.view(np.uint32)
        magnitude = bits & LOW31
        carried = magnitude + (self.random_bits(stream, x.size, x) >> np.uint32(9))
        exponent = (carried >> np.uint32(23)).astype(np.int32) - POWER_OFFSET
        code = np.clip(exponent, 1, 127) | (bits >> np.uint32(24) & np.uint32(0x80)).astype(np.int32)
        return np.where(magnitude > 0, code, 0).astype(np.uint8)

    def add_powers(self, out: Tensor, codes: Tensor, weight: float) -> Tensor:
        """Compute ``out += weight v`` for the values v that :meth:`round_powers` encoded."""
        check_packed(codes.size, 8, out.size)
        power = codes.astype(np.uint32) & np.uint32(0x7F)
        bits = power + np.uint32(POWER_OFFSET) << np.uint32(23) | (codes >> 7).astype(np.uint32) << np.uint32(31)
        out += np.float32(weight) * np.where(power > 0, bits, np.uint32(0)).view(np.float32)
        return out

    def round_float8(self, x: Tensor, bucket_size: int, stream: Stream | None) -> tuple[Tensor, Tensor]:
        """Round to 8-bit floats (e4m3: a sign, 4 bits of exponent, 3 of mantissa) per bucket: with s the largest
        magnitude of the bucket and y = abs(x)/s 448, of which 2^e is the power of two below, at least 2^-6,
        k = floor(2^(3-e) y + u) and the code is 8 (e + 6) + k, at most 126, which e4m3 has for k 2^(e-3),
        and 128 for the sign. u is uniform, or 0.5 without a stream.

        Returns:
            the codes (uint8, n) and the scales (float32, ceil(n / bucket_size)).
        """
        bucket_size = bucket_within(bucket_size, x.size)
        magnitude = np.zeros((-(-x.size // bucket_size), bucket_size), np.float32)
        magnitude.reshape(-1)[: x.size] = np.abs(x)
        scales = np.minimum(magnitude.max(axis=1, initial=0), FLOAT32_MAX)
        divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
        scaled = (magnitude / divisor * np.float32(LARGEST_FLOAT8)).reshape(-1)[: x.size]
        biased = np.maximum(scaled.view(np.int32) >> 23, LOWEST_BIASED)
        places = scaled * (257 - biased << 23).view(np.float32)  # in units of its last bit
        offset = np.float32(0.5) if stream is None else self.uniform(stream, x.size)
        code = np.minimum((biased - LOWEST_BIASED) * 8 + np.floor(places + offset).astype(np.int32), 126)
        return (code + np.where(x < 0, 128, 0)).astype(np.uint8), scales

    def add_float8(self, out: Tensor, codes: Tensor, scales: Tensor, bucket_size: int, weight: float) -> Tensor:
        """Compute ``out += weight s v / 448`` for the values v that :meth:`round_float8` encoded. Codes 127 and 255,
        which it does not make, are 480 and -480."""
        bucket_size = bucket_within(bucket_size, codes.size)
        check_quantized(codes.size, scales.size, out.size, bucket_size)
        out += np.repeat(scales * np.float32(weight), bucket_size)[: codes.size] * FLOAT8[codes]
        return out

    def rotate(self, x: Tensor) -> Tensor:
        """Return a new tensor: each 32 elements times the Hadamard matrix of 32 rows over sqrt(32), at most the largest
        float32. Fewer elements at the end are copied. It is its own inverse."""
        whole = x.size // ROTATED * ROTATED
        rows = x[:whole] * np.float32(1 / ROTATED)  # so that no sum overflows
        span = 1
        while span < ROTATED:
            pairs = rows.reshape(-1, 2, span)
            rows = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1).reshape(-1)
            span *= 2
        with np.errstate(over="ignore"):
            rows = np.clip(rows * ROOT, -FLOAT32_MAX, FLOAT32_MAX)
        return np.concatenate([rows, x[whole:]])

    def bucketize(self, x: Tensor, scale: Tensor, edges: Tensor) -> Tensor:
        """Count the ascending ``edges`` (float32, at most 255) below x / scale, as uint8.

        ``scale`` is of shape (1,); a scale of 0 divides by 1."""
        divisor = scale[0] if scale[0] > 0 else np.float32(1)
        return np.searchsorted(edges, x / divisor, side="left").astype(np.uint8)

    def add_table(
        self, out: Tensor, packed: Tensor, bits: int, table: Tensor, scale: Tensor | None, weight: float
    ) -> Tensor:
        """Compute ``out += (weight scale) table[code]`` for the codes that ``pack(codes, bits)`` made; ``scale`` of
        shape (1,), None is 1."""
        check_scale(scale)
        check_table(table, bits)
        codes = self.unpack(packed, bits, out.size)
        self.check_indices(codes, table.size)
        out += (table_factor(scale, weight) * table)[codes]
        return out

    def quantile_buckets(self, x: Tensor, buckets: int) -> tuple[Tensor, Tensor]:
        """Cut elements, in the order of value, into buckets of equal counts: the element of rank r among n is in
        bucket floor(r buckets / n), so that sizes differ by at most one; of equal elements the lower index has the
        lower rank. 1 <= buckets <= 256, and at most n unless the tensor is empty.

        Returns:
            the bucket numbers (uint8) and the mean of each bucket (accumulated in float64, as float32).
        """
        # one stable sort: the ranks are the positions that elements have in it
        codes = np.empty(x.size, np.uint8)
        codes[np.argsort(x, kind="stable")] = np.arange(x.size) * buckets // max(1, x.size)
        sums = np.bincount(codes, weights=x, minlength=buckets)
        return codes, (sums / np.maximum(1, np.bincount(codes, minlength=buckets))).astype(np.float32)

    # -- sparsification --------------------------------------------------------------------------------

    def topk(self, x: Tensor, k: int) -> Tensor:
        """Return the indices of the k largest magnitudes, ascending; of equal ones the lower index wins, and NaN is
        larger than Inf."""
        bits = x.view(np.uint32) & LOW31  # magnitudes in the order of their bit patterns
        # Stable: of equal magnitudes the lower index comes first.
        order = np.argsort(~bits, kind="stable")[:k]
        return np.sort(order).astype(np.int32)

    def topk_chunks(self, x: Tensor, chunk: int, k: int) -> Tensor:
        """Return the indices, ascending, of the k largest magnitudes of each ``chunk`` elements (a power of two, 32 to
        4096), as :meth:`topk` chooses them; of m elements at the end the ceil(k m / chunk) largest: of n
        ceil(k n / chunk)."""
        rows, count = -(-x.size // chunk), -(-k * x.size // chunk)
        # -1 is below all magnitudes, so padding is chosen last.
        bits = np.full(rows * chunk, -1, np.int32)
        bits[: x.size] = x.view(np.uint32) & LOW31
        order = np.argsort(-bits.reshape(rows, chunk), axis=1, kind="stable")[:, :k]
        order[-1:, count - (rows - 1) * k :] = chunk  # behind those that the last chunk has
        found = np.sort(order, axis=1) + chunk * np.arange(rows)[:, None]
        return found.reshape(-1)[:count].astype(np.int32)

    def bitmap(self, indices: Tensor, n: int) -> Tensor:
        """Return one bit per position below n, set at ascending ``indices``, packed as by :meth:`pack`."""
        codes = np.zeros(n, np.uint8)
        codes[indices] = 1
        return np.packbits(codes, bitorder="little")

    def positions(self, bitmap: Tensor, n: int, count: int | None = None) -> Tensor:
        """Invert :meth:`bitmap`: ascending int32 indices. ``count`` is their number, if it is known: then nothing needs
        to be read back from a device, where -1 stands for missing ones."""
        return np.flatnonzero(np.unpackbits(bitmap, count=n, bitorder="little")).astype(np.int32)

    def narrow(self, indices: Tensor) -> Tensor:
        """Return the lower 16 bits of indices (int16)."""
        return indices.astype(np.uint16).view(np.int16)

    def widen(self, narrow: Tensor) -> Tensor:
        """Invert :meth:`narrow`, for indices below 65536."""
        return narrow.view(np.uint16).astype(np.int32)

    def widen_chunks(self, narrow: Tensor, chunk: int, k: int) -> Tensor:
        """Return the indices that :meth:`topk_chunks` gave, from their lower 16 bits."""
        starts = np.arange(narrow.size, dtype=np.int32) // max(1, k) * chunk
        # A chunk never crosses a multiple of 2^16, so its start has the upper bits of all its positions.
        return (starts & ~0xFFFF) | narrow.view(np.uint16)

    def above(self, x: Tensor, threshold: float) -> Tensor:
        """Return the indices with abs(x) > threshold (rounded to float32), ascending; NaN is above nothing."""
        return np.flatnonzero(np.abs(x) > np.float32(threshold)).astype(np.int32)

    def largest_above(
        self, x: Tensor, threshold: float, room: int, ratio: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Select the elements with abs(x) > threshold, at most ``room`` of them (if there are more the largest, ties by
        index), and at most the part ``ratio`` of all above it, rounded, at least 1. Nothing is read, so it is for
        devices.

        Returns:
            values and int32 indices, ascending, filled up with 0 and n; and their count, int32 of shape (1,).
        """
        top = self.topk(x, room)
        values, total = x[top], np.count_nonzero(np.abs(x) > np.float32(threshold))
        shown = np.abs(values) > np.float32(threshold)
        if ratio != 1:
            order = np.argsort(~(values.view(np.uint32) & LOW31), kind="stable")
            shown[order[max(1, int(np.rint(ratio * total))) :]] = False
        count, rest = np.count_nonzero(shown), np.count_nonzero(~shown)
        values = np.concatenate([values[shown], np.zeros(rest, np.float32)])
        return values, np.concatenate([top[shown], np.full(rest, x.size, np.int32)]), np.array([count], np.int32)

    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """Return the k-th largest magnitude, 1 <= k <= n; NaN is larger than Inf."""
        bits = x.view(np.uint32) & LOW31
        return float(np.partition(bits, x.size - k)[x.size - k].view(np.float32))

    def check_indices(self, indices: Tensor, n: int) -> None:
        """Raise PayloadError unless all are in [0, n). Does nothing where reading them would wait, on GPUs and in
        graphs: there the operations that use them have checks of their own."""
        if indices.size:
            check_range(int(indices.min()), int(indices.max()), n)

    def gather(self, x: Tensor, indices: Tensor) -> Tensor:
        """Return ``x[indices]``."""
        return x[indices]

    def scatter_add(self, out: Tensor, indices: Tensor, values: Tensor, weight: float) -> Tensor:
        """Compute ``out[indices] += weight values`` for distinct indices."""
        check_count("values", values.size, indices.size)
        self.check_indices(indices, out.size)
        out[indices] += np.float32(weight) * values
        return out

    def zero_at(self, out: Tensor, indices: Tensor) -> Tensor:
        """Compute ``out[indices] = 0``."""
        self.check_indices(indices, out.size)
        out[indices] = 0
        return out

    def add_at(self, out: Tensor, indices: Tensor, value: Tensor, weight: float) -> Tensor:
        """Compute ``out[indices] += weight value`` for distinct indices; ``value`` of shape (1,)."""
        check_count("means", value.size, 1)
        self.check_indices(indices, out.size)
        out[indices] += np.float32(weight) * value[0]
        return out

    def clip_norm(self, x: Tensor, limit: float) -> Tensor:
        """Return a new tensor ``x min(1, limit / ||x||_2)``; the norm in float64, the factor rounded to float32 unless
        that has no exact digits for it (below 2**-126), the product rounded once."""
        norm = np.sqrt(np.square(x, dtype=np.float64).sum())
        return (x.astype(np.float64) * clip_factor(limit, norm)).astype(np.float32)

    def one_side(self, x: Tensor, sign: int) -> tuple[Tensor, int | Tensor]:
        """Return ``max(sign x, 0)`` for sign 1 or -1, and the number of positive elements, as a 0-d tensor where
        reading would wait; NaN counts as 0."""
        positive = x > 0 if sign > 0 else x < 0
        return np.where(positive, np.abs(x), np.float32(0)), int(positive.sum())

    def fixed_tags(self, x: Tensor, bound: float, top: float, step8: float, step16: float) -> Tensor:
        """Return the number of bits that each element needs, as codes 0 to 3; both steps are powers of two.

        0 (none) if abs(x) <= bound, unrounded; else 1 (8 bits) if abs(x) <= top and rounds to at most 127
        steps of ``step8``; else 2 (16 bits) likewise with 32767 of ``step16``; else, and for NaN, 3 (32 bits)."""
        magnitude = np.abs(x)
        inside = magnitude <= np.float32(top)
        capped = np.where(inside, magnitude, np.float32(0))
        # From more bits to fewer, since the last assignment counts.
        tags = np.full(x.shape, 3, np.uint8)
        tags[inside & (np.rint(capped * np.float32(1 / step16)) <= 32767)] = 2
        tags[inside & (np.rint(capped * np.float32(1 / step8)) <= 127)] = 1
        tags[magnitude <= rounded_down(bound)] = 0
        return tags

    def where_code(self, codes: Tensor, code: int) -> Tensor:
        """Return the indices of the codes that equal ``code``, ascending."""
        return np.flatnonzero(codes == code).astype(np.int32)

    def to_fixed(self, x: Tensor, step: float, dtype: str) -> Tensor:
        """Return ``x / step`` rounded to nearest even, as "int8" or "int16"; it must fit. ``step`` is a power of
        two."""
        return np.rint(x * np.float32(1 / step)).astype(dtype)


NumpyKernels = Kernels
"""Name of the reference, where it is meant and not what subclasses share with it."""


def _feistel(index: np.ndarray, n: int, stream: Stream) -> np.ndarray:
    """Permute indices by an unbalanced Feistel network on a power of two that holds n; Philox is its round function."""
    left_bits, right_bits = feistel_bits(n)
    key_low, key_high, step, draw = stream.permuting().words
    left, right = index >> np.uint32(right_bits), index & np.uint32((1 << right_bits) - 1)
    for number in range(FEISTEL_ROUNDS):
        constants = (np.full_like(right, c) for c in (number, step, draw))
        mixed = philox((right, *constants), (key_low, key_high))[0] & np.uint32((1 << left_bits) - 1)
        left, right = right, left ^ mixed
        # The halves swap, and so do their widths.
        left_bits, right_bits = right_bits, left_bits
    return left << np.uint32(right_bits) | right
