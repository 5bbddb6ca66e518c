"""The reference: every kernel in plain NumPy, written to be read."""

import itertools
import math
from typing import Any

import numpy as np

from grace.kernels.checks import check_count, check_packed, check_quantized, check_range, check_scale
from grace.kernels.contract.primitives import LARGEST_FACTOR, Kernels, bucket_within
from grace.kernels.contract.quantization import gaussian_reach
from grace.kernels.random import FEISTEL_ROUNDS, Stream, feistel_bits, philox
from grace.kernels.reference.quantization import ValueReference
from grace.kernels.reference.sparsification import SparseReference

FLOAT32_MAX = np.finfo(np.float32).max


class NumpyKernels(ValueReference, SparseReference, Kernels):
    """Kernels for NumPy arrays. NumPy has no bfloat16; everything else is complete.

    >>> k = NumpyKernels()
    >>> k.unpack(k.pack(np.uint8([1, 2, 3, 0, 1]), 2), 2, 5)
    array([1, 2, 3, 0, 1], dtype=uint8)
    """

    name = "numpy"

    def flat(self, x):
        return np.ascontiguousarray(x).reshape(-1)

    def reshape(self, x, shape):
        return x.reshape(shape)

    def cast(self, x, dtype):
        if dtype == "bfloat16":
            raise TypeError("NumPy has no bfloat16; use float16, or a framework's tensors")
        with np.errstate(over="ignore"):
            return x.astype(dtype, copy=False)

    def zeros(self, shape, dtype, like):
        return np.zeros(shape, dtype)

    def full(self, values, dtype, like):
        return np.array(values, dtype)

    def to_list(self, x):
        return x.astype(np.float64).tolist()

    def zero(self, out):
        out[...] = 0
        return out

    def join(self, tensors, out=None):
        return np.concatenate(tensors, out=out)

    def concat(self, tensors, axis):
        return np.concatenate(tensors, axis)

    def split(self, x, sizes):
        ends = list(itertools.accumulate(sizes))
        return [x[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def to_bytes(self, x):
        return np.ascontiguousarray(x).reshape(-1).view(np.uint8)

    def from_bytes(self, raw, dtype, shape):
        return (raw != 0 if dtype == "bool" else raw.view(dtype)).reshape(shape)

    def host_buffer(self, n):
        return np.empty(n, np.uint8)

    def adopt(self, array, dtype, shape, like):
        return array.view(dtype).reshape(shape)

    def take_rows(self, x, rows):
        return x[rows]

    def put_rows(self, out, rows, values):
        out[rows] = values
        return out

    def add_rows(self, out, rows, values, weight):
        np.add.at(out, rows, np.asarray(weight, out.dtype) * values)
        return out

    def distinct(self, rows):
        return np.unique(rows, return_inverse=True)

    def nbytes(self, x):
        return x.nbytes

    def dtype(self, x):
        return x.dtype.name

    def all_finite(self, x, most=math.inf) -> Any:
        return bool((np.isfinite(x) if most == math.inf else np.abs(x.astype(np.float32)) <= most).all())

    def combine(self, a, x, b, y):
        # asarray: NumPy makes scalars of 0-d results
        return np.asarray(np.float32(a) * x.astype(np.float32) + np.float32(b) * y.astype(np.float32))

    def add(self, out, x, weight=1.0):
        out += np.float32(weight) * x.astype(out.dtype, copy=False)
        return out

    def divide(self, out, x, by):
        wide = np.result_type(x, out)
        out[...] = x.reshape(out.shape).astype(wide, copy=False) / wide.type(by)
        return out

    def mean_abs(self, x):
        return np.array([np.abs(x).mean(dtype=np.float64) if x.size else 0.0], np.float32)

    def signs(self, x):
        return np.where(x >= 0, 1, -1).astype(x.dtype)

    def matmul(self, a, b, transpose=False):
        return (np.swapaxes(a, -1, -2) if transpose else a) @ b

    def matmul_add(self, out, a, b, weight, keep=1.0):
        product = np.float32(weight) * (a @ b.T).reshape(out.shape)
        out[...] = product if keep == 0 else np.float32(keep) * out + product
        return out

    def orthonormalize(self, x):
        return np.ascontiguousarray(np.linalg.qr(x)[0])

    def fill_zero_columns(self, x, other):
        return np.where((x != 0).any(axis=0) & (np.abs(x) <= LARGEST_FACTOR).all(axis=0), x, other)

    def zero_columns(self, matrices):
        largest = [np.abs(x).max(axis=0, initial=0) for x in matrices]
        return not all(((most > 0) & (most <= LARGEST_FACTOR)).all() for most in largest)

    def random_bits(self, stream: Stream, n, like=None):
        key_low, key_high, step, draw = stream.words
        block = np.arange((n + 3) // 4, dtype=np.uint64)
        low, high = (block & np.uint64(0xFFFFFFFF)).astype(np.uint32), (block >> np.uint64(32)).astype(np.uint32)
        counter = (low, high, np.full_like(low, step), np.full_like(low, draw))
        return np.stack(philox(counter, (key_low, key_high)), axis=1).reshape(-1)[:n]

    def uniform(self, stream, n, like=None):
        return (self.random_bits(stream, n) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)

    def random_indices(self, stream, n, k, like=None):
        # 1. walk each index through the permutation of the power-of-two domain until it lands below n
        index = _feistel(np.arange(k, dtype=np.uint32), n, stream)
        while (outside := index >= n).any():
            index[outside] = _feistel(index[outside], n, stream)
        return index.astype(np.int32)

    def quantize(self, x, levels, bucket_size, norm, stream):
        bucket_size = bucket_within(bucket_size, x.size)
        n, buckets = x.size, -(-x.size // bucket_size)
        padded = np.zeros(buckets * bucket_size, np.float32)
        padded[:n] = np.abs(x)
        magnitude = padded.reshape(buckets, bucket_size)
        if norm == "max":
            scales = magnitude.max(axis=1, initial=0)
        else:
            squares = np.square(magnitude, dtype=np.float64).sum(axis=1)
            sizes = np.minimum(bucket_size, n - bucket_size * np.arange(buckets))
            scales = np.sqrt(squares) if norm == "l2" else np.sqrt(squares / sizes) * gaussian_reach(levels)
        scales = np.minimum(scales, FLOAT32_MAX).astype(np.float32)
        divisor = np.where(scales > 0, scales, np.float32(1))[:, None]
        exact = (magnitude / divisor * np.float32(levels)).reshape(-1)[:n]
        below, above = math.floor(levels), math.ceil(levels)  # of a code 0; they differ where there is no level 0
        offset = np.float32(0.5 if below == above else 0) if stream is None else self.uniform(stream, n)
        code = np.minimum(np.floor(exact + offset), below).astype(np.int32)
        return np.where(x >= 0, above + code, below - code).astype(np.uint8), scales

    def dequantize(self, out, codes, scales, levels, bucket_size, weight):
        bucket_size = bucket_within(bucket_size, codes.size)
        check_quantized(codes.size, scales.size, out.size, bucket_size)
        # code / levels is at most 1, so that nothing overflows or vanishes that need not
        factor = np.repeat(scales * np.float32(weight), bucket_size)[: codes.size]
        out += factor * ((codes.astype(np.float32) - np.float32(levels)) / np.float32(levels))
        return out

    def pack(self, codes, bits):
        stream = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
        return np.packbits(stream.reshape(-1), bitorder="little")

    def unpack(self, packed, bits, n):
        check_packed(packed.size, bits, n)
        stream = np.unpackbits(packed, count=n * bits, bitorder="little").reshape(n, bits)
        return np.packbits(stream, axis=1, bitorder="little").reshape(-1)

    def pack_signs(self, x):
        return np.packbits(x >= 0, bitorder="little")

    def add_signs(self, out, packed, scale, weight):
        check_scale(scale)
        check_packed(packed.size, 1, out.size)
        bits = np.unpackbits(packed, count=out.size, bitorder="little")
        amount = np.float32(weight) * (np.float32(1) if scale is None else scale[0])
        out += np.where(bits == 1, amount, -amount)
        return out

    def topk(self, x, k):
        bits = x.view(np.uint32) & np.uint32(0x7FFFFFFF)  # magnitudes in the order of their bit patterns
        order = np.argsort(~bits, kind="stable")[:k]
        return np.sort(order).astype(np.int32)

    def bitmap(self, indices, n):
        codes = np.zeros(n, np.uint8)
        codes[indices] = 1
        return np.packbits(codes, bitorder="little")

    def positions(self, bitmap, n, count=None):
        return np.flatnonzero(np.unpackbits(bitmap, count=n, bitorder="little")).astype(np.int32)

    def narrow(self, indices):
        return indices.astype(np.uint16).view(np.int16)

    def widen(self, narrow):
        return narrow.view(np.uint16).astype(np.int32)

    def check_indices(self, indices, n):
        if indices.size:
            check_range(int(indices.min()), int(indices.max()), n)

    def gather(self, x, indices):
        return x[indices]

    def scatter_add(self, out, indices, values, weight):
        check_count("values", values.size, indices.size)
        self.check_indices(indices, out.size)
        out[indices] += np.float32(weight) * values
        return out


def _feistel(index: np.ndarray, n: int, stream: Stream) -> np.ndarray:
    """An unbalanced Feistel network on a power of two that holds n; Philox is its round function."""
    left_bits, right_bits = feistel_bits(n)
    key_low, key_high, step, draw = stream.permuting().words
    left, right = index >> np.uint32(right_bits), index & np.uint32((1 << right_bits) - 1)
    for number in range(FEISTEL_ROUNDS):
        constants = (np.full_like(right, c) for c in (number, step, draw))
        mixed = philox((right, *constants), (key_low, key_high))[0] & np.uint32((1 << left_bits) - 1)
        left, right = right, left ^ mixed
        left_bits, right_bits = right_bits, left_bits
    return left << np.uint32(right_bits) | right
