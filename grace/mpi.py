"""The MPI backend: mpi4py's non-blocking collectives on the tensors' own memory."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

if Path(sys.prefix, "lib", "libmpi.so.40").exists():  # an Open MPI from a wheel that mpirun did not start is lost
    os.environ.setdefault("OPAL_PREFIX", sys.prefix)

from mpi4py import MPI

from grace.backend import Backend, Handle, Tensor
from grace.kernels import kernels_of

TIMEOUT = 1800.0
"""Seconds that a collective may take before its rank gives up; another rank has then ended or hangs."""
SPINS, SLEEP = 50, 50e-6
"""How often a request is looked at before the process sleeps between looks, and for how many seconds."""

NUMBERS = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int64": MPI.INT64_T, "int32": MPI.INT32_T}


def _add_halves(a: Any, b: Any, datatype: Any) -> None:
    left, right = np.frombuffer(a, np.float16), np.frombuffer(b, np.float16)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(left, right, out=right)


def _add_bfloats(a: Any, b: Any, datatype: Any) -> None:
    left, right = np.frombuffer(a, np.uint16), np.frombuffer(b, np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        total = _widened(left) + _widened(right)
    bits = total.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16  # to nearest, ties to even
    right[:] = np.where(np.isnan(total), 0x7FC0, rounded).astype(np.uint16)


def _widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class MPIBackend(Backend):
    """Collectives of one MPI communicator, for tensors in host memory; others are staged through it.

    MPI knows no 16-bit floats: their sums are an operation of ours, rounded to nearest after each addition.

    Args:
        comm: an mpi4py communicator, which is duplicated; ``MPI.COMM_WORLD`` if left out.
        timeout: seconds that a collective may take.
    """

    name = "mpi"

    def __init__(self, comm: Any = None, timeout: float = TIMEOUT):
        self.comm = (MPI.COMM_WORLD if comm is None else comm).Dup()
        self.timeout = timeout
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.pending: list[Any] = []
        self.sums = {
            "float16": MPI.Op.Create(_add_halves, commute=True),
            "bfloat16": MPI.Op.Create(_add_bfloats, commute=True),
        }
        _abort_on_errors(self.comm)

    def describe(self) -> str:
        return f"MPI ({MPI.get_vendor()[0]}), rank {self.rank} of {self.size}"

    def allreduce(self, tensor: Tensor) -> Handle:
        dtype = kernels_of(tensor).dtype(tensor)
        if dtype not in NUMBERS and dtype not in self.sums:
            raise TypeError(f"MPI does not sum {dtype}; it sums {', '.join([*NUMBERS, *self.sums])}")
        self.count(2 * (self.size - 1) / self.size * kernels_of(tensor).nbytes(tensor))
        staged = _Staged(tensor, ours=dtype in self.sums)
        datatype, op = NUMBERS.get(dtype, MPI.UINT16_T), self.sums.get(dtype, MPI.SUM)
        buffer = [staged.memory, staged.memory.nbytes // datatype.Get_size(), datatype]
        return self._handle(self.comm.Iallreduce(MPI.IN_PLACE, buffer, op), tensor, staged.give_back)

    def allgather(self, tensor: Tensor) -> Handle:
        k = kernels_of(tensor)
        self.count((self.size - 1) * k.nbytes(tensor))
        length = tensor.shape[0]
        sent = _Staged(tensor)
        gathered = k.zeros((self.size * length,), k.dtype(tensor), tensor)
        received = _Staged(gathered)
        request = self.comm.Iallgather([sent.memory, MPI.BYTE], [received.memory, sent.memory.nbytes, MPI.BYTE])
        rows = [gathered[i * length : (i + 1) * length] for i in range(self.size)]
        return self._handle(request, rows, received.give_back, sent)

    def alltoall(self, tensor: Tensor) -> Handle:
        k = kernels_of(tensor)
        self.count((self.size - 1) / self.size * k.nbytes(tensor))
        length = tensor.shape[0] // self.size
        sent = _Staged(tensor)
        gathered = k.zeros(tuple(tensor.shape), k.dtype(tensor), tensor)
        received = _Staged(gathered)
        part = sent.memory.nbytes // self.size
        request = self.comm.Ialltoall([sent.memory, part, MPI.BYTE], [received.memory, part, MPI.BYTE])
        rows = [gathered[i * length : (i + 1) * length] for i in range(self.size)]
        return self._handle(request, rows, received.give_back, sent)

    def broadcast(self, tensor: Tensor, root: int) -> Handle:
        if root == self.rank:
            self.count((self.size - 1) * kernels_of(tensor).nbytes(tensor))
        staged = _Staged(tensor)
        return self._handle(self.comm.Ibcast([staged.memory, MPI.BYTE], root), tensor, staged.give_back)

    def allgather_object(self, value: Any) -> list[Any]:
        return self.comm.allgather(value)

    def _handle(self, request: Any, result: Any, done: Any, *alive: Any) -> Handle:
        """``alive``: what MPI reads or writes until the request is complete."""
        self.pending = [other for other in self.pending if not other.Test()]  # which also moves them on
        self.pending.append(request)

        def wait() -> None:
            nonlocal alive
            self._complete(request)
            done()
            alive = ()

        return Handle(wait, result)

    def _complete(self, request: Any) -> None:
        """Look at the request until it is complete: a signal or the timeout must be able to end this."""
        deadline, looks = time.monotonic() + self.timeout, 0
        while not request.Test():
            looks += 1
            if looks > SPINS:
                time.sleep(SLEEP)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer from the other ranks within {self.timeout:.0f} s")

    def shutdown(self) -> None:
        """Leave; a rank that leaves in the middle of a collective ends the others, who would wait for ever."""
        if not MPI.Is_finalized() and any(not request.Test() for request in self.pending):
            self.comm.Abort(1)


@functools.cache
def _cuda_aware() -> bool:
    """Whether this MPI reads and writes a GPU's memory, as Open MPI tells of itself."""
    for library in (None, "libmpi.so.40"):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support())
        except (OSError, AttributeError):
            continue
    return False


