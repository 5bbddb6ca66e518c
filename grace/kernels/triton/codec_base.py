"""Base of codecs of whole buckets on a GPU: the table that kernels read, and the header of a wire.

Nothing is read back from the device: flags there mark variables that are out of range, and one of the launches writes
them into the wire.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import triton
import triton.language as tl
from numpy import ndarray as Array

from grace.kernels.bucket_codec import BucketCodec, DeviceHeader, Places
from grace.kernels.constants import ANY_BITS
from grace.kernels.torch.copies import StagedCopy, to_device
from grace.kernels.triton import bucket_tables
from grace.kernels.triton.launching import BLOCK, launch, signed

TYPES = {"float32": (tl.float32, 4), "float16": (tl.float16, 2), "bfloat16": (tl.bfloat16, 2), "uint8": (tl.uint8, 1)}
"""Types of numbers in a wire, and their bytes."""
KEPT_TABLES = 4
"""Tables that each codec keeps: of residuals that alternate, for encoding and for decoding."""

Step = int | torch.Tensor


class TritonCodec(BucketCodec):
    """Encodes and decodes all variables of a bucket, by launches on their device.

    A method that reads each variable once names its ``encoder``; the others override ``write``.
    """

    on_device = True
    encoder: ClassVar[Any]
    """``encoder(flags, table, owners, variables, most, *numbers)``; ``numbers`` begin with the step if it ``draws``."""
    numbers: tuple[float, ...] = ()
    constants: dict[str, Any]
    """Arguments that kernels are compiled for, and options of the compiler."""
    span = BLOCK
    """Elements of a program."""
    granule = 16
    """Number of which the address of a payload's first tensor must be a multiple, to be read wide."""

    def __init__(self, sizes: Sequence[int], payloads: Places, device: torch.device, **constants: Any):
        self.device, self.variables, self.constants = device, len(sizes), constants
        self.step: torch.Tensor | None = None
        """Tensor that kernels read the step from, for CUDA graphs; else None."""
        self.plan = np.zeros((self.variables, bucket_tables.COLUMNS.value), np.int64)
        self.plan[:, bucket_tables.SIZE.value] = sizes
        for row, payload in zip(self.plan, payloads, strict=True):
            for column, tensor in enumerate(payload[:2], bucket_tables.FIRST.value):
                row[column] = tensor.offset
        # Cleared by the kernel that writes the header of each wire.
        self.flags = torch.zeros(self.variables, dtype=torch.int32, device=device)
        self.copies: OrderedDict[tuple[int, np.dtype, int, bytes], StagedCopy] = OrderedDict()
        self.captured = list[torch.Tensor]()
        self.owners, self.plan[:, bucket_tables.START.value] = self.shared([-(-n // self.span) for n in sizes])

    def shared(self, programs: Sequence[int]) -> tuple[torch.Tensor, Array]:
        """Return the variable of each program, given each variable's number of programs; and the first program of each
        variable."""
        owners = np.repeat(np.arange(self.variables, dtype=np.int32), programs)
        return torch.from_numpy(owners).to(self.device), np.cumsum([0, *programs])[:-1]

    def empty(self, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    # -- tables ----------------------------------------------------------------------------------------

    def to_device_once(self, values: Array) -> torch.Tensor:
        """Return numbers on the device. They are copied there, without waiting, unless they were lately."""
        on_gpu = self.device.type == "cuda"
        if on_gpu and torch.cuda.is_current_stream_capturing():
            held = to_device(torch.from_numpy(values.copy()), self.device)
            self.captured.append(held)  # a graph reads it whenever it is replayed
            return held
        # By stream, too: another one could read a copy before it is made.
        stream = torch.cuda.current_stream(self.device).cuda_stream if on_gpu else 0
        form = stream, values.dtype, len(values)
        key = *form, values.tobytes()
        copy = self.copies.pop(key, None)
        if copy is None:
            copy = self._oldest_copy(form) or StagedCopy(len(values), values.dtype, self.device)
            copy.write(values)
        self.copies[key] = copy  # the last one is the one that was used last
        return copy.tensor

    def _oldest_copy(self, form: tuple[int, np.dtype, int]) -> StagedCopy | None:
        """Return the copy of this stream, dtype and size that was not used for longest, to be written to; None if
        there are few copies, or none of these."""
        if len(self.copies) < 2 * KEPT_TABLES:
            return None
        found = next((key for key in self.copies if key[:3] == form), None)
        if found is None:
            self.copies.popitem(last=False)
            return None
        return self.copies.pop(found)

    def table(
        self,
        rows: Array,
        wires: Array | Sequence[int],
        factors: Array | None = None,
        streams: Array | None = None,
        headers: Sequence[int] = (),
    ) -> torch.Tensor:
        """Return the table for kernels: a row of each variable, then addresses of wires, and of one's ``headers``."""
        # Tables are of int64, which keeps the bits of addresses.
        rows = np.ascontiguousarray(rows, np.uint64).view(np.int64)
        wires = np.ascontiguousarray(wires, np.uint64).view(np.int64)
        apart, wires = (wires[0] - wires[0, :1], wires[0, :1]) if wires.ndim > 1 else (0, wires)
        whole = np.empty(self.plan.size + len(wires) + len(headers), np.int64)
        plan = whole[: self.plan.size].reshape(self.plan.shape)
        plan[:] = self.plan
        parts, sides = rows[:, :3], rows[:, 3:]
        plan[:, : parts.shape[1]] = parts
        if sides.size:
            plan[:, [bucket_tables.KEPT_SIDES.value, bucket_tables.NEXT_SIDES.value]] = sides
        plan[:, bucket_tables.FIRST.value : bucket_tables.MORE.value] += np.reshape(apart, (-1, 1))
        # Reads of 16 bytes begin at multiples of 16.
        plan[:, bucket_tables.FLOATS.value] = (parts % 16 == 0).all(axis=1)
        starts = plan[:, bucket_tables.FIRST.value, None] + wires
        plan[:, bucket_tables.CODES.value] = (starts % self.granule == 0).all(axis=1)
        if factors is not None:
            plan[:, bucket_tables.FACTORS.value] = np.ascontiguousarray(factors, np.float32).view(np.int64)[:, 0]
        if streams is not None:
            plan[:, bucket_tables.KEY.value] = np.ascontiguousarray(streams[:, :2]).view(np.int64)[:, 0]
            plan[:, bucket_tables.DRAW.value] = streams[:, 3]
        whole[self.plan.size :] = [*wires, *headers]
        return self.to_device_once(whole)

    # -- encoding --------------------------------------------------------------------------------------

    def encode(
        self, rows: Array, factors: Array, wire: int, most: np.uint32, streams: Array, *header: DeviceHeader
    ) -> torch.Tensor:
        (one,) = header
        headers = [*(int(wire) + offset for offset in one.offsets), *one.received]
        table = self.table(rows, [wire], factors, streams if self.draws else None, headers)
        keeps, looks = bool(rows[:, 2].any()), most != ANY_BITS
        step = signed(int(streams[0, 2])) if self.step is None else self.step
        return self.write(table, keeps, bool(looks), signed(int(most)), step, one)

    def write(
        self, table: torch.Tensor, keeps: bool, looks: bool, most: int, step: Step, header: DeviceHeader
    ) -> torch.Tensor:
        """Launch what encodes; ends with :meth:`write_header`, or with a kernel that does the same."""
        given = self.flags, table, self.owners, self.variables, most, *((step,) if self.draws else ()), *self.numbers
        shape = {**self.constants, "KEEPS": keeps, "LOOKS": looks, "N": self.span}
        launch(self.encoder, len(self.owners), *given, **shape)
        return self.write_header(table, header)

    def header_arguments(
        self, header: DeviceHeader
    ) -> tuple[tuple[torch.Tensor, ...], tuple[float, ...], dict[str, Any]]:
        """Return the arguments of kernels that write the header of a wire: tensors, numbers, and a type."""
        offsets, dtype, marks, overflow, received = header
        in_range = self.empty(self.variables // len(offsets), torch.float32)
        tensors = self.flags, in_range, self.to_device_once(np.array(marks, np.float32))
        return tensors, (len(offsets), len(received), len(marks), float(overflow)), {"Type": TYPES[dtype][0]}

    def write_header(self, table: torch.Tensor, header: DeviceHeader) -> torch.Tensor:
        """Write the header of a wire."""
        (flags, in_range, marks), numbers, of_type = self.header_arguments(header)
        given, programs = (flags, table, in_range, marks, self.variables), triton.cdiv(len(header.numbers), 128)
        launch(bucket_tables.write_header, programs, *given, *numbers, **of_type, N=128)
        return in_range

    # -- decoding --------------------------------------------------------------------------------------

    def decode(self, outs: Array, wires: Array, count: float, loss_scale: float) -> bool:
        table = self.table(np.asarray(outs)[:, None], wires)
        self.read(table, len(wires), float(np.float32(1 / count)), count, loss_scale)
        return True

    def read(self, table: torch.Tensor, ranks: int, weight: float, count: float, loss_scale: float) -> None:
        """Launch what decodes."""
        raise NotImplementedError
