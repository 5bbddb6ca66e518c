"""The codec of :mod:`grace.kernels.triton.low_rank_buckets`: of two rounds, between which ranks add up their wires."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
import triton
from numpy import ndarray as Array

from grace.kernels.bucket_codec import DeviceHeader, Places
from grace.kernels.constants import LARGEST_FACTOR
from grace.kernels.triton import low_rank_buckets
from grace.kernels.triton.codec_base import Step, TritonCodec
from grace.kernels.triton.launching import BLOCK, launch

R, C = 64, 128
"""Rows and columns of a tile: so much of P and Q is read beside it, and added up behind it, that this is little."""
N, T = 64, 32
"""Elements of a product that a program adds up, and over how many tiles at a time."""
PAIRS = 1 << 9
"""Products of two numbers of a row of P that a program holds."""
ITEM = 4
WIDEST = 1 << 24
"""Columns of a matrix: within a tile 32 bits count elements."""


class LowRank(TritonCodec):
    """Codec of :class:`~grace.compressors.powersgd.PowerSGD`. Each payload is the first round's P, then the second's Q.

    ``encode`` writes P; ``receive`` takes its sum over ranks, ``follow`` writes Q, ``receive`` takes that sum, and
    ``decode`` writes means and residuals.
    """

    draws = "shared"

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device):
        super().__init__(sizes, payloads, device)
        ps, qs = zip(*payloads, strict=True)
        rows, columns, ranks = [p.shape[0] for p in ps], [q.shape[0] for q in qs], [p.shape[1] for p in ps]
        self.most = max(ranks)
        self.width = triton.next_power_of_2(self.most)
        down, across = [-(-n // R) for n in rows], [-(-n // C) for n in columns]
        there = [int(n > 0) for n in sizes]
        tiles = [i * j * t for i, j, t in zip(down, across, there, strict=True)]
        p_sizes = [n * k for n, k in zip(rows, ranks, strict=True)]
        q_sizes = [n * k for n, k in zip(columns, ranks, strict=True)]
        shapes, of = np.zeros((self.variables, low_rank_buckets.SHAPE.value), np.int64), low_rank_buckets
        steps = [R * n for n in down], [C * n for n in across]
        parts = (
            [n * j for n, j in zip(p_sizes, across, strict=True)],
            [n * i for n, i in zip(q_sizes, down, strict=True)],
        )
        for column, values in (
            (of.ROWS, rows), (of.ACROSS, columns), (of.RANK_OF, ranks),
            (of.P_AT, [p.offset // ITEM for p in ps]), (of.Q_AT, [q.offset // ITEM for q in qs]),
            (of.LEFT, _starts([self.most * n for n in steps[0]])), (of.LEFT_STEP, steps[0]),
            (of.RIGHT, _starts([self.most * n for n in steps[1]])), (of.RIGHT_STEP, steps[1]),
            (of.P_PARTS, _starts(parts[0])), (of.Q_PARTS, _starts(parts[1])),
        ):  # fmt: skip
            shapes[:, column.value] = values
        self.span_of_q = max(1, BLOCK // self.width)
        programs = {  # by numbers: a constexpr of Triton 3.2 cannot be a key
            of.TILES.value: tiles,
            of.P_ADDS.value: [-(-n // N) for n in p_sizes],
            of.Q_ADDS.value: [-(-n // N) for n in q_sizes],
            of.Q_TILES.value: [-(-n // self.span_of_q) * t for n, t in zip(columns, there, strict=True)],
        }
        found = []
        for column, each in programs.items():
            owners, shapes[:, column] = self.shared(each)
            found.append(owners)
        self.tiles, self.p_adds, self.q_adds, self.q_tiles = found
        self.shapes = torch.from_numpy(shapes).to(device)
        # Zeros: what pads a column to whole tiles is read, and never written.
        self.left, self.right = (torch.zeros(self.most * sum(n), device=device) for n in steps)
        self.parts = self.empty(max(map(sum, parts)), torch.float32)  # of P first, then of Q
        self.found = torch.zeros((self.variables, 2, self.width), dtype=torch.int32, device=device)
        self.rows_at_once = max(1, PAIRS // self.width**2)
        self.finite = self.encoding_table = torch.empty(0)
        self.kept = self.nexts = np.zeros(self.variables, np.uint64)

    @staticmethod
    def takes(payloads: Places) -> bool:
        """Return True if the kernels take matrices of these P and Q."""
        return all(q.shape[0] <= WIDEST for _, q in payloads)

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *header: DeviceHeader
    ) -> torch.Tensor:
        self.nexts = rows[:, 2].copy()
        return super().encode(rows, factors, wire, most, streams, *header)

    def start_from(self, kept: Array, following: Array) -> None:
        """Set the addresses of the last step's Q, 0 for none, and of this one's; of each variable, uint64."""
        self.kept = kept
        self.plan[:, low_rank_buckets.Q_KEPT.value] = kept.astype(np.int64)
        self.plan[:, low_rank_buckets.Q_NEXT.value] = following.astype(np.int64)

    def write(
        self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, header: DeviceHeader
    ) -> torch.Tensor:
        self.encoding_table, programs, shape = table, len(self.q_tiles), {"J": self.span_of_q, "RP": self.width}
        places = table, self.shapes, self.q_tiles
        # 1. Find columns of the last Q that are zero or out of range; 2. start from the others, and random ones.
        if self.kept.any():
            launch(low_rank_buckets.judge_factors, programs, self.found, *places, LARGEST_FACTOR, **shape)
        launch(low_rank_buckets.start_factors, programs, self.right, self.found, *places, step, **shape)
        # 3. Compute x, and each tile's part of P = x Q; 4. add the parts up, in one order.
        given = self.flags, self.found, self.parts, self.right, table, self.shapes, self.tiles, most
        shape = {"LOOKS": looks, "RANK": self.most, "RP": self.width, "R": R, "C": C}
        launch(low_rank_buckets.multiply_rows, len(self.tiles), *given, **shape, warps=16)
        parts = self.flags, self.parts, table, self.shapes, self.p_adds, self.variables
        launch(low_rank_buckets.add_rows, len(self.p_adds), *parts, LOOKS=looks, C=C, N=N, T=T)
        return self.write_header(table, header)

    def receive(self, sums: torch.Tensor, count: float, last: bool) -> torch.Tensor:
        """Take the sum of all ranks' wires; return 1.0 for each variable whose sum is finite, else 0.0, on the
        device."""
        if not last:
            self.finite = self.empty((2, self.variables), torch.float32)
            given = self.finite, self.left, sums, self.shapes, float(count), self.variables
            shape = {"ROWS_": self.rows_at_once, "RP": self.width}
            launch(low_rank_buckets.orthogonalize_bucket, self.variables, *given, **shape)
            return self.finite[0]
        places, shape = (self.encoding_table, self.shapes, self.q_tiles), {"J": self.span_of_q, "RP": self.width}
        numbers = float(count), self.variables
        launch(
            low_rank_buckets.take_factors, len(self.q_tiles), self.finite, self.right, sums, *places, *numbers, **shape
        )
        return self.finite[1]

    def follow(self, wire: torch.Tensor, header: DeviceHeader) -> None:
        """Write the second payloads, and the header of their wire."""
        given = self.parts, self.left, self.encoding_table, self.shapes, self.tiles
        launch(low_rank_buckets.multiply_columns, len(self.tiles), *given, RANK=self.most, R=R, C=C, warps=16)
        numbers = (
            self.to_device_once(np.array(header.numbers, np.float32)),
            header.offsets[0] // ITEM,
            len(header.numbers),
        )
        parts = wire, self.parts, self.shapes, self.q_adds
        launch(low_rank_buckets.add_columns, len(self.q_adds), *parts, *numbers, R=R, N=N, T=T)

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        rows = np.stack([np.asarray(outs, np.uint64), self.nexts, self.nexts], axis=1)
        given = self.left, self.right, self.table(rows, []), self.shapes, self.tiles
        launch(low_rank_buckets.decode_products, len(self.tiles), *given, R=R, C=C, warps=16)
        return True


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the offset of each part, one behind the other."""
    return [0, *accumulate(sizes)][:-1]
