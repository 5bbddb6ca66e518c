"""The primitives of the sparsifiers whose payload size depends on the data, and of those that choose in chunks."""

import abc
from typing import Any

from grace.kernels.random import Stream

Tensor = Any


class SparseKernels(abc.ABC):
    """A part of :class:`~grace.kernels.contract.primitives.Kernels`, whose conventions hold here.

    Sizes that depend on the data are known to the host, so those that have them wait for the device.
    """

    random_bits: Any
    widen: Any
    check_indices: Any
    topk: Any

    @abc.abstractmethod
    def topk_chunks(self, x: Tensor, chunk: int, k: int) -> Tensor:
        """Indices, ascending, of the k largest magnitudes of each ``chunk`` elements (a power of two, 32 to 4096), as
        ``topk`` chooses them; of m elements at the end the ceil(k m / chunk) largest: of n ceil(k n / chunk)."""

    @abc.abstractmethod
    def widen_chunks(self, narrow: Tensor, chunk: int, k: int) -> Tensor:
        """The indices that :meth:`topk_chunks` gave, of their lower 16 bits."""

    @abc.abstractmethod
    def above(self, x: Tensor, threshold: float) -> Tensor:
        """Indices with abs(x) > threshold (rounded to float32), ascending; NaN is above nothing."""

    def largest_above(
        self, x: Tensor, threshold: float, room: int, ratio: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The elements with abs(x) > threshold, for which there is ``room`` (of more the largest, ties by index), and
        of all that there are only the part ``ratio``, rounded, at least 1. Nothing is read, so it is for devices.

        Returns values and int32 indices, ascending, filled up with 0 and n; and int32 of shape (1,), how many they
        are."""
        raise NotImplementedError(f"{type(self).__name__} reads how many there are")

    @abc.abstractmethod
    def kth_magnitude(self, x: Tensor, k: int) -> float:
        """The k-th largest magnitude, 1 <= k <= n; NaN is larger than Inf."""

    @abc.abstractmethod
    def sample_indices(self, stream: Stream, n: int, k: int, like: Tensor) -> Tensor:
        """k <= n distinct indices below n, ascending: one from each of k equal slices of [0, n).

        Slice j is [floor(j n / k), floor((j + 1) n / k)); its index is start + floor(width bits[j] / 2**32)."""

    @abc.abstractmethod
    def zero_at(self, out: Tensor, indices: Tensor) -> Tensor:
        """``out[indices] = 0``."""

    @abc.abstractmethod
    def add_at(self, out: Tensor, indices: Tensor, value: Tensor, weight: float) -> Tensor:
        """``out[indices] += weight value`` for distinct indices; ``value`` of shape (1,)."""

    @abc.abstractmethod
    def clip_norm(self, x: Tensor, limit: float) -> Tensor:
        """A new tensor ``x min(1, limit / ||x||_2)``; the norm in float64, the factor rounded to float32 unless that
        has no exact digits for it (below 2**-126), the product rounded once."""

    @abc.abstractmethod
    def one_side(self, x: Tensor, sign: int) -> tuple[Tensor, Any]:
        """``max(sign x, 0)`` for sign 1 or -1, and how many elements are positive, as a 0-d tensor where reading would
        wait; NaN counts as 0."""

    @abc.abstractmethod
    def fixed_tags(self, x: Tensor, bound: float, top: float, step8: float, step16: float) -> Tensor:
        """How many bits each element needs, as codes 0 to 3; both steps are powers of two.

        0 (none) if abs(x) <= bound, unrounded; else 1 (8 bits) if abs(x) <= top and rounds to at most 127
        steps of ``step8``; else 2 (16 bits) likewise with 32767 of ``step16``; else, and for NaN, 3 (32 bits)."""

    @abc.abstractmethod
    def where_code(self, codes: Tensor, code: int) -> Tensor:
        """Indices of the codes that equal ``code``, ascending."""

    @abc.abstractmethod
    def to_fixed(self, x: Tensor, step: float, dtype: str) -> Tensor:
        """``x / step`` rounded to nearest even, as "int8" or "int16"; it must fit. ``step`` is a power of two."""
