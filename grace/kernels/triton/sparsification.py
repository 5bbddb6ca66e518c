"""The sparsifiers' kernels in Triton."""

from typing import Any

import torch
import triton

from grace.kernels.checks import check_count, check_packed
from grace.kernels.triton import packing, random, selection
from grace.kernels.triton.launching import BLOCK, FEWER, launch
from grace.kernels.triton.quantization import blocks

PROGRAMS = 1024
"""Of a search for the largest: more would count more digits than elements."""
STEP = 1024
"""Elements that such a program reads at once."""


def steps_of(n: int) -> int:
    """How often each program of a search reads: its places and counts have 16 bits.

    >>> steps_of(0), steps_of(3 << 20), steps_of(1 << 30)
    (1, 4, 32)
    """
    return min(triton.next_power_of_2(max(1, triton.cdiv(n, PROGRAMS * STEP))), (1 << 15) // STEP)


def room_of(n: int, k: int, steps: int) -> int:
    """How many of its elements each program of a search may list: most likely those above the guess are little more
    than k. Where there are more than there is room for, they are read where they are.

    >>> room_of(1 << 20, 1 << 13, 1), room_of(1 << 20, 1 << 17, 2), room_of(1 << 20, 1 << 19, 2)
    (256, 1024, 2048)
    """
    return steps * STEP // (4 if 16 * k <= n else 2 if 3 * k <= n else 1)


class SparseTriton:
    """A part of :class:`~grace.kernels.triton.primitives.TritonKernels`."""

    check_indices: Any

    def random_indices(self, stream, n, k, like):
        out = torch.empty(k, dtype=torch.int32, device=like.device)
        launch(random.write_walked, triton.cdiv(k, BLOCK), out, n, k, *random.walk_of(stream, n), N=BLOCK)
        return out

    def sample_indices(self, stream, n, k, like):
        out = torch.empty(k, dtype=torch.int32, device=like.device)
        launch(random.write_samples, triton.cdiv(k, FEWER), out, n, k, *random.words_of(stream), N=FEWER)
        return out

    def topk(self, x, k):
        """Nothing is read back: the smallest of the largest is found digit by digit, by counting, on the device."""
        n, out = x.numel(), torch.empty(k, dtype=torch.int32, device=x.device)
        if not k:
            return out
        steps = steps_of(n)
        programs, room, wide = triton.cdiv(n, steps * STEP), room_of(n, k, steps), int(x.data_ptr() % 16 == 0)
        counts = torch.empty(selection.STATE.value, dtype=torch.int32, device=x.device)
        rows = torch.empty((programs, 32), dtype=torch.int16, device=x.device)
        listed, ties = torch.empty((2, programs), dtype=torch.int32, device=x.device)
        patterns, places = (
            torch.empty(programs * room, dtype=dtype, device=x.device) for dtype in (torch.int32, torch.int16)
        )
        given = counts, x, n, k, steps, room, wide
        launch(selection.guess_largest, 1, counts, x, n, k, warps=16)
        first = patterns, places, listed, ties, counts, x, n, steps, room
        launch(selection.list_largest, programs, *first, N=STEP)
        for done in (1, 2):
            launch(selection.count_digit, programs, patterns, listed, *given, PASS=done, N=STEP, warps=8)
        launch(selection.count_last, programs, rows, patterns, listed, ties, *given, N=STEP)
        launch(selection.write_largest, programs, out, rows, places, patterns, listed, *given, N=STEP, P=32)
        return out

    def topk_chunks(self, x, chunk, k):
        n, count = x.numel(), -(-k * x.numel() // chunk)
        out, rows = torch.empty(count, dtype=torch.int32, device=x.device), max(1, BLOCK // chunk)
        numbers = {"CHUNK": chunk, "ROWS": rows, "warps": max(4, chunk // 512)}
        launch(selection.write_of_chunks, triton.cdiv(n, rows * chunk), out, x, n, k, count, **numbers)
        return out

    def widen_chunks(self, narrow, chunk, k):
        out = torch.empty(narrow.numel(), dtype=torch.int32, device=narrow.device)
        launch(selection.widen_chunks, blocks(out), out, narrow.contiguous(), out.numel(), k, CHUNK=chunk, N=BLOCK)
        return out

    def above(self, x, threshold):
        return _chosen(x, float(threshold))

    def where_code(self, codes, code):
        return _chosen(codes, code)

    def bitmap(self, indices, n):
        words = torch.empty(triton.cdiv(n, 32), dtype=torch.int32, device=indices.device)
        given = words, indices, indices.numel(), n
        launch(packing.write_bits, triton.cdiv(n, 32 * FEWER), *given, WORDS=FEWER, N=FEWER)
        return words.view(torch.uint8)[: triton.cdiv(n, 8)]

    def positions(self, bitmap, n, count=None):
        check_packed(bitmap.numel(), 1, n)
        steps = steps_of(n)
        programs = max(1, triton.cdiv(n, steps * STEP))
        counts = torch.empty(programs, dtype=torch.int32, device=bitmap.device)
        launch(packing.count_bits, programs, counts, bitmap, n, steps, N=STEP)
        out = torch.empty(int(counts.sum()) if count is None else count, dtype=torch.int32, device=bitmap.device)
        launch(packing.write_positions, programs, out, counts, bitmap, n, len(out), steps, N=STEP)
        return out

    def scatter_add(self, out, indices, values, weight):
        check_count("values", values.numel(), indices.numel())
        self.check_indices(indices, out.numel())
        k = indices.numel()
        launch(
            selection.scatter_add, triton.cdiv(k, BLOCK), out, indices, values, out.numel(), k, float(weight), N=BLOCK
        )
        return out

    def zero_at(self, out, indices):
        self.check_indices(indices, out.numel())
        launch(selection.scatter_one, blocks(indices), out, indices, None, out.numel(), indices.numel(), 0.0, N=BLOCK)
        return out

    def add_at(self, out, indices, value, weight):
        check_count("means", value.numel(), 1)
        self.check_indices(indices, out.numel())
        k = indices.numel()
        launch(
            selection.scatter_one, triton.cdiv(k, BLOCK), out, indices, value, out.numel(), k, float(weight), N=BLOCK
        )
        return out


def _chosen(x: torch.Tensor, value: float | int) -> torch.Tensor:
    """The places of what :func:`~grace.kernels.triton.selection.chosen` takes; their number is read back."""
    ends = counted(x, value)
    return placed(x, value, ends, int(ends[-1]) if len(ends) else 0)


def counted(x: torch.Tensor, value: float | int) -> torch.Tensor:
    """How many elements of each program and all before it are chosen."""
    counts = torch.empty(blocks(x), dtype=torch.int32, device=x.device)
    launch(selection.count_chosen, blocks(x), counts, x, x.numel(), value, N=BLOCK)
    return counts.cumsum(0, dtype=torch.int32)


def placed(x: torch.Tensor, value: float | int, ends: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the first ``count`` elements that are chosen; -1 for those that are not there."""
    out = torch.full((count,), -1, dtype=torch.int32, device=x.device)
    launch(selection.write_chosen, blocks(x), out, ends, x, x.numel(), value, count, N=BLOCK)
    return out
