"""The codecs of whole buckets by name: the loops of each, and what they take beside the bucket.

Buffers are made once and kept.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy import ndarray as Array

from grace.kernels.bucket_codec import BucketCodec, DeviceHeader, Places
from grace.kernels.constants import ITEM_SIZE, gaussian_reach
from grace.kernels.numba import buckets, rounding, sparsified_buckets
from grace.kernels.numba.buckets import FIRST, MORE, SIZE
from grace.kernels.numba.half_precision import HALVES
from grace.kernels.numba.loops import TILE, f32
from grace.kernels.numba.selection import SAMPLED, _room
from grace.kernels.random import feistel_bits


class Codec(BucketCodec):
    """Encodes and decodes a bucket by one loop each, on the CPU.

    A method is a class that names its loops, and sets what they take beside the bucket.
    """

    encoder: ClassVar[Callable[..., None]]
    """``encoder(rows, factors, plan, streams, wire, most, in_range, *encoding)``."""
    decoder: ClassVar[Callable[..., object]]
    """``decoder(outs, wires, plan, weight, *decoding)``; False if a wire cannot be decoded."""
    encoding: tuple[object, ...] = ()
    decoding: tuple[object, ...] = ()

    def __init__(self, sizes: Sequence[int], payloads: Places):
        self.plan = np.zeros((len(sizes), 5), np.int64)
        self.plan[:, SIZE] = sizes
        for row, payload in zip(self.plan, payloads, strict=True):
            for column, tensor in enumerate(payload, FIRST):
                row[column] = tensor.offset
        self.in_range = np.zeros(len(sizes), np.bool_)

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *header: DeviceHeader
    ) -> list[bool]:
        self.encoder(rows, factors, self.plan, streams, wire, most, self.in_range, *self.encoding)
        return self.in_range.tolist()

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        if wires.ndim == 1:
            return self.read(self.plan, outs, wires, count, loss_scale)
        # offsets from the first variable's wire
        plan = self.plan.copy()
        plan[:, FIRST:MORE] += (wires[0] - wires[0, 0]).astype(np.int64)[:, None]
        return self.read(plan, outs, wires[0, :1], count, loss_scale)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        """Call the loop that decodes; return False if a wire cannot be decoded."""
        return self.decoder(outs, wires, plan, f32(1 / count), *self.decoding) is not False


class Numbers(Codec):
    """float32 or 16 bits, of several ranks or summed by the engine; see :class:`~grace.compressors.cast.Cast`."""

    encoder = staticmethod(buckets.encode_numbers)
    decoder = staticmethod(buckets.decode_numbers)

    def __init__(self, sizes: Sequence[int], payloads: Places):
        super().__init__(sizes, payloads)
        self.encoding = ({"float32": buckets.FLOAT32, **HALVES}[payloads[0][0].dtype],)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        self.decoder(outs, wires, plan, count, *self.encoding)  # sums are divided, not multiplied
        return True


class Signs(Codec):
    """One bit per element; see :class:`~grace.compressors.efsignsgd.EFSignSGD` (scaled), ``OneBit`` (sided),
    ``SignSGD`` (voted) and ``Signum`` (moment)."""

    FORMS: ClassVar = {
        "scaled": buckets.SCALED,
        "sided": buckets.SIDED,
        "voted": buckets.VOTED,
        "moment": buckets.MOMENT,
    }
    encoder = staticmethod(buckets.encode_signs)
    decoder = staticmethod(buckets.decode_signs)

    def __init__(self, sizes: Sequence[int], payloads: Places, form: str):
        super().__init__(sizes, payloads)
        self.encoding = (self.FORMS[form],)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        self.decoding = *self.encoding, f32(1) / f32(1 / loss_scale)  # a vote is in units of the scaled loss
        return super().read(plan, outs, wires, count, loss_scale)


class Levels(Codec):
    """Codec of :class:`~grace.compressors.qsgd.QSGD`, and of :class:`~grace.compressors.block.Block` (nearest)."""

    encoder = staticmethod(buckets.encode_levels)
    decoder = staticmethod(buckets.decode_levels)
    draws = True

    def __init__(
        self,
        sizes: Sequence[int],
        payloads: Places,
        levels: float,
        bits: int,
        bucket_size: int,
        norm: str = "max",
        nearest: bool = False,
    ):
        super().__init__(sizes, payloads)
        self.draws = not nearest
        # Up to 7 codes of the tile before may still be held.
        reach, held = gaussian_reach(levels) if norm == "rms" else 1.0, np.empty(TILE + 8, np.uint8)
        self.encoding = float(levels), bits, bucket_size, rounding.NORMS[norm], reach, nearest, held
        self.decoding = float(levels), bits, bucket_size, held


class Ternary(Levels):
    """Codec of :class:`~grace.compressors.terngrad.TernGrad`."""

    encoder = staticmethod(buckets.encode_ternary)

    def __init__(self, sizes: Sequence[int], payloads: Places, clip: float):
        # One scale for each variable: QSGD's bucket is as large as the largest.
        super().__init__(sizes, payloads, levels=1, bits=2, bucket_size=max([1, *sizes]))
        self.encoding = (clip,)


class Powers(Codec):
    """Codec of :class:`~grace.compressors.natural.Natural`."""

    encoder = staticmethod(buckets.encode_powers)
    decoder = staticmethod(buckets.decode_powers)
    draws = True


class Entries(Codec):
    """Base of codecs whose payloads are values with their positions."""

    decoder = staticmethod(sparsified_buckets.decode_sparsified)

    def __init__(self, sizes: Sequence[int], payloads: Places):
        super().__init__(sizes, payloads)
        self.plan[:, MORE] = self.counts = [values.shape[0] for values, _ in payloads]
        self.plan[:, MORE + 1] = [ITEM_SIZE[coded.dtype] for _, coded in payloads]
        self.chosen = np.empty(max(self.counts, default=0), np.int32)


class Largest(Entries):
    """Codec of :class:`~grace.compressors.topk.TopK`."""

    encoder = staticmethod(sparsified_buckets.encode_largest)
    decoding = 0, 1  # no chunks

    def __init__(self, sizes: Sequence[int], payloads: Places):
        super().__init__(sizes, payloads)
        rooms = [_room(k) for n, k in zip(sizes, self.counts, strict=True) if n >= SAMPLED]
        # A tile that begins with room left is listed whole.
        room = max(rooms, default=0) + TILE
        sample = np.empty(max(sizes, default=0) if rooms else 0, np.uint32)  # as much is written to as is needed
        last = np.zeros(len(sizes), np.uint32)
        self.encoding = last, np.empty(room, np.int32), np.empty(room, np.uint32), sample, self.chosen


class LargestOfChunks(Entries):
    """Codec of :class:`~grace.compressors.topk.TopK`, with chunks."""

    encoder = staticmethod(sparsified_buckets.encode_chunks)

    def __init__(self, sizes: Sequence[int], payloads: Places, chunk: int, kept: int):
        super().__init__(sizes, payloads)
        self.decoding = chunk, kept
        self.encoding = chunk, kept, np.empty(chunk + 1, np.int32), np.empty(chunk + 1, np.uint32), self.chosen


class Drawn(Codec):
    """Codec of :class:`~grace.compressors.randomk.RandomK`."""

    encoder = staticmethod(sparsified_buckets.encode_drawn)
    decoder = staticmethod(sparsified_buckets.decode_drawn)
    draws = "shared"

    def __init__(self, sizes: Sequence[int], payloads: Places, scaled: bool):
        super().__init__(sizes, payloads)
        self.plan[:, MORE] = counts = [payload[0].shape[0] for payload in payloads]
        self.plan[:, MORE + 1] = [left | right << 8 for left, right in map(feistel_bits, sizes)]
        self.scales = np.array([n / k if scaled and k else 1.0 for n, k in zip(sizes, counts, strict=True)])
        self.indices = np.empty(sum(counts), np.int32)
        self.encoding = self.indices, self.scales.astype(np.float32)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        self.decoder(outs, wires, plan, (1 / count * self.scales).astype(np.float32), self.indices)
        return True


CODECS: dict[str, type[Codec]] = {
    "numbers": Numbers,
    "signs": Signs,
    "levels": Levels,
    "ternary": Ternary,
    "powers": Powers,
    "drawn": Drawn,
    "largest": Largest,
    "largest of chunks": LargestOfChunks,
}
