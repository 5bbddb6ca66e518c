"""The codecs of whole buckets by name: the launches of each, and what they take beside the bucket."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
from numpy import ndarray as Array

from grace.kernels.bucket_codec import DeviceHeader, Places
from grace.kernels.constants import ITEM_SIZE, gaussian_reach
from grace.kernels.random import FEISTEL_DRAW, feistel_bits
from grace.kernels.torch.copies import constant
from grace.kernels.triton import bucket_levels, bucket_tables, buckets, rounding, sparsified_buckets
from grace.kernels.triton.codec_base import TYPES, Step, TritonCodec
from grace.kernels.triton.launching import BLOCK, FEWER, LARGEST_ROW, STEP, launch, room_of, signed, steps_of
from grace.kernels.triton.low_rank_codecs import LowRank
from grace.kernels.triton.selection import SAMPLE, STATE


class TritonNumbers(TritonCodec):
    """float32 or 16 bits; see :class:`~grace.compressors.cast.Cast`."""

    encoder = buckets.encode_numbers

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device):
        kind, nbytes = TYPES[payloads[0][0].dtype]
        super().__init__(sizes, payloads, device, Type=kind, BYTES=nbytes)

    def read(self, table: torch.Tensor, ranks: int, weight: float, count: float, loss_scale: float) -> None:
        weight = 1.0 if self.constants["BYTES"] == 4 else weight  # those of 32 bits are divided as a sum
        given = table, self.owners, self.variables, ranks, weight, float(count)
        launch(buckets.decode_numbers, len(self.owners), *given, **self.constants, N=self.span)


class TritonSigns(TritonCodec):
    """One bit per element; see :class:`~grace.compressors.efsignsgd.EFSignSGD` (scaled), ``OneBit`` (sided),
    ``SignSGD`` (voted) and ``Signum`` (moment)."""

    FORMS = {"scaled": buckets.SCALED, "sided": buckets.SIDED, "voted": buckets.VOTED, "moment": buckets.MOMENT}
    span = 2 * BLOCK
    granule = 4

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, form: str):
        super().__init__(sizes, payloads, device, FORM=self.FORMS[form])
        self.parts: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        self.unfinished = form in ("scaled", "sided")
        if self.unfinished:
            parts = self.empty((len(self.owners), 1 if form == "scaled" else 2), torch.float64)
            self.parts = parts, self.empty(len(self.owners), torch.int32)

    def write(
        self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, header: DeviceHeader
    ) -> torch.Tensor:
        programs, given = len(self.owners), (table, self.owners, self.variables)
        shape = {**self.constants, "N": self.span}
        launch(buckets.encode_signs, programs, self.flags, *self.parts, *given, most, **shape, KEEPS=keeps)
        if self.parts[0] is None:
            return self.write_header(table, header)
        tensors, numbers, of_type = self.header_arguments(header)
        scales, shape = (*tensors, *self.parts, table, self.variables, *numbers), {"PART": self.span, "N": BLOCK}
        launch(buckets.write_sign_scales, self.variables, *scales, **self.constants, **shape, **of_type, KEEPS=keeps)
        return tensors[1]

    def finish(self, rows: Array, sides: torch.Tensor) -> None:
        launch(buckets.subtract_signs, len(self.owners), self.table(rows, []), self.owners, N=self.span)
        sides.zero_()

    def read(self, table: torch.Tensor, ranks: int, weight: float, count: float, loss_scale: float) -> None:
        unit = float(np.float32(1) / np.float32(1 / loss_scale))
        given = table, self.owners, self.variables, ranks, weight, unit
        launch(buckets.decode_signs, len(self.owners), *given, **self.constants, N=self.span)


class TritonPowers(TritonCodec):
    """Codec of :class:`~grace.compressors.natural.Natural`."""

    encoder = buckets.encode_powers
    draws = True
    granule = 4

    def read(self, table: torch.Tensor, ranks: int, weight: float, count: float, loss_scale: float) -> None:
        given = table, self.owners, self.variables, ranks, weight
        launch(buckets.decode_powers, len(self.owners), *given, N=self.span)


class TritonLevels(TritonCodec):
    """Codec of :class:`~grace.compressors.qsgd.QSGD`, and of :class:`~grace.compressors.block.Block`.

    In one launch where a program reads whole buckets, and their codes begin with a byte.
    """

    granule = 4
    form = rounding.LEVELS
    factor = 0.0
    """Standard deviations that are clipped to."""
    edges: torch.Tensor | None = None
    entries: torch.Tensor | None = None
    """Values of a table; codes are places in it."""

    def __init__(
        self,
        sizes: Sequence[int],
        payloads: Places,
        device: torch.device,
        levels: float = 0,
        bits: int = 8,
        bucket_size: int = 1 << 62,
        norm: str = "max",
        nearest: bool = False,
        float8: bool = False,
        rotated: bool = False,
    ):
        super().__init__(sizes, payloads, device)
        self.draws, self.levels, longest = not nearest, float(levels), max([1, *sizes])
        self.form = rounding.FLOAT8 if float8 else self.form if norm == "max" else rounding.LEVELS_BY_NORM
        self.reach = gaussian_reach(levels) if norm == "rms" else 0.0
        self.shape = {"FORM": self.form, "ROTATED": rotated, "BITS": bits}
        # 0 says that all elements of a variable have one scale.
        self.scaled = {**self.shape, "BUCKET": 0 if bucket_size >= longest else bucket_size, "N": self.span}
        self.bucket_size, self.small = min(bucket_size, max(longest, LARGEST_ROW + 1)), bucket_size <= LARGEST_ROW
        if self.small:
            # Ranges in Triton have powers of two.
            columns = max(4, triton.next_power_of_2(bucket_size))
            rows = max(1, (2 if bucket_size % 4 == 0 else 1) * BLOCK // columns)
            self.at_once, folded = bits == 8 or columns == bucket_size, [-(-n // (rows * bucket_size)) for n in sizes]
            warps = max(4, columns // 512)
            self.rows = {
                **self.shape,
                "REACH": self.reach,
                "WRITES": self.at_once,
                "BUCKET": bucket_size,
                "ROWS": rows,
                "COLS": columns,
                "DRAWN": self.draws,
                "warps": warps,
            }
        else:
            self.at_once, each = False, [min(self.bucket_size, max(1, n)) for n in sizes]
            joined = [max(1, -(-n // size)) for n, size in zip(sizes, each, strict=True)]
            folded = [-(-n // size) * -(-size // LARGEST_ROW) for n, size in zip(sizes, each, strict=True)]
            self.joining, self.plan[:, bucket_tables.JOINED.value] = self.shared(joined)
            self.parts = self.empty((sum(folded), 3 if self.form == bucket_levels.TERNARY else 1), torch.float64)
            self.limits = self.empty(self.variables, torch.float32)
        self.folding, self.plan[:, bucket_tables.FOLDED.value] = self.shared(folded)

    def write(
        self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, header: DeviceHeader
    ) -> torch.Tensor:
        limits = None
        if self.small:
            rows = self.flags, table, self.folding, self.variables, most, step, self.levels
            launch(bucket_levels.encode_rows, len(self.folding), *rows, **self.rows, KEEPS=keeps)
        else:
            limits, in_range = self.limits, self.find_scales(table, keeps, most, header)
        if not self.at_once:
            count = 0 if self.edges is None else len(self.edges)
            given = table, self.owners, self.variables, step, self.levels, limits, self.edges, count, self.entries
            chosen = {**self.scaled, "DRAWN": self.draws, "KEEPS": keeps}
            launch(bucket_levels.encode_scaled, len(self.owners), *given, **chosen)
        return self.write_header(table, header) if self.small else in_range

    def find_scales(self, table: torch.Tensor, keeps: bool, most: int, header: DeviceHeader) -> torch.Tensor:
        """Write the scales of buckets that take many programs, and the wire's header."""
        given = self.flags, self.parts, table, self.folding, self.variables, most, self.bucket_size
        shape = {
            "FORM": self.form,
            "ROTATED": self.shape["ROTATED"],
            "FOURS": self.bucket_size % 4 == 0,
            "KEEPS": keeps,
        }
        launch(bucket_levels.fold_buckets, len(self.folding), *given, **shape, N=LARGEST_ROW, warps=8)
        tensors, numbers, of_type = self.header_arguments(header)
        scales = *tensors, self.limits, self.parts, table, self.joining, self.variables, *numbers
        shape = {"FORM": self.form, "REACH": self.reach, "PART": LARGEST_ROW, "N": BLOCK}
        launch(
            bucket_levels.write_scales, len(self.joining), *scales, self.bucket_size, self.factor, **shape, **of_type
        )
        return tensors[1]

    def read(self, table: torch.Tensor, ranks: int, weight: float, count: float, loss_scale: float) -> None:
        given = table, self.owners, self.variables, ranks, weight, self.levels, self.entries
        launch(bucket_levels.decode_levels, len(self.owners), *given, **self.scaled)


