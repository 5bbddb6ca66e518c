"""The codecs of :mod:`grace.kernels.triton.sparsified_buckets`, and by name all there are; see
:mod:`grace.kernels.triton.codec_base`."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy import ndarray as Array

from grace.kernels.bucket_codec import End, Places
from grace.kernels.index_coding import POSITION_BYTES
from grace.kernels.random import FEISTEL_DRAW, feistel_bits
from grace.kernels.triton import bucket_tables, sparsified_buckets
from grace.kernels.triton.bucket_codecs import CODECS as VALUE_CODECS
from grace.kernels.triton.codec_base import Step, TritonCodec
from grace.kernels.triton.launching import BLOCK, FEWER, STEP, launch, room_of, signed, steps_of
from grace.kernels.triton.low_rank_codecs import LowRank
from grace.kernels.triton.selection import SAMPLE, STATE


class Entries(TritonCodec):
    """Base of codecs whose payloads are values with their positions."""

    chunk, kept = 0, 1
    """Elements of a chunk, and how many of them are sent; no chunks."""

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, **constants: Any):
        super().__init__(sizes, payloads, device, **constants)
        for row, (values, coded, *_) in zip(self.plan, payloads, strict=True):
            row[bucket_tables.MORE.value], row[bucket_tables.WIDTH.value] = values.shape[0], POSITION_BYTES[coded.dtype]
        self.marked = bool((self.plan[:, bucket_tables.WIDTH.value] == 1).any())
        self.written_from = self.plan[:, bucket_tables.START.value].copy()
        self.readers, self.read_from = self.shared([-(-n // BLOCK) for n in sizes])

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *end: Any
    ) -> torch.Tensor:
        self.plan[:, bucket_tables.START.value] = self.written_from
        return super().encode(rows, factors, wire, most, streams, *end)

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        self.plan[:, bucket_tables.START.value] = self.read_from
        return super().decode(outs, wires, count, loss_scale)

    def read(self, table: torch.Tensor, ranks: int, weight: float, count: float, loss_scale: float) -> None:
        programs, marked = len(self.readers), self.flags
        given = table, self.readers, self.variables, ranks, programs
        if self.marked:
            marked = self.empty((ranks, programs), torch.int32)
            launch(sparsified_buckets.count_marks, programs, marked, *given, N=BLOCK)
        shape = {"CHUNK": self.chunk, "B": 128, "N": BLOCK}
        launch(sparsified_buckets.decode_entries, programs, marked, *given, weight, self.kept, **shape)


class TritonLargestOfChunks(Entries):
    """See :class:`~grace.compressors.topk.TopK`, with chunks."""

    encoder = sparsified_buckets.encode_chunks

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, chunk: int, kept: int):
        self.chunk, self.kept, self.numbers, self.span = chunk, kept, (kept,), max(BLOCK, chunk)
        super().__init__(sizes, payloads, device, CHUNK=chunk, warps=self.span // 256)


class TritonLargest(Entries):
    """See :class:`~grace.compressors.topk.TopK`."""

    least: Callable[[], float] | None = None
    """The threshold that entries are above, if there is one."""

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device):
        self.steps = steps_of(sum(sizes))
        self.span = self.steps * STEP
        super().__init__(sizes, payloads, device)
        kept = zip(sizes, self.plan[:, bucket_tables.MORE.value].tolist(), strict=True)
        self.room = max([STEP // 4, *(room_of(n, k, self.steps) for n, k in kept if n > SAMPLE.value)])

    def write(self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, end: End) -> torch.Tensor:
        programs, numbers = len(self.owners), (self.steps, self.room)
        counts, rows = self.empty((self.variables, STATE.value), torch.int32), self.empty((programs, 32), torch.int16)
        listed, ties = self.empty((2, programs), torch.int32)
        patterns, places = (self.empty(programs * self.room, dtype) for dtype in (torch.int32, torch.int16))
        given = counts, table, self.owners
        above, least = {"ABOVE": self.least is not None}, 0
        if self.least is not None:
            least = int(np.float32(self.least()).view(np.int32))
        launch(sparsified_buckets.guess_of_bucket, self.variables, counts, table, least, KEEPS=keeps, warps=16)
        first = self.flags, patterns, places, listed, ties, *given, self.variables, most, least, *numbers
        launch(sparsified_buckets.list_of_bucket, programs, *first, **above, KEEPS=keeps, LOOKS=looks, N=STEP, warps=8)
        for done in (1, 2):
            digits = {**above, "PASS": done, "N": STEP}
            launch(sparsified_buckets.digit_of_bucket, programs, patterns, listed, *given, *numbers, **digits, warps=8)
        lists = rows, patterns, listed, ties
        launch(sparsified_buckets.last_of_bucket, programs, *lists, *given, *numbers, **above, N=STEP)
        written = rows, places, patterns, listed, *given, self.variables, *numbers
        launch(sparsified_buckets.write_of_bucket, programs, *written, **above, KEEPS=keeps, N=STEP, P=32)
        return self.write_end(table, end)


class LargestAbove(TritonLargest):
    """See :class:`~grace.compressors.threshold.Threshold`."""

    def __init__(
        self,
        sizes: Sequence[int],
        payloads: Places,
        device: torch.device,
        least: Callable[[], float],
    ):
        super().__init__(sizes, payloads, device)
        self.least, self.plan[:, bucket_tables.COUNT.value] = least, [count.offset for _, _, count in payloads]


class TritonDrawn(TritonCodec):
    """See :class:`~grace.compressors.randomk.RandomK`: places that all ranks draw alike, twice, as that costs less than
    keeping them."""

    draws = "shared"

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, scaled: bool):
        super().__init__(sizes, payloads, device)
        counts = [payload[0].shape[0] for payload in payloads]
        self.scales = np.array([n / k if scaled and k else 1.0 for n, k in zip(sizes, counts, strict=True)])
        self.plan[:, bucket_tables.MORE.value] = counts
        self.plan[:, bucket_tables.SCALE.value] = self.scales.astype(np.float32).view(np.int32)
        self.plan[:, bucket_tables.WIDTH.value] = [left | right << 8 for left, right in map(feistel_bits, sizes)]
        self.drawers, self.plan[:, bucket_tables.SECOND.value] = self.shared([-(-k // FEWER) for k in counts])
        self.words: Any = None

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *end: Any
    ) -> torch.Tensor:
        self.words = streams.copy()
        self.words[:, 3] |= FEISTEL_DRAW
        return super().encode(rows, factors, wire, most, self.words, *end)

    def write(self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, end: End) -> torch.Tensor:
        chosen = {"KEEPS": keeps, "LOOKS": looks, "N": self.span}
        launch(sparsified_buckets.compensate_bucket, len(self.owners), self.flags, table, self.owners, most, **chosen)
        given = table, self.drawers, self.variables, step
        launch(sparsified_buckets.encode_drawn, len(self.drawers), *given, KEEPS=keeps, N=FEWER)
        return self.write_end(table, end)

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        weights = np.stack([1 / count * self.scales, self.scales], axis=1).astype(np.float32)
        table = self.table(np.asarray(outs)[:, None], wires, weights, self.words)
        launch(sparsified_buckets.zero_bucket, len(self.owners), table, self.owners, N=self.span)
        step = signed(int(self.words[0, 2])) if self.step is None else self.step
        given = table, self.drawers, self.variables, len(wires), step
        launch(sparsified_buckets.decode_drawn, len(self.drawers), *given, N=FEWER)
        return True


CODECS: dict[str, type[TritonCodec]] = {
    **VALUE_CODECS,
    "drawn": TritonDrawn,
    "largest": TritonLargest,
    "largest above": LargestAbove,
    "largest of chunks": TritonLargestOfChunks,
    "low rank": LowRank,
}
"""All codecs by name."""
