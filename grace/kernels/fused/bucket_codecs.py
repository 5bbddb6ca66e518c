"""The codecs of :mod:`grace.kernels.fused.buckets` by name, each for the variables of one bucket.

A codec is made with the bucket's plan: for each variable its number of elements, and the shape, dtype and byte offset
of each of its payload's tensors in the wire. Buffers are made once and kept.
"""

from collections.abc import Sequence

import numpy as np
from numpy import ndarray as Array

from grace.kernels.constants import Placed, gaussian_reach
from grace.kernels.fused import addresses, buckets, rounding, sparsified_buckets
from grace.kernels.fused.loops import TILE, f32
from grace.kernels.fused.primitives import _random_indices
from grace.kernels.fused.selection import SAMPLED
from grace.kernels.index_coding import POSITION_BYTES
from grace.kernels.random import FEISTEL_DRAW, feistel_bits


class Codec:
    """Encodes and decodes all variables of a bucket; addresses are of contiguous float32 tensors on the CPU.

    Args:
        sizes: elements of each variable.
        payloads: where each variable's payload stands in a wire.
    """

    draws: bool | str = False
    """True if encoding takes random numbers; "shared" if all ranks draw the same ones."""
    on_device = False
    """True if it writes the header at the end of the wire, since only the device knows what is in range."""

    def __init__(self, sizes: Sequence[int], payloads: Sequence[Sequence[Placed]]):
        self.plan = np.zeros((len(sizes), 5), np.int64)
        self.plan[:, addresses.SIZE] = sizes
        for row, payload in zip(self.plan, payloads, strict=True):
            for column, tensor in enumerate(payload, addresses.FIRST):
                row[column] = tensor.offset
        self.in_range = np.zeros(len(sizes), np.bool_)
        self.most = max(sizes, default=0)

    def encode(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> list[bool]:
        """Write every payload into the wire, and the next residuals.

        Args:
            rows: addresses, uint64 of shape (variables, 3): gradient, residual, next residual.
            factors: float32 of shape (variables, 2): of its residual, and of its gradient.
            wire: the address of the wire.
            most: the bit pattern of the largest magnitude that is in range.
            streams: uint32 of shape (variables, 4): the words of each variable's random numbers.

        Returns:
            True for each variable whose x was in range.
        """
        self.write(rows, factors, wire, most, streams)
        return self.in_range.tolist()

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        """Call the loop that encodes, which also writes ``in_range``."""
        raise NotImplementedError

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        """Write the mean over ``count`` ranks' wires into ``outs``; return False if one cannot be decoded.

        Args:
            outs, wires: addresses, uint64; wires of shape (ranks,), or (1, variables) if each variable has a
                wire of its own.
        """
        if wires.ndim == 1:
            return self.read(self.plan, outs, wires, count, loss_scale)
        plan = self.plan.copy()
        plan[:, addresses.FIRST : addresses.MORE] += (wires[0] - wires[0, 0]).astype(np.int64)[:, None]
        return self.read(plan, outs, wires[0, :1], count, loss_scale)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        """Call the loop that decodes; return False if a wire cannot be decoded."""
        raise NotImplementedError


class Numbers(Codec):
    """float32 or 16 bits, of several ranks or summed by the engine; see :class:`~grace.compressors.cast.Cast`."""

    FORMS = {"float32": buckets.FLOAT, "float16": buckets.HALF, "bfloat16": buckets.BRAIN}

    def __init__(self, sizes: Sequence[int], payloads: Sequence[Sequence[Placed]]):
        super().__init__(sizes, payloads)
        self.form = self.FORMS[payloads[0][0].dtype]

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        buckets.encode_numbers(rows, factors, self.plan, wire, most, self.form, self.in_range)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        buckets.decode_numbers(outs, wires, plan, count, self.form)
        return True


class Signs(Codec):
    """One bit per element; see :class:`~grace.compressors.efsignsgd.EFSignSGD` (scaled), ``OneBit`` (sided),
    ``SignSGD`` (voted) and ``Signum`` (moment)."""

    FORMS = {"scaled": buckets.SCALED, "sided": buckets.SIDED, "voted": buckets.VOTED, "moment": buckets.MOMENT}

    def __init__(self, sizes: Sequence[int], payloads: Sequence[Sequence[Placed]], form: str):
        super().__init__(sizes, payloads)
        self.form = self.FORMS[form]

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        buckets.encode_signs(rows, factors, self.plan, wire, most, self.form, self.in_range)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        buckets.decode_signs(outs, wires, plan, f32(1 / count), self.form, f32(1) / f32(1 / loss_scale))
        return True


class Levels(Codec):
    """See :class:`~grace.compressors.qsgd.QSGD`, and :class:`~grace.compressors.block.Block` (nearest)."""

    draws = True

    def __init__(
        self,
        sizes: Sequence[int],
        payloads: Sequence[Sequence[Placed]],
        levels: float,
        bits: int,
        bucket: int,
        norm: str = "max",
        nearest: bool = False,
    ):
        super().__init__(sizes, payloads)
        self.levels, self.bits, self.bucket, self.nearest = float(levels), bits, bucket, nearest
        self.scaled = rounding.NORMS[norm], gaussian_reach(levels) if norm == "rms" else 1.0
        self.draws = not nearest
        self.held = np.empty(TILE + 8, np.uint8)

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        chosen = self.levels, self.bits, self.bucket, *self.scaled, self.nearest, self.held, self.in_range
        buckets.encode_levels(rows, factors, self.plan, streams, wire, most, *chosen)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        chosen = self.levels, self.bits, self.bucket, self.held
        buckets.decode_levels(outs, wires, plan, f32(1 / count), *chosen)
        return True


class Ternary(Levels):
    """See :class:`~grace.compressors.terngrad.TernGrad`."""

    def __init__(self, sizes: Sequence[int], payloads: Sequence[Sequence[Placed]], clip: float):
        super().__init__(sizes, payloads, levels=1, bits=2, bucket=max([1, *sizes]))
        self.clip = clip

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        buckets.encode_ternary(rows, factors, self.plan, streams, wire, most, self.clip, self.in_range)


class Powers(Codec):
    """See :class:`~grace.compressors.natural.Natural`."""

    draws = True

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        buckets.encode_powers(rows, factors, self.plan, streams, wire, most, self.in_range)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        buckets.decode_powers(outs, wires, plan, f32(1 / count))
        return True


class Largest(Codec):
    """See :class:`~grace.compressors.topk.TopK`."""

    def __init__(self, sizes: Sequence[int], payloads: Sequence[Sequence[Placed]]):
        super().__init__(sizes, payloads)
        self.last, room = np.zeros(len(sizes), np.uint32), 0
        for row, n, (values, coded) in zip(self.plan, sizes, payloads, strict=True):
            row[addresses.MORE], row[addresses.MORE + 1] = values.shape[0], POSITION_BYTES[coded.dtype]
            if n >= SAMPLED:
                room = max(room, 4 * values.shape[0] + 1024)
        self.indices, self.found = np.empty(room + TILE, np.int32), np.empty(room + TILE, np.uint32)
        self.sample = np.empty(self.most if room else 0, np.uint32)  # of which as much is written to as is needed
        self.chosen = np.empty(max((payload[0].shape[0] for payload in payloads), default=0), np.int32)

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        spare = self.last, self.indices, self.found, self.sample, self.chosen
        sparsified_buckets.encode_largest(rows, factors, self.plan, wire, most, *spare, self.in_range)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        return sparsified_buckets.decode_sparsified(outs, wires, plan, f32(1 / count), 0, 1)


class LargestOfChunks(Codec):
    """See :class:`~grace.compressors.topk.TopK`, with chunks."""

    def __init__(self, sizes: Sequence[int], payloads: Sequence[Sequence[Placed]], chunk: int, kept: int):
        super().__init__(sizes, payloads)
        self.chunk, self.kept = chunk, kept
        for row, (values, coded) in zip(self.plan, payloads, strict=True):
            row[addresses.MORE], row[addresses.MORE + 1] = values.shape[0], POSITION_BYTES[coded.dtype]
        self.indices, self.found = np.empty(chunk + 1, np.int32), np.empty(chunk + 1, np.uint32)
        self.chosen = np.empty(max(self.plan[:, addresses.MORE], default=0), np.int32)

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        spare = self.indices, self.found, self.chosen
        sparsified_buckets.encode_chunks(
            rows, factors, self.plan, wire, most, self.chunk, self.kept, *spare, self.in_range
        )

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        return sparsified_buckets.decode_sparsified(outs, wires, plan, f32(1 / count), self.chunk, self.kept)


class Drawn(Codec):
    """See :class:`~grace.compressors.randomk.RandomK`."""

    draws = "shared"

    def __init__(self, sizes: Sequence[int], payloads: Sequence[Sequence[Placed]], scaled: bool):
        super().__init__(sizes, payloads)
        self.plan[:, addresses.MORE] = counts = [payload[0].shape[0] for payload in payloads]
        self.scales = [n / count if scaled and count else 1.0 for n, count in zip(sizes, counts, strict=True)]
        self.indices = [np.empty(count, np.int32) for count in counts]

    def write(self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array) -> None:
        for v, (indices, scale) in enumerate(zip(self.indices, self.scales, strict=True)):
            n, (key_low, key_high, step, draw) = int(self.plan[v, addresses.SIZE]), streams[v]
            words = key_low, key_high, step, np.uint32(draw | FEISTEL_DRAW)
            _random_indices(indices, n, *feistel_bits(n), *words)
            given = rows[v], factors[v], self.plan[v], wire, most, indices, f32(scale)
            self.in_range[v] = sparsified_buckets.encode_drawn(*given)

    def read(self, plan: Array, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        for v, (indices, scale) in enumerate(zip(self.indices, self.scales, strict=True)):
            sparsified_buckets.decode_drawn(outs[v], wires, plan[v], f32(1 / count * scale), indices)
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
