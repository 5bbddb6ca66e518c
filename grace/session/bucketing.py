"""Where the buckets of a model are cut: by what travels, within bounds on the gradients that make it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

COLLECTIVE_BYTES = 100_000
"""What a link of 1 to 10 Gbit/s sends while one more collective is started, awaited and decoded."""
GRADIENT_BYTES = 25 << 20
"""Of gradient at most in a bucket: DistributedDataParallel's. What a codec holds at a time, and must have done before
anything of it travels."""
FIRST_BYTES = 1 << 20
"""Of the bucket that is ready first, likewise."""


@dataclass(frozen=True)
class Limits:
    """How much one bucket may hold.

    If neither is given, a bucket is what makes a step shortest. Of a model that sends W bytes in n buckets, the last
    one's W / n travel when backward is done, and each costs :data:`COLLECTIVE_BYTES` = c of the link's time beside:
    c n + W / n is least where a bucket has sqrt(c W). No bucket has more than :data:`GRADIENT_BYTES` of gradient.
    The first one has a quarter, so that the link starts early. What is not compressed goes as in
    DistributedDataParallel.

    Args:
        bucket_bytes: bytes on the wire.
        group_bytes: bytes of gradient.

    >>> limits = Limits()
    >>> [round(limits.wire(total, compressed=True)) for total in (1e6, 25e6)]  # top-k's and QSGD's of ResNet-50
    [316228, 1581139]
    >>> limits.wire(100e6, compressed=False), Limits(5000).wire(100e6, compressed=True)
    (26214400.0, 5000.0)
    """

    bucket_bytes: int | None = None
    group_bytes: int | None = None

    @property
    def given(self) -> bool:
        """Whether the user has said anything."""
        return self.bucket_bytes is not None or self.group_bytes is not None

    @property
    def of_sets(self) -> "Limits":
        """The same for sets that somebody has chosen: they stay whole, within the bound on gradients."""
        return self if self.given else Limits(group_bytes=GRADIENT_BYTES)

    def wire(self, total: float, compressed: bool) -> float:
        """Bytes that one bucket may send, of so many in all."""
        if self.bucket_bytes is not None:
            return float(self.bucket_bytes)
        if self.group_bytes is not None:
            return math.inf
        return math.sqrt(COLLECTIVE_BYTES * total) if compressed else float(GRADIENT_BYTES)

    @property
    def gradient(self) -> float:
        """Bytes of gradient that one bucket may hold."""
        if self.group_bytes is not None:
            return float(self.group_bytes)
        return math.inf if self.given else float(GRADIENT_BYTES)

    def lengths(self, sizes: Sequence[tuple[int, float]], first: bool = True) -> list[int]:
        """How many variables each bucket gets.

        A bucket ends where the next variable would be too much and it has a quarter of that, so that nothing small
        travels alone. What remains for the last one takes from the one before until it is worth a collective.

        Args:
            sizes: of each, in the order in which they become ready: bytes of gradient, and bytes on the wire.
            first: whether a smaller bucket goes first.

        >>> limits = Limits(bucket_bytes=100)
        >>> limits.lengths([(n, n) for n in (8, 500, 40, 60, 50)])
        [2, 2, 1]
        >>> limits.lengths([(n, n) for n in (60, 30, 60, 40, 4)]), limits.lengths([(n, n) for n in (8, 500, 4)])
        ([2, 1, 2], [3])
        """
        gradients, wires = sum(size for size, _ in sizes), sum(sent for _, sent in sizes)
        compressed = wires < gradients
        wire, gradient = max(1.0, self.wire(wires, compressed)), self.gradient
        lengths: list[int] = []
        start, held, travels, part = 0, 0, 0.0, 1.0
        if first and (wires > wire or gradients > gradient):
            part = min(FIRST_BYTES / min(wire, gradient), 0.25 if compressed and not self.given else 1.0)

        def share() -> float:
            return max(held / gradient, travels / wire)

        for i, (size, sent) in enumerate(sizes):
            enough = share() >= part / 4
            held, travels = held + size, travels + sent
            if share() > part and enough:
                lengths.append(i - start)
                start, held, travels, part = i, size, sent, 1.0
        lengths.append(len(sizes) - start)
        return self._without_a_tiny_end(lengths, [sent for _, sent in sizes], min(wire, gradient) / 8)

    @staticmethod
    def _without_a_tiny_end(lengths: list[int], sizes: Sequence[float], tiny: float) -> list[int]:
        """The same, with a last bucket that is worth a collective."""
        worth = min(float(COLLECTIVE_BYTES), tiny)
        *others, before, last = [0, 0, *lengths]
        while before and sum(sizes[-last:]) < worth:
            before, last = before - 1, last + 1
        if sum(sizes[-last - before : -last]) < worth:  # nothing is left of the one before, or too little
            before, last = 0, last + before
        return [length for length in (*others, before, last) if length]
