"""The limits of the bytes in a bucket: on the wire, and of gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLLECTIVE_BYTES = 100_000
"""Bytes that a link of 1 to 10 Gbit/s sends while one more collective is started, awaited and decoded."""
GRADIENT_BYTES = 25 << 20
"""Largest number of bytes of gradient in a bucket: DistributedDataParallel's. A codec holds that much at a time, and
must encode it before the bucket is sent."""
FIRST_BYTES = 1 << 20
"""Largest number of bytes of gradient in the bucket that is ready first."""


@dataclass(frozen=True)
class Limits:
    """Limits of the bytes in one bucket, like DDP's ``bucket_cap_mb`` and Horovod's fusion threshold.

    If neither is given, buckets get the size that makes a step shortest. If a model sends W bytes in n buckets, the
    W / n bytes of the last one are sent after backward, and each bucket costs the time of :data:`COLLECTIVE_BYTES` = c
    bytes more: c n + W / n is least for buckets of sqrt(c W) bytes. No bucket has more than :data:`GRADIENT_BYTES` of
    gradient. The first one has a quarter, so that the link starts early. Uncompressed gradients have the buckets of
    DistributedDataParallel.

    Args:
        bucket_bytes: bytes on the wire.
        group_bytes: bytes of gradient.

    >>> limits = Limits()
    >>> [round(limits.wire_bytes(total, compressed=True)) for total in (1e6, 25e6)]  # top-k's and QSGD's of ResNet-50
    [316228, 1581139]
    >>> limits.wire_bytes(100e6, compressed=False), Limits(5000).wire_bytes(100e6, compressed=True)
    (26214400.0, 5000.0)
    """

    bucket_bytes: int | None = None
    group_bytes: int | None = None

    @property
    def is_set(self) -> bool:
        """True if the user gave a limit."""
        return self.bucket_bytes is not None or self.group_bytes is not None

    @property
    def for_sets(self) -> "Limits":
        """Limits for sets of variables that the user chose: sets are cut only by the bound on bytes of gradient."""
        return self if self.is_set else Limits(group_bytes=GRADIENT_BYTES)

    def wire_bytes(self, total: float, compressed: bool) -> float:
        """Return the bytes that one bucket may send, if the model sends ``total`` bytes."""
        if self.bucket_bytes is not None:
            return float(self.bucket_bytes)
        if self.group_bytes is not None:
            return math.inf
        return math.sqrt(COLLECTIVE_BYTES * total) if compressed else float(GRADIENT_BYTES)

    @property
    def gradient_bytes(self) -> float:
        """Largest number of bytes of gradient in one bucket."""
        if self.group_bytes is not None:
            return float(self.group_bytes)
        return math.inf if self.is_set else float(GRADIENT_BYTES)

    def lengths(self, sizes: Sequence[tuple[int, float]], first: bool = True) -> list[int]:
        """Return the number of variables in each bucket.

        A bucket ends before a variable that would exceed its limit, unless it has less than a quarter of that limit, so
        that no small bucket travels alone. A small last bucket takes variables from the bucket before it until it is
        worth a collective.

        Args:
            sizes: bytes of gradient, and bytes on the wire, of each variable, in the order in which variables become
                ready.
            first: True if the first bucket is smaller.

        >>> limits = Limits(bucket_bytes=100)
        >>> limits.lengths([(n, n) for n in (8, 500, 40, 60, 50)])
        [2, 2, 1]
        >>> limits.lengths([(n, n) for n in (60, 30, 60, 40, 4)]), limits.lengths([(n, n) for n in (8, 500, 4)])
        ([2, 1, 2], [3])
        """
        gradients, wires = sum(size for size, _ in sizes), sum(sent for _, sent in sizes)
        compressed = wires < gradients
        # At least 1: a model may send nothing, and shares are divided by it.
        wire, gradient = max(1.0, self.wire_bytes(wires, compressed)), self.gradient_bytes
        lengths: list[int] = []
        start, held, travels, part = 0, 0, 0.0, 1.0
        if first and (wires > wire or gradients > gradient):  # a single bucket is not cut
            part = min(FIRST_BYTES / min(wire, gradient), 0.25 if compressed and not self.is_set else 1.0)

        def share() -> float:
            return max(held / gradient, travels / wire)

        for i, (size, sent) in enumerate(sizes):
            enough = share() >= part / 4
            held, travels = held + size, travels + sent
            if share() > part and enough:
                lengths.append(i - start)
                start, held, travels, part = i, size, sent, 1.0
        lengths.append(len(sizes) - start)
        # An eighth of the limit: if the user's is small, COLLECTIVE_BYTES would join whole buckets to the last.
        return self._enlarge_last(lengths, [sent for _, sent in sizes], min(wire, gradient) / 8)

    @staticmethod
    def _enlarge_last(lengths: list[int], sizes: Sequence[float], tiny: float) -> list[int]:
        """Return lengths of buckets with a last bucket that is worth a collective.

        Args:
            lengths: numbers of variables in the buckets.
            sizes: bytes on the wire of each variable.
            tiny: an upper bound, in bytes, of the size that is worth a collective.
        """
        worth = min(float(COLLECTIVE_BYTES), tiny)
        *others, before, last = [0, 0, *lengths]  # zeros for buckets that there may not be
        while before and sum(sizes[-last:]) < worth:
            before, last = before - 1, last + 1
        if sum(sizes[-last - before : -last]) < worth:  # the bucket before is empty now, or too small itself: join both
            before, last = 0, last + before
        return [length for length in (*others, before, last) if length]