class _Staged:
    """A tensor's memory as MPI takes it: bytes, without a copy, or a copy in host memory that goes back.

    A GPU's memory goes to MPI itself where MPI is CUDA-aware, but for sums that are operations of ours.
    """

    _said = False

    def __init__(self, tensor: Tensor, ours: bool = False):
        k = kernels_of(tensor)
        self.tensor, self.copy = k.to_bytes(tensor), None
        device = getattr(getattr(tensor, "device", None), "type", "cpu")
        if device == "cuda" and _cuda_aware() and not ours:
            import torch

            torch.cuda.current_stream(self.tensor.device).synchronize()  # MPI knows nothing of streams
            self.memory: Any = self.tensor
            return
        if device != "cpu":
            if not _Staged._said:
                _Staged._said = True
                warnings.warn("gradients go through host memory on their way to MPI and back", stacklevel=4)
            import torch

            self.copy = torch.empty(self.tensor.shape, dtype=torch.uint8, pin_memory=True).copy_(self.tensor)
        self.memory = np.asarray(self.tensor if self.copy is None else self.copy)

    def give_back(self) -> None:
        """What MPI wrote, where the tensor is."""
        if self.copy is not None:
            self.tensor.copy_(self.copy)


def _abort_on_errors(comm: Any) -> None:
    """An error that nobody catches ends all ranks: the others would wait for this one for ever."""
    before = sys.excepthook
    if getattr(before, "aborts", False):
        return

    def hook(kind: Any, value: Any, trace: Any) -> None:
        before(kind, value, trace)
        sys.stderr.flush()
        if comm.Get_size() > 1:
            comm.Abort(1)

    hook.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = hook