class TritonTernary(TritonLevels):
    """Codec of :class:`~grace.compressors.terngrad.TernGrad`."""

    form = bucket_levels.TERNARY

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, clip: float):
        self.factor = clip
        super().__init__(sizes, payloads, device, levels=1, bits=2)


class Table(TritonLevels):
    """Codec of :class:`~grace.compressors.dynamic8.Dynamic8`."""

    form = bucket_levels.TABLE

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, edges: Array, entries: Array):
        super().__init__(sizes, payloads, device, nearest=True)
        self.edges, self.entries = constant(edges, device), constant(entries, device)


class Entries(TritonCodec):
    """Base of codecs whose payloads are values with their positions."""

    chunk, kept = 0, 1
    """Elements of a chunk, and how many of them are sent; no chunks."""

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, **constants: object):
        super().__init__(sizes, payloads, device, **constants)
        for row, (values, coded, *_) in zip(self.plan, payloads, strict=True):
            row[bucket_tables.MORE.value], row[bucket_tables.WIDTH.value] = values.shape[0], ITEM_SIZE[coded.dtype]
        self.marked = bool((self.plan[:, bucket_tables.WIDTH.value] == 1).any())
        # Encoding and decoding start other numbers of programs for a variable.
        self.written_from = self.plan[:, bucket_tables.START.value].copy()
        self.readers, self.read_from = self.shared([-(-n // BLOCK) for n in sizes])

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *header: DeviceHeader
    ) -> torch.Tensor:
        self.plan[:, bucket_tables.START.value] = self.written_from
        return super().encode(rows, factors, wire, most, streams, *header)

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
    """Codec of :class:`~grace.compressors.topk.TopK`, with chunks."""

    encoder = sparsified_buckets.encode_chunks

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, chunk: int, kept: int):
        self.chunk, self.kept, self.numbers, self.span = chunk, kept, (kept,), max(BLOCK, chunk)
        super().__init__(sizes, payloads, device, CHUNK=chunk, warps=self.span // 256)


class TritonLargest(Entries):
    """Codec of :class:`~grace.compressors.topk.TopK`."""

    least: Callable[[], float] | None = None
    """The threshold that entries are above, if there is one."""

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device):
        self.steps = steps_of(sum(sizes))
        self.span = self.steps * STEP
        super().__init__(sizes, payloads, device)
        kept = zip(sizes, self.plan[:, bucket_tables.MORE.value].tolist(), strict=True)
        self.room = max([STEP // 4, *(room_of(n, k, self.steps) for n, k in kept if n > SAMPLE.value)])

    def write(
        self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, header: DeviceHeader
    ) -> torch.Tensor:
        programs, numbers = len(self.owners), (self.steps, self.room)
        counts, rows = self.empty((self.variables, STATE.value), torch.int32), self.empty((programs, 32), torch.int16)
        listed, ties = self.empty((2, programs), torch.int32)
        patterns, places = (self.empty(programs * self.room, dtype) for dtype in (torch.int32, torch.int16))
        given = counts, table, self.owners
        above, least = {"ABOVE": self.least is not None}, 0
        if self.least is not None:
            least = int(np.float32(self.least()).view(np.int32))
        # 1. Guess a threshold for each variable, from a sample.
        launch(sparsified_buckets.guess_of_bucket, self.variables, counts, table, least, KEEPS=keeps, warps=16)
        # 2. Compute x, list what is above the guess, and count first digits.
        first = self.flags, patterns, places, listed, ties, *given, self.variables, most, least, *numbers
        launch(sparsified_buckets.list_of_bucket, programs, *first, **above, KEEPS=keeps, LOOKS=looks, N=STEP, warps=8)
        # 3. Count the two middle digits of candidates.
        for done in (1, 2):
            digits = {**above, "PASS": done, "N": STEP}
            launch(sparsified_buckets.digit_of_bucket, programs, patterns, listed, *given, *numbers, **digits, warps=8)
        # 4. Count the last digit, by each program for itself too.
        lists = rows, patterns, listed, ties
        launch(sparsified_buckets.last_of_bucket, programs, *lists, *given, *numbers, **above, N=STEP)
        # 5. Write the entries.
        written = rows, places, patterns, listed, *given, self.variables, *numbers
        launch(sparsified_buckets.write_of_bucket, programs, *written, **above, KEEPS=keeps, N=STEP, P=32)
        return self.write_header(table, header)


class LargestAbove(TritonLargest):
    """Codec of :class:`~grace.compressors.threshold.Threshold`."""

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, least: Callable[[], float]):
        super().__init__(sizes, payloads, device)
        self.least, self.plan[:, bucket_tables.COUNT.value] = least, [count.offset for _, _, count in payloads]


class TritonDrawn(TritonCodec):
    """Codec of :class:`~grace.compressors.randomk.RandomK`, whose places all ranks draw alike, twice, as that costs
    less than keeping them."""

    draws = "shared"

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, scaled: bool):
        super().__init__(sizes, payloads, device)
        counts = [payload[0].shape[0] for payload in payloads]
        self.scales = np.array([n / k if scaled and k else 1.0 for n, k in zip(sizes, counts, strict=True)])
        self.plan[:, bucket_tables.MORE.value] = counts
        self.plan[:, bucket_tables.SCALE.value] = self.scales.astype(np.float32).view(np.int32)
        self.plan[:, bucket_tables.WIDTH.value] = [left | right << 8 for left, right in map(feistel_bits, sizes)]
        self.drawers, self.plan[:, bucket_tables.SECOND.value] = self.shared([-(-k // FEWER) for k in counts])
        self.words = np.zeros((self.variables, 4), np.uint32)

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *header: DeviceHeader
    ) -> torch.Tensor:
        self.words = streams.copy()
        self.words[:, 3] |= FEISTEL_DRAW
        return super().encode(rows, factors, wire, most, self.words, *header)

    def write(
        self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, header: DeviceHeader
    ) -> torch.Tensor:
        chosen = {"KEEPS": keeps, "LOOKS": looks, "N": self.span}
        launch(sparsified_buckets.compensate_bucket, len(self.owners), self.flags, table, self.owners, most, **chosen)
        given = table, self.drawers, self.variables, step
        launch(sparsified_buckets.encode_drawn, len(self.drawers), *given, KEEPS=keeps, N=FEWER)
        return self.write_header(table, header)

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        # A table has pairs of factors, of which decoding takes the first.
        weights = np.stack([1 / count * self.scales, self.scales], axis=1).astype(np.float32)
        table = self.table(np.asarray(outs)[:, None], wires, weights, self.words)
        launch(sparsified_buckets.zero_bucket, len(self.owners), table, self.owners, N=self.span)
        step = signed(int(self.words[0, 2])) if self.step is None else self.step
        given = table, self.drawers, self.variables, len(wires), step
        launch(sparsified_buckets.decode_drawn, len(self.drawers), *given, N=FEWER)
        return True


CODECS: dict[str, type[TritonCodec]] = {
    "numbers": TritonNumbers,
    "signs": TritonSigns,
    "powers": TritonPowers,
    "levels": TritonLevels,
    "coded": TritonLevels,
    "ternary": TritonTernary,
    "table": Table,
    "drawn": TritonDrawn,
    "largest": TritonLargest,
    "largest above": LargestAbove,
    "largest of chunks": TritonLargestOfChunks,
    "low rank": LowRank,
}
