"""Triton kernels of single variables: random numbers, which take a hundred of torch's operations, selections by which
torch makes the host wait, and the sum that each rank's sparsified payload is decoded by. Everything else of a single
variable is left to torch; buckets have codecs."""

import torch
import triton
from torch.utils._python_dispatch import _disable_current_modes

from grace.kernels.random import Stream, feistel_bits
from grace.kernels.reference import NumpyKernels
from grace.kernels.torch.primitives import DTYPES, TorchKernels
from grace.kernels.triton import packing, random, selection
from grace.kernels.triton.launching import BLOCK, STEP, launch, room_of, steps_of
from grace.kernels.triton.random import words_of
from grace.kernels.wire_checks import check_count, check_packed


class TritonKernels(TorchKernels):
    """Tensors on a GPU: torch's operations, and Triton's kernels where tensors are contiguous."""

    name = "torch-triton"
    codecs = "grace.kernels.triton.bucket_codecs"

    def blank(self, shape, dtype, like):
        return torch.empty(shape, dtype=DTYPES[dtype], device=like.device)

    def addresses(self, tensors, dtype="float32"):
        wanted = DTYPES[dtype]
        found = [x.data_ptr() for x in tensors if x.dtype is wanted and x.is_contiguous()]
        return found if len(found) == len(tensors) and len({x.device for x in tensors}) <= 1 else None

    def random_bits(self, stream, n, like=None):
        out = torch.empty(n, dtype=torch.int64, device=like.device)
        launch(random.write_random, triton.cdiv(n, BLOCK), out, n, *words_of(stream), N=BLOCK)
        return out

    def random_indices(self, stream, n, k, like=None):
        out = torch.empty(k, dtype=torch.int32, device=like.device)
        walk = *words_of(stream.permuting()), *feistel_bits(n)
        launch(random.write_walked, triton.cdiv(k, BLOCK), out, n, k, *walk, N=BLOCK)
        return out

    def topk(self, x, k):
        """Find the smallest of the largest digit by digit, by counting on the device: nothing is read back."""
        if not x.is_contiguous():
            return super().topk(x, k)
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

    def positions(self, bitmap, n, count=None):
        check_packed(bitmap.numel(), 1, n)
        bitmap = bitmap.contiguous()
        steps = steps_of(n)
        programs = max(1, triton.cdiv(n, steps * STEP))
        counts = torch.empty(programs, dtype=torch.int32, device=bitmap.device)
        launch(packing.count_bits, programs, counts, bitmap, n, steps, N=STEP)
        # Without a count the host waits here for the device.
        out = torch.empty(int(counts.sum()) if count is None else count, dtype=torch.int32, device=bitmap.device)
        launch(packing.write_positions, programs, out, counts, bitmap, n, len(out), steps, N=STEP)
        return out

    def scatter_add(self, out, indices, values, weight):
        if not all(x.is_contiguous() for x in (out, indices, values)):
            return super().scatter_add(out, indices, values, weight)
        check_count("values", values.numel(), indices.numel())
        self.check_indices(indices, out.numel())
        given = out, indices, values, out.numel(), indices.numel(), float(weight)
        launch(selection.scatter_add, triton.cdiv(indices.numel(), BLOCK), *given, N=BLOCK)
        return out


def trouble(device: torch.device) -> str:
    """Return the reason why the kernels cannot be used on a device; empty if one of them computes the right numbers."""
    stream = Stream(0x0123456789ABCDEF, 1, 2)
    try:
        with _disable_current_modes():  # whoever traces with tensors that have no numbers
            found = KERNELS.random_bits(stream, 9, torch.empty(0, device=device)).cpu().numpy()
    except Exception as error:  # of the compiler, the C compiler that it calls, or the driver
        return f"{type(error).__name__}: {error}"
    return "" if (found == NumpyKernels().random_bits(stream, 9)).all() else "it computes other numbers than the CPU"


KERNELS = TritonKernels()
