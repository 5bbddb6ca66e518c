"""The reference of the primitives in :mod:`grace.kernels.contract.sparsification`, in plain NumPy."""

import numpy as np

from grace.kernels.checks import check_count
from grace.kernels.contract.sparsification import SparseKernels

LOW31 = np.uint32(0x7FFFFFFF)


def rounded_down(value: float) -> np.float32:
    """The largest float32 that is at most ``value``."""
    near = np.float32(value)
    return near if float(near) <= value else np.nextafter(near, np.float32(-np.inf))


SMALLEST_FACTOR = 2.0**-126


def clip_factor(limit: float, norm: float) -> float:
    """min(1, limit / norm), rounded to float32 where that is a normal number.

    >>> clip_factor(1.0, 4.0), clip_factor(1.0, 2.0**140) == 2.0**-140
    (0.25, True)
    """
    factor = float(limit / norm) if norm > limit else 1.0
    return float(np.float32(factor)) if factor >= SMALLEST_FACTOR else factor


class SparseReference(SparseKernels):
    """A part of :class:`~grace.kernels.reference.primitives.NumpyKernels`.

    >>> from grace.kernels import NumpyKernels
    >>> NumpyKernels().above(np.float32([1, -5, 3, 0]), 2.0)
    array([1, 2], dtype=int32)
    """

    def topk_chunks(self, x, chunk, k):
        rows, count = -(-x.size // chunk), -(-k * x.size // chunk)
        bits = np.full(rows * chunk, -1, np.int32)
        bits[: x.size] = x.view(np.uint32) & LOW31
        order = np.argsort(-bits.reshape(rows, chunk), axis=1, kind="stable")[:, :k]
        order[-1:, count - (rows - 1) * k :] = chunk  # behind those that the last chunk has
        found = np.sort(order, axis=1) + chunk * np.arange(rows)[:, None]
        return found.reshape(-1)[:count].astype(np.int32)

    def widen_chunks(self, narrow, chunk, k):
        starts = np.arange(narrow.size, dtype=np.int32) // max(1, k) * chunk
        return (starts & ~0xFFFF) | narrow.view(np.uint16)

    def above(self, x, threshold):
        return np.flatnonzero(np.abs(x) > np.float32(threshold)).astype(np.int32)

    def largest_above(self, x, threshold, room, ratio=1.0):
        top: np.ndarray = self.topk(x, room)
        values, total = x[top], np.count_nonzero(np.abs(x) > np.float32(threshold))
        shown = np.abs(values) > np.float32(threshold)
        if ratio != 1:
            order = np.argsort(~(values.view(np.uint32) & LOW31), kind="stable")
            shown[order[max(1, int(np.rint(ratio * total))) :]] = False
        count, rest = np.count_nonzero(shown), np.count_nonzero(~shown)
        values = np.concatenate([values[shown], np.zeros(rest, np.float32)])
        return values, np.concatenate([top[shown], np.full(rest, x.size, np.int32)]), np.array([count], np.int32)

    def kth_magnitude(self, x, k):
        bits = x.view(np.uint32) & LOW31  # magnitudes in the order of their bit patterns
        return float(np.partition(bits, x.size - k)[x.size - k].view(np.float32))

    def sample_indices(self, stream, n, k, like=None):
        starts = np.arange(k + 1, dtype=np.uint64) * np.uint64(n) // np.uint64(max(1, k))
        width = starts[1:] - starts[:-1]
        bits = self.random_bits(stream, k, like).astype(np.uint64)
        return (starts[:-1] + (width * bits >> np.uint64(32))).astype(np.int32)

    def zero_at(self, out, indices):
        self.check_indices(indices, out.size)
        out[indices] = 0
        return out

    def add_at(self, out, indices, value, weight):
        check_count("means", value.size, 1)
        self.check_indices(indices, out.size)
        out[indices] += np.float32(weight) * value[0]
        return out

    def clip_norm(self, x, limit):
        norm = np.sqrt(np.square(x, dtype=np.float64).sum())
        return (x.astype(np.float64) * clip_factor(limit, norm)).astype(np.float32)

    def one_side(self, x, sign):
        positive = x > 0 if sign > 0 else x < 0
        return np.where(positive, np.abs(x), np.float32(0)), int(positive.sum())

    def fixed_tags(self, x, bound, top, step8, step16):
        magnitude = np.abs(x)
        inside = magnitude <= np.float32(top)
        capped = np.where(inside, magnitude, np.float32(0))
        tags = np.full(x.shape, 3, np.uint8)
        tags[inside & (np.rint(capped * np.float32(1 / step16)) <= 32767)] = 2
        tags[inside & (np.rint(capped * np.float32(1 / step8)) <= 127)] = 1
        tags[magnitude <= rounded_down(bound)] = 0
        return tags

    def where_code(self, codes, code):
        return np.flatnonzero(codes == code).astype(np.int32)

    def to_fixed(self, x, step, dtype):
        return np.rint(x * np.float32(1 / step)).astype(dtype)
